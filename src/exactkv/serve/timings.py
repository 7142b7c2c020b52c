"""What a reply cost, and what its cache held in the end: told where a request asks for ``timings``."""

from __future__ import annotations

from exactkv.generation.loop import Stats
from exactkv.models.model import Model
from exactkv.serve.schema.openai import Span, Timings


def timings(model: Model, stats: Stats) -> Timings:
    """Of a text that has ended."""
    held = max(0, stats.prompt_tokens + stats.generated_tokens - 1)  # all tokens but the last
    return Timings(
        prompt_tokens=stats.prompt_tokens, cached_tokens=stats.cached_tokens, fed_tokens=stats.fed_tokens,
        generated_tokens=stats.generated_tokens, first_token_seconds=stats.first_token_seconds,
        prefill_seconds=stats.prefill_seconds, decode_seconds=stats.decode_seconds,
        tokens_per_second=stats.decode_rate, cache=spans(model, held),
    )  # fmt: skip


def spans(model: Model, length: int) -> list[Span]:
    """For each kind of layer the positions that a row of that length keeps, ``start`` <= p < ``end``."""
    spec = model.new_cache(0).spec
    told = [
        Span(
            kind=str(zone.pattern) if zone.high is None else f"anchors of {zone.pattern}", layers=len(zone.layers),
            start=min(zone.retained_from(length, 0), zone.clip(length)), end=zone.clip(length),
        )
        for zone in spec.zones
    ]  # fmt: skip
    if spec.recurrent:
        told.append(Span(kind="recurrent", layers=len(spec.recurrent), start=max(0, length - 1), end=length))
    return told
