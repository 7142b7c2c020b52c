"""Rope as configs describe it: a RopeSpec from "rope_theta" and "rope_scaling" (older files) or "rope_parameters"
(newer), which may hold a dict for each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.config import Config
from exactkv.models.rope import longrope_amplitude, yarn_amplitude
from exactkv.models.spec import (
    DynamicNtk,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Proportion,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "llama3_factors", "proportional")


def rope(
    config: Config,
    head_dim: int,
    base: float = 10_000.0,
    interleaved: bool = False,
    partial: float | None = None,
    others: tuple[str, ...] = (),
    absent: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """The one rope of a config. ``base``, ``partial`` (the part of the head that turns): what no field means;
    ``partial`` is None for a family whose whole head turns, so that another part is an error. ``others``: fields of
    its dict that the caller reads. ``absent``: the dict that no dict means."""
    fields = {**config.take("rope_scaling", {}), **config.take("rope_parameters", {})} or dict(absent or {})
    fields = {name: value for name, value in fields.items() if name not in others}
    bases = {b for b in (config.take("rope_theta", None), fields.pop("rope_theta", None)) if b is not None}
    if len(bases) > 1:
        raise LoadError(
            f"config of a {config.family} model: rope_theta is {' and '.join(map(str, sorted(bases)))}, at the top "
            "and in rope_parameters; keep the one that the model was trained with"
        )
    part = fields.pop(
        "partial_rotary_factor", config.take("partial_rotary_factor", 1.0 if partial is None else partial)
    )
    _check_part(config, part, partial is not None)
    return rope_of(config, fields, head_dim, float(bases.pop() if bases else base), interleaved, part)


def _check_part(config: Config, part: Any, any_part: bool) -> None:
    fits = isinstance(part, int | float) and not isinstance(part, bool) and (0 < part <= 1 if any_part else part == 1)
    if not fits:
        expected = "a number above 0, at most 1" if any_part else "1: the whole head turns in this family"
        raise LoadError(f"config of a {config.family} model: partial_rotary_factor is {part!r}, expected {expected}")


def ropes_of_kinds(
    config: Config,
    head_dims: Mapping[str, int],
    bases: Mapping[str, float],
    local_base: str = "",
    absent: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, RopeSpec]:
    """A rope for each kind of layer. Where the config has but one, scaling is for full layers only; ``local_base``
    names the field for the base of the others. ``absent``: the dicts that no dict means."""
    per_kind = config.fields.get("rope_parameters") or (not config.fields.get("rope_scaling") and absent) or {}
    if "full_attention" in per_kind:
        config.ignore("rope_parameters", "rope_theta", "rope_scaling", local_base)
        given = {kind: dict(per_kind[kind]) for kind in head_dims}
        for fields in given.values():
            if fields.get("rope_type") != "proportional":
                _check_part(config, fields.pop("partial_rotary_factor", 1.0), False)
        return {
            kind: rope_of(
                config, fields, head_dims[kind], float(fields.pop("rope_theta", bases[kind]))
            )
            for kind, fields in given.items()
        }  # fmt: skip
    full = rope(config, head_dims["full_attention"], bases["full_attention"])
    local = float(config.take(local_base, bases["sliding_attention"])) if local_base else full.base
    return {"full_attention": full, "sliding_attention": RopeSpec(head_dims["sliding_attention"], local)}


def rope_of(
    config: Config,
    fields: Mapping[str, Any],
    head_dim: int,
    base: float,
    interleaved: bool = False,
    partial: float = 1.0,
) -> RopeSpec:
    """What the fields of a "rope_scaling" dict mean; they are checked as the config's are."""
    named = {str(fields[name]) for name in ("type", "rope_type") if fields.get(name) is not None}
    if len(named - {"su", "longrope"}) > 1 and "short_factor" not in fields:
        raise LoadError(f"config of a {config.family} model: rope's type is {' and '.join(sorted(named))}; keep one")
    inner = Config({k: v for k, v in fields.items() if k != "type"}, f"{config.family} rope", config.accepted)
    kind = inner.expect("rope_type", *KINDS, default=fields.get("type", "default"))
    kind = "longrope" if "short_factor" in fields else kind  # once called "su", and "yarn"
    if kind == "yarn" and base <= 1.0:
        raise LoadError(
            f"config of a {config.family} model: rope_theta is {base:g}, expected more than 1 with YaRN, whose ramp is "
            "over the logarithm to that base; compare config.json with the original"
        )
    dim = int(head_dim * partial)
    scaling, amplitude = _scaling(kind, inner, config, dim)
    if scaling is None or isinstance(scaling, LinearScaling):  # a length that counts for the maximum alone
        inner.ignore("original_max_position_embeddings", *(() if scaling else ("factor",)))
    inner.ignore("max_position_embeddings")
    inner.finish()
    return RopeSpec(dim, base, interleaved, scaling, amplitude)


def _scaling(kind: str, inner: Config, config: Config, dim: int) -> tuple[RopeScaling | None, float]:
    """The scaling, and the amplitude that comes with it."""

    def factor() -> float:
        return float(inner.take("factor"))

    match kind:
        case "linear":
            return LinearScaling(factor()), 1.0
        case "dynamic":
            return DynamicNtk(factor(), config.take("max_position_embeddings")), 1.0
        case "llama3_factors":
            return FrequencyFactors(tuple(float(f) for f in inner.take("factors"))), 1.0
        case "llama3":
            low, high = float(inner.take("low_freq_factor")), float(inner.take("high_freq_factor"))
            return Llama3Scaling(factor(), low, high, _original_length(inner, config)), 1.0
        case "proportional":
            pairs = int(inner.take("partial_rotary_factor", 1.0) * dim // 2)
            return Proportion(pairs, float(inner.take("factor", 1.0))), 1.0
        case "yarn":
            yarn = YarnScaling(
                factor(),
                _original_length(inner, config),
                float(inner.take("beta_fast", 32.0)),
                float(inner.take("beta_slow", 1.0)),
                bool(inner.take("truncate", True)),
            )
            scale, everywhere = inner.take("mscale", None), inner.take("mscale_all_dim", None)
            amplitude = yarn_amplitude(yarn.factor)
            if scale and everywhere:
                amplitude = yarn_amplitude(yarn.factor, scale) / yarn_amplitude(yarn.factor, everywhere)
            return yarn, float(inner.take("attention_factor", amplitude))
        case "longrope":
            original = _original_length(inner, config)
            short, long = (tuple(float(f) for f in inner.take(f"{name}_factor")) for name in ("short", "long"))
            if len(short) != dim // 2 or len(long) != dim // 2:
                raise LoadError(
                    f"config of a {config.family} model: long rope has {len(short)} and {len(long)} factors, "
                    f"expected {dim // 2}, one a pair"
                )
            stretch = float(inner.take("factor", config.take("max_position_embeddings") / original))
            amplitude = float(inner.take("attention_factor", longrope_amplitude(stretch, original)))
            return LongRope(short, long, original), amplitude
    return None, 1.0


def _original_length(inner: Config, config: Config) -> int:
    """The length before scaling, of the config or of the rope's dict; without any the model's maximum."""
    given = inner.take("original_max_position_embeddings", config.take("max_position_embeddings", None))
    return int(config.take("original_max_position_embeddings", given))
