"""A directory whose weights are quantized, read as if they were not: computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models import packed_files
from exactkv.models.formats import floats, integers
from exactkv.models.formats.fields import check_fields
from exactkv.models.formats.recipe import Recipe, Shapes, ending
from exactkv.models.source import FLOATS, DirectorySource, is_split, shown

Reader = Callable[[Mapping[str, Any], Shapes], tuple[dict[str, Recipe], set[str]]]
READERS: dict[str, Reader] = {
    "fp8": floats.fp8,
    "mxfp4": floats.mxfp4,
    "compressed-tensors": integers.compressed,
    "awq": integers.awq,
    "gptq": integers.gptq,
}
"""By "quant_method": from the fields of "quantization_config" and the stored tensors' shapes to a recipe for each
tensor that is computed, and the names of stored ones that only quantized activations need."""


CACHE_SCALES = (
    ".kv_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
    ".q_zero_point", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
"""Tensors for caches (and attention) in 8 bits, set aside: here both keep what the projections give."""


def open_directory(path: Path, accept_fields: Collection[str] = ()) -> DirectorySource:
    """The source at a model directory. ``accept_fields``: see `load`.

    Raises LoadError, see DirectorySource, and where the weights are quantized in a way that is not supported."""
    directory = DirectorySource(path)
    found = [f["quantization_config"] for f in _all_fields(directory.config) if f.get("quantization_config")]
    if not found:
        directory.refuse_quantized()
        return directory
    fields = found[0] if isinstance(found[0], dict) else {"quant_method": found[0]}
    method = str(fields.get("quant_method", "?")).lower()
    if method == packed_files.METHOD:
        return packed_files.PackedSource(path, fields)
    if method not in READERS:
        raise LoadError(
            f"{path}: the weights are quantized ({method}), which is not supported; supported: {', '.join(READERS)}. "
            "Take the model's version in bfloat16 or float16, or a GGUF file of it."
        )
    check_fields(method, fields, accept_fields)
    return QuantizedSource(path, fields, READERS[method])


def _all_fields(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config, *(value for value in config.values() if isinstance(value, dict))]


class QuantizedSource(DirectorySource):
    """Tensors are computed in float32 and rounded once, to the dtype in which they are asked for."""

    def __init__(self, path: Path, fields: Mapping[str, Any], reader: Reader):
        super().__init__(path)
        for part in _all_fields(self.config):
            part.pop("quantization_config", None)
        stored = super().shapes()
        self.recipes, aside = reader(fields, stored)
        used = {part for recipe in self.recipes.values() for part in recipe.parts} | aside
        used |= ending(stored, *CACHE_SCALES)
        self._shapes = {name: shape for name, shape in stored.items() if name not in used}
        self._shapes |= {name: recipe.shape for name, recipe in self.recipes.items()}
        self._check_scales()

    def _check_scales(self) -> None:
        """Raise LoadError where weights are quantized and nothing says by which scale, or a part of them is not
        there."""
        stored = super().shapes()
        if absent := sorted({p for recipe in self.recipes.values() for p in recipe.parts if p not in stored}):
            raise LoadError(
                f"{self.path}: {len(absent)} tensors that the quantized weights need are missing: {shown(absent)}. "
                "Download the files again, or take the model in bfloat16 or float16."
            )
        lacking = [
            f"{name} ({dtype}; expected {name.removesuffix('_packed')}_scale beside it)"
            for name, dtype in self.dtypes().items()
            if name in self._shapes
            and name not in self.recipes
            and name.endswith((".weight", ".weight_packed"))
            and dtype not in FLOATS
        ]
        if lacking:
            raise LoadError(
                f"{self.path}: the scales of {len(lacking)} quantized weights are missing: {shown(lacking)}. "
                "Download the files again, or take the model in bfloat16 or float16."
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def same(self, first: str, second: str) -> bool:
        if first not in self.recipes and second not in self.recipes:
            return super().same(first, second)
        if self._shapes[first] != self._shapes[second]:
            return False
        wholes = [torch.empty(self._shapes[name]) for name in (first, second)]
        for name, whole in zip((first, second), wholes, strict=True):
            self.read(name, whole)
        return torch.equal(*wholes)

    def read(self, name: str, out: Tensor) -> None:
        recipe = self.recipes.get(name)
        if recipe is None:
            super().read(name, out)
            return
        if not is_split(recipe.shape, out.shape):
            raise LoadError(
                f"{self.path}: tensor {name!r} has the shape {list(recipe.shape)}; "
                f"it was to be written into {list(out.shape)}."
            )
        try:
            recipe.fill(out, *(self.stored(part) for part in recipe.parts))
        except LoadError as error:
            raise LoadError(f"{self.path}: {name!r} cannot be computed: {error}") from None
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            raise LoadError(
                f"{self.path}: {name!r} cannot be computed from {', '.join(recipe.parts)}, whose shapes or dtypes do "
                f"not fit ({error}); the files are damaged, or their format is another"
            ) from error
