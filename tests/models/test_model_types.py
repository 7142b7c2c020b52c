"""Which arithmetic a config means: the architecture that it names settles it, whatever it calls itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import exactkv
from exactkv.errors import LoadError
from exactkv.models.families import FAMILIES
from exactkv.models.load import read_spec, text_config
from exactkv.verify.targets import exactkv as target
from tests.models.cases import CASES
from tests.models.cases_dense import DENSE
from tests.models.cases_mixtures import MIXTURES
from tests.models.oracle import BOUND, Case, build, config_of, difference, oracle_logits, tokens, transformers
from tests.models.saved import change_config, change_tensors, refusal
from tests.models.test_recurrent_oracle import CASES as RECURRENT

YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MINISTRAL3 = Case("ministral3", "Ministral3", {"rope_parameters": YARN})


def saved_config(case: Case) -> dict[str, Any]:
    config = json.loads(json.dumps(config_of(case).get_text_config().to_dict()))
    kind = config["model_type"]
    names = next(f.architectures for f in FAMILIES if kind in f.architectures)
    return {**config, "architectures": [names[names.index(kind) - 1]]}


def test_every_architecture_is_followed_by_its_type() -> None:
    for family in FAMILIES:
        pairs = zip(family.architectures[::2], family.architectures[1::2], strict=True)
        for architecture, kind in pairs:
            config = getattr(transformers, architecture).config_class
            assert config.model_type == kind, family.name


@pytest.mark.parametrize("case", (*CASES, *DENSE, *MIXTURES, *RECURRENT), ids=lambda case: case.name)
def test_the_architecture_settles_what_the_config_means(case: Case) -> None:
    config = saved_config(case)
    expected = read_spec(*text_config(config))
    for other in ("x", None, 5, f"x_{config['model_type']}"):
        assert read_spec(*text_config({**config, "model_type": other})) == expected
    del config["model_type"]
    assert read_spec(*text_config(config)) == expected


@pytest.mark.parametrize("kind", ["x", None])
def test_ministral3_by_its_architecture_alone(tmp_path: Path, kind: str | None) -> None:
    oracle, ids = build(MINISTRAL3), tokens(1, 100)
    oracle.save_pretrained(tmp_path)
    model = exactkv.load(change_config(tmp_path, model_type=kind), dtype="float32", device="cpu")
    assert difference(model(ids), oracle_logits(oracle, ids)) <= BOUND


def test_names_that_contradict_each_other_are_refused(model_dir: Path) -> None:
    message = refusal(change_config(model_dir, model_type="mistral"))
    assert "'LlamaForCausalLM', which goes with the model_type 'llama', and model_type is 'mistral'" in message


def test_a_temperature_is_for_ministral3_alone(tmp_path: Path) -> None:
    build(MINISTRAL3).save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral")
    assert "unknown fields that may change the arithmetic: llama_4_scaling_beta = 0.5" in refusal(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_mistral3s_text_model(tmp_path: Path, prefix: str) -> None:
    oracle, ids = build(MINISTRAL3), tokens(1, 100)
    oracle.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())

    def within(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            inner = name.removeprefix("model.") if prefix.startswith("model.") else name
            tensors[name if prefix.startswith("model.") and inner == name else prefix + inner] = tensors.pop(name)
        tensors["vision_tower.x.weight"] = ids.float()
        tensors["multi_modal_projector.linear_1.weight"] = ids.float()

    change_tensors(tmp_path, within)
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    model = exactkv.load(tmp_path, dtype="float32", device="cpu")
    assert difference(model(ids), oracle_logits(oracle, ids)) <= BOUND
    with pytest.raises(LoadError, match="text_config's model_type is 'llama'; expected mistral or ministral"):
        text_config({**outer, "text_config": {**text, "model_type": "llama"}})


def test_verify_reads_what_load_reads() -> None:
    """Kimi K2: DeepSeek V3's architecture under a type of its own; and a config without any type."""
    case = next(case for case in MIXTURES if case.name == "deepseek-v3")
    expected = target.from_recipe({"config": target.tiny(saved_config(case)), "seed": 0}).model.spec
    for kind in ("kimi_k2", None):
        small = target.tiny({**saved_config(case), "model_type": kind})
        assert target.from_recipe({"config": small, "seed": 0}).model.spec == expected
