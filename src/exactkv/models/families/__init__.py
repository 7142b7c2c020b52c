"""The supported families, a file each."""

from __future__ import annotations

from collections.abc import Mapping
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
    does not know, and those supported."""
    architectures = config.get("architectures")
    given = [*(architectures if isinstance(architectures, list) else [architectures]), config.get("model_type")]
    for name in given:
        for family in FAMILIES:
            if name in family.architectures:
                return family
    supported = "; ".join(f"{f.name} ({', '.join(a for a in f.architectures if a[0].isupper())})" for f in FAMILIES)
    shown = ", ".join(repr(n) for n in given if n) or "nothing"
    raise LoadError(f"unsupported architecture: the config names {shown}. {_nearest(config)}Supported: {supported}.")


def _nearest(config: Mapping[str, Any]) -> str:
    """Which family would read most of the config, and what is missing. That it could read all of it does not say that
    its arithmetic is the same."""
    inner = config.get("text_config")
    fields = inner if isinstance(inner, dict) else config
    tried = []
    for family in FAMILIES:
        reader = LenientConfig(fields, family.name)
        try:
            family.spec(reader)
            problem = ""
        except Exception as error:  # whatever a family's reader makes of another's fields
            problem = str(error) if isinstance(error, LoadError) else "some of its fields have other values"
        new = [*reader.unknown(), *(f"{name} = {value!r}"[:80] for name, value in reader.unsupported.items())]
        tried.append((bool(problem), len(new), family, new, problem))
    failed, _, family, new, problem = min(tried, key=lambda t: t[:2])
    if failed and "hidden_size" not in fields:
        return ""
    needed = f"; a family for it would have to give a meaning to: {', '.join(new)}" if new else ""
    refused = f" ({problem})" if problem else ""
    return (
        f"The nearest supported family by the config's fields is {family.name}{refused}{needed}. "
        "docs/adding-a-family.md says how to add one. "
    )


__all__ = ["FAMILIES", "Alternating", "Family", "Source", "Transposed", "find_family"]
