"""The kernels of a decode step in triton's interpreter, so that they are compared where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import torch
from exactkv.models.captured import CapturedStep
from tests.gpu.decoding import dense_model, fed_uncaptured
from tests.tiny import random_tokens

torch.set_num_threads(1)
for every_word in (False, True):
    for rows in (1, 2):
        model = dense_model(every_word=every_word)
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
                assert error <= 5e-6, (every_word, rows, i, r, error)
                assert int(captured.chosen[r]) == int(logits[r].argmax())
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_step_in_the_interpreter_equals_one_forward_pass():
    env = {**os.environ, "TRITON_INTERPRET": "1", "EXACTKV_POISON": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr
