"""Decoding one row on a GPU: tokens a second, the wait before the first token, memory; beside transformers.

    python benchmarks/gpu_decode.py [--shape llama-3.1-8b] [--layers N] [--contexts 512,8192] [--peer] [--json]
    python benchmarks/gpu_decode.py --kernels     where the time of a step goes, by kernel
    python benchmarks/gpu_decode.py --sweep       the product with one row, by tile, for each shape of the model

Random weights, bfloat16, batch 1. "floor": the bytes a token must read, at 4.11 TB/s, measured for reading.
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

from exactkv.models.decode import greedy
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.shapes import shape_config, shape_spec

READING = 4.11e12


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


def ours(model: Model, contexts: list[int], count: int) -> dict[str, Any]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    cache = model.new_cache()
    made = time.perf_counter() - started
    token = int(model([[1, 2, 3]], cache=cache, logits="last").argmax())
    first = time.perf_counter() - started
    int(model([[token]], cache=cache, logits="last").argmax())
    found: dict[str, Any] = {
        "new_cache_s": made,
        "first_token_s": first,
        "first_step_s": time.perf_counter() - started - first,
    }
    assert model.decode_path is not None
    found["declined"] = model.decode_path.declined
    weights = sum(w.nbytes for n, w in model.decoder.weights.items() if model.spec.tied_head or n != "embedding.weight")
    for context in contexts:
        torch.cuda.reset_peak_memory_stats()
        cache = model.new_cache()
        prompt = random_prompt(context, model.spec.vocab_size)
        for i in range(0, context, 512):
            last = model(prompt[:, i : i + 512], cache=cache, logits="last")
        token = int(last.argmax())
        peak = torch.cuda.max_memory_allocated()

        def calls(token: int = token, cache: Any = cache) -> None:
            for _ in range(count):
                token = int(model([[token]], cache=cache, logits="last").argmax())

        def ahead(token: int = token, cache: Any = cache) -> None:
            for _ in greedy(model.decode_path, cache, token, count, model.spec.max_length):
                pass

        bytes_read = weights + sum(
            min(context + count // 2, x.attention.pattern.bound or context + count // 2)
            * 4 * x.attention.num_kv_heads * x.attention.head_dim  # type: ignore[union-attr]
            for x in model.spec.layers
        )  # fmt: skip
        floor = READING / bytes_read
        row = {"floor": floor, "prefill_peak_bytes": peak - model.nbytes}
        for name, work in (("calls", calls), ("ahead", ahead)):
            taken = []
            for _ in range(3):
                cache.rewind(context)
                torch.cuda.synchronize()
                started = time.perf_counter()
                work()
                torch.cuda.synchronize()
                taken.append(time.perf_counter() - started)
            row[name] = count / statistics.median(taken)
            row[f"{name}_of_floor"] = row[name] / floor
        cache.rewind(context)
        step = cache.begin(1, [1], [[token]])
        model.decode_path.run(step, [token], cache.spec, model.spec.max_length)
        graph = model.decode_path._steps[1].graph
        assert graph is not None
        row["replay"] = 20 / seconds(lambda g=graph: [g.replay() for _ in range(20)])
        row["replay_of_floor"] = row["replay"] / floor
        row["peak_bytes_over_weights"] = torch.cuda.max_memory_allocated() - model.nbytes
        found[str(context)] = row
    return found


def by_kernel(model: Model, context: int) -> list[dict[str, Any]]:
    """Time of each kernel in one replay at ``context``, summed by name."""
    from torch.profiler import ProfilerActivity, profile

    cache = model.new_cache()
    model(random_prompt(context, model.spec.vocab_size), cache=cache, logits="none")
    for _ in range(2):
        model([[1]], cache=cache, logits="last")
    assert model.decode_path is not None
    graph = model.decode_path._steps[1].graph
    assert graph is not None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key, "calls": e.count / 10, "us_each": e.self_device_time_total / e.count,
         "us": e.self_device_time_total / 10}
        for e in seen.key_averages() if e.self_device_time_total
    ]  # fmt: skip
    return sorted(rows, key=lambda r: -r["us"])


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


def transformers_peer(name: str, layers: int | None, contexts: list[int], count: int) -> dict[str, Any]:
    """transformers on the same shape with its DynamicCache, greedy by hand."""
    import transformers

    config = transformers.AutoConfig.for_model(**shape_config(name, layers))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    weights, found = torch.cuda.memory_allocated(), {}
    with torch.no_grad():
        for context in contexts:
            torch.cuda.reset_peak_memory_stats()
            cache = transformers.DynamicCache()
            prompt = random_prompt(context, config.vocab_size).cuda()
            for i in range(0, context, 512):
                out = peer(prompt[:, i : i + 512], past_key_values=cache, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)

            def steps(token: torch.Tensor = token, cache: Any = cache) -> None:
                for _ in range(count):
                    token = peer(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
                    token.item()

            steps()
            found[str(context)] = {
                "calls": count / seconds(steps, 1),
                "peak_bytes_over_weights": torch.cuda.max_memory_allocated() - weights,
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--tokens", type=int, default=100)
    for flag in ("--peer", "--kernels", "--sweep", "--json"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_decode: skipped, there is no CUDA device")
        return 2
    contexts = [int(n) for n in options.contexts.split(",")]
    spec = shape_spec(options.shape, options.layers)
    started = time.perf_counter()
    model = Model(spec, random_weights(spec, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    found: dict[str, Any] = {"shape": options.shape, "layers": options.layers, "device": torch.cuda.get_device_name()}
    found["weights_s"] = time.perf_counter() - started
    if options.sweep:
        found["sweep"] = sweep(model)
    else:
        found["exactkv"] = ours(model, contexts, options.tokens)
    if options.kernels:
        found["kernels"] = {n: by_kernel(model, n) for n in contexts}
    if options.peer:
        del model
        found["transformers"] = transformers_peer(options.shape, options.layers, contexts, min(50, options.tokens))
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
