"""How long rows may be where rope is scaled: as long as the scaling is for, and as transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import exactkv
from exactkv import InputError
from exactkv.models.load import read_spec, text_config
from exactkv.models.shapes import shape_config, shape_names
from exactkv.models.spec import DynamicNtk, LinearScaling
from tests.models.oracle import BOUND, Case, build, difference, oracle_logits, tokens

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("Qwen2", {**YARN, "original_max_position_embeddings": 32}),
        ("Qwen2", YARN),
        ("Llama", LINEAR),
        ("Gemma3", {FULL: {**YARN, "original_max_position_embeddings": 32}, SLIDING: {"rope_type": "default"}}),
    ],
    ids=str,
)
def test_rows_may_be_as_long_as_the_scaling_is_for(tmp_path: Path, kind: str, rope: dict[str, Any]) -> None:
    fields = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 8} if kind == "Gemma3" else {}
    oracle = build(Case("x", kind, {"max_position_embeddings": 32, "rope_parameters": rope, **fields}))
    oracle.save_pretrained(tmp_path)
    model, ids = exactkv.load(tmp_path, dtype="float32", device="cpu"), tokens(1, 128)
    assert model.spec.max_length == 128
    assert difference(model(ids), oracle_logits(oracle, ids)) <= BOUND
    with pytest.raises(InputError, match="128"):
        model(tokens(1, 129))


def length(name: str, **fields: Any) -> int:
    return read_spec(*text_config({**shape_config(name), **fields})).max_length


@pytest.mark.parametrize(
    ("name", "maximum", "rope", "expected"),
    [
        ("qwen2.5-0.5b", 32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        ("qwen3-0.6b", 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        (
            "qwen3-0.6b",
            131072,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            131_072,
        ),
        ("qwen3-0.6b", 40960, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768}, 40_960),
        ("llama-3.1-8b", 4096, {"type": "linear", "factor": 4.0}, 16_384),
        ("llama-3.1-8b", 16384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
    ],
    ids=str,
)
def test_the_maximum_of_configs_that_count_the_factor_or_do_not(
    name: str, maximum: int, rope: dict[str, Any], expected: int
) -> None:
    assert length(name, max_position_embeddings=maximum, rope_scaling=rope) == expected


@pytest.mark.parametrize("name", shape_names())
def test_the_maximum_of_published_configs_is_theirs(name: str) -> None:
    """None of them leaves the factor of its rope out."""
    config = shape_config(name)
    spec = read_spec(*text_config(config))
    scalings = [layer.rope.scaling for layer in spec.layers if layer.rope is not None]
    if not any(isinstance(s, LinearScaling | DynamicNtk) for s in scalings) and "max_position_embeddings" in config:
        assert spec.max_length == config["max_position_embeddings"]
