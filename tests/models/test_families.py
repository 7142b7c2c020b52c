"""What families say: specs that hold together, rope that follows the maximum length, bytes by formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import exactkv
from exactkv import InputError
from exactkv.models import families
from exactkv.models.families import find_family
from exactkv.models.load import read_spec
from exactkv.models.model import Model
from exactkv.models.parameters import parameters
from exactkv.models.random import random_weights
from exactkv.models.spec import DynamicNtk, FrequencyFactors, LongRope, RopeSpec, check_spec
from exactkv.ops import REFERENCE
from tests.models.cases import CASES
from tests.models.cases_dense import DENSE
from tests.models.cases_mixtures import MIXTURES, latent
from tests.models.oracle import BOUND, Case, build, config_of, difference, oracle_logits, tokens
from tests.models.saved import change_tensors

ALL = (*CASES, *DENSE, *MIXTURES)
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [2.0, 3.0, 5.0, 9.0]


def spec_of(case: Case) -> Any:
    fields = config_of(case).to_dict()
    family = find_family(fields)
    return read_spec(family, fields.get(family.nested or "", fields))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_every_spec_holds_together(case: Case) -> None:
    """Its numbers are sane, it names a tensor of the files for every parameter, and random weights run."""
    spec = spec_of(case)
    check_spec(spec)
    family = find_family(config_of(case).to_dict())
    for ours in parameters(spec):
        number = ours.split(".")[1]
        assert ours.replace(f"layers.{number}.", "layers.{i}.", 1) in family.names
    assert replace(spec, layers=spec.layers) == spec and hash(spec) == hash(spec_of(case))


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt-oss", "deepseek-v3", "cohere2", "olmo2", "qwen2-moe",
                                  "gemma3n", "gemma4"])  # fmt: skip
def test_random_weights_run_and_the_reference_agrees(name: str) -> None:
    spec = spec_of(next(case for case in ALL if case.name == name))
    weights = random_weights(spec, dtype=torch.float64)
    model, reference = Model(spec, weights), Model(spec, weights, ops=REFERENCE)
    ids = tokens(2, 19)
    expected = reference(ids)
    assert expected is not None and expected.isfinite().all()
    assert difference(model(ids), expected) < 1e-12
    cache = model.new_cache(2, slack=3)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 9), (9, 10), (10, 19))]
    assert difference(torch.cat([p for p in parts if p is not None], dim=1), expected) < 1e-12
    last = model(ids, lengths=[19, 7], logits="last")
    assert difference(last, torch.stack((expected[0, 18], expected[1, 6]))) < 1e-12
    cache = model.new_cache(2)
    assert model(ids[:, :9], cache=cache, logits="none") is None
    last = model(ids[:, 9:], cache=cache, lengths=[10, 3], logits="last")
    assert difference(last, torch.stack((expected[0, 18], expected[1, 11]))) < 1e-12


def test_family_files_are_small() -> None:
    for file in Path(families.__file__).parent.glob("*.py"):
        if file.name not in ("__init__.py", "family.py", "common.py", "ropes.py", "mixtures.py"):
            assert len(file.read_text().splitlines()) <= 110, file.name


def test_latent_attention_keeps_as_many_bytes_as_the_formula_says() -> None:
    """A token takes (kv_rank + rope_dim) numbers a layer, whatever the number of heads (arXiv 2405.04434, table 1)."""
    spec = spec_of(latent("deepseek", "DeepseekV3"))
    model = Model(spec, random_weights(spec))
    cache = model.new_cache(batch_size=2, max_length=100)
    model(tokens(2, 50), cache=cache)
    assert cache.nbytes == 2 * 100 * len(spec.layers) * (16 + 4) * 4


# tensors that files may call otherwise


def resaved(directory: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The fingerprint of the model in ``directory`` after its tensors were changed."""
    return exactkv.load(change_tensors(directory, change), dtype="float32", device="cpu").fingerprint


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "deepseek-v3", "glm4-moe"])
def test_experts_may_be_stacked_or_apart(tmp_path: Path, name: str) -> None:
    build(next(case for case in MIXTURES if case.name == name)).save_pretrained(tmp_path)
    apart = exactkv.load(tmp_path, dtype="float32", device="cpu").fingerprint

    def stack(tensors: dict[str, Any]) -> None:
        experts = [n for n in tensors if ".experts." in n]
        assert experts, "transformers stores them one by one"
        for layer in {n.split(".")[2] for n in experts}:
            block = "block_sparse_moe" if name == "mixtral" else "mlp"
            gate, down, up = ("w1", "w2", "w3") if name == "mixtral" else ("gate_proj", "down_proj", "up_proj")
            count = sum(n.startswith(f"model.layers.{layer}.") and n.endswith(f"{gate}.weight") for n in experts)
            stem = f"model.layers.{layer}.{block}"
            took = [[tensors.pop(f"{stem}.experts.{e}.{x}.weight") for e in range(count)] for x in (gate, up, down)]
            both = [torch.cat(pair) for pair in zip(took[0], took[1], strict=True)]
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(took[2])
            if name == "mixtral":
                tensors[f"model.layers.{layer}.mlp.gate.weight"] = tensors.pop(f"{stem}.gate.weight")

    assert resaved(tmp_path, stack) == apart


def test_older_files_of_gpt2_and_gpt_neox(tmp_path: Path) -> None:
    """GPT-2's names once had no prefix, and files held the causal masks."""
    for name, kind in (("gpt2", "gpt2"), ("gpt-neox", "gpt_neox")):
        directory = tmp_path / name
        build(next(case for case in DENSE if case.name == name)).save_pretrained(directory)
        now = exactkv.load(directory, dtype="float32", device="cpu").fingerprint

        def older(tensors: dict[str, Any], kind: str = kind) -> None:
            for old in [n for n in tensors if n.startswith("transformer.")]:
                tensors[old.removeprefix("transformer.")] = tensors.pop(old)
            mask = "h.1.attn" if kind == "gpt2" else "gpt_neox.layers.1.attention"
            tensors[f"{mask}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
            tensors[f"{mask}.masked_bias"] = torch.tensor(-1e9)

        assert resaved(directory, older) == now


def test_text_model_within_a_larger_one(tmp_path: Path) -> None:
    """As the hub has Gemma 3n: "model.language_model.…", beside towers and what shared layers do not need."""
    build(next(case for case in DENSE if case.name == "gemma3n")).save_pretrained(tmp_path)
    alone = exactkv.load(tmp_path, dtype="float32", device="cpu").fingerprint

    def within(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = torch.ones(16, 32)
        tensors["model.vision_tower.x.weight"] = torch.ones(2)

    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert resaved(tmp_path, within) == alone

    def without_head(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert resaved(tmp_path, without_head) == alone, "as AutoModel saves it"


# rope that depends on the length


def phi3(tmp_path: Path) -> tuple[Any, Model]:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": SHORT, "long_factor": LONG}
    fields = {"original_max_position_embeddings": 16, "max_position_embeddings": 64, "rope_parameters": rope}
    oracle = build(Case("phi3-long", "Phi3", fields, without=("head_dim",)))
    oracle.save_pretrained(tmp_path)
    return oracle, exactkv.load(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("length", [15, 16, 17, 18, 40])
def test_long_rope_follows_max_length(tmp_path: Path, length: int) -> None:
    """Up to the switch, and in one pass past it, transformers' keys are all of one kind, and an oracle."""
    oracle, model = phi3(tmp_path)
    ids = tokens(2, length)
    expected = oracle_logits(oracle, ids)
    assert difference(model(ids, max_length=length), expected) <= BOUND
    cache = model.new_cache(2, max_length=length)
    steps = [model(ids[:, t : t + 1], cache=cache) for t in range(length)]
    assert difference(torch.cat([s for s in steps if s is not None], dim=1), expected) <= BOUND


def test_long_rope_is_part_of_a_caches_identity(tmp_path: Path) -> None:
    _, model = phi3(tmp_path)
    ids = tokens(1, 15)
    made = {n: model.new_cache(max_length=n) for n in (15, 16, 17, 64)}
    identities = {n: cache.spec.identity for n, cache in made.items()}
    assert identities[15] == identities[16] != identities[17] == identities[64]
    assert model.new_cache().spec.identity == identities[64], "the default is the model's maximum"
    short, long = model(ids, max_length=16), model(ids, max_length=17)
    assert difference(short, model(ids, max_length=15)) == 0 and difference(long, model(ids)) == 0
    assert short is not None and difference(long, short) > 1e-3
    assert difference(model(ids, cache=made[16]), short) <= BOUND
    assert long is not None and difference(model(ids, cache=made[17]), long) <= BOUND
    with pytest.raises(InputError, match="differs from cache 0 in its model"):
        exactkv.join([model.new_cache(max_length=16), model.new_cache(max_length=17)])


@pytest.mark.parametrize("wrong", [0, -1, 65, 1.5, True, "16"])
def test_max_length_is_checked(tmp_path: Path, wrong: Any) -> None:
    _, model = phi3(tmp_path)
    with pytest.raises(InputError, match="max_length is"):
        model(tokens(1, 3), max_length=wrong)
    with pytest.raises(InputError, match="max_length is"):
        model.new_cache(max_length=wrong)


def test_max_length_bounds_a_call(tmp_path: Path) -> None:
    _, model = phi3(tmp_path)
    with pytest.raises(InputError, match="17 tokens were given; max_length is at most 16"):
        model(tokens(1, 17), max_length=16)
    cache = model.new_cache(max_length=16)
    with pytest.raises(InputError, match="max_length is 17, the cache's is 16"):
        model(tokens(1, 3), cache=cache, max_length=17)
    model(tokens(1, 3), cache=cache, max_length=16)


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_dynamic_ntk_follows_max_length(tmp_path: Path, length: int) -> None:
    """transformers' base follows the length of the pass; ours is that of ``max_length``."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    oracle = build(Case("dynamic", "Llama", {"max_position_embeddings": 16, "rope_parameters": rope}))
    oracle.save_pretrained(tmp_path)
    model = exactkv.load(tmp_path, dtype="float32", device="cpu")
    assert model.spec.max_length == 64
    ids = tokens(2, length)
    assert difference(model(ids, max_length=length), oracle_logits(oracle, ids)) <= BOUND


def test_settled_ropes() -> None:
    long = RopeSpec(4, 10.0, scaling=LongRope((1.0, 2.0), (3.0, 4.0), 16))
    assert long.settled(16).scaling == FrequencyFactors((1.0, 2.0))
    assert long.settled(17).scaling == FrequencyFactors((3.0, 4.0))
    dynamic = RopeSpec(4, 10.0, scaling=DynamicNtk(2.0, 16))
    assert dynamic.settled(16) == dynamic.settled(3) == RopeSpec(4, 10.0)
    assert dynamic.settled(32).base == pytest.approx(10.0 * 3.0**2)
    plain = RopeSpec(4, 10.0)
    assert plain.settled(99) is plain
