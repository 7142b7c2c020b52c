"""The seed of this project, measured: what one wrong comparison in a cache does to Llama 4, and what it hides from.

A tiny random Llama 4 reads 12 tokens; they are decoded one by one and compared with one forward pass. Once with
the fault (a chunked layer's cache drops rows by its *allocated* size, tests/faults/allocated_size.py), once
healthy; beside it a dense model, which the fault does not touch.

    python benchmarks/chunked_decode.py [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.faults.allocated_size import allocated_size_taken_for_length  # noqa: E402
from tests.tiny import fed_in_pieces, random_tokens, tiny_llama4  # noqa: E402

LENGTH = 12


def differences(chunk_size: int | None, faulty: bool, dtype: torch.dtype = torch.float32) -> list[float]:
    """Max |logit difference| of each position, decoded one by one against one forward pass."""
    model = tiny_llama4(chunk_size, dtype)
    tokens = torch.tensor([random_tokens(LENGTH)])
    with allocated_size_taken_for_length() if faulty else contextlib.nullcontext():
        decoded = fed_in_pieces_unchecked(model, tokens) if faulty else fed_in_pieces(model, tokens, [1] * LENGTH)
    return (decoded - model(tokens)).abs().amax(dim=(0, 2)).tolist()


def fed_in_pieces_unchecked(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """As other engines' tests did it: nobody asks the cache whether it still keeps its contract."""
    cache = model.new_cache(tokens.shape[0])
    return torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(tokens.shape[1])], dim=1)


def measure() -> list[dict[str, Any]]:
    rows = []
    for name, chunk_size in (("chunk 4", 4), ("chunk 8", 8), ("dense control", None)):
        for faulty in (True, False):
            by_position = differences(chunk_size, faulty)
            rows.append(
                {
                    "model": name,
                    "cache": "faulty" if faulty else "healthy",
                    "max_difference": max(by_position),
                    "at_position_0": by_position[0],
                    "least_of_later_positions": min(by_position[1:]),
                    "by_position": by_position,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    rows = measure()
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"tiny random Llama 4, {LENGTH} tokens, float32: max |logit difference|, decode against one forward pass\n")
    print(f"{'model':15}{'cache':10}{'position 0':>12}{'least later':>13}{'most':>12}")
    for row in rows:
        figures = (row["at_position_0"], row["least_of_later_positions"], row["max_difference"])
        print(f"{row['model']:15}{row['cache']:10}{figures[0]:12.1e}{figures[1]:13.1e}{figures[2]:12.1e}")


if __name__ == "__main__":
    main()
