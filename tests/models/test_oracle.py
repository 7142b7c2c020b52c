"""Every family against transformers: a tiny random model is saved by it, loaded by us, the logits compared.

transformers runs one forward pass without cache, eager attention, float32. Ours are one forward pass, and one
token at a time through a cache; both with the text's length as ``max_length``, which dynamic NTK and long rope follow.
Bound: 1e-5 of the largest logit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import exactkv
from exactkv.models.model import Model
from exactkv.ops import REFERENCE
from tests.models.cases import CASES, LINEAR_ROPE, gemma_rope, llama3_rope, llama4
from tests.models.cases_dense import DENSE
from tests.models.cases_mixtures import MIXTURES
from tests.models.oracle import BOUND, VOCAB, Case, build, difference, oracle_logits, tokens, where


@pytest.fixture(scope="module", params=(*CASES, *DENSE, *MIXTURES), ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(case, transformers' model, ours)"""
    case = request.param
    oracle = build(case)
    directory = tmp_path_factory.mktemp(case.name)
    oracle.save_pretrained(directory)
    yield case, oracle, exactkv.load(directory, dtype="float32", device="cpu")


def test_one_forward_pass(pair: tuple[Case, Any, Model]) -> None:
    case, oracle, model = pair
    for length in case.lengths:
        ids = tokens(2, length)
        ours, theirs = model(ids, max_length=length), oracle_logits(oracle, ids)
        assert difference(ours, theirs) <= BOUND, f"{length} tokens: {where(ours, theirs)}"


def test_one_token_at_a_time(pair: tuple[Case, Any, Model]) -> None:
    case, oracle, model = pair
    ids = tokens(2, max(case.lengths), seed=1)
    cache = model.new_cache(batch_size=2, step=4, max_length=ids.shape[1])
    steps = []
    for t in range(ids.shape[1]):
        logits = model(ids[:, t : t + 1], cache=cache)
        assert logits is not None
        steps.append(logits)
    assert difference(torch.cat(steps, dim=1), oracle_logits(oracle, ids)) <= BOUND


def test_attention_matters(pair: tuple[Case, Any, Model]) -> None:
    """The comparison cannot pass with the wrong rows: another first token moves the second token's logits."""
    _, _, model = pair
    ids = tokens(1, 2)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % VOCAB
    a, b = model(ids), model(other)
    assert a is not None and b is not None
    assert difference(a[:, 1], b[:, 1]) > 0.05


def test_temperature_with_left_padding(tmp_path: Path) -> None:
    """transformers is wrong here: for Llama 4's temperature it counts a query's position from the left edge
    of the batch, padding included, so that a row of a batch differs from the row alone. Our rows are
    ragged, not left-padded, and equal the row alone, computed by the reference and by transformers."""
    case = llama4("temperature", floor_scale=3, attn_scale=0.7, no_rope_layers=[0, 0, 0, 1])
    oracle = build(case)
    oracle.save_pretrained(tmp_path)
    model = exactkv.load(tmp_path, dtype="float32", device="cpu")
    reference = Model(model.spec, model.decoder.weights, ops=REFERENCE)
    short, long = tokens(1, 7), tokens(1, 12)
    alone = oracle_logits(oracle, short)
    assert difference(reference(short), alone) <= BOUND

    padding = 12 - 7
    ids = torch.cat([torch.nn.functional.pad(short, (padding, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = oracle(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert difference(padded[:1, padding:], alone) > 100 * BOUND

    ragged = torch.cat([torch.nn.functional.pad(short, (0, padding)), long])
    ours = model(ragged, lengths=[7, 12])
    assert ours is not None
    assert difference(ours[:1, :7], alone) <= BOUND
    assert difference(ours[1:], oracle_logits(oracle, long)) <= BOUND


def test_chunks_null_is_refused_by_transformers() -> None:
    """Why `oracle_logits` gives a mask: should transformers learn it, its own should be used."""
    oracle = build(llama4("chunk-null", attention_chunk_size=None))
    with pytest.raises(ValueError, match="attention_chunk_size"), torch.no_grad():
        oracle(input_ids=tokens(1, 3), use_cache=False)


def test_saved_configs_are_read_in_their_older_form(tmp_path: Path) -> None:
    """The hub's configs have rope_theta, rope_scaling, rope_local_base_freq, newer ones rope_parameters."""
    for kind, fields in (
        ("Llama", {"rope_parameters": llama3_rope()}),
        ("Gemma3", {"sliding_window": 8, **gemma_rope(LINEAR_ROPE)}),
    ):
        oracle = build(Case(kind, kind, fields))
        new, old = tmp_path / f"{kind}-new", tmp_path / f"{kind}-old"
        for directory in (new, old):
            oracle.save_pretrained(directory)
        config = json.loads((old / "config.json").read_text())
        rope = config.pop("rope_parameters")
        full = rope.get("full_attention", rope)
        config["rope_theta"] = full.pop("rope_theta")
        config["rope_scaling"] = {"type" if k == "rope_type" and kind == "Gemma3" else k: v for k, v in full.items()}
        if kind == "Gemma3":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        (old / "config.json").write_text(json.dumps(config))
        assert exactkv.load(old).spec == exactkv.load(new).spec
