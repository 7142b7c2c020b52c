"""Small models saved by transformers, and what is done with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import exactkv
from exactkv import LoadError

safetensors_torch = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SOURCE = str(Path(exactkv.__file__).parents[1])


def save(directory: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **fields: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **fields})).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


def change_config(directory: Path, **fields: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return directory


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors_torch.load_file(file).items()}
    change(tensors)
    safetensors_torch.save_file(tensors, file)
    return directory


def refusal(path: Path | str, **arguments: Any) -> str:
    with pytest.raises(LoadError) as caught:
        exactkv.load(path, **{"device": "cpu", **arguments})
    return str(caught.value)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
