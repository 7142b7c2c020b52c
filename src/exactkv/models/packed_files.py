"""Directories of packed weights: written by `exactkv quantize`, read as any model directory.

``config.json`` is the model's own, with a "quantization_config" that lists the packed tensors. Tensors have our
parameters' names; a packed one lies as PackedWeight has it, "….numbers" and "….scales", and is used as it is mapped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exactkv.errors import InputError, LoadError
from exactkv.models.families.family import Family
from exactkv.models.model import Model
from exactkv.models.source import DirectorySource, TensorSource, shown
from exactkv.models.tokenizer import Tokenizer
from exactkv.ops.packed import MIDDLE, Packed, packed

METHOD = "exactkv"
VERSION = 1
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "*.model",
    "*.tiktoken", "tekken.json", "merges.txt", "vocab.txt", "vocab.json",
)  # fmt: skip


@dataclass(frozen=True)
class StoredPacked:
    """A packed tensor of the files."""

    path: Path
    name: str
    bits: int

    def read(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Packed:
        """It, of that shape, with its scales in ``dtype``. Raises LoadError where the parts do not fit."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:  # maps the file
            numbers, scales = (file.get_tensor(f"{self.name}.{part}") for part in ("numbers", "scales"))
        try:
            return packed(numbers.to(device), scales.to(device, dtype), shape, self.bits)
        except InputError as error:
            raise LoadError(f"{self.path}: {self.name}: {error}; the files are damaged or of another model") from None


class PackedSource(DirectorySource):
    """A directory that `write` made. Raises LoadError, see DirectorySource, and where it is of another version."""

    def __init__(self, path: Path, fields: Mapping[str, Any]):
        super().__init__(path)
        self.config.pop("quantization_config", None)
        if fields.get("version") != VERSION:
            raise LoadError(
                f"{path}: its packed weights are of version {fields.get('version')!r}, this exactkv reads {VERSION}; "
                "quantize the original model again"
            )
        given = fields.get("tensors")
        if not isinstance(given, dict) or not all(
            isinstance(t, dict) and t.get("bits") in MIDDLE and isinstance(t.get("shape"), list) for t in given.values()
        ):
            raise LoadError(f"{path}/config.json: quantization_config has no list of tensors with bits and shape")
        self._packed: dict[str, dict[str, Any]] = given
        stored = super().shapes()
        if absent := [f"{n}.{p}" for n in given for p in ("numbers", "scales") if f"{n}.{p}" not in stored]:
            raise LoadError(f"{path}: {len(absent)} packed tensors are missing: {shown(absent)}. Copy the files again.")

    def named(self, family: Family) -> Family:
        own = {"head.weight", *map(_general, self.shapes())}  # a tied head is asked for too
        names = {name: (name,) for name in own}
        return replace(family, names=names, instead=(), prefixes=("",), left_aside=())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = super().shapes()
        parts = {f"{name}.{part}" for name in self._packed for part in ("numbers", "scales")}
        found = {name: shape for name, shape in plain.items() if name not in parts}
        return found | {name: tuple(tensor["shape"]) for name, tensor in self._packed.items()}

    def packed(self) -> dict[str, StoredPacked]:
        """The packed tensors by our names."""
        return {
            name: StoredPacked(self.file_of(f"{name}.numbers"), name, t["bits"]) for name, t in self._packed.items()
        }


def _general(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"layers.{{i}}.{rest.partition('.')[2]}" if first == "layers" else name


def write(model: Model, source: TensorSource, directory: Path) -> None:
    """Write ``model``, read from ``source`` and packed, into ``directory``, which must not exist; it is whole or not
    there. Raises InputError where it exists or the weights are not packed."""
    from safetensors.torch import save_file

    weights = model.decoder.weights
    if not any(isinstance(w, Packed) for w in weights.values()):
        raise InputError(f"none of the weights of {model.name} can be packed: no group of 32 divides their inputs")
    refuse_existing(directory)
    tensors, listed = {}, {}
    for name, weight in weights.items():
        if isinstance(weight, Packed):
            tensors[f"{name}.numbers"], tensors[f"{name}.scales"] = weight.numbers.cpu(), weight.scales.cpu()
            listed[name] = {"bits": weight.bits, "group": weight.group, "shape": list(weight.shape)}
        else:
            tensors[name] = weight.cpu().contiguous()
    quantization = {"quant_method": METHOD, "version": VERSION, "format": model.quantization, "tensors": listed}
    dtype = str(model.dtype).removeprefix("torch.")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        _write_json(partial / "config.json", {**source.config, "dtype": dtype, "quantization_config": quantization})
        if source.generation_config:
            _write_json(partial / "generation_config.json", source.generation_config)
        _write_tokenizer(partial, source, model.tokenizer)
        refuse_existing(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(directory: Path) -> None:
    """Raise InputError where there is something already."""
    if os.path.lexists(directory):
        raise InputError(f"{directory} exists already; nothing is overwritten: remove it or name another directory")


def _write_tokenizer(directory: Path, source: TensorSource, tokenizer: Tokenizer | None) -> None:
    """The files of ``source`` as they are, if it is a directory; else what makes the same tokenizer."""
    if isinstance(source, DirectorySource):
        for pattern in _TOKENIZER_FILES:
            for file in source.path.glob(pattern):
                shutil.copyfile(file, directory / file.name)
    elif tokenizer is not None:
        tokenizer.backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = dict(tokenizer.special_tokens)
        if tokenizer.chat_template is not None:
            config["chat_template"] = tokenizer.chat_template
        _write_json(directory / "tokenizer_config.json", config)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
