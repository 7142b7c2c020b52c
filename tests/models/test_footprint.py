"""The bytes that `exactkv models --supported` names are those that caches take."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from exactkv.models.families import FAMILIES, find_family
from exactkv.models.footprint import footprint
from exactkv.models.load import read_spec
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.shapes import shape_config, shape_names, shape_spec
from tests.models.cases import CASES
from tests.models.cases_dense import DENSE
from tests.models.cases_mixtures import MIXTURES
from tests.models.oracle import config_of
from tests.models.test_recurrent_oracle import CASES as RECURRENT

ALL = {case.name: case for case in (*CASES, *DENSE, *MIXTURES, *RECURRENT)}
NAMES = ("llama", "gemma3", "llama4", "gemma3n", "deepseek-v3", "mamba2", "falcon-h1", "lfm2", "recurrent-gemma")


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_is_what_caches_take(name: str) -> None:
    config = config_of(ALL[name]).to_dict()
    config["architectures"] = [
        type(config_of(ALL[name])).__name__.replace("TextConfig", "").replace("Config", "") + "ForCausalLM"
    ]
    spec = read_spec(find_family(config), config)
    model = Model(spec, random_weights(spec))
    found = footprint(spec, torch.float32)
    sizes = []
    for length in (60, 61):
        cache = model.new_cache(max_length=length)
        model([[1] * length], cache=cache, logits="none")
        sizes.append(cache.nbytes)
    assert sizes[1] - sizes[0] == found.token_bytes
    bounded = sizes[0] - 60 * found.token_bytes
    states = 3 if spec.cache_spec("").recurrent else 1  # those of earlier positions, which slack keeps
    assert found.bounded_bytes <= bounded <= 1.25 * states * found.bounded_bytes + 8 * 4 * 100
    assert (found.bounded_bytes == 0) == (name in ("llama", "deepseek-v3"))


def test_known_figures() -> None:
    assert footprint(shape_spec("llama-3.1-8b")).token_bytes == 32 * 2 * 8 * 128 * 2 == 128 * 1024
    scout = footprint(shape_spec("llama-4-scout"))
    assert scout.patterns == {"chunk 8192": 36, "full": 12}
    assert scout.bounded_bytes == 36 * 8192 * 2 * 8 * 128 * 2  # 1.2 GB
    assert footprint(shape_spec("deepseek-v3")).token_bytes == 61 * (512 + 64) * 2
    assert footprint(shape_spec("phi-3.5-mini")).bounded_bytes == 0  # its window is longer than any text


def test_fewer_layers_of_a_shape() -> None:
    assert [str(layer.attention.pattern) for layer in shape_spec("llama-4-scout", 4).layers] == ["chunk 8192"] * 3 + [
        "full"
    ]  # type: ignore[union-attr]
    assert len(shape_spec("gpt2", 2).layers) == 2
    with pytest.raises(Exception, match="1 to 48 layers, not 49"):
        shape_spec("llama-4-scout", 49)
    with pytest.raises(Exception, match="no shape is called 'x'"):
        shape_spec("x")


def test_the_table_names_every_family() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "exactkv", "models", "--supported", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert [f["family"] for f in found] == [family.name for family in FAMILIES]
    models = [m["model"] for f in found for m in f["models"]]
    assert sorted(models) == sorted(shape_names())
    config = shape_config("llama-3.1-8b")
    (llama,) = [m for f in found for m in f["models"] if m["model"] == "llama-3.1-8b"]
    assert llama["patterns"] == {"full": config["num_hidden_layers"]} and llama["cache_bytes_a_token"] == 131072


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_the_table_is_readable_in_a_narrow_terminal(columns: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "exactkv", "models", "--supported"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": str(columns)},
    )  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) <= columns
    for whole in ("deepseek-v2-lite", "qwen3-next-80b-a3b", "131.1 kB", "536.9 MB", "window 32768"):
        assert whole in done.stdout
