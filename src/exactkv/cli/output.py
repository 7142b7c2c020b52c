"""What the commands print for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exactkv.generation import Logprobs, Stats
    from exactkv.models.model import Model


def print_json(value: Any, indent: int | None = None) -> None:
    """One JSON value on standard output, strict (no NaN), whole in any locale: characters that its encoding lacks
    are escaped."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, allow_nan=False, indent=indent), flush=True)


def usage(stats: Stats, completion_tokens: int) -> dict[str, int]:
    """The tokens that a text took; see docs/generation.md."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "fed_tokens": stats.fed_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": stats.prompt_tokens + completion_tokens,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }


def told_logprobs(model: Model, logprobs: Iterable[Logprobs]) -> list[dict[str, Any]]:
    """One object a token; see docs/generation.md."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = None if model.tokenizer is None else model.tokenizer.decode([token], skip_special_tokens=False)
        return {"token": token, "text": text, "logprob": logprob}

    return [
        {
            **told(at.token, at.logprob),
            "sampled_logprob": at.sampled_logprob,
            "top_logprobs": [told(*pair) for pair in at.top_logprobs],
            "sampled_top_logprobs": [told(*pair) for pair in at.sampled_top_logprobs],
        }
        for at in logprobs
    ]
