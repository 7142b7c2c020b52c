"""Where the time of a decode step of one row goes on a GPU: by kernel, and by tile of its products.

    python benchmarks/gpu_decode.py --kernels [--shape llama-3.1-8b] [--layers N] [--contexts 512,8192] [--json]
    python benchmarks/gpu_decode.py --sweep       the product with one row, by tile, for each shape of the model

Random weights, bfloat16, batch 1. Rates, ceilings and memory: `exactkv bench`; other engines: benchmarks/peers.py.
Exit status: 0, or 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.shapes import shape_spec


def seconds(work: Callable[[], Any], times: int = 3) -> float:
    """The median time of ``work``, the device's included."""
    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def random_prompt(count: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(count))


def by_kernel(model: Model, context: int) -> dict[str, Any]:
    """The captured step at ``context``: steps a second of the graph alone, and the time of each kernel in one, summed
    by name."""
    from torch.profiler import ProfilerActivity, profile

    cache = model.new_cache()
    prompt = random_prompt(context, model.spec.vocab_size)
    for i in range(0, context, 512):
        model(prompt[:, i : i + 512], cache=cache, logits="none")
    for _ in range(2):
        model([[1]], cache=cache, logits="last")
    assert model.decode_path is not None
    graph = model.decode_path._steps[1].graph
    assert graph is not None
    alone = 20 / seconds(lambda: [graph.replay() for _ in range(20)])
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key, "calls": e.count / 10, "us_each": e.self_device_time_total / e.count,
         "us": e.self_device_time_total / 10}
        for e in seen.key_averages() if e.self_device_time_total
    ]  # fmt: skip
    return {"graph_alone_steps_per_second": alone, "kernels": sorted(rows, key=lambda r: -r["us"])}


def sweep(model: Model) -> list[dict[str, Any]]:
    """The product with one row by tile, over several matrices in turn so that none is in the cache."""
    from exactkv.ops.triton import launch

    layers, found = model.decoder.layers, []
    cases = {
        "qkv": ([x.attention.qkv for x in layers], "", True), "out": ([x.attention.out for x in layers], "", False),
        "gate_up": ([x.mlp.up for x in layers], "silu", True), "down": ([x.mlp.down for x in layers], "", False),
        "head": ([model.decoder.head], "", True),
    }  # fmt: skip
    for name, (weights, activation, normed) in cases.items():
        rows, inputs = weights[0].shape
        rows //= 2 if activation else 1
        x, out = (torch.randn(1, n, dtype=model.dtype, device="cuda") for n in (inputs, rows))
        norm, residual = (
            torch.ones(inputs, device="cuda") if normed else None,
            None if normed else torch.randn_like(out),
        )
        for block_n in (2, 4, 8, 16):
            for block_k in (512, 1024, 2048):
                for warps in (4, 8):
                    each = block_n * block_k * (2 if activation else 1) / warps / 32
                    if not 8 <= each <= 128:
                        continue

                    shape, many = (block_n, block_k, warps), weights * 8 if name == "head" else weights
                    graph = torch.cuda.CUDAGraph()
                    for captured in (False, True):
                        with torch.cuda.graph(graph) if captured else nullcontext():
                            for w in many[: len(many) if captured else 1]:
                                launch.gemv(x, w, out, norm=norm, eps=1e-5, residual=residual, activation=activation,
                                            shape=shape)  # fmt: skip
                    graph.replay()
                    taken = seconds(graph.replay, 5) / len(many)
                    found.append({"matrix": name, "tile": shape, "us": taken * 1e6,
                                  "TB/s": weights[0].nbytes / taken / 1e12})  # fmt: skip
    return sorted(found, key=lambda r: (r["matrix"], r["us"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--contexts", default="512,8192")
    for flag in ("--kernels", "--sweep", "--json"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if not (options.kernels or options.sweep):
        parser.error("give --kernels or --sweep")
    if not torch.cuda.is_available():
        print("gpu_decode: skipped, there is no CUDA device")
        return 2
    contexts = [int(n) for n in options.contexts.split(",")]
    spec = shape_spec(options.shape, options.layers)
    model = Model(spec, random_weights(spec, dtype=torch.bfloat16, device="cuda"))
    found: dict[str, Any] = {"shape": options.shape, "layers": options.layers, "device": torch.cuda.get_device_name()}
    if options.sweep:
        found["sweep"] = sweep(model)
    if options.kernels:
        found["contexts"] = {str(n): by_kernel(model, n) for n in contexts}
    if options.json:
        print(json.dumps(found))
        return 0
    show(found)
    return 0


def show(found: dict[str, Any], indent: str = "") -> None:
    """Nested figures, a line each."""
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{indent}{key}")
            show(value, indent + "  ")
        elif isinstance(value, list):
            print(f"{indent}{key}")
            for row in value:
                print(
                    indent + "  " + "  ".join(f"{v:.2f}" if isinstance(v, float) else str(v)[:70] for v in row.values())
                )
        else:
            print(f"{indent}{key}: {value:,.3f}" if isinstance(value, float) else f"{indent}{key}: {value}")


if __name__ == "__main__":
    sys.exit(main())
