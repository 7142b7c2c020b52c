"""A tiny model on the disk, and the command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from exactkv.models.families import llama
from exactkv.models.parameters import parameters
from exactkv.models.random import random_weights
from tests.generation.tiny_text import TEMPLATE, VOCAB, byte_backend, text_spec

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose tokens are bytes, with a chat template, in Hugging Face's format."""
    return write_model(tmp_path_factory.mktemp("tiny"), TEMPLATE)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return write_model(tmp_path_factory.mktemp("base"), None)


def write_model(directory: Path, chat_template: str | None) -> Path:
    spec = text_spec()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 8, "max_position_embeddings": spec.max_length, "rms_norm_eps": spec.norm_eps,
        "rope_theta": 10_000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    tensors = {}
    weights = random_weights(spec, seed=1, gain=1.5)
    for name, parameter in parameters(spec).items():
        general = name.replace("layers.0.", "layers.{i}.").replace("layers.1.", "layers.{i}.")
        index = name.split(".")[1]
        parts = weights[name].split(list(parameter.parts or parameter.shape[:1]))
        for source, part in zip(llama.NAMES[general], parts, strict=True):
            tensors[source.replace("{i}", index)] = part.contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    byte_backend().save(str(directory / "tokenizer.json"))
    tokenizer = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": chat_template}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", {"eos_token_id": 258}),
    ):
        (directory / name).write_text(json.dumps(content))
    return directory


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Start:
    """Start `python -m exactkv ARGUMENTS` with all three streams as pipes."""

    def run(*arguments: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "exactkv", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )

    return run
