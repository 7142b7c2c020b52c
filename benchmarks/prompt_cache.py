"""What six turns of a conversation feed and how long their first token takes, hot and recomputed, in one run.

    python benchmarks/prompt_cache.py [--tokens 4000] [--models smollm2 gemma3 llama4 mamba2] [--json]

The turns are made of random token ids, so that base models and tiny random ones take part: *append* a message, the
*same* prompt again, *regenerate* (after an answer), *edit* the last message, edit an *earlier* one, and *drop thinking*
(a stretch that is left out of the last answer). Every hot turn must give the tokens of the cold one. Other engines' own
reuse is not measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

import exactkv  # noqa: E402
from exactkv.generation import Generation, stream  # noqa: E402

MESSAGE, THINKING, ANSWERED = 20, 60, 8


def model_named(name: str) -> exactkv.Model:
    if name == "llama4":
        from tests.tiny import tiny_llama4

        return tiny_llama4(64, max_position_embeddings=1 << 16)
    if name == "mamba2":
        from tests.hybrid import MAMBA2, hybrid_model

        return hybrid_model([MAMBA2] * 4, torch.float32)
    return exactkv.load(name, dtype="float32", device="cpu")


def answered(model: exactkv.Model, prompt: list[int], cache: exactkv.Cache | None, ends: list[int]) -> Generation:
    at = [end for end in ends if end <= len(prompt)]
    made = stream(model, prompt, ANSWERED, stop_token_ids=(), cache=cache, checkpoints=at)
    list(made)
    return made


def turns(model: exactkv.Model, tokens: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    spare = iter(
        torch.randint(0, min(model.spec.vocab_size, 40_000), (2 * tokens + 1000,), generator=generator).tolist()
    )
    take = lambda count: [next(spare) for _ in range(count)]  # noqa: E731
    history = take(tokens)
    ends = list(range(tokens // 8, tokens + 1, max(1, tokens // 8)))
    first = answered(model, history, None, ends)
    cache = first.cache
    rows: list[dict[str, Any]] = []

    def turn(name: str, prompt: list[int]) -> Generation:
        hot = answered(model, prompt, cache, [*ends, len(prompt) - MESSAGE])
        cold = answered(model, prompt, None, [])
        assert hot.tokens == cold.tokens, f"{name}: the hot turn says {hot.tokens}, the cold one {cold.tokens}"
        stats = hot.stats
        assert stats.prompt_tokens == stats.cached_tokens + stats.fed_tokens
        rows.append(
            {
                "turn": name, "prompt": stats.prompt_tokens, "fed": stats.fed_tokens,
                "hot_seconds": stats.first_token_seconds, "cold_seconds": cold.stats.first_token_seconds,
                "bytes": stats.cache_bytes,
            }
        )  # fmt: skip
        return hot

    thought = [*history, *first.tokens]
    question = take(MESSAGE)
    turn("append", [*thought, *question])
    turn("same again", [*thought, *question])
    turn("regenerate", [*thought, *question])
    turn("edit the last", [*thought, *question[: MESSAGE // 4], *take(MESSAGE)])
    turn("edit an earlier", [*history[: tokens * 3 // 4 + 2], *take(MESSAGE)])
    thinking = [*history, *take(THINKING), *question]
    answered(model, thinking, cache, [*ends, len(history)])
    turn("drop thinking", [*history, *question, *take(MESSAGE)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3", "llama4", "mamba2"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {name: turns(model_named(name), given.tokens) for name in given.models}
    if given.json:
        print(json.dumps(found))
        return
    print("| model | turn | prompt | fed | first token, hot | recomputed | bytes |\n|---|---|---|---|---|---|---|")
    for name, rows in found.items():
        for r in rows:
            times = f"{r['hot_seconds']:.3f} s | {r['cold_seconds']:.3f} s"
            print(f"| {name} | {r['turn']} | {r['prompt']} | {r['fed']} | {times} | {r['bytes']:,} |")


if __name__ == "__main__":
    main()
