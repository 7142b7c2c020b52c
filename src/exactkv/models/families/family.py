"""What a family's file provides: which configs it reads, what decoder they mean, what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exactkv.models.config import Config
from exactkv.models.spec import DecoderSpec


@dataclass(frozen=True)
class Transposed:
    """A tensor that the files hold with its last two axes swapped."""

    name: str
    transposed: bool = True


@dataclass(frozen=True)
class Alternating:
    """A tensor of ``parts`` parts whose rows take turns in the files: one by one, or ``by_head`` as many as a head
    has."""

    name: str
    parts: int
    by_head: bool = False
    transposed: bool = False


Source = str | Transposed | Alternating
Names = Mapping[str, tuple[Source, ...]]


@dataclass(frozen=True)
class Family:
    """``names``: our parameter -> the files' tensors that are stacked in it; "{i}" is the layer's number, "{e}" an
    expert's, where each expert has tensors of its own. A parameter with fewer parts has the first of them.
    ``instead``: other tables, each for the parameters that some files hold otherwise.
    ``architectures``: the config's names for this family: by "architectures", each followed by the "model_type" that
    goes with it; those of text models first.
    ``nested``: the field that holds the text model's config, if it has one of its own.
    ``prefixes``: what the files may put before each name; one that begins with "model." goes in place of the name's
    own "model.". ``left_aside``: regular expressions of tensors that the decoder does not need; "{layers}" is the
    number of layers."""

    name: str
    architectures: tuple[str, ...]
    spec: Callable[[Config], DecoderSpec]
    names: Names
    instead: tuple[Names, ...] = ()
    nested: str | None = None
    prefixes: tuple[str, ...] = ("",)
    left_aside: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
