"""Configs that are refused: one error that says what was given, what is expected, what to do. And what looks alike but
is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import exactkv
from exactkv.errors import LoadError
from exactkv.models.families import find_family
from exactkv.models.families.common import ACTIVATIONS
from exactkv.models.load import read_spec, text_config
from exactkv.models.shapes import shape_config
from exactkv.models.spec import DecoderSpec
from tests.models.cases_dense import DENSE
from tests.models.cases_mixtures import MIXTURES
from tests.models.oracle import BOUND, Case, build, difference, oracle_logits, tokens, transformers
from tests.models.saved import change_config, change_tensors, refusal
from tests.models.test_recurrent_oracle import CASES as RECURRENT
from tests.models.test_recurrent_oracle import built


def meaning(name: str, **fields: Any) -> DecoderSpec:
    return read_spec(*text_config({**shape_config(name), **fields}))


def refused(name: str, **fields: Any) -> str:
    with pytest.raises(LoadError) as caught:
        meaning(name, **fields)
    return str(caught.value)


# which model


@pytest.mark.parametrize(
    "head", ["LlamaForSequenceClassification", "Qwen2ForTokenClassification", "LlamaForQuestionAnswering"]
)
def test_another_head_is_refused(model_dir: Path, head: str) -> None:
    message = refusal(change_config(model_dir, architectures=[head]))
    assert f"{head!r}, a model whose head is for another task than text; expected one such as" in message


def test_a_base_model_or_none_is_read_where_the_head_is_there(model_dir: Path) -> None:
    for architectures in (None, [], ["LlamaModel"]):
        exactkv.load(change_config(model_dir, architectures=architectures), device="cpu")
    change_tensors(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
    message = refusal(model_dir)
    assert "1 missing: lm_head.weight" in message and "This is a base model without a head" in message


SAVED_WITHOUT_A_HEAD = [
    replace(case, fields={**case.fields, "tie_word_embeddings": True})
    for case in (*DENSE, *MIXTURES, *RECURRENT)
    if case.name in ("qwen3", "gpt-neox", "gpt2", "gpt-oss", "deepseek-v3", "mamba", "jamba")
]


@pytest.mark.parametrize("case", SAVED_WITHOUT_A_HEAD, ids=lambda case: case.name)
def test_what_is_saved_as_a_base_model_is_read_where_its_head_is_the_embedding(tmp_path: Path, case: Case) -> None:
    """transformers' AutoModel leaves the first part of all names out."""
    oracle, ids = built(case), tokens(2, 9)
    oracle.base_model.save_pretrained(tmp_path)
    assert difference(exactkv.load(tmp_path, dtype="float32", device="cpu")(ids), oracle_logits(oracle, ids)) <= BOUND
    message = refusal(change_config(tmp_path, tie_word_embeddings=False))
    assert "This is a base model without a head; expected a model for text" in message


@pytest.mark.parametrize("kind", ["t5", "bart", "bert", "roberta", "modernbert", "vit"])
def test_what_is_no_decoder_is_called_so(kind: str) -> None:
    config = {**transformers.AutoConfig.for_model(kind).to_dict(), "architectures": [f"{kind}Model"]}
    with pytest.raises(LoadError, match=r"It is an encoder( with a decoder)?, not a decoder"):
        find_family(config)


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [
        ("falcon", "gpt_neox"), ("phi", "gpt_neox"), ("opt", "gpt2"), ("gptj", "gpt2"), ("deepseek_v32", "deepseek"),
        ("cohere", "cohere2"), ("qwen3_5_text", "qwen3_next"), ("bamba", "granite_hybrid"), ("diffllama", "llama"),
        ("exaone_moe", "exaone4"), ("kimi_k25", "deepseek"),
        ("lfm2_moe", "lfm2"), ("flex_olmo", "olmo"), ("dots1", "glm"), ("ernie4_5_moe", "qwen"), ("doge", "olmo"),
        ("deepseek_v4", "deepseek"), ("nemotron_h", "granite_hybrid"), ("falcon_mamba", "mamba"),
    ],
)  # fmt: skip
def test_the_nearest_family_is_one_of_the_name_and_the_parts(kind: str, nearest: str) -> None:
    config = transformers.AutoConfig.for_model(kind).to_dict()
    with pytest.raises(LoadError, match=rf"fields is {nearest}\b"):
        find_family(config)


def test_where_a_family_knows_every_field_the_arithmetic_is_what_may_differ() -> None:
    expected = "knows every field, but the arithmetic may differ: compare .*_flex_olmo.py with modeling_olmoe.py"
    with pytest.raises(LoadError, match=expected):
        find_family(transformers.AutoConfig.for_model("flex_olmo").to_dict())


@pytest.mark.parametrize("kind", ["dbrx", "blt", "mpt", "xlnet", "ctrl", "bloom"])
def test_there_is_a_nearest_family_whatever_the_fields_are_called(kind: str) -> None:
    config = {**transformers.AutoConfig.for_model(kind).to_dict(), "architectures": ["XForCausalLM"]}
    with pytest.raises(LoadError, match=r"The nearest supported family by the config's (name and )?fields is \w+"):
        find_family(config)


def test_a_decoder_made_from_an_encoder_is_no_encoder() -> None:
    config = {**transformers.AutoConfig.for_model("modernbert-decoder").to_dict()}
    with pytest.raises(LoadError, match="The nearest supported family") as caught:
        find_family({**config, "architectures": ["ModernBertDecoderForCausalLM"]})
    assert "an encoder" not in str(caught.value)


# sizes


@pytest.mark.parametrize("count", [0, -1, 10**6, 10**12, True, 2.0])
@pytest.mark.parametrize(("name", "field"), [("llama-3.1-8b", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_the_number_of_layers_is_checked_before_there_are_any(name: str, field: str, count: Any) -> None:
    assert f"{field} is {count!r}, expected an integer from 1 to 10,000" in refused(name, **{field: count})


def test_an_unknown_model_of_many_layers_is_refused_at_once() -> None:
    with pytest.raises(LoadError, match="unsupported architecture"):
        find_family({"model_type": "novel", "hidden_size": 8, "num_hidden_layers": 10**12})


@pytest.mark.parametrize("base", [1.0, 0.5])
def test_yarn_needs_a_base_above_one(base: float) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    message = refused("llama-3.1-8b", rope_theta=base, rope_scaling=yarn)
    assert f"rope_theta is {base:g}, expected more than 1 with YaRN" in message


def test_one_stream_of_gemma_3n_is_refused() -> None:
    assert "altup_num_inputs = 1 is not supported; expected 2" in refused("gemma-3n-e2b", altup_num_inputs=1)


@pytest.mark.parametrize(("shared", "of"), [(31, " of 'full_attention'"), (36, "")])
def test_shared_layers_need_one_to_share_with(shared: int, of: str) -> None:
    assert f"no layer{of} before them has keys and values" in refused("gemma-4-e2b", num_kv_shared_layers=shared)


def test_gemma_4s_last_layer_is_full_whatever_the_config_says() -> None:
    kinds = ["sliding_attention"] * 35
    spec = meaning("gemma-4-e2b", layer_types=kinds, num_kv_shared_layers=0)
    assert transformers.Gemma4TextConfig(layer_types=kinds, num_hidden_layers=35).layer_types[-1] == "full_attention"
    assert [layer.attention.head_dim for layer in spec.layers] == [256] * 34 + [512]


@pytest.mark.parametrize("per_layer", [{}, None])
def test_gemma_4s_full_heads_are_local_ones_where_newer_files_say_nothing(per_layer: Any) -> None:
    """transformers 5.17 writes an empty per_layer_config, and no global_head_dim, where all heads are alike."""
    spec = meaning("gemma-4-e2b", per_layer_config=per_layer, global_head_dim=None)
    full = 512 if per_layer is None else 256
    assert {layer.attention.head_dim for layer in spec.layers} == {256, full}


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_more_experts_than_the_best_groups_hold_are_refused(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind).to_dict()
    fields = {**config, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 8}
    read_spec(*text_config(fields))
    with pytest.raises(LoadError, match=r"num_experts_per_tok would be 9, more than the 2 best of 4 groups of 16 "):
        read_spec(*text_config({**fields, "num_experts_per_tok": 9}))


def test_more_experts_a_token_than_there_are_are_refused() -> None:
    assert "num_experts_per_tok would be 9, more than 8 experts hold" in refused("mixtral-8x7b", num_experts_per_tok=9)


def test_falcon_h1s_biases_are_for_multipliers_of_1() -> None:
    ones = {"attention_in_multiplier": 1.0, "key_multiplier": 1.0, "ssm_in_multiplier": 1.0}
    meaning("falcon-h1-0.5b", **ones, attention_bias=True, mamba_proj_bias=True)
    message = refused("falcon-h1-0.5b", attention_bias=True)
    assert "key_multiplier = 0.390625 is not supported; expected multipliers of 1" in message
    message = refused("falcon-h1-0.5b", mamba_proj_bias=True)
    assert "mamba_proj_bias = True with ssm_in_multiplier = 1.25 is not supported" in message


# the files


def test_a_dtype_that_is_none_is_refused(model_dir: Path) -> None:
    for wrong in ("float61", 3, {"a": 1}):
        message = refusal(change_config(model_dir, dtype=wrong, torch_dtype=None))
        assert f"dtype is {wrong!r}, expected one of bfloat16, float16" in message
    assert exactkv.load(model_dir, device="cpu", dtype="float32").dtype == torch.float32
    for name in ("auto", "float8_e4m3fn", None):  # nothing to compute in: as the weights are
        assert exactkv.load(change_config(model_dir, dtype=name), device="cpu").dtype == torch.float32
    assert exactkv.load(change_config(model_dir, dtype="torch.bfloat16"), device="cpu").dtype == torch.bfloat16


def test_a_byte_order_mark_is_no_fault(model_dir: Path) -> None:
    file = model_dir / "config.json"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    exactkv.load(model_dir, device="cpu")


# what is read


def test_activations_by_all_their_names() -> None:
    x = torch.linspace(-6, 6, 101)
    for name, ours in ACTIVATIONS.items():
        theirs = transformers.activations.ACT2FN[name](x)
        assert torch.allclose(exactkv.ops.TORCH.activate(x, ours), theirs, rtol=0, atol=1e-5), name


def test_gpt2_with_a_head_of_its_own_in_older_and_newer_files(tmp_path: Path) -> None:
    case = next(case for case in DENSE if case.name == "gpt2-untied")
    oracle = build(case)
    oracle.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    assert difference(exactkv.load(tmp_path, device="cpu")(ids), oracle_logits(oracle, ids)) <= BOUND
    assert "lm_head.weight" in change_names(tmp_path)
    assert difference(exactkv.load(tmp_path, device="cpu")(ids), oracle_logits(oracle, ids)) <= BOUND


def change_names(directory: Path) -> set[str]:
    """Take "transformer." from all names; those there are then."""
    found: set[str] = set()

    def older(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        found.update(tensors)

    change_tensors(directory, older)
    return found
