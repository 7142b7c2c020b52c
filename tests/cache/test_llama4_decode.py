"""The seed of this project: a chunked cache decodes what one forward pass gives, and the fault is caught."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chunked_decode import differences
from exactkv.cache import join
from tests.tiny import fed_in_pieces, random_tokens, tiny_llama4

ROOT = Path(__file__).resolve().parents[2]
BOUND = 5e-6  # of max |logit|, float32


@pytest.mark.parametrize("chunk_size", [4, 8])
def test_the_fault_spoils_every_decoded_position_and_leaves_the_first_right(chunk_size):
    by_position = differences(chunk_size, faulty=True)
    assert by_position[0] <= 5e-6
    assert min(by_position[1:]) > 0.1 and max(by_position) > 1


@pytest.mark.parametrize("chunk_size", [4, 8])
def test_healthy(chunk_size):
    assert max(differences(chunk_size, faulty=False)) <= 5e-6
    assert max(differences(chunk_size, faulty=False, dtype=torch.float64)) <= 1e-12


def test_a_dense_control_model_notices_neither():
    assert max(differences(None, faulty=True)) <= 5e-6
    assert max(differences(None, faulty=False)) <= 5e-6


def test_the_benchmark_prints_it():
    script = ROOT / "benchmarks" / "chunked_decode.py"
    done = subprocess.run([sys.executable, script, "--json"], capture_output=True, text=True, check=True)
    rows = {(r["model"], r["cache"]): r["max_difference"] for r in json.loads(done.stdout)}
    assert rows["chunk 4", "faulty"] > 1 > 5e-6 >= rows["chunk 4", "healthy"]
    assert len(rows) == 6


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [12, 40])
@pytest.mark.parametrize("chunk_size", [4, 8, 16, 64, 256, 300])
def test_one_by_one(batch, length, chunk_size):
    compare(batch, length, chunk_size, [1] * length)


@pytest.mark.parametrize("chunk_size", [4, 8, 16, 64, 256, 300])
def test_600_tokens_one_by_one_in_a_batch(chunk_size):
    compare(3, 600, chunk_size, [1] * 600)


@pytest.mark.parametrize("chunk_size", [4, 64, 256, 300])
def test_600_tokens_in_pieces_larger_and_smaller_than_the_chunk(chunk_size):
    compare(1, 600, chunk_size, [299, 1, 1, 256, 2, 3, 38])
    compare(1, 600, chunk_size, [1, 599])
    compare(1, 600, chunk_size, [600])


def compare(batch, length, chunk_size, pieces):
    model = tiny_llama4(chunk_size)
    tokens = torch.tensor([random_tokens(length, seed) for seed in range(batch)])
    whole = model(tokens)
    difference = (fed_in_pieces(model, tokens, pieces) - whole).abs().max()
    assert difference <= BOUND * whole.abs().max()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), chunk_size=st.sampled_from([4, 8, 16, 64, 256, 300]), slack=st.integers(0, 9))
def test_any_composition_with_rewinds_joins_and_leaves(data, chunk_size, slack):
    """float64 against one forward pass; rows join and leave between pieces of any size."""
    model = tiny_llama4(chunk_size, torch.float64)
    cache, shadow = model.new_cache(1, slack=slack), [[]]
    for _ in range(data.draw(st.integers(1, 10))):
        action = data.draw(st.sampled_from(["feed", "feed", "feed", "rewind", "join", "leave"]))
        if action == "join" and len(shadow) < 3:
            cache, shadow = join([cache, model.new_cache(1, slack=slack)]), [*shadow, []]
        elif action == "leave" and len(shadow) > 1:
            r = data.draw(st.integers(0, len(shadow) - 1))
            cache, shadow = cache.drop([r]), shadow[:r] + shadow[r + 1 :]
        elif action == "rewind":
            back = [data.draw(st.integers(0, min(len(ids), 2 * chunk_size))) for ids in shadow]
            to = [len(ids) - b for ids, b in zip(shadow, back, strict=True)]
            for r, reached in enumerate(cache.rewind(to)):
                assert reached == to[r] or reached % chunk_size == 0
                assert back[r] > slack + 1 or reached == to[r], "slack + 1 tokens can always be rewound, at first"
                shadow[r] = shadow[r][:reached]
            # What slack promises counts from the furthest position written; go on past it before the next.
            feed(model, cache, shadow, [[1] * (2 * chunk_size + slack) for _ in shadow])
        else:
            width = data.draw(st.integers(1, 2 * chunk_size + 3))
            seed = data.draw(st.integers(0, 999))
            feed(model, cache, shadow, [random_tokens(width, seed + r) for r in range(len(shadow))])


def feed(model, cache, shadow, pieces):
    logits = model(torch.tensor(pieces), cache=cache)
    cache.check_integrity()
    for r, piece in enumerate(pieces):
        shadow[r] = shadow[r] + piece
        whole = model([shadow[r]])[0, -len(piece) :]
        assert (logits[r] - whole).abs().max() <= 1e-12 * whole.abs().max()
