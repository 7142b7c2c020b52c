"""The supported families, a file each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.config import LenientConfig
from exactkv.models.families import (
    cohere2,
    deepseek,
    exaone4,
    falcon_h1,
    gemma,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    jamba,
    lfm2,
    llama,
    llama4,
    mamba,
    mamba2,
    mistral,
    mixtral,
    nemotron,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    recurrent_gemma,
    seed_oss,
    smollm3,
    starcoder2,
)
from exactkv.models.families.family import Alternating, Family, Source, Transposed
from exactkv.models.spec import DecoderSpec, MoeSpec

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    llama4.FAMILY,
    qwen.FAMILY,
    gemma.FAMILY_1,
    gemma.FAMILY_2,
    gemma3.FAMILY,
    gemma3n.FAMILY,
    gemma4.FAMILY,
    phi3.FAMILY,
    cohere2.FAMILY,
    olmo.FAMILY,
    smollm3.FAMILY,
    granite.FAMILY,
    glm.FAMILY,
    deepseek.FAMILY,
    gpt_oss.FAMILY,
    exaone4.FAMILY,
    starcoder2.FAMILY,
    gpt_neox.FAMILY,
    gpt2.FAMILY,
    seed_oss.FAMILY,
    nemotron.FAMILY,
    mamba.FAMILY,
    mamba2.FAMILY,
    lfm2.FAMILY,
    falcon_h1.FAMILY,
    jamba.FAMILY,
    granite_hybrid.FAMILY,
    qwen3_next.FAMILY,
    recurrent_gemma.FAMILY,
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family that reads this config. Raises LoadError if there is none; it names the nearest one, what that one
    does not know, and those supported. Also where the model has another head than one for text."""
    architectures = config.get("architectures")
    given = [*(architectures if isinstance(architectures, list) else [architectures]), config.get("model_type")]
    for name in given:
        for family in FAMILIES:
            if name in family.architectures:
                _check_head(family, given)
                return family
    shown = ", ".join(repr(n) for n in given if n) or "nothing"
    if reason := _no_decoder(config, given):
        raise LoadError(
            f"unsupported architecture: the config names {shown}. It is {reason}, not a decoder, which writes text "
            "token by token; expected is a decoder."
        )
    supported = "; ".join(f"{f.name} ({', '.join(a for a in f.architectures if a[0].isupper())})" for f in FAMILIES)
    nearest = _nearest(config, [str(n) for n in given if n])
    raise LoadError(f"unsupported architecture: the config names {shown}. {nearest}Supported: {supported}.")


def model_type_of(family: Family, config: Mapping[str, Any]) -> str | None:
    """The "model_type" by which a config of this family is read: where it names an architecture that is known, the one
    of that, whatever it calls itself. Raises LoadError where it calls itself another known one."""
    named, given = config.get("architectures"), config.get("model_type")
    types = dict(zip(family.architectures[::2], family.architectures[1::2], strict=True))
    known = [
        name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str) and name in types
    ]
    if not known or given == types[known[0]]:
        return given
    others = {kind for f in FAMILIES for kind in f.architectures} - {t for n, t in types.items() if _is_wrapper(n)}
    if isinstance(given, str) and given in others:
        raise LoadError(
            f"config of a {family.name} model: architectures names {known[0]!r}, which goes with the model_type "
            f"{types[known[0]]!r}, and model_type is {given!r}; correct the one that is wrong"
        )
    return types[known[0]]


def text_type(family: Family, inner: Mapping[str, Any]) -> str:
    """The "model_type" by which the text model's config within a larger one is read. Raises LoadError."""
    names, types = family.architectures[::2], family.architectures[1::2]
    texts = [kind for name, kind in zip(names, types, strict=True) if not _is_wrapper(name)]
    given = inner.get("model_type")
    if given in texts:
        return str(given)
    if isinstance(given, str) and any(given in f.architectures for f in FAMILIES if f is not family):
        raise LoadError(
            f"config of a {family.name} model: {family.nested}'s model_type is {given!r}; expected {' or '.join(texts)}"
        )
    return texts[0]


def _is_wrapper(architecture: str) -> bool:
    return architecture.endswith("ForConditionalGeneration")


_OTHER_HEAD = re.compile(r"\w+For(?!CausalLM|ConditionalGeneration)[A-Z]\w*")


def _check_head(family: Family, given: Sequence[Any]) -> None:
    """Raise LoadError where the config names a model whose head is not for text. A base model may pass: whether the
    head is there, the weights tell."""
    if not any(name in family.architectures for name in given[:-1]):
        for name in given[:-1]:
            if isinstance(name, str) and _OTHER_HEAD.fullmatch(name):
                expected = next(a for a in family.architectures if a[0].isupper())
                raise LoadError(
                    f"the config names {name!r}, a model whose head is for another task than text; expected one such "
                    f"as {expected!r}. Take the model for text that it was made from."
                )


_ENCODERS = ("bert", "electra", "deberta", "mpnet", "xlnet", "esm", "vit", "clip", "siglip")
_MASKED = re.compile(r"\w+For(MaskedLM|PreTraining|ImageClassification)")


def _no_decoder(config: Mapping[str, Any], given: Sequence[Any]) -> str:
    """What the model is, if by its config it is no decoder; else nothing. One for causal text is, whatever it was
    made from (ModernBertDecoder)."""
    if config.get("is_encoder_decoder"):
        return "an encoder with a decoder"
    if any(isinstance(name, str) and name.endswith("ForCausalLM") for name in given):
        return ""
    words = [part for name in given if isinstance(name, str) for part in re.split(r"[_\W]+", name.lower())]
    masked = any(_MASKED.fullmatch(str(name)) for name in given)
    if masked or "type_vocab_size" in config or any(word.endswith(_ENCODERS) for word in words):
        return "an encoder"
    return ""


def _nearest(config: Mapping[str, Any], given: Sequence[str]) -> str:
    """Which family would read most of the config, one of its name and with the same parts before others, and what is
    missing. That it could read all of it does not say that its arithmetic is the same."""
    inner = config.get("text_config")
    fields = inner if isinstance(inner, dict) else config
    parts = [any(re.search(pattern, name) for name in fields) for pattern in _SPEAK_OF]
    tried = []
    for family, kind in ((f, kind) for f in FAMILIES for kind in f.architectures if kind.islower()):
        reader = LenientConfig({**fields, "model_type": kind}, family.name)
        try:
            spec, problem = family.spec(reader), ""
        except Exception as error:  # whatever a family's reader makes of another's fields
            spec, problem = None, str(error) if isinstance(error, LoadError) else "some of its fields have other values"
        if reader.missing:
            problem = f"which also needs {', '.join(reader.missing)}"
        new = [*reader.unknown(), *(f"{name} = {value!r}"[:80] for name, value in reader.unsupported.items())]
        kin = _kin(given, family)
        has = _parts(family, spec)
        others = sum(
            worth if theirs else worth // 3
            for worth, ours, theirs in zip(_WORTH, has, parts, strict=True)
            if ours != theirs
        )
        strange = len(new) + len(reader.missing) + 4 * bool(problem) + others - _KIN * kin
        tried.append((strange, family, kind, new, problem, kin))
    _, family, kind, new, problem, kin = min(tried, key=lambda t: t[0])
    nearest = f"{family.name} ({problem})" if problem else family.name
    means = f"a family for it would have to give a meaning to: {', '.join(new)}"
    if not new and not problem:
        own = config.get("model_type") or "X"
        means = (
            "it knows every field, but the arithmetic may differ: compare transformers' "
            f"modeling_{own}.py with modeling_{kind.removesuffix('_text')}.py"
        )
    return (
        f"The nearest supported family by the config's {'name and ' if kin else ''}fields is {nearest}"
        f"{f'; {means}' if new or not problem else ''}. docs/adding-a-family.md says how to add one. "
    )


_KIN, _WORTH = 18, (30, 24, 8, 20)
"""How many fields a name is worth, and each kind of part (see `_parts`) that a family lacks; a third if it has one too
many."""
_SPEAK_OF = (r"mamba|ssm|conv|lru|linear_(num|key|value)|state_size", r"[kqo]v?_lora_rank", r"expert", r"^layer_?norm")
"""What fields of recurrent layers, of latent attention, of mixtures and of layer norms are called."""


def _parts(family: Family, spec: DecoderSpec | None) -> tuple[bool, ...]:
    """Whether a family has recurrent layers and latent attention; of a decoder of its, whether it has mixtures and
    layer norms."""
    return (
        any(".recurrent." in ours for ours in family.names),
        any(".kv_down." in ours for ours in family.names),
        spec is not None and any(isinstance(p, MoeSpec) for layer in spec.layers for p in (layer.mlp, layer.beside)),
        spec is not None and spec.norm == "layer",
    )


def _kin(given: Sequence[str], family: Family) -> bool:
    """Whether a name that the config gives is in one of the family's, but for numbers, or the other way round."""

    def stem(name: str) -> str:
        return re.sub(r"[^a-z]", "", re.split(r"For[A-Z]|LMHead", name)[0].lower().removesuffix("_text"))

    ours, theirs = ({s for s in map(stem, names) if len(s) > 2} for names in (family.architectures, given))
    return any(a in b or b in a for a in ours for b in theirs)


__all__ = ["FAMILIES", "Alternating", "Family", "Source", "Transposed", "find_family", "model_type_of", "text_type"]
