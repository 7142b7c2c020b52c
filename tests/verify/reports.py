"""Reports made by hand, for the tests of what is shown."""

from __future__ import annotations

import math
from typing import Any

from exactkv.verify.report import EXACT, NOT_SUPPORTED, UNDECIDED, VIOLATION, Diagnosis, Outcome, Report

INJECTION = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)> & \"'"


def report(outcomes: list[Outcome] | None = None, **changes: Any) -> Report:
    """A tiny Llama 4 in a library; exact unless ``outcomes`` say otherwise."""
    given: dict[str, Any] = {
        "target": "Llama4ForCausalLM, shrunk",
        "engine": "transformers",
        "versions": {"transformers": "5.17.0", "torch": "2.11.0"},
        "model": "config.json",
        "dtype": "float32",
        "seed": 0,
        "layers": ["chunked 8", "chunked 8", "sliding 12", "full"],
        "length": 64,
        "noise": 1.3e-6,
        "tolerance": 1.04e-5,
        "scale": 3.41,
        "judged_by": ["the one pass over fewer tokens", "the one pass in a batch", "the one pass in a wider dtype"],
        "seconds": 12.34,
        "outcomes": [exact()] if outcomes is None else outcomes,
    }
    return Report(**{**given, **changes})


def differences(first_wrong: int | None = None, length: int = 64, size: float = 3.1) -> list[float | None]:
    """Noise, and from ``first_wrong`` on something larger; the first four positions are not compared."""
    found: list[float | None] = [None] * 4
    for i in range(4, length):
        noise = 4e-7 * (1 + math.sin(i * 1.7) ** 2 * 2)
        found.append(noise if first_wrong is None or i < first_wrong else size * (0.02 + math.sin(i * 0.9) ** 2))
    return found


def exact(schedule: str = "steps", cache: str = "dynamic", **changes: Any) -> Outcome:
    given: dict[str, Any] = {
        "kinds": "AC", "worst": 1.2e-6, "tolerance": 1.04e-5, "compared": 60, "differences": differences(),
        "seconds": 0.41,
    }  # fmt: skip
    return Outcome(schedule, cache, status=EXACT, **{**given, **changes})


def violation(schedule: str = "pieces", cache: str = "static", **changes: Any) -> Outcome:
    given: dict[str, Any] = {
        "kinds": "ABD", "worst": 3.1, "tolerance": 1.04e-5, "compared": 56, "differences": differences(9),
        "reason": "position 9 differs by 3.1e-2", "seconds": 0.55, "diagnosis": diagnosis(),
    }  # fmt: skip
    return Outcome(schedule, cache, status=VIOLATION, **{**given, **changes})


def unsupported(schedule: str, cache: str = "dynamic", reason: str = "batches") -> Outcome:
    return Outcome(schedule, cache, "J", NOT_SUPPORTED, reason=reason)


def undecided(schedule: str = "long", cache: str = "dynamic") -> Outcome:
    return Outcome(schedule, cache, "Q", UNDECIDED, reason="every position stands at a near-tie of the router")


def diagnosis(**changes: Any) -> Diagnosis:
    given: dict[str, Any] = {
        "kind": "A",
        "title": "allocated size taken for live length",
        "because": "It starts when the chunk is left while the buffer is not full, and goes away with step=1.",
        "first_position": 9,
        "relation": "1 after the start of the second chunk of 8, the first step after a prefill of 9",
        "first_layer": 1,
        "layer_kind": "chunked 8",
        "layer_differences": [0.0, 3e-7, 1.3e-2, 0.4, 2.9],
        "confirmed": True,
        "operations": ["New('a', step=16)", "Feed('a', <9 tokens 3, 17, … 5>)", "Feed('a', 12)"],
        "script": "import torch\n\ncache = make(step=16)\nfor token in text:\n    print(feed(cache, [token]) < 1e-3)\n",
    }
    return Diagnosis(**{**given, **changes})


def mixed() -> Report:
    """Something of everything."""
    other = diagnosis(
        kind="E", title="rewind claims more than it does", confirmed=False, script="", first_position=None, relation="",
        first_layer=None, layer_kind="", layer_differences=[], because="crop returned 3, and 2 were taken back.",
        operations=["Rewind('a', 3)"],
    )  # fmt: skip
    return report(
        [
            exact("steps"),
            exact("pieces of 1, 2, 3", kinds="ABCDL"),
            violation("steps", "static", differences=differences(9, size=0.001), worst=0.001),
            violation("pieces"),
            violation(
                "rewind and feed other tokens", "dynamic", kinds="E", worst=None, differences=[], diagnosis=other,
                reason="claimed 3 tokens taken back, 2 were",
            ),
            violation(
                "save and load", "static", kinds="O", worst=math.nan, diagnosis=None, reason="NaN at position 20",
                differences=[*differences()[:20], math.nan, math.inf, *differences()[22:]],
            ),
            undecided(),
            unsupported("ragged batch"), unsupported("join, leave"), unsupported("ragged batch", "static"),
            unsupported("prompt store", reason="a prefix store"),
        ],
        notes=["two positions stand at near-ties and were left out"],
        config={"model_type": "llama4", "hidden_size": 32},
    )  # fmt: skip
