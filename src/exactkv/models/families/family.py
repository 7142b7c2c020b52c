"""What a family's file provides: which configs it reads, what decoder they mean, what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.spec import DecoderSpec, FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling


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
    ``architectures``: the config's names for this family, by "architectures" or "model_type".
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


def rope_fields(config: Config, default_base: float = 10_000.0) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from "rope_theta" and "rope_scaling" (older files) or "rope_parameters" (newer)."""
    merged = {**config.take("rope_scaling", {}), **config.take("rope_parameters", {})}
    bases = {base for base in (config.take("rope_theta", None), merged.pop("rope_theta", None)) if base is not None}
    if len(bases) > 1:
        raise LoadError(
            f"config of a {config.family} model: rope_theta is {' and '.join(map(str, sorted(bases)))}, at the top "
            "and in rope_parameters; keep the one that the model was trained with"
        )
    return float(bases.pop() if bases else default_base), rope_scaling(config, merged)


def rope_scaling(config: Config, fields: Mapping[str, object]) -> RopeScaling | None:
    """The scaling that a "rope_scaling" dict means; its own fields are checked as the config's are."""
    inner = Config({k: v for k, v in fields.items() if k != "type"}, f"{config.family} rope")
    kind = inner.expect(
        "rope_type", "default", "linear", "llama3", "llama3_factors", default=fields.get("type", "default")
    )
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(float(inner.take("factor")))
    elif kind == "llama3_factors":
        scaling = FrequencyFactors(tuple(float(f) for f in inner.take("factors")))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            float(inner.take("factor")),
            float(inner.take("low_freq_factor")),
            float(inner.take("high_freq_factor")),
            int(inner.take("original_max_position_embeddings")),
        )
    inner.finish()
    return scaling
