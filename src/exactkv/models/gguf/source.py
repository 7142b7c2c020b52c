"""A GGUF file presented in Hugging Face terms: config, tensor names and shapes, weights, tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.gguf.file import GGUFFile, TensorInfo
from exactkv.models.gguf.quants import dequantize_into
from exactkv.models.gguf.translate import architecture_of, translate_config, translate_generation_config

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_RELEASED = 4 << 20  # bytes of the mapping after which its memory is given back


class GGUFSource:
    """A GGUF model file as a directory of config.json, safetensors and tokenizer files would present it.

    config: as config.json; besides Hugging Face's fields, `rope_scaling` may be {"rope_type":
    "llama3_factors", "factors": [...]}, by which each rotary frequency is divided. generation_config:
    `eos_token_id` (a list), `bos_token_id`, `pad_token_id`. Weights stay in the memory-mapped file until they
    are read.

    Raises LoadError if the file can't be read or is damaged, if its architecture is not supported, or if its
    metadata ask for something that is not known here.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        name, self._arch = architecture_of(metadata, self._file.path)
        rope_freqs = self._file.tensors.get(_ROPE_FREQS) if name == "llama" else None
        self._tensors = {
            self._hugging_face_name(info.name): info for info in self._file.tensors.values() if info is not rope_freqs
        }
        self.config: dict[str, Any] = translate_config(
            metadata,
            {info.name: info.shape for info in self._file.tensors.values()},
            self._rope_factors(rope_freqs) if rope_freqs else None,
            self._file.path,
        )
        self.generation_config: dict[str, Any] = translate_generation_config(metadata)
        self._tokenizer: Tokenizer | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face tensor name -> shape in torch order. A tensor of the file without a Hugging Face name
        is listed under its GGUF name. (`rope_freqs.weight` of llama is not listed: it went into the
        config.)
        """
        return {name: info.shape for name, info in self._tensors.items()}

    def read(self, name: str, out: Tensor) -> None:
        """Write the tensor `name` (a key of `shapes()`) into `out`: of the same shape, any floating dtype,
        stride and device. What GGUF changed is undone: llama's row order of q and k, Gemma's norm weights
        stored + 1.

        Raises LoadError if there is no such tensor or `out` has another shape.
        """
        info = self._tensors.get(name)
        if info is None:
            raise LoadError(f"{self._file.path} holds no tensor {name!r}; see shapes() for those it holds.")
        if tuple(out.shape) != info.shape:
            raise LoadError(
                f"{self._file.path}: tensor {name!r} has shape {list(info.shape)}, the model expects "
                f"{list(out.shape)}; the file's metadata and its tensors do not belong together."
            )
        part = info.name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        if part in self._arch.permuted:
            heads = self.config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            self._read_permuted(info, heads, out)
        elif self._arch.norm_offset and part.endswith("norm"):
            stored = torch.empty(info.shape)
            self._read_plain(info, stored)
            out.copy_(stored - self._arch.norm_offset)
        else:
            self._read_plain(info, out)
        self._file.release(info, 0, info.num_bytes)

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer with its chat template, made once; the vocabulary's lists, which take more memory
        than many a layer, are then given up. Raises LoadError for a vocabulary of an unsupported kind.
        """
        from exactkv.models.gguf.vocabulary import build_tokenizer

        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(self._file.metadata, self._file.path)
            for name in ("tokens", "scores", "token_type", "merges"):
                self._file.metadata.pop(f"tokenizer.ggml.{name}", None)
        return self._tokenizer

    def _hugging_face_name(self, name: str) -> str:
        if match := _BLOCK_TENSOR.fullmatch(name):
            layer, part, kind = match.groups()
            return f"model.layers.{layer}.{self._arch.blocks[part]}.{kind}" if part in self._arch.blocks else name
        stem = name.removesuffix(".weight")
        return f"{_TOP_LEVEL[stem]}.weight" if stem in _TOP_LEVEL else name

    def _rope_factors(self, info: TensorInfo) -> list[float]:
        factors = torch.empty(info.shape)
        self._read_plain(info, factors)
        return [float(factor) for factor in factors.flatten()]

    def _read_plain(self, info: TensorInfo, out: Tensor) -> None:
        columns = info.shape[-1] if info.shape else 1
        rows = out.numel() // max(columns, 1)
        raw = self._file.raw(info).view(rows, -1)
        if out.dim() <= 2:
            matrix = out.view(1, -1) if out.dim() < 2 else out
            step = max(1, _RELEASED // raw.shape[1])
            for first in range(0, rows, step):
                last = min(rows, first + step)
                dequantize_into(raw[first:last], info.type, matrix[first:last])
                self._file.release(info, first * raw.shape[1], last * raw.shape[1])
            return
        contiguous = torch.empty(rows, columns, dtype=out.dtype, device=out.device)
        dequantize_into(raw, info.type, contiguous)
        out.copy_(contiguous.view(out.shape))

    def _read_permuted(self, info: TensorInfo, heads: int, out: Tensor) -> None:
        """Rows of a head: GGUF interleaves its two halves (0, h, 1, h + 1, …), as its rope turns neighbours;
        Hugging Face keeps the halves. Rows are quantized one by one, so their bytes are reordered, a head at
        a time.
        """
        rows = info.shape[0]
        if rows % (2 * heads):
            raise LoadError(
                f"{self._file.path}: tensor {info.name!r} has {rows} rows, no whole number of pairs for "
                f"{heads} heads; the file's metadata and its tensors do not belong together."
            )
        size = rows // heads
        out = out if out.dim() == 2 else out.unsqueeze(1)  # a bias: rows of one value
        raw = self._file.raw(info).view(heads, size // 2, 2, -1)
        for head in range(heads):
            halves = raw[head].transpose(0, 1).reshape(size, -1)
            dequantize_into(halves, info.type, out[head * size : (head + 1) * size])
