"""Tiny random models of transformers', and what is compared with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

BOUND = 1e-5
VOCAB = 97

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
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
    forward passes, around the boundaries that the case is about. ``without``: sizes that its config does not have."""

    name: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 7, 33)
    without: tuple[str, ...] = ()


def config_of(case: Case) -> Any:
    """transformers' config of a case."""
    fields = {name: value for name, value in {**SIZES, **case.fields}.items() if name not in case.without}
    if case.kind == "Llama4Vision":
        vision = transformers.Llama4VisionConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            image_size=28, patch_size=14, vision_output_dim=16,
            projector_input_dim=16, projector_output_dim=16,
        )  # fmt: skip
        text = transformers.Llama4TextConfig(**fields)
        return transformers.Llama4Config(text_config=text, vision_config=vision, attn_implementation="eager")
    make = getattr(transformers, f"{case.kind}TextConfig", None) or getattr(transformers, f"{case.kind}Config")
    return make(**fields)


def build(case: Case, seed: int = 0) -> Any:
    """transformers' model of a case, float32, eager attention, in which every part of a layer matters."""
    head = {"GPT2": "GPT2LMHeadModel", "Llama4Vision": "Llama4ForConditionalGeneration"}
    model = getattr(transformers, head.get(case.kind, f"{case.kind}ForCausalLM"))(config_of(case))
    return draw(model.eval(), seed)


@torch.no_grad()
def draw(model: Any, seed: int) -> Any:
    """Weights under which attention is far from uniform: transformers' own (deviation 0.02) hide faults."""
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if type(model).__name__ in ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM") else 1.0
    unscaled = type(model).__name__ in ("Gemma3nForCausalLM", "Gemma4ForCausalLM")
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(weight, torch.nn.Buffer) and not name.endswith(("e_score_correction_bias", "layer_scalar")):
            continue
        if "q_norm" in name and unscaled:  # else attention is so sharp that it magnifies rounding
            weight.normal_(8**-0.5, 0.1, generator=generator)
        elif name.endswith("layer_scalar"):
            weight.normal_(1.0, 0.2, generator=generator)
        elif "norm" in name or ".ln_" in name:
            weight.normal_(0.0 if name.endswith("bias") else neutral, 0.1, generator=generator)
        elif weight.dim() < 2:
            weight.normal_(0.0, 0.5, generator=generator)
        elif any(part in name for part in ("embed_tokens", "embed_in", "wte", "wpe")):
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


def where(ours: Tensor | None, theirs: Tensor) -> str:
    """For a message: how large the difference is, where it begins, and what that speaks of. [B, T, V]"""
    assert ours is not None and ours.shape == theirs.shape
    wrong = ((ours - theirs).abs().amax((0, 2)) / theirs.abs().max() > BOUND).nonzero().flatten().tolist()
    first = wrong[0] if wrong else None
    hint = {
        0: "embeddings, norms, v, output, MLP or head: a single key's weight is 1, whatever q, k and rope are",
        1: "rope, q, k, their norms, or the scale",
    }.get(first, "a window, a chunk, or rope that depends on length")  # type: ignore[arg-type]
    found = f"{difference(ours, theirs):.1e} of max |logit|, bound {BOUND:.0e}"
    return found if first is None else f"{found}; wrong from position {first} on ({hint})"
