"""Recurrent and hybrid families against transformers: one forward pass of it without cache, float32.

Several of its classes are wrong for several tokens on a warm cache, so nothing else of it is compared. Ours are one
forward pass, and a row fed in pieces of 1, 2, 3 and more tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import exactkv
from exactkv.models.model import Model
from exactkv.ops import REFERENCE
from tests.models.oracle import BOUND, Case, build, difference, draw, oracle_logits, tokens

modeling_falcon_h1 = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")

LENGTHS = (1, 2, 3, 7, 40)
ALONE = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
SSD = tuple(name for name in ALONE if name != "head_dim")
MAMBA = {"state_size": 5, "time_step_rank": 3}
MAMBA2 = {"state_size": 5, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}
FALCON = {
    "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 5,
    "mamba_chunk_size": 8,
}  # fmt: skip
MULTIPLIERS = {
    "mlp_multipliers": [0.7, 1.2], "key_multiplier": 0.6, "attention_out_multiplier": 0.8, "ssm_out_multiplier": 1.3,
    "attention_in_multiplier": 1.1, "ssm_multipliers": [0.9, 1.2, 0.7, 1.1, 0.8], "ssm_in_multiplier": 1.25,
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.5,
}  # fmt: skip
JAMBA = {
    "mamba_d_state": 5, "mamba_dt_rank": 3, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
    "num_hidden_layers": 4,
}  # fmt: skip
GRANITE = {
    "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_state": 5, "mamba_chunk_size": 8,
    "shared_intermediate_size": 40, "num_local_experts": 4, "attention_multiplier": 0.3, "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0, "logits_scaling": 3.0,
}  # fmt: skip
QWEN3_NEXT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
GEMMA = {"attention_window_size": 8, "lru_width": 40}


def case(name: str, kind: str, *given: dict[str, Any], without: tuple[str, ...] = (), **fields: Any) -> Case:
    merged = {k: v for part in given for k, v in part.items()}
    # transformers' Falcon-H1 with a gated norm loses an axis where there is one token.
    lengths = LENGTHS[1:] if fields.get("mamba_rms_norm") else LENGTHS
    return Case(name, kind, {**merged, **fields}, lengths, without)


CASES = (
    case("mamba", "Mamba", MAMBA, without=ALONE),
    case("mamba-bias-width-2", "Mamba", MAMBA, conv_kernel=2, use_bias=True, use_conv_bias=False, without=ALONE),
    case("mamba-untied", "Mamba", MAMBA, tie_word_embeddings=False, time_step_rank="auto", without=ALONE),
    case("mamba2", "Mamba2", MAMBA2, without=SSD),
    case("mamba2-bias-tied", "Mamba2", MAMBA2, n_groups=1, use_bias=True, tie_word_embeddings=True, without=SSD),
    case("mamba2-limits", "Mamba2", MAMBA2, time_step_limit=(0.3, 0.8), use_conv_bias=False, without=SSD),
    case("lfm2", "Lfm2", LFM2, without=("head_dim",)),
    case("lfm2-bias-untied", "Lfm2", LFM2, conv_bias=True, conv_L_cache=4, tie_word_embeddings=False,
         block_auto_adjust_ff_dim=False, without=("head_dim",)),
    case("falcon-h1", "FalconH1", FALCON),
    case("falcon-h1-multipliers", "FalconH1", FALCON, MULTIPLIERS),
    case("falcon-h1-norm-before", "FalconH1", FALCON, MULTIPLIERS, mamba_rms_norm=True),
    case("falcon-h1-norm-after", "FalconH1", FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False,
         projectors_bias=True, mlp_bias=True, attention_bias=True, mamba_proj_bias=True, mamba_conv_bias=False),
    case("jamba", "Jamba", JAMBA, without=("head_dim",)),
    case("jamba-bias-dense", "Jamba", JAMBA, num_experts=1, mamba_proj_bias=True, mamba_conv_bias=False,
         mamba_d_conv=3, tie_word_embeddings=True, without=("head_dim",)),
    case("granite-hybrid", "GraniteMoeHybrid", GRANITE, without=("head_dim",)),
    case("granite-hybrid-dense-rope", "GraniteMoeHybrid", GRANITE, num_local_experts=0, mamba_n_groups=2,
         position_embedding_type="rope", mamba_proj_bias=True, attention_bias=True, tie_word_embeddings=True,
         without=("head_dim",)),
    case("qwen3-next", "Qwen3Next", QWEN3_NEXT),
    case("qwen3-next-bias-dense", "Qwen3Next", QWEN3_NEXT, attention_bias=True, mlp_only_layers=[0], head_dim=16,
         tie_word_embeddings=True, linear_num_key_heads=4, linear_conv_kernel_dim=2, norm_topk_prob=False,
         layer_types=None, full_attention_interval=3, num_hidden_layers=4),
    # "hidden_act" is after the convolution and in MLPs; gates stay silu.
    case("mamba-gelu", "Mamba", MAMBA, hidden_act="gelu", without=ALONE),
    case("mamba2-relu", "Mamba2", MAMBA2, hidden_act="relu", without=SSD),
    case("falcon-h1-gelu", "FalconH1", FALCON, hidden_act="gelu"),
    case("falcon-h1-norm-before-relu", "FalconH1", FALCON, hidden_act="relu", mamba_rms_norm=True),
    case("jamba-relu", "Jamba", JAMBA, hidden_act="relu", without=("head_dim",)),
    case("granite-hybrid-gelu", "GraniteMoeHybrid", GRANITE, hidden_act="gelu", without=("head_dim",)),
    case("qwen3-next-relu", "Qwen3Next", QWEN3_NEXT, hidden_act="relu"),
    case("recurrent-gemma", "RecurrentGemma", GEMMA, without=("head_dim", "max_position_embeddings")),
    case("recurrent-gemma-bias-window-3", "RecurrentGemma", GEMMA, lru_width=32, attention_window_size=3,
         attention_bias=True, conv1d_width=3, num_hidden_layers=6, num_key_value_heads=1,
         without=("head_dim", "max_position_embeddings")),
)  # fmt: skip


def built(case: Case) -> Any:
    """transformers' model, with decays that neither vanish nor forget at once, and a scan whose products of four
    projections are no larger than what is beside them: else roundings grow from layer to layer."""
    model = build(case)
    for layer in model.model.layers if case.kind == "FalconH1" else ():  # a buffer, which `build` has drawn anew
        layer.mamba.mup_vector.copy_(modeling_falcon_h1.compute_mup_vector(model.config))
    for name, weight in model.named_parameters():
        if "backbone.embeddings" in name:
            weight.data.mul_(weight.shape[1] ** 0.5)
        if "x_proj" in name or "mamba.in_proj" in name:
            weight.data.mul_(0.5)
        if name.endswith("A_log"):
            weight.data.copy_(torch.arange(1, weight.shape[-1] + 1).log().expand_as(weight))
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.data.sub_(1.0)
        elif case.kind in ("Qwen3Next", "RecurrentGemma") and "norm" in name and "linear_attn" not in name:
            weight.data.sub_(1.0)  # their norms multiply by 1 + w
        elif name.endswith("recurrent_param"):
            weight.data.sub_(4.0)
    return model


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(case, transformers' model, ours)"""
    oracle = built(request.param)
    directory = tmp_path_factory.mktemp(request.param.name)
    oracle.save_pretrained(directory)
    yield request.param, oracle, exactkv.load(directory, dtype="float32", device="cpu")


def test_one_forward_pass(pair: tuple[Case, Any, Model]) -> None:
    case, oracle, model = pair
    for length in case.lengths:
        ids = tokens(2, length)
        found = difference(model(ids), oracle_logits(oracle, ids))
        print(f"{case.name} {length}: {found:.1e}")
        assert found <= BOUND, f"{length} tokens: {found:.1e}"


def test_in_pieces(pair: tuple[Case, Any, Model]) -> None:
    _, oracle, model = pair
    ids = tokens(2, 24, seed=1)
    expected, whole = oracle_logits(oracle, ids), model(ids)
    assert whole is not None
    reference = Model(model.spec, model.decoder.weights, ops=REFERENCE)
    assert difference(reference(ids), whole) <= 5e-6
    for pieces in ([1] * 24, [2, 3] * 4 + [4], [17, 1, 6]):
        cache, steps = model.new_cache(batch_size=2), []
        for part in ids.split(pieces, dim=1):
            logits = model(part, cache=cache)
            assert logits is not None
            steps.append(logits)
        cache.check_integrity()
        found = torch.cat(steps, dim=1)
        assert difference(found, expected) <= BOUND
        assert difference(found, whole) <= 5e-6


def test_the_past_matters(pair: tuple[Case, Any, Model]) -> None:
    """The comparison cannot pass without a state: another first token moves the second token's logits."""
    _, _, model = pair
    ids = tokens(1, 2)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % model.spec.vocab_size
    a, b = model(ids), model(other)
    assert a is not None and b is not None
    assert difference(a[:, 1], b[:, 1]) > 0.02


@pytest.mark.parametrize("seed", [1, 2])
def test_a_delta_nets_noise_is_what_its_model_makes_of_a_rounding(tmp_path: Path, seed: int) -> None:
    """Heads of 7 and 5: the gated norm magnifies rows in which the memory answers next to nothing. Our float32 must be
    no further from float64 than float64 from itself with embeddings disturbed by a rounding, up to a few times."""
    oracle = draw(built(case("odd", "Qwen3Next", QWEN3_NEXT, linear_key_head_dim=7, linear_value_head_dim=5)), seed)
    oracle.save_pretrained(tmp_path)
    single, double = (exactkv.load(tmp_path, dtype=dtype, device="cpu") for dtype in ("float32", "float64"))
    ids = tokens(2, 200)
    exact, embedding = double(ids), double.decoder.weights["embedding.weight"]
    found, moved, kept = difference(single(ids), exact), [], embedding.clone()
    for turn in range(4):
        noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        embedding.copy_(kept * (1 + 2**-24 * noise))
        moved.append(difference(double(ids), exact))
    print(f"seed {seed}: {found:.1e}, disturbed {max(moved):.1e}")
    assert found <= 8 * max(moved)
