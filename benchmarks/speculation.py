"""Plain decoding against prompt lookup, in one run: text that is mostly copied, and text that cannot be guessed.

    python benchmarks/speculation.py [--model smollm2] [--dtype float32] [--tokens 160] [--rounds 3] [--json]

The two take turns, and their medians are compared. Replies end where the model ends them. In float32 tokens must be
equal; in bfloat16, where a pass of several rows rounds differently, it is told how many of the first ones are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch

import exactkv
from exactkv.generation import Sampling, stream

REPORT = (
    "The committee met on Tuesday to review the results of the third quarter. Sales of garden furniture rose by "
    "twelve percent, while sales of indoor lamps fell by three percent. The director of operations, Marianne "
    "Delacroix, said that the new warehouse in Rotterdam had shortened delivery times from nine days to four. The "
    "board agreed to open a second warehouse in Gdansk before the end of the year, provided that its cost stays "
    "below two million euros. The next meeting will take place on the fourteenth of November in the main building."
)
EDIT = [{"role": "user", "content": f"Copy this text word by word, and change nothing:\n\n{REPORT}"}]
STORY = "Once upon a time"
CASES: dict[str, tuple[Any, Sampling]] = {
    "editing a given text, greedy": (EDIT, Sampling()),
    "editing a given text, temperature 0.3": (EDIT, Sampling(temperature=0.3, seed=1)),
    "a story at temperature 0.8": (STORY, Sampling(temperature=0.8, seed=1)),
    "a story at temperature 1.3": (STORY, Sampling(temperature=1.3, seed=1)),
}


def run(model: exactkv.Model, prompt: Any, tokens: int, sampling: Sampling, draft: str | None) -> Any:
    made = stream(model, prompt, tokens, sampling, draft=draft)
    for _ in made:
        pass
    return made


def measured(model: exactkv.Model, tokens: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, (prompt, sampling) in CASES.items():
        seconds: dict[str | None, list[float]] = {None: [], "lookup": []}
        for round_ in range(rounds + 1):
            said = []
            for draft in (None, "lookup") if round_ % 2 else ("lookup", None):
                print(f"{name}: round {round_} of {rounds}, {draft or 'plain'} …", file=sys.stderr, flush=True)
                made = run(model, prompt, tokens, sampling, draft)
                if round_:  # the first one warms up
                    seconds[draft].append(made.stats.decode_seconds / (len(made.tokens) - 1))
                said.append(made.tokens)
                if draft:
                    stats = made.stats
            made_tokens = len(said[0])
            equal = next((i for i, (a, b) in enumerate(zip(*said, strict=False)) if a != b), made_tokens)
            assert said[0] == said[1] or model.dtype != torch.float32, f"{name}: drafts changed the text"
        plain, lookup = (statistics.median(seconds[d]) for d in (None, "lookup"))
        rows.append(
            {
                "text": name, "tokens": made_tokens, "plain_tokens_per_second": 1 / plain,
                "lookup_tokens_per_second": 1 / lookup, "ratio": plain / lookup,
                "equal": equal, "drafted": stats.drafted_tokens, "accepted": stats.accepted_tokens,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = measured(exactkv.load(given.model, dtype=given.dtype), given.tokens, given.rounds)
    if given.json:
        print(json.dumps(rows))
        return
    print("| text | tokens, of which equal | plain, tokens/s | prompt lookup | ratio | guessed | came true |")
    print("|---" * 7 + "|")
    for r in rows:
        speeds = f"{r['plain_tokens_per_second']:.1f} | {r['lookup_tokens_per_second']:.1f} | {r['ratio']:.2f}"
        print(f"| {r['text']} | {r['tokens']}, {r['equal']} | {speeds} | {r['drafted']} | {r['accepted']} |")


if __name__ == "__main__":
    main()
