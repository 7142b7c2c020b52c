"""Memory of bounded layers over a long text: flat, and equal to the formula.

    python benchmarks/memory.py [--tokens 20000] [--json]

A tiny model with windowed, chunked and full layers decodes one token after another. For each kind of layer the bytes
held are compared with the formula: rows <= 1.25 x (window or chunk + slack), times the bytes of a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from tests.tiny import FULL, chunk, tiny_model, window  # noqa: E402

KINDS = {"window 64": window(64), "chunk 128": chunk(128), "window 32 + 4 anchors": window(32, anchors=4), "full": FULL}
HEADS, SIZE = 2, 8
ROW_BYTES = 2 * HEADS * SIZE * 4  # k and v, float32


def formula(kind: str) -> int | None:
    """Bytes that one layer holds at most; None for a full layer."""
    pattern = KINDS[kind]
    if pattern.bound is None:
        return None
    return (pattern.bound + max(1, pattern.bound // 4) + pattern.anchors) * ROW_BYTES


def measure(tokens: int) -> list[dict[str, Any]]:
    rows = []
    torch.set_num_threads(1)
    for kind, pattern in KINDS.items():
        model = tiny_model([pattern], torch.float32, max_length=tokens)
        cache = model.new_cache()
        sizes = {}
        for i in range(tokens):
            model([[i % 97]], cache=cache, logits="none")
            if i + 1 in (1, 100, 1_000, 10_000, tokens):
                sizes[i + 1] = cache.nbytes
        cache.check_integrity()
        rows.append({"layer": kind, "bytes_after": sizes, "formula": formula(kind)})
        print(f"{kind:24}" + "".join(f"{n:>10}: {b:>9,}" for n, b in sizes.items()), file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    print("bytes held by one layer after so many decoded tokens", file=sys.stderr)
    rows = measure(args.tokens)
    wrong = [r for r in rows if r["formula"] is not None and max(r["bytes_after"].values()) != r["formula"]]
    for r in rows:
        said = "grows with the text" if r["formula"] is None else f"formula {r['formula']:,} bytes"
        print(f"{r['layer']:24}{said}{'  DIFFERS' if r in wrong else ''}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
