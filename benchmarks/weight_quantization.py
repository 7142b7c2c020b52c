"""What packing weights in 8 and 4 bits costs and gains: perplexity and agreement with float32, decode speed, bytes.

    python benchmarks/weight_quantization.py [--models smollm2 gemma3] [--tokens 1024] [--rounds 5] [--json]

Loss: on the beginning of a text of this repository, in windows of 512 tokens. Speed: one token at a time after 64, all
formats in turns, the median of the rounds, and the median of each round's ratio to bfloat16: neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

import exactkv  # noqa: E402

FORMATS = (None, "int8", "int4", "int4:64")
WINDOW, PROMPT, DECODED = 512, 64, 24


def logits_of(model: exactkv.Model, windows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model(ids[None])[0].float() for ids in windows]


def loss(found: list[torch.Tensor], wanted: list[torch.Tensor], windows: list[torch.Tensor]) -> dict[str, float]:
    """Perplexity, and of all positions the share whose best token is that of ``wanted``, and the mean divergence."""
    nats = [
        torch.nn.functional.cross_entropy(f[:-1], ids[1:], reduction="sum")
        for f, ids in zip(found, windows, strict=True)
    ]
    count = sum(len(ids) - 1 for ids in windows)
    same = [float((f.argmax(-1) == w.argmax(-1)).float().mean()) for f, w in zip(found, wanted, strict=True)]
    apart = [
        torch.nn.functional.kl_div(f.log_softmax(-1), w.log_softmax(-1), log_target=True, reduction="batchmean")
        for f, w in zip(found, wanted, strict=True)
    ]
    return {
        "perplexity": float(torch.exp(torch.stack(nats).sum() / count)),
        "top1_agreement": statistics.mean(same),
        "divergence_nats": float(torch.stack(apart).mean()),
    }


def decode_rate(model: exactkv.Model, ids: torch.Tensor) -> float:
    cache = model.new_cache()
    model(ids[None, :PROMPT], cache=cache, logits="last")
    model([[5]], cache=cache, logits="last")
    started = time.perf_counter()
    for _ in range(DECODED):
        model([[5]], cache=cache, logits="last")
    return DECODED / (time.perf_counter() - started)


def measure(name: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    exact = exactkv.load(name, dtype="float32", device="cpu")
    text = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    ids = torch.tensor(exact.tokenizer.encode(text)[:tokens])
    windows = list(ids.split(WINDOW))
    wanted = logits_of(exact, windows)
    rows = [{"model": name, "weights": "float32", "MB": exact.nbytes / 1e6, **loss(wanted, wanted, windows)}]
    del exact
    models = {}
    for form in FORMATS:
        models[form] = exactkv.load(name, dtype="bfloat16", device="cpu", quantize=form)
        found = loss(logits_of(models[form], windows), wanted, windows)
        rows.append({"model": name, "weights": form or "bfloat16", "MB": models[form].nbytes / 1e6, **found})
    rates = [{form: decode_rate(model, ids) for form, model in models.items()} for _ in range(rounds)]
    for row, form in zip(rows[1:], FORMATS, strict=True):
        row["tokens_per_s"] = statistics.median(r[form] for r in rates)
        row["ratio_to_bfloat16"] = statistics.median(r[form] / r[None] for r in rates)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON on standard output")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for row in measure(name, args.tokens, args.rounds):
            rows.append(row)
            print(
                "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), file=sys.stderr
            )
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
