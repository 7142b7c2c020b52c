"""A GGUF file presented as `load` reads models: config in Hugging Face terms, tensors, tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.families.family import Family
from exactkv.models.gguf.file import GGUFFile, TensorInfo
from exactkv.models.gguf.layout import layout
from exactkv.models.gguf.names import INSTEAD, LEFT_ASIDE, NAMES
from exactkv.models.gguf.quants import dequantize_into
from exactkv.models.gguf.translate import architecture_of, translate_config, translate_generation_config
from exactkv.models.source import is_split

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer

_RELEASED = 4 << 20  # bytes of the mapping after which its memory is given back


class GGUFSource:
    """A GGUF model file as a directory of config.json, safetensors and tokenizer files would present it, but for the
    names of tensors, which are GGUF's: `named` makes a family that knows them.

    config: as config.json; besides Hugging Face's fields, `rope_scaling` may be {"rope_type":
    "llama3_factors", "factors": [...]}, by which each rotary frequency is divided. generation_config:
    `eos_token_id` (a list), `bos_token_id`, `pad_token_id`. Weights stay in the memory-mapped file until they
    are read.

    Raises LoadError if the file can't be read or is damaged, if its architecture is not supported, or if its
    metadata ask for something that is not known here.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        metadata, tensors = self._file.metadata, self._file.tensors
        _, self._arch = architecture_of(metadata, self._file.path)
        shapes = {name: info.shape for name, info in tensors.items()}
        self.config: dict[str, Any] = translate_config(metadata, shapes, self._floats, self._file.path)
        self._tensors = layout(tensors, self._arch, self.config)
        self.generation_config: dict[str, Any] = translate_generation_config(metadata)
        self._tokenizer: Tokenizer | None = None

    def named(self, family: Family) -> Family:
        """The family of this model, with the names that tensors have here."""
        return replace(
            family,
            names={**NAMES, **self._arch.names},
            instead=(INSTEAD,),
            prefixes=("",),
            left_aside=(*LEFT_ASIDE, *self._arch.left_aside),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF tensor name -> shape in torch order, as the model has it."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def read(self, name: str, out: Tensor) -> None:
        """See TensorSource.read; `name` is a key of `shapes()`. What GGUF changed is undone (`layout`).

        Raises LoadError if there is no such tensor or `out` has another shape.
        """
        stored = self._tensors.get(name)
        if stored is None:
            raise LoadError(f"{self._file.path} holds no tensor {name!r}; see shapes() for those it holds.")
        if not is_split(stored.shape, out.shape):
            raise LoadError(
                f"{self._file.path}: tensor {name!r} has shape {list(stored.shape)}, the model expects "
                f"{list(out.shape)}; the file's metadata and its tensors do not belong together."
            )
        info = stored.parts[0]
        if stored.change is not None:
            parts = [self._read_whole(part) for part in stored.parts]
            out.copy_(stored.change(parts).reshape(out.shape))
        elif stored.heads is not None:
            self._read_permuted(info, stored.heads, out)
        elif info.shape == stored.shape and (len(info.shape) > 1 or out.dim() < 2):
            self._read_plain(info, out)
        else:
            out.copy_(self._read_whole(info).view(out.shape))
        for part in stored.parts:
            self._file.release(part, 0, part.num_bytes)

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

    def _floats(self, name: str) -> list[float]:
        return [float(value) for value in self._read_whole(self._file.tensors[name]).flatten()]

    def _read_whole(self, info: TensorInfo) -> Tensor:
        whole = torch.empty(info.shape)
        self._read_plain(info, whole)
        return whole

    def _read_plain(self, info: TensorInfo, out: Tensor) -> None:
        columns = info.shape[-1] if info.shape else 1
        raw = self._file.raw(info).view(out.numel() // max(columns, 1), -1)
        self._read_rows(info, raw, out.view(1, -1) if out.dim() < 2 else out)

    def _read_rows(self, info: TensorInfo, raw: Tensor, out: Tensor) -> None:
        """Rows into a matrix, or into the matrices of a stack, one after the other."""
        if out.dim() > 2:
            for rows, matrix in zip(raw.chunk(out.shape[0]), out, strict=True):
                self._read_rows(info, rows, matrix)
            return
        step = max(1, _RELEASED // raw.shape[1])
        start = int(raw.storage_offset()) - info.offset  # the mapping is one storage
        for first in range(0, raw.shape[0], step):
            last = min(raw.shape[0], first + step)
            dequantize_into(raw[first:last], info.type, out[first:last])
            self._file.release(info, start + first * raw.shape[1], start + last * raw.shape[1])

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
