"""Every GGUF architecture against transformers: its tiny random models, converted as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import pytest
import torch

import exactkv
from exactkv.errors import LoadError
from exactkv.models.families import FAMILIES
from exactkv.models.gguf import GGUFSource
from exactkv.models.gguf.architectures import ARCHITECTURES
from exactkv.models.gguf.file import GGUFFile
from exactkv.models.load import read_spec, text_config
from exactkv.models.plan import plan_reading
from tests.models.cases import CASES
from tests.models.cases_dense import DENSE, FULL, SLIDING, yarn
from tests.models.cases_mixtures import MIXTURES
from tests.models.gguf_converter import Type, write
from tests.models.oracle import BOUND, Case, difference, oracle_logits, tokens
from tests.models.test_recurrent_oracle import CASES as RECURRENT
from tests.models.test_recurrent_oracle import GRANITE as HYBRID
from tests.models.test_recurrent_oracle import built

BY_NAME = {case.name: case for case in (*CASES, *DENSE, *MIXTURES, *RECURRENT)}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0], "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}


def known(arch: str, name: str, **fields: Any) -> tuple[str, Case]:
    """A case of the oracle's, with other fields where GGUF files cannot say those, or say them always."""
    case = BY_NAME[name]
    return arch, replace(case, fields={**case.fields, **fields})


PLAIN = {"rope_type": "default", "rope_theta": 150_000.0}
MODELS = (
    known("llama", "llama"),
    known("llama", "llama-tied", mlp_bias=True, attention_bias=False, head_dim=16),
    known("llama", "llama-rope-llama3"),
    known("llama", "llama-rope-linear"),
    known("llama", "llama-rope-yarn"),
    known("llama", "mixtral"),
    known("llama4", "llama4", attention_chunk_size=8192, floor_scale=8192, interleave_moe_layer_step=2),
    known("mistral3", "ministral3", rope_parameters={
        **yarn()["rope_parameters"], "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}),
    known("qwen2", "qwen2"),
    known("qwen2moe", "qwen2-moe"),
    known("qwen3", "qwen3"),
    known("qwen3moe", "qwen3-moe"),
    known("qwen3next", "qwen3-next", layer_types=["linear_attention", FULL, "linear_attention"]),
    known("gemma", "gemma"),
    known("gemma2", "gemma2", query_pre_attn_scalar=8),
    known("gemma3", "gemma3-default-pattern"),
    known("gemma3n", "gemma3n"),
    known("gemma4", "gemma4"),
    known("gemma4", "gemma4-keys-as-values", final_logit_softcapping=20.0),
    known("gemma4", "gemma4-mixture", final_logit_softcapping=20.0),
    known("phi3", "phi3-partial"),
    known("phi3", "phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=32),
    known("cohere2", "cohere2"),
    known("olmo2", "olmo2"),
    known("olmo2", "olmo3"),
    known("olmo2", "olmo3-yarn", rope_parameters={
        FULL: {**yarn()["rope_parameters"], "attention_factor": 1.2079441541679836},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0}}),
    known("olmoe", "olmoe"),
    known("smollm3", "smollm3"),
    known("granite", "granite"),
    known("granitehybrid", "granite-hybrid"),
    known("granitehybrid", "granite-hybrid-dense-rope"),
    ("granitemoe", Case("granite-moe", "GraniteMoeHybrid", {
        **HYBRID, "layer_types": ["attention"] * 3, "position_embedding_type": "rope"}, without=("head_dim",))),
    known("chatglm", "glm"),
    known("glm4", "glm4"),
    known("glm4moe", "glm4-moe", n_group=1),
    known("glm4moe", "glm4-moe-plain"),
    known("deepseek2", "deepseek-v2"),
    known("deepseek2", "deepseek-v2-lite", attention_bias=False, n_group=1, topk_group=1),
    known("deepseek2", "deepseek-v3"),
    known("deepseek2", "deepseek-v3-yarn", norm_topk_prob=True),
    known("gpt-oss", "gpt-oss-hub-rope", layer_types=[SLIDING, FULL, SLIDING]),
    known("gpt-oss", "gpt-oss", layer_types=[SLIDING, FULL, SLIDING], rope_parameters=PLAIN),
    known("exaone4", "exaone4-full"),
    known("exaone4", "exaone4-windows"),
    known("starcoder2", "starcoder2", sliding_window=None),
    known("seed_oss", "seed-oss"),
    known("nemotron", "nemotron"),
    known("nemotron", "nemotron-bias"),
    known("gptneox", "gpt-neox"),
    known("gptneox", "gpt-neox-sequential", attention_bias=True),
    known("gpt2", "gpt2"),
    known("mamba", "mamba"),
    known("mamba2", "mamba2"),
    known("lfm2", "lfm2"),
    known("falcon-h1", "falcon-h1-multipliers"),
    known("falcon-h1", "falcon-h1-norm-after", attention_bias=False),
    known("jamba", "jamba"),
    known("jamba", "jamba-bias-dense", mamba_proj_bias=False),
)  # fmt: skip


@pytest.fixture(scope="module", params=MODELS, ids=lambda given: f"{given[0]}-{given[1].name}")
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(case, transformers' model, its file)"""
    arch, case = request.param
    oracle = built(case)
    yield case, oracle, write(oracle, arch, tmp_path_factory.mktemp(arch) / "model.gguf")


def test_logits(converted: tuple[Case, Any, Path]) -> None:
    case, oracle, path = converted
    model = exactkv.load(path, dtype="float32", device="cpu")
    for length in (case.lengths[-1], 9):
        ids = tokens(2, length)
        assert difference(model(ids, max_length=length), oracle_logits(oracle, ids)) <= BOUND


def test_experts_of_four_bits(tmp_path: Path) -> None:
    oracle = built(replace(BY_NAME["gpt-oss"], fields={**BY_NAME["gpt-oss"].fields, "intermediate_size": 64}))
    path = write(
        oracle, "gpt-oss", tmp_path / "model.gguf",
        lambda name: Type.MXFP4 if name.endswith("exps.weight") else Type.Q8_0 if "attn_q.w" in name else Type.F32,
    )  # fmt: skip
    weights = exactkv.load(path, dtype="float32", device="cpu").decoder.weights
    experts = oracle.model.layers[0].mlp.experts
    gate_up, down = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)
    for ours, theirs in (
        ("gate_up", torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)),
        ("down", down),
    ):
        rounded = gguf.quants.dequantize(gguf.quants.quantize(theirs.detach().numpy(), Type.MXFP4), Type.MXFP4)
        assert torch.equal(weights[f"layers.0.mlp.experts.{ours}.weight"], torch.from_numpy(rounded))
    query = oracle.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(weights["layers.0.attention.qkv.weight"][:32], query, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("arch", "name", "change"), [("deepseek2", "deepseek-v2", "whole_keys"), ("glm4moe", "glm4-moe-plain", "further")]
)
def test_other_forms(arch: str, name: str, change: str, tmp_path: Path) -> None:
    """Keys and values in one tensor, as older files have them; a layer that predicts further tokens."""
    case = BY_NAME[name]
    oracle, ids = built(case), tokens(2, 9)
    expected = oracle_logits(oracle, ids)
    extra = {f"blk.3.{part}.weight": torch.ones(32, 32) for part in ("nextn.eh_proj", "attn_q")}
    path = write(oracle, arch, tmp_path / "model.gguf", extra=extra if change == "further" else None, **{change: 1})
    assert difference(exactkv.load(path, dtype="float32", device="cpu")(ids), expected) <= BOUND


def test_nemotrons_rope_by_a_converter_that_counts_other_heads_is_refused(tmp_path: Path) -> None:
    path = write(built(BY_NAME["nemotron"]), "nemotron", tmp_path / "model.gguf")
    with pytest.raises(LoadError, match=r"rope.dimension_count = 4 is half of 32 / 4, but heads are 16 wide"):
        meaning(path, lambda metadata: metadata.update({"nemotron.rope.dimension_count": 4}))


def test_layers_that_the_metadata_do_not_speak_of_are_an_error(converted: tuple[Case, Any, Path]) -> None:
    _, _, path = converted
    key = next(key for key in GGUFFile(path).metadata if key.endswith(".block_count"))
    with pytest.raises(LoadError):
        meaning(path, lambda metadata: metadata.update({key: metadata[key] - 1}))


def meaning(path: Path, change: Callable[[dict[str, Any]], object] = lambda metadata: None) -> Any:
    """The decoder that a file means, and where its tensors go, after a change of its metadata."""
    file = GGUFFile(path)
    change(file.metadata)
    with patch("exactkv.models.gguf.source.GGUFFile", lambda _: file):
        source = GGUFSource(path)
    family, fields = text_config(source.config)
    spec = read_spec(family, fields)
    return spec, plan_reading(source.named(family), spec, source.shapes(), "it")


# Keys that converters leave out where a model's config does: then they mean the default of its code.
SAID_OR_DEFAULT = {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}


def test_a_missing_key_changes_nothing_or_is_an_error(converted: tuple[Case, Any, Path]) -> None:
    _, _, path = converted
    whole, lost = meaning(path), []
    for key in GGUFFile(path).metadata:
        if key.startswith(("general.", "tokenizer.")):
            continue
        try:
            if meaning(path, lambda metadata, key=key: metadata.pop(key)) != whole:  # type: ignore[misc]
                lost.append(key.split(".", 1)[1])
        except LoadError as error:
            assert str(path) in str(error) or "do not fit" in str(error) or "config of" in str(error)
    assert set(lost) <= SAID_OR_DEFAULT


def test_an_unknown_key_is_an_error(converted: tuple[Case, Any, Path]) -> None:
    _, _, path = converted
    arch = GGUFFile(path).metadata["general.architecture"]
    for key in ("surprise", "attention.clamp_kqv", "swiglu_clamp_exp"):
        with pytest.raises(LoadError, match=f"{key} = 3.0 is not known for this architecture"):
            meaning(path, lambda metadata, key=key: metadata.update({f"{arch}.{key}": 3.0}))  # type: ignore[misc]


def test_every_architecture_is_tested_and_belongs_to_a_family() -> None:
    assert {arch for arch, _ in MODELS} == set(ARCHITECTURES)
    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())
    families = {name for family in FAMILIES for name in family.architectures}
    assert all(set(architecture.model_types) <= families for architecture in ARCHITECTURES.values())
