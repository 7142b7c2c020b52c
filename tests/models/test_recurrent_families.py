"""What recurrent and hybrid families say: the configs of real models read, their specs whole, their caches' bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exactkv.errors import LoadError
from exactkv.models.families import find_family
from exactkv.models.load import read_spec
from exactkv.models.model import Model
from exactkv.models.parameters import parameters
from exactkv.models.random import random_weights
from exactkv.models.shapes import shape_config
from exactkv.models.spec import DecoderSpec, check_spec
from exactkv.ops import REFERENCE
from tests.models.oracle import config_of, difference, tokens
from tests.models.test_recurrent_oracle import CASES

COMMON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02, "use_cache": True,
          "torch_dtype": "bfloat16", "transformers_version": "4.55.0"}  # fmt: skip
PARAMETERS = {  # in millions, as the models' cards say or their names
    "mamba-130m-hf": 129, "mamba-codestral-7b-v0.1": 7285, "lfm2-1.2b": 1170, "falcon-h1-0.5b": 521,
    "jamba-v0.1": 51570, "granite-4.0-h-tiny": 6939, "qwen3-next-80b-a3b": 79674, "recurrentgemma-2b": 2683,
}  # fmt: skip


def spec_of(fields: dict[str, Any]) -> DecoderSpec:
    return read_spec(find_family(fields), {**COMMON, **fields})


@pytest.mark.parametrize("name", PARAMETERS)
def test_configs_of_the_hub_are_read(name: str) -> None:
    """All fields known; as many parameters as the model has."""
    spec = spec_of(shape_config(name))
    count = sum(torch.Size(p.shape).numel() for p in parameters(spec).values())
    assert count / 1e6 == pytest.approx(PARAMETERS[name], rel=0.01)
    assert hash(spec) == hash(spec_of(shape_config(name)))


def test_what_the_configs_mean() -> None:
    lfm2 = spec_of(shape_config("lfm2-1.2b"))
    assert [i for i, layer in enumerate(lfm2.layers) if layer.attention] == [2, 5, 8, 10, 12, 14]
    assert lfm2.layers[0].mlp is not None and lfm2.layers[0].mlp.intermediate_size == 8192
    jamba = spec_of(shape_config("jamba-v0.1"))
    assert [i for i, layer in enumerate(jamba.layers) if layer.attention] == [4, 12, 20, 28]
    assert jamba.max_length == 262144 and not jamba.ropes
    assert spec_of({**shape_config("lfm2-1.2b"), "intermediate_size": 12288}) == lfm2
    falcon = spec_of(shape_config("falcon-h1-0.5b"))
    assert all(layer.attention and layer.recurrent for layer in falcon.layers)
    granite = spec_of(shape_config("granite-4.0-h-tiny"))
    assert [i for i, layer in enumerate(granite.layers) if layer.attention] == [5, 15, 25, 35] and not granite.ropes
    qwen = spec_of(shape_config("qwen3-next-80b-a3b"))
    assert [i for i, layer in enumerate(qwen.layers) if layer.attention] == list(range(3, 48, 4))
    assert [rope.dim for rope in qwen.ropes] == [64]


@pytest.mark.parametrize(("name", "state"), [
    ("mamba-130m-hf", 24 * (3 * 1536 + 1536 * 16)),
    ("lfm2-1.2b", 10 * 2 * 2048),
    ("falcon-h1-0.5b", 36 * (3 * (1536 + 2 * 128) + 24 * 64 * 128)),
    ("qwen3-next-80b-a3b", 36 * (3 * 8192 + 32 * 128 * 128)),
    ("recurrentgemma-2b", 18 * (3 * 2560 + 2560)),
])  # fmt: skip
def test_a_state_is_as_large_as_the_formula_says(name: str, state: int) -> None:
    layers = spec_of(shape_config(name)).cache_spec("").recurrent
    assert sum(torch.Size(part.shape).numel() for layer in layers for part in layer.parts.values()) == state


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_spec_holds_together(case: Any) -> None:
    """Its numbers are sane, it names a tensor of the files for every parameter; random weights run, and fast and
    slow, whole and in pieces, are one."""
    fields = config_of(case).to_dict()
    family, spec = find_family(fields), read_spec(find_family(fields), fields)
    check_spec(spec)
    for ours in parameters(spec):
        assert ours.replace(f"layers.{ours.split('.')[1]}.", "layers.{i}.", 1) in family.names
    weights = random_weights(spec, dtype=torch.float64)
    model, ids = Model(spec, weights), tokens(2, 19)
    expected = Model(spec, weights, ops=REFERENCE)(ids)
    assert expected is not None and expected.isfinite().all() and expected.std() > 0.01
    assert difference(model(ids), expected) < 1e-12
    cache = model.new_cache(2, slack=3)
    parts = [model(part, cache=cache) for part in ids.split((9, 1, 2, 7), dim=1)]
    assert difference(torch.cat([p for p in parts if p is not None], dim=1), expected) < 1e-12
    cache.check_integrity()
    assert cache.rewind(15) == [15, 15]
    again = model(ids[:, 15:], cache=cache)
    assert difference(again, expected[:, 15:]) < 1e-12


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("lfm2-1.2b", {"layer_types": ["conv", "mamba"] * 8}, "layer_types"),
    ("lfm2-1.2b", {"block_ff_dim": None, "intermediate_size": None}, "makes no sense"),
    ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 3}, "expected 40"),
    ("qwen3-next-80b-a3b", {"layer_types": ["conv"] * 48}, "linear_attention"),
    ("recurrentgemma-2b", {"block_types": ["mamba"]}, "block_types"),
    ("falcon-h1-0.5b", {"attn_layer_indices": [1, 2]}, "attn_layer_indices"),
    ("falcon-h1-0.5b", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ("mamba-130m-hf", {"rms_norm": False}, "rms_norm"),
    ("mamba-130m-hf", {"state_size": 0}, "state_size"),
    ("jamba-v0.1", {"sliding_window": 8}, "sliding_window"),
    ("jamba-v0.1", {"mamba_of_the_future": 8}, "mamba_of_the_future"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        spec_of({**shape_config(name), **changes})
