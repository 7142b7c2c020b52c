"""The kernels of a decode step in triton's interpreter, so that they are compared where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = """
import torch
from exactkv.models.captured import CapturedStep
from tests.gpu.decoding import dense_model, fed_uncaptured, mixture_model
from tests.tiny import random_tokens, tiny_llama4

torch.set_num_threads(1)
model, rows = {model}, {rows}
cache = model.new_cache(rows, step=4, slack=2)
prompts = torch.tensor([random_tokens(5, r) for r in range(rows)])
model(prompts, cache=cache)
captured = CapturedStep(model.decoder, cache.spec, rows, capture=False)
for i in range(8):
    if i == 3:
        cache.rewind(4)
    if i == 5:
        kept = cache.fork(1)
    fed = [random_tokens(1, 10 * i + r)[0] for r in range(rows)]
    if rows == 2 and i == 2:
        fed[1] = -1
    logits = fed_uncaptured(model, cache, fed, captured)
    cache.check_integrity()
    for r in range(rows):
        if fed[r] < 0:
            continue
        expected = model([cache.tokens(r)])[0, -1]
        error = float((logits[r] - expected).abs().max() / expected.abs().max())
        assert error <= 5e-6, (i, r, error)
        assert int(captured.chosen[r]) == int(logits[r].argmax())
print("equal")
"""
PIECES = """
import torch
from exactkv.cache import ChunkedAttention, FullAttention, SlidingWindow, visible
from exactkv.ops.triton import launch

torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
patterns = [FullAttention(), SlidingWindow(window=7), SlidingWindow(window=50), ChunkedAttention(chunk_size=24),
            ChunkedAttention(chunk_size=100)]
for pattern in patterns:
    for start, count in ((0, 70), (5, 3), (61, 40), (100, 1)):
        for softcap in (None, 5.0):
            first = int(pattern.first_visible(start))
            n = start + count - first
            q = torch.randn(count, 4, 24, generator=g).transpose(0, 1)  # as it comes from the projection
            k, v = torch.randn(2, n + 40, 24, generator=g), torch.randn(2, n + 40, 24, generator=g)
            k[:, n:], v[:, n:] = torch.nan, torch.nan  # dead rows after the last
            k, v = k[:, :n], v[:, :n]
            sinks = None if softcap is None else torch.randn(4, generator=g)
            found = launch.flash(q, k, v, pattern, start, first, 0.3, softcap, sinks)
            scores = q.double() @ k.double().repeat_interleave(2, 0).transpose(1, 2) * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            seen = visible(pattern, torch.arange(start, start + count), torch.arange(first, start + count))
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], -1)
            expected = scores.softmax(-1)[..., :n] @ v.double().repeat_interleave(2, 0)
            assert (found - expected).abs().max() < 5e-6, (pattern, start, count, softcap)
print("equal")
"""


def in_interpreter(code: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "EXACTKV_POISON": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "model",
    ["dense_model()", "dense_model(every_word=True)", "mixture_model()", "mixture_model(post_norms=True)",
     "tiny_llama4(8)"],
)  # fmt: skip
def test_a_step_equals_one_forward_pass(model: str, rows: int) -> None:
    in_interpreter(STEPS.replace("{model}", model).replace("{rows}", str(rows)))


def test_pieces_of_prompts_see_what_their_pattern_shows() -> None:
    in_interpreter(PIECES)
