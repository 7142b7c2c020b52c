"""Every family against transformers: a tiny random model is saved by it, loaded by us, the logits compared.

transformers runs one forward pass without cache, eager attention, float32. Ours are one forward pass, and one
token at a time through a cache. Bound: 1e-5 of the largest logit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import exactkv
from exactkv.models.model import Model
from exactkv.ops import REFERENCE

transformers = pytest.importorskip("transformers")

BOUND = 1e-5
VOCAB = 97

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Case:
    """``kind``: of transformers' config and model class. ``fields``: of its config. ``lengths``: of the
    forward passes, around the boundaries that the case is about."""

    name: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 7, 33)


def llama3_rope(low: float = 1.0, high: float = 4.0, base: float = 500.0) -> dict[str, Any]:
    """Head size 8 and base 500 make wavelengths 6.3, 30, 140 and 664: below, between and above the bounds."""
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": 8.0,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 64,
    }


def gemma_rope(full: dict[str, Any], local_base: float = 100.0) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": local_base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA4 = {
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 4,
    "num_hidden_layers": 4,
    "rope_parameters": PLAIN_ROPE,
}
AROUND_8 = (1, 7, 8, 9, 16, 17, 33)

CASES = (
    Case("llama", "Llama", {"rope_parameters": PLAIN_ROPE}),
    Case("llama-many-heads", "Llama", {"num_key_value_heads": 4, "head_dim": 16}),
    Case("llama-rope-llama3", "Llama", {"rope_parameters": llama3_rope()}, (1, 63, 64, 65, 100)),
    Case("llama-rope-linear", "Llama", {"rope_parameters": LINEAR_ROPE}, (1, 63, 64, 65, 100)),
    Case("llama-attention-bias", "Llama", {"attention_bias": True}),
    Case("llama-mlp-bias", "Llama", {"mlp_bias": True}),
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case("mistral-window", "Mistral", {"sliding_window": 8}, AROUND_8),
    Case("mistral-no-window", "Mistral", {"sliding_window": None}),
    Case("gemma3", "Gemma3", {"sliding_window": 8, **gemma_rope(PLAIN_ROPE)}, AROUND_8),
    Case("gemma3-default-pattern", "Gemma3", {"sliding_window": 8, "num_hidden_layers": 7,
         "layer_types": None}, AROUND_8),
    Case("gemma3-rope-linear", "Gemma3", {"sliding_window": 8, **gemma_rope(LINEAR_ROPE)}, AROUND_8),
    Case("gemma3-rope-llama3", "Gemma3", {"sliding_window": 8, **gemma_rope(llama3_rope())}, (8, 64, 65)),
    Case("gemma3-scale-bias-untied", "Gemma3", {"query_pre_attn_scalar": 20, "attention_bias": True,
         "tie_word_embeddings": False, "sliding_window": 5}, (4, 5, 6, 20)),
    Case("llama4", "Llama4", {}, AROUND_8),
    Case("llama4-chunk-4", "Llama4", {"attention_chunk_size": 4}, (3, 4, 5, 8, 9, 30)),
    Case("llama4-chunk-5", "Llama4", {"attention_chunk_size": 5}, (4, 5, 6, 10, 11, 30)),
    Case("llama4-chunk-null", "Llama4", {"attention_chunk_size": None}, (1, 8, 9, 40)),
    Case("llama4-no-rope-given", "Llama4", {"no_rope_layers": [0, 1, 1, 0]}, AROUND_8),
    Case("llama4-no-rope-empty", "Llama4", {"no_rope_layers": [], "num_hidden_layers": 5}, AROUND_8),
    Case("llama4-no-rope-interval", "Llama4", {"no_rope_layer_interval": 2}, AROUND_8),
    Case("llama4-no-qk-norm", "Llama4", {"use_qk_norm": False}, AROUND_8),
    Case("llama4-no-temperature", "Llama4", {"attn_temperature_tuning": False}, AROUND_8),
    Case("llama4-temperature", "Llama4", {"floor_scale": 3, "attn_scale": 0.7}, (1, 2, 3, 4, 6, 50)),
    Case("llama4-moe-layers", "Llama4", {"moe_layers": [0, 3]}, AROUND_8),
    Case("llama4-moe-none", "Llama4", {"moe_layers": []}, (9,)),
    Case("llama4-moe-step-2", "Llama4", {"interleave_moe_layer_step": 2}, AROUND_8),
    Case("llama4-moe-top-2", "Llama4", {"num_experts_per_tok": 2}, AROUND_8),
    Case("llama4-bias-tied", "Llama4", {"attention_bias": True, "tie_word_embeddings": True}, (9,)),
    Case("llama4-rope-llama3", "Llama4", {"rope_parameters": llama3_rope()}, (8, 64, 65)),
    Case("llama4-rope-equal-factors", "Llama4", {"rope_parameters": llama3_rope(1.0, 1.0)}, (8, 64, 65)),
    Case("llama4-with-vision", "Llama4Vision", {}, AROUND_8),
)  # fmt: skip


def build(case: Case, seed: int = 0) -> Any:
    """transformers' model of a case, float32, eager attention, in which every part of a layer matters."""
    fields = {**SIZES, "num_hidden_layers": 3, **case.fields}
    if case.kind == "Llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    elif case.kind == "Mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**fields))
    elif case.kind == "Gemma3":
        pattern = ["sliding_attention", "full_attention", "sliding_attention"]
        fields = {"layer_types": pattern, "query_pre_attn_scalar": 8, **fields}
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**fields))
    else:
        fields = {**fields, **LLAMA4, **case.fields}
        text = transformers.Llama4TextConfig(**fields)
        if case.kind == "Llama4":
            model = transformers.Llama4ForCausalLM(text)
        else:
            vision = transformers.Llama4VisionConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                image_size=28, patch_size=14, vision_output_dim=16,
                projector_input_dim=16, projector_output_dim=16,
            )  # fmt: skip
            config = transformers.Llama4Config(text_config=text, vision_config=vision, attn_implementation="eager")
            model = transformers.Llama4ForConditionalGeneration(config)
    return draw(model.eval(), seed)


@torch.no_grad()
def draw(model: Any, seed: int) -> Any:
    """Weights under which attention is far from uniform: transformers' own (deviation 0.02) hide faults."""
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if "Gemma" in type(model).__name__ else 1.0
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.normal_(neutral, 0.1, generator=generator)
        elif weight.dim() < 2:
            weight.normal_(0.0, 0.5, generator=generator)
        elif "embed_tokens" in name:
            weight.normal_(0.0, 1.0, generator=generator)
        else:
            inputs = weight[0].numel() if weight.dim() == 4 else weight.shape[1]
            weight.normal_(0.0, inputs**-0.5, generator=generator)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * length + seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


@torch.no_grad()
def oracle_logits(oracle: Any, ids: Tensor) -> Tensor:
    """One forward pass of transformers without cache. [B, T, V]"""
    text = oracle.config.get_text_config()
    arguments: dict[str, Any] = {}
    if getattr(text, "attention_chunk_size", 0) is None:
        # transformers' Llama 4 makes no mask for "no chunks", though its config allows it; it takes one.
        length = ids.shape[1]
        hidden = torch.ones(length, length).triu(1).bool()
        mask = torch.zeros(length, length).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        arguments["attention_mask"] = {"full_attention": mask, "chunked_attention": mask}
    return oracle(input_ids=ids, use_cache=False, **arguments).logits


def difference(ours: Tensor | None, theirs: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    assert ours is not None and ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small a second thread only waits, for long where other programs use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(case, transformers' model, ours)"""
    case = request.param
    oracle = build(case)
    directory = tmp_path_factory.mktemp(case.name)
    oracle.save_pretrained(directory)
    yield case, oracle, exactkv.load(directory, dtype="float32", device="cpu")


def test_one_forward_pass(pair: tuple[Case, Any, Model]) -> None:
    case, oracle, model = pair
    for length in case.lengths:
        ids = tokens(2, length)
        found = difference(model(ids), oracle_logits(oracle, ids))
        assert found <= BOUND, f"{length} tokens: {found:.1e}"


def test_one_token_at_a_time(pair: tuple[Case, Any, Model]) -> None:
    case, oracle, model = pair
    ids = tokens(2, max(case.lengths), seed=1)
    cache = model.new_cache(batch_size=2, step=4)
    steps = []
    for t in range(ids.shape[1]):
        logits = model(ids[:, t : t + 1], cache=cache)
        assert logits is not None
        steps.append(logits)
    assert difference(torch.cat(steps, dim=1), oracle_logits(oracle, ids)) <= BOUND


def test_attention_matters(pair: tuple[Case, Any, Model]) -> None:
    """The comparison cannot pass with the wrong rows: another first token moves the second token's logits."""
    _, _, model = pair
    ids = tokens(1, 2)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % VOCAB
    a, b = model(ids), model(other)
    assert a is not None and b is not None
    assert difference(a[:, 1], b[:, 1]) > 0.05


def test_temperature_with_left_padding(tmp_path: Path) -> None:
    """transformers is wrong here: for Llama 4's temperature it counts a query's position from the left edge
    of the batch, padding included, so that a row of a batch differs from the row alone. Our rows are
    ragged, not left-padded, and equal the row alone, computed by the reference and by transformers."""
    case = Case("llama4-temperature", "Llama4", {"floor_scale": 3, "attn_scale": 0.7, "no_rope_layers": [0, 0, 0, 1]})
    oracle = build(case)
    oracle.save_pretrained(tmp_path)
    model = exactkv.load(tmp_path, dtype="float32", device="cpu")
    reference = Model(model.spec, model.decoder.weights, ops=REFERENCE)
    short, long = tokens(1, 7), tokens(1, 12)
    alone = oracle_logits(oracle, short)
    assert difference(reference(short), alone) <= BOUND

    padding = 12 - 7
    ids = torch.cat([torch.nn.functional.pad(short, (padding, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = oracle(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert difference(padded[:1, padding:], alone) > 100 * BOUND

    ragged = torch.cat([torch.nn.functional.pad(short, (0, padding)), long])
    ours = model(ragged, lengths=[7, 12])
    assert ours is not None
    assert difference(ours[:1, :7], alone) <= BOUND
    assert difference(ours[1:], oracle_logits(oracle, long)) <= BOUND


def test_chunks_null_is_refused_by_transformers() -> None:
    """Why `oracle_logits` gives a mask: should transformers learn it, its own should be used."""
    oracle = build(Case("llama4-chunk-null", "Llama4", {"attention_chunk_size": None}))
    with pytest.raises(ValueError, match="attention_chunk_size"), torch.no_grad():
        oracle(input_ids=tokens(1, 3), use_cache=False)


def test_saved_configs_are_read_in_their_older_form(tmp_path: Path) -> None:
    """The hub's configs have rope_theta, rope_scaling, rope_local_base_freq, newer ones rope_parameters."""
    for kind, fields in (
        ("Llama", {"rope_parameters": llama3_rope()}),
        ("Gemma3", {"sliding_window": 8, **gemma_rope(LINEAR_ROPE)}),
    ):
        oracle = build(Case(kind, kind, fields))
        new, old = tmp_path / f"{kind}-new", tmp_path / f"{kind}-old"
        for directory in (new, old):
            oracle.save_pretrained(directory)
        config = json.loads((old / "config.json").read_text())
        rope = config.pop("rope_parameters")
        full = rope.get("full_attention", rope)
        config["rope_theta"] = full.pop("rope_theta")
        config["rope_scaling"] = {"type" if k == "rope_type" and kind == "Gemma3" else k: v for k, v in full.items()}
        if kind == "Gemma3":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        (old / "config.json").write_text(json.dumps(config))
        assert exactkv.load(old).spec == exactkv.load(new).spec
