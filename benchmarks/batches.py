"""Many requests: one by one, 8 and 32 at once, and transformers' continuous batching, in one run.

    python benchmarks/batches.py [--requests 32] [--prompt 64] [--tokens 48] [--json]

SmolLM2 in float32; transformers runs the same shape with random weights, through its ``generate_batch``. All requests
have random prompts of about ``--prompt`` tokens (half to one and a half) and get ``--tokens`` tokens. What is generated
at once must be what is generated alone. Tokens a second count generated tokens, prefill included.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
import transformers

import exactkv
from exactkv.generation import generate, stream

Tokens = list[tuple[int, ...]]


def theirs() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32, attn_implementation="paged|sdpa").eval()


def generated_by_theirs(model: Any, prompts: list[list[int]], tokens: int, rows: int) -> Tokens:
    settings = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    limits = transformers.ContinuousBatchingConfig(
        block_size=32, num_blocks=32 * 16, max_batch_tokens=512, max_requests_per_batch=rows
    )
    found = model.generate_batch(prompts, settings, limits, progress_bar=False)
    return [tuple(found[name].generated_tokens) for name in sorted(found, key=lambda n: int(n.split("_")[1]))]


def timed(what: str, run: Callable[[], Tokens]) -> tuple[float, Tokens]:
    print(f"{what} …", file=sys.stderr, flush=True)
    started = time.perf_counter()
    made = run()
    return time.perf_counter() - started, made


def one_by_one(model: exactkv.Model, prompts: list[list[int]], tokens: int) -> Tokens:
    made = []
    for prompt in prompts:
        text = stream(model, prompt, tokens, stop_token_ids=())
        for _ in text:
            pass
        made.append(tuple(text.tokens))
    return made


def measured(requests: int, prompt: int, tokens: int) -> list[dict[str, Any]]:
    logging.disable(logging.WARNING)
    model, other = exactkv.load("smollm2", dtype="float32", device="cpu"), theirs()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(prompt // 2, prompt * 3 // 2 + 1, (requests,), generator=generator).tolist()
    prompts = [torch.randint(3, 49_000, (n,), generator=generator).tolist() for n in sizes]
    one_by_one(model, prompts[:1], 4)  # warms up
    generated_by_theirs(other, prompts[:1], 4, 8)
    seconds, alone = timed("exactkv, one by one", lambda: one_by_one(model, prompts, tokens))
    rows = [{"engine": "exactkv", "at once": 1, "seconds": seconds}]
    for at_once in (8, 32):
        batch = lambda n=at_once: [  # noqa: E731
            r.tokens for r in generate(model, prompts, max_rows=n, max_tokens=tokens, stop_token_ids=())
        ]
        seconds, made = timed(f"exactkv, {at_once} at once", batch)
        assert made == alone, "a row says something else than alone"
        rows.append({"engine": "exactkv", "at once": at_once, "seconds": seconds})
        their = lambda n=at_once: generated_by_theirs(other, prompts, tokens, n)  # noqa: E731
        seconds, made = timed(f"transformers, {at_once} at once", their)
        assert all(len(t) == tokens for t in made)
        rows.append({"engine": "transformers", "at once": at_once, "seconds": seconds})
    for row in rows:
        row["tokens_per_second"] = requests * tokens / row["seconds"]
        row["against one by one"] = rows[0]["seconds"] / row["seconds"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = measured(given.requests, given.prompt, given.tokens)
    if given.json:
        print(json.dumps(rows))
        return
    print("| engine | at once | tokens/s | against one by one |\n|---|---|---|---|")
    for r in rows:
        print(f"| {r['engine']} | {r['at once']} | {r['tokens_per_second']:.1f} | {r['against one by one']:.2f} |")


if __name__ == "__main__":
    main()
