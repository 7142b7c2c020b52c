"""transformers' models written as GGUF files, as llama.cpp's converter writes them: names by the gguf package's own
map."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.gguf_metadata import Metadata
from tests.models.oracle import VOCAB

Named = Iterator[tuple[str, Tensor]]
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
OFFSET = ("gemma", "gemma2", "gemma3", "qwen3next", "nemotron")


Type = gguf.GGMLQuantizationType


def write(
    model: Any,
    arch: str,
    path: Path,
    type_of: Callable[[str], Type] = lambda name: Type.F32,
    extra: dict[str, Tensor] | None = None,
    **change: Any,
) -> Path:
    """The model as a GGUF file. ``type_of``: the type of a tensor. ``extra``: tensors besides. ``change``: fields
    of its config that the file is written by."""
    model.save_pretrained(path.parent / "hub")
    tensors = {n: t for file in (path.parent / "hub").glob("*.safetensors") for n, t in load_file(file).items()}
    config = _by_name(model.config.get_text_config()) if arch == "gemma4" else model.config.get_text_config()
    writer = gguf.GGUFWriter(path, arch)
    for field, value in change.items():
        setattr(config, field, value)
    Metadata(writer, config, arch).write()
    vocabulary(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, _enum(arch)), config.num_hidden_layers + 1)
    for name, tensor in [*converted(tensors, config, arch), *(extra or {}).items()]:
        found = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale")) or name
        assert found.startswith(("blk.", "token_embd", "output", "position", "rope_", "per_layer", "altup")), name
        values, kind = tensor.float().contiguous().numpy(), type_of(found)
        writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _by_name(config: Any) -> SimpleNamespace:
    """Gemma 4's config as the hub has it: full layers by fields of their own."""
    fields = config.to_dict()
    wide = fields["per_layer_config"][str(fields["layer_types"].index("full_attention"))]
    wide = {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide.get("num_key_value_heads")}
    return SimpleNamespace(**fields, **{k: v for k, v in wide.items() if v is not None})


def _enum(arch: str) -> str:
    return next(number.name for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([chr(33 + i) if i < 94 else '!"' if i == 94 else f"<{i}>" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(['! "'])


def permute(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def converted(tensors: dict[str, Tensor], config: Any, arch: str) -> Named:
    """The tensors as the converter changes them, under names that the gguf package's map knows (or has made)."""
    stacked: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda n: [int(p) if p.isdigit() else -1 for p in n.split(".")]):
        tensor = tensors[name]
        if match := re.fullmatch(r"(.*\.experts|.*block_sparse_moe)\.(?:experts\.)?(\d+)\.(\w+)\.weight", name):
            stacked.setdefault(f"{match[1]}.{match[3]}", []).append(tensor)
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            yield from _changed(name, tensor, config, arch)
    for name, parts in stacked.items():
        part = name.rsplit(".")[-1]
        part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
        layer = re.search(r"layers\.(\d+)\.", name)
        assert layer is not None
        yield f"model.layers.{layer[1]}.mlp.experts.{part}.weight", torch.stack(parts)
    yield from _extra(config, arch)


def _changed(name: str, tensor: Tensor, config: Any, arch: str) -> Named:
    heads = (config.num_attention_heads, getattr(config, "num_key_value_heads", 0)) if arch in PERMUTED else (0, 0)
    name = name.replace("model.language_model.", "model.").replace("correction_bias", "correction.bias")
    block = name.split(".")[2] if name.startswith(("model.layers", "backbone.layers")) else ""
    if arch == "falcon-h1":
        tensor = _folded(name, tensor, config)
    if arch in PERMUTED and (match := re.search(r"([qk])_proj\.(weight|bias)$", name)):
        tensor = permute(tensor, heads["qk".index(match[1])])
    if arch in OFFSET and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    if arch in ("mamba2", "granitehybrid", "falcon-h1"):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        if name.endswith(("A_log", ".D")):
            tensor = tensor.unsqueeze(1)
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            tensor = tensor.view(groups, -1)
    name = name.replace(".dt_bias", ".dt_proj.bias") if name.endswith(".dt_bias") else name
    name += ".weight" if name.endswith(("sinks", "correct_output_scale", "layer_scalar")) else ""
    if arch == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight$", name):
        tensor = tensor.t()
    if arch == "gptneox" and "query_key_value" in name:
        tensor = tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    if name.endswith("in_proj_qkvz.weight"):
        yield from _split_qkvz(block, tensor, config)
    elif name.endswith("kv_b_proj.weight") and not hasattr(config, "whole_keys"):
        both = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif match := re.fullmatch(r"(.*)\.altup_(un?embed_)?projections\.(\d)\.weight", name):
        yield from _stack_streams(match[2] or "", int(match[3]), tensor, config)
    elif name.endswith("router.scale"):
        yield f"blk.{block}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{block}.ffn_down_exps.scale", tensor
    elif ".experts." in name or "input_linear" in name or "output_linear" in name:
        yield from _experts(name, block, tensor, config, arch)
    else:
        yield name, tensor


_STREAMS: dict[str, list[Tensor]] = {}


def _stack_streams(kind: str, index: int, tensor: Tensor, config: Any) -> Named:
    parts = _STREAMS.setdefault(kind, [])
    if index == 0:
        parts.clear()
    parts.append(tensor)
    if len(parts) == config.altup_num_inputs - 1:
        yield f"model.altup_{kind}projections.weight", torch.stack(parts)


def _split_qkvz(block: str, tensor: Tensor, config: Any) -> Named:
    keys, heads = config.linear_key_head_dim, config.linear_num_key_heads
    values = config.linear_value_head_dim * config.linear_num_value_heads // heads
    *qkv, z = tensor.unflatten(0, (heads, -1)).split([keys, keys, values, values], dim=1)
    yield f"blk.{block}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in qkv])
    yield f"blk.{block}.attn_gate.weight", z.flatten(0, 1)


def _experts(name: str, block: str, tensor: Tensor, config: Any, arch: str) -> Named:
    """Experts that the hub's files hold in one tensor, and what lies beside them."""
    if arch in ("granitemoe", "granitehybrid"):
        shared, mixed = "shared_mlp" in name, bool(config.num_local_experts)
        ending = ("_shexp" if mixed else "") if shared else "_exps"
        if name.endswith("input_linear.weight"):
            gate, up = tensor.chunk(2, dim=-2)
            yield f"blk.{block}.ffn_gate{ending}.weight", gate
            yield f"blk.{block}.ffn_up{ending}.weight", up
        else:
            yield f"blk.{block}.ffn_down{ending}.weight", tensor
    elif arch == "gpt-oss":
        kind = "bias" if name.endswith("_bias") else "weight"
        tensor = tensor if kind == "bias" else tensor.transpose(-1, -2)
        if "gate_up" in name:
            yield f"blk.{block}.ffn_gate_exps.{kind}", tensor[:, 0::2]
            yield f"blk.{block}.ffn_up_exps.{kind}", tensor[:, 1::2]
        else:
            yield f"blk.{block}.ffn_down_exps.{kind}", tensor
    elif arch == "llama4":
        if "gate_up" in name:
            gate, up = tensor.transpose(-1, -2).chunk(2, dim=-2)
            yield f"blk.{block}.ffn_gate_exps.weight", gate
            yield f"blk.{block}.ffn_up_exps.weight", up
        else:
            yield f"blk.{block}.ffn_down_exps.weight", tensor.transpose(-1, -2)
    elif arch == "gemma4":
        yield f"blk.{block}.ffn_{'gate_up' if 'gate_up' in name else 'down'}_exps.weight", tensor
    else:
        assert arch in ("lfm2", "qwen3next", "jamba"), name
        yield name, tensor


def _folded(name: str, tensor: Tensor, c: Any) -> Tensor:
    """Falcon-H1's factors, multiplied into the weights."""
    for part, factor in (
        ("down_proj.weight", c.mlp_multipliers[1]), ("gate_proj.weight", c.mlp_multipliers[0]),
        ("k_proj.weight", c.key_multiplier * c.attention_in_multiplier),
        ("q_proj.weight", c.attention_in_multiplier), ("v_proj.weight", c.attention_in_multiplier),
        ("self_attn.o_proj.weight", c.attention_out_multiplier), ("mamba.out_proj.weight", c.ssm_out_multiplier),
        ("lm_head.weight", c.lm_head_multiplier), ("embed_tokens.weight", c.embedding_multiplier),
    ):  # fmt: skip
        tensor = tensor * factor if name.endswith(part) else tensor
    if name.endswith("mamba.in_proj.weight"):
        states = c.mamba_n_groups * c.mamba_d_state
        parts = tensor.split([c.mamba_d_ssm, c.mamba_d_ssm, states, states, c.mamba_n_heads])
        tensor = torch.cat([p * m * c.ssm_in_multiplier for p, m in zip(parts, c.ssm_multipliers, strict=True)])
    return tensor


def _extra(config: Any, arch: str) -> Named:
    """Rope factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    if arch == "phi3" and rope.get("long_factor"):
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
    if full.get("rope_type") == "proportional":
        half = config.global_head_dim // 2
        turned = int(half * full["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (half - turned))
    if full.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, full)


def _llama3_factors(config: Any, rope: dict[str, Any]) -> Tensor:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
    original, low, high = (rope[f] for f in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()
