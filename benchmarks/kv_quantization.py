"""What quantized caches cost in quality and time, and what they save: int8 and int4 beside dense, on real models.

    python benchmarks/kv_quantization.py [--models smollm2 gemma3] [--storages dense int8 int4] [--tokens 2048]
        [--window 1024] [--dtype bfloat16] [--text docs/verify.md] [--decode 32] [--json]

Quality: perplexity of a text as `exactkv perplexity --kv-storage` measures it, and in how many places the most probable
token is that of the dense cache, over one window fed at once with every storage. Bytes: the true size of a cache after
that window, and the share of the dense one's. Speed: decoding after that window, storages taking turns; beside it the
bytes of the cache that a token reads, dense and as stored.
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
from exactkv.generation import perplexity  # noqa: E402


def measured(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each storage, the dense one first."""
    model = exactkv.load(name, device="cpu", dtype=args.dtype)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode((ROOT / args.text).read_text())[: args.tokens]
    window = ids[: args.window]
    dense = model([window])[0].float()
    results = []
    for storage in args.storages:
        cache = model.new_cache(storage=storage, max_length=args.window + args.decode * args.rounds + 8)
        own = model([window], cache=cache)[0].float()
        loss = perplexity(model, ids, args.window, storage=storage)
        kl = torch.nn.functional.kl_div(own.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="none")
        results.append(
            {
                "model": model.name, "dtype": args.dtype, "storage": storage, "tokens": len(ids), "window": args.window,
                "perplexity": loss.perplexity, "standard_error": loss.standard_error,
                "top1_agreement": float((own.argmax(-1) == dense.argmax(-1)).float().mean()),
                "mean_kl": float(kl.sum(-1).mean()),
                "cache_bytes": model.new_cache(storage=storage, max_length=args.window).nbytes,
                "cache": cache, "decode_ms": [],
            }
        )  # fmt: skip
    for _ in range(args.rounds):
        for result in results:
            result["decode_ms"].append(decoded(model, result["cache"], args.decode))
    for result in results:
        del result["cache"]
        result["decode_ms"] = statistics.median(result["decode_ms"])
        result["of_dense_bytes"] = result["cache_bytes"] / results[0]["cache_bytes"]
        result["of_dense_time"] = result["decode_ms"] / results[0]["decode_ms"]
        result["of_dense_perplexity"] = result["perplexity"] / results[0]["perplexity"]
    return results


def decoded(model: exactkv.Model, cache: Any, count: int) -> float:
    """Milliseconds a token, the median of so many."""
    spent = []
    for _ in range(count):
        started = time.perf_counter()
        model([[1]], cache=cache, logits="last")
        spent.append(time.perf_counter() - started)
    return statistics.median(spent) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--storages", nargs="+", default=["dense", "int8", "int4"], help="the first one is the measure")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--text", default="docs/verify.md", help="a file of the repository")
    parser.add_argument("--decode", type=int, default=16, help="tokens a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = []
    for name in args.models:
        results = measured(name, args)
        found += results
        if not args.json:
            print(f"{results[0]['model']}, {args.dtype}, {results[0]['tokens']} tokens in windows of {args.window}")
            for r in results:
                print(
                    f"  {r['storage']:8} perplexity {r['perplexity']:.3f} ({r['of_dense_perplexity'] - 1:+.2%})  "
                    f"top-1 {r['top1_agreement']:.1%}  KL {r['mean_kl']:.4f}  cache {r['cache_bytes'] / 1e6:.2f} MB "
                    f"({r['of_dense_bytes']:.1%})  {r['decode_ms']:.1f} ms a token (x {r['of_dense_time']:.2f})",
                    flush=True,
                )
    if args.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
