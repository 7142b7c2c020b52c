"""Which tensors of a model's files go where in our parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from exactkv.errors import LoadError
from exactkv.models.families import Alternating, Family, Source
from exactkv.models.families.family import Names
from exactkv.models.parameters import Parameter, parameters
from exactkv.models.source import TensorSource, shown
from exactkv.models.spec import DecoderSpec

Shapes = Mapping[str, tuple[int, ...]]


def as_saved(family: Family, shapes: Shapes) -> Family:
    """The family with the names that the files (``shapes`` by name) use: what is saved as a base model, without a
    head of its own, lacks the first part of all names ("model.", "backbone.", "gpt_neox.")."""
    first = _name(family.names["embedding.weight"][0]).split(".")[0] + "."

    def shortened(table: Names) -> Names:
        return {
            ours: tuple(
                source.removeprefix(first)
                if isinstance(source, str)
                else replace(source, name=source.name.removeprefix(first))
                for source in sources
            )
            for ours, sources in table.items()
        }

    patterns = tuple(pattern.removeprefix(re.escape(first)) for pattern in family.left_aside)
    base = replace(
        family,
        names=shortened(family.names),
        instead=tuple(map(shortened, family.instead)),
        prefixes=tuple(prefix.removeprefix(first) for prefix in family.prefixes),
        left_aside=(*family.left_aside, *patterns),
    )

    def holds(family: Family) -> bool:
        return any(s in shapes for prefix in family.prefixes for s in _known(family, prefix, "embedding.weight"))

    return base if holds(base) and not holds(family) else family


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the files and where it goes: what ``index`` selects of ours. ``shape``: in the files.
    ``transposed``: its last two axes are swapped there. ``alternating``: (axis, parts, block) where our parts follow
    each other along ``axis`` and the files' take turns every ``block`` rows."""

    source: str
    shape: tuple[int, ...]
    ours: str
    index: tuple[int | slice, ...]
    transposed: bool = False
    alternating: tuple[int, int, int] | None = None

    def fill(self, weights: Mapping[str, Tensor], source: TensorSource) -> int:
        """Read the tensor into its place; the number of bytes there."""
        out = weights[self.ours][self.index]
        nbytes, rows = out.nbytes, -2
        if self.alternating is not None:
            rows, parts, block = self.alternating
            out = out.unflatten(rows, (parts, -1, block)).transpose(rows, rows + 1)
        source.read(self.source, out.movedim(-1, rows) if self.transposed else out)
        return nbytes


def plan_reading(
    family: Family, spec: DecoderSpec, shapes: Shapes, name: str, is_zero: Callable[[str], bool] = lambda _: False
) -> list[Piece]:
    """Which tensors of the files (``shapes`` by name) go where. Raises one LoadError that lists every tensor
    that is missing, unknown, or of another shape. ``is_zero`` tells of a tensor: a bias of zeros, which quantizers
    write for matrices that have none, is not unknown."""
    wanted = parameters(spec)
    prefix = max(family.prefixes, key=lambda p: sum(s in shapes for ours in wanted for s in _known(family, p, ours)))
    pieces = [p for ours, parameter in wanted.items() for p in _pieces(family, spec, prefix, shapes, ours, parameter)]
    missing = [p.source for p in pieces if p.source not in shapes]
    misshapen = [
        f"{p.source} is {list(shapes[p.source])}, expected {list(p.shape)}"
        for p in pieces
        if p.source in shapes and tuple(shapes[p.source]) != p.shape
    ]
    used = {p.source for p in pieces}
    if spec.tied_head:
        used |= {stored_name(family, prefix, shapes, "head.weight") for prefix in family.prefixes}
    patterns = (pattern.replace("{layers}", str(len(spec.layers))) for pattern in family.left_aside)
    aside = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")

    def adds_nothing(stored: str) -> bool:
        matrix = stored.removesuffix("bias") + "weight"
        return stored.endswith(".bias") and matrix in used and len(shapes[matrix]) == 2 and is_zero(stored)

    unknown = sorted(n for n in shapes if n not in used and not aside.fullmatch(n) and not adds_nothing(n))
    problems = [
        f"{len(names)} {what}: {shown(names)}"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen))
        if names
    ]
    if problems:
        reason = "Either config and weights are not of the same model, or it has parts that are not supported."
        if not unknown and not misshapen and all(p.ours.startswith("head.") for p in pieces if p.source in missing):
            reason = (
                "This is a base model without a head; expected a model for text. Take that one, or, where its head is "
                "the embedding, set tie_word_embeddings to true in config.json."
            )
        raise LoadError(
            f"{name}: the tensors do not fit the config of a {family.name} model: {'; '.join(problems)}. {reason}"
        )
    return pieces


def stored_name(family: Family, prefix: str, shapes: Shapes, ours: str) -> str:
    """The files' name of one of our parameters that is one tensor there."""
    return _stored(prefix, _sources(family, prefix, shapes, ours)[0])


def _pieces(
    family: Family, spec: DecoderSpec, prefix: str, shapes: Shapes, ours: str, parameter: Parameter
) -> Iterator[Piece]:
    layer = re.match(r"layers\.(\d+)\.", ours)
    sources = _sources(family, prefix, shapes, ours)
    whole = parameter.shape[parameter.axis : parameter.axis + 1]
    first = 0
    for source, rows in zip(sources, parameter.parts if parameter.parts and len(sources) > 1 else whole, strict=False):
        each = "{e}" in _name(source)
        for e in range(parameter.shape[0]) if each else (None,):
            stored = _stored(prefix, source, layer[1] if layer else "", e)
            shape = (*parameter.shape[: parameter.axis], rows, *parameter.shape[parameter.axis + 1 :])
            index: tuple[int | slice, ...] = (slice(None),) * parameter.axis + (slice(first, first + rows),)
            if e is not None:
                shape, index = shape[1:], (e, *index[1:])
            transposed = not isinstance(source, str) and source.transposed
            if transposed:
                shape = (*shape[:-2], shape[-1], shape[-2])
            turns = None
            if isinstance(source, Alternating):
                heads = spec.layers[int(layer[1])].attention if layer and source.by_head else None
                block = getattr(heads, "head_dim", 1)
                turns = (parameter.axis if e is None else parameter.axis - 1, source.parts, block)
            yield Piece(stored, shape, ours, index, transposed, turns)
        first += rows


def _tables(family: Family, ours: str) -> list[Sequence[Source]]:
    """The files' tensors that are one of our parameters: as they are called, then as they may be called instead."""
    general = re.sub(r"^layers\.\d+\.", "layers.{i}.", ours)
    return [table[general] for table in (family.names, *family.instead) if general in table]


def _sources(family: Family, prefix: str, shapes: Shapes, ours: str) -> Sequence[Source]:
    """Of the tables for a parameter the one that the files follow; the first if they follow none."""
    layer = re.match(r"layers\.(\d+)\.", ours)
    tables = _tables(family, ours)
    if not tables:
        raise LoadError(
            f"the decoder of this {family.name} config has a parameter {ours}, and the family's table of names says "
            "nothing of it: give its file's tensor there (models/families), or correct the spec."
        )
    for sources in tables:
        if _stored(prefix, sources[0], layer[1] if layer else "", 0) in shapes:
            return sources
    return tables[0]


def _known(family: Family, prefix: str, ours: str) -> Iterator[str]:
    layer = re.match(r"layers\.(\d+)\.", ours)
    for sources in _tables(family, ours):
        yield _stored(prefix, sources[0], layer[1] if layer else "", 0)


def _name(source: Source) -> str:
    return source if isinstance(source, str) else source.name


def _stored(prefix: str, source: Source, layer: str = "", expert: int | None = None) -> str:
    """A full name. A prefix that begins with "model." takes the place of the name's own."""
    name = _name(source).replace("{i}", layer).replace("{e}", str(expert))
    if not prefix.startswith("model."):
        return prefix + name
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name
