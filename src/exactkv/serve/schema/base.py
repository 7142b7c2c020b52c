"""What the schemas have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_STOPS, MOST_STOP_LENGTH = 64, 1024
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP_LENGTH)]
Stops = StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Count = Annotated[int, Field(ge=1)]
Json = dict[str, Any]


class Asked(BaseModel):
    """Part of a request: types are not converted, and fields that are not known are an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Told(BaseModel):
    """Part of a response."""

    model_config = ConfigDict(protected_namespaces=())


class SamplingFields(Asked):
    """How tokens are chosen: beyond the APIs' own, any setting of `exactkv.Sampling` that is a number."""

    temperature: float | None = Field(None, ge=0, description="0 takes the most probable token.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all tokens.")


class MoreSampling(SamplingFields):
    """What OpenAI's API adds, and what most servers do."""

    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    penalty_window: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id, as digits, to what its logit gains.")
    ignore_eos: bool = Field(False, description="Go on after end tokens, for tests of load.")
    cache_salt: str | None = Field(
        None, max_length=1024, description="The prompt cache is shared with requests of the same salt and key alone."
    )


class StreamOptions(Asked):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
