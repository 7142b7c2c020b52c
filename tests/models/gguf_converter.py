"""transformers' models written as GGUF files, as llama.cpp's converter writes them: names by the gguf package's own
map, metadata by its writer."""

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

from tests.models.oracle import VOCAB

Named = Iterator[tuple[str, Tensor]]
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
OFFSET = ("gemma", "gemma2", "gemma3", "qwen3next")


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


class Metadata:
    """What the converter says of a model."""

    def __init__(self, writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
        self.w, self.c, self.arch = writer, config, arch

    def get(self, *names: str) -> Any:
        return next((v for n in names if (v := getattr(self.c, n, None)) is not None), None)

    def write(self) -> None:
        self.common()
        own = getattr(self, self.arch.replace("-", "_"), None)
        if own is not None:
            own()
        if self.arch in ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "llama4"):
            self.w.add_rope_dimension_count(self.head_dim)

    @property
    def head_dim(self) -> int:
        return int(self.get("head_dim") or self.c.hidden_size // self.c.num_attention_heads)

    def common(self) -> None:
        w, count = self.w, self.c.num_hidden_layers
        w.add_vocab_size(VOCAB)
        w.add_block_count(count)
        for names, add in (
            (("max_position_embeddings", "n_positions"), w.add_context_length),
            (("hidden_size",), w.add_embedding_length),
            (("intermediate_size_mlp", "intermediate_size", "n_inner"), w.add_feed_forward_length),
            (("num_attention_heads",), w.add_head_count),
            (("num_key_value_heads",), w.add_head_count_kv),
            (("rms_norm_eps", "norm_eps"), w.add_layer_norm_rms_eps),
            (
                () if "mamba" in self.arch else ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
                w.add_layer_norm_eps,
            ),
            (("num_local_experts", "num_experts", "n_routed_experts"), w.add_expert_count),
            (("num_experts_per_tok", "top_k_experts"), w.add_expert_used_count),
            (("n_group",), w.add_expert_group_count),
            (("topk_group",), w.add_expert_group_used_count),
        ):
            if (value := self.get(*names)) is not None:
                add(value)
        self.rope(getattr(self.c, "rope_parameters", None) or {})
        if self.get("head_dim") is not None and self.arch != "mamba2":
            w.add_key_length(self.c.head_dim)
            w.add_value_length(self.c.head_dim)

    def rope(self, given: dict[str, Any]) -> None:
        w, rope = self.w, given.get("full_attention", given)
        kind = rope.get("rope_type")
        if kind in ("linear", "yarn"):
            w.add_rope_scaling_type(gguf.RopeScalingType(kind))
            w.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for field, add in (
                ("attention_factor", w.add_rope_scaling_yarn_attn_factor),
                ("beta_fast", w.add_rope_scaling_yarn_beta_fast),
                ("beta_slow", w.add_rope_scaling_yarn_beta_slow),
            ):
                if rope.get(field) is not None:
                    add(rope[field])
        if kind and self.arch not in ("gemma", "gemma2", "gptneox", "mamba", "mamba2", "jamba"):
            w.add_rope_freq_base(rope["rope_theta"])
        if (local := given.get("sliding_attention")) and self.arch != "olmo2":
            w.add_rope_freq_base_swa(local["rope_theta"])

    def partial(self, default: float) -> None:
        part = (self.c.rope_parameters or {}).get("partial_rotary_factor", default)
        self.w.add_rope_dimension_count(int(self.head_dim * part))

    def windows(self) -> None:
        self.w.add_sliding_window(self.c.sliding_window)
        self.w.add_sliding_window_pattern([kind == "sliding_attention" for kind in self.c.layer_types])

    def expert_size(self) -> None:
        self.w.add_expert_feed_forward_length(self.get("moe_intermediate_size", "intermediate_size"))

    def llama4(self) -> None:
        self.w.add_interleave_moe_layer_step(self.c.interleave_moe_layer_step)
        self.w.add_expert_feed_forward_length(self.c.intermediate_size)

    def mistral3(self) -> None:
        self.w.add_rope_scaling_yarn_log_mul(self.c.rope_parameters["mscale_all_dim"])
        self.w.add_attn_temperature_scale(self.c.rope_parameters["llama_4_scaling_beta"])

    def granite(self) -> None:
        self.w.add_attention_scale(self.c.attention_multiplier)
        self.w.add_embedding_scale(self.c.embedding_multiplier)
        self.w.add_residual_scale(self.c.residual_multiplier)
        self.w.add_logit_scale(self.c.logits_scaling)

    def granitemoe(self) -> None:
        self.granite()
        if self.get("shared_intermediate_size"):
            self.w.add_expert_shared_feed_forward_length(self.c.shared_intermediate_size)
        self.w.add_rope_scaling_finetuned(True)

    def granitehybrid(self) -> None:
        self.granitemoe()
        self.ssm(int(self.c.mamba_expand * self.c.hidden_size))
        kinds = ["attention" if kind in ("attention", "full_attention") else "mamba" for kind in self.c.layer_types]
        self.w.add_head_count_kv([self.c.num_key_value_heads * (kind == "attention") for kind in kinds])
        self.w.add_rope_scaling_finetuned(self.c.position_embedding_type == "rope")

    def ssm(self, inner: int) -> None:
        self.w.add_ssm_conv_kernel(self.c.mamba_d_conv)
        self.w.add_ssm_state_size(self.c.mamba_d_state)
        self.w.add_ssm_inner_size(inner)
        self.w.add_ssm_group_count(self.c.mamba_n_groups)
        self.w.add_ssm_time_step_rank(self.c.mamba_n_heads)

    def qwen2moe(self) -> None:
        self.expert_size()
        self.w.add_expert_shared_feed_forward_length(self.c.shared_expert_intermediate_size)

    def qwen3moe(self) -> None:
        self.expert_size()

    def qwen3next(self) -> None:
        self.qwen2moe()
        self.w.add_ssm_conv_kernel(self.c.linear_conv_kernel_dim)
        self.w.add_ssm_state_size(self.c.linear_key_head_dim)
        self.w.add_ssm_group_count(self.c.linear_num_key_heads)
        self.w.add_ssm_time_step_rank(self.c.linear_num_value_heads)
        self.w.add_ssm_inner_size(self.c.linear_value_head_dim * self.c.linear_num_value_heads)
        self.w.add_full_attention_interval(self.c.layer_types.index("full_attention") + 1)
        self.partial(0.25)

    def gemma2(self) -> None:
        self.w.add_attn_logit_softcapping(self.c.attn_logit_softcapping)
        self.gemma3()

    def gemma3(self) -> None:
        if self.get("final_logit_softcapping"):
            self.w.add_final_logit_softcapping(self.c.final_logit_softcapping)
        self.w.add_sliding_window(self.c.sliding_window)

    def _per_layer(self) -> None:
        self.gemma3()
        self.windows()
        self.w.add_shared_kv_layers(self.c.num_kv_shared_layers)
        self.w.add_embedding_length_per_layer_input(self.c.hidden_size_per_layer_input or 0)

    def gemma3n(self) -> None:
        self._per_layer()
        self.w.add_altup_active_idx(self.c.altup_active_idx)
        self.w.add_altup_num_inputs(self.c.altup_num_inputs)
        normal = torch.distributions.normal.Normal(0, 1)
        self.w.add_activation_sparsity_scale(
            [normal.icdf(torch.tensor(s)).item() for s in self.c.activation_sparsity_pattern]
        )

    def gemma4(self) -> None:
        self._per_layer()
        w, count, kinds = self.w, self.c.num_hidden_layers, self.c.layer_types
        for add, size in (
            (w.add_key_length, self.c.global_head_dim), (w.add_value_length, self.c.global_head_dim),
            (w.add_key_length_swa, self.c.head_dim), (w.add_value_length_swa, self.c.head_dim),
            (w.add_rope_dimension_count, self.c.global_head_dim), (w.add_rope_dimension_count_swa, self.c.head_dim),
        ):  # fmt: skip
            add(size)
        if self.get("moe_intermediate_size"):
            w.add_expert_feed_forward_length(self.c.moe_intermediate_size)
        if self.c.use_double_wide_mlp:
            size, first = self.c.intermediate_size, count - self.c.num_kv_shared_layers
            w.add_feed_forward_length([size * (1 + (i >= first)) for i in range(count)])
        if (wide := self.get("num_global_key_value_heads")) is not None:
            w.add_head_count_kv([wide if k == "full_attention" else self.c.num_key_value_heads for k in kinds])

    def phi3(self) -> None:
        rope = self.c.rope_parameters
        self.partial(1.0)
        self.w.add_rope_scaling_orig_ctx_len(self.c.original_max_position_embeddings)
        self.w.add_sliding_window(self.c.sliding_window or 0)
        if rope.get("long_factor"):
            original = self.c.original_max_position_embeddings
            stretch = self.c.max_position_embeddings / original
            self.w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))

    def cohere2(self) -> None:
        self.w.add_logit_scale(self.c.logit_scale)
        self.w.add_sliding_window(self.c.sliding_window)
        self.w.add_rope_dimension_count(self.head_dim)
        self.w.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def olmo2(self) -> None:
        if self.get("sliding_window"):
            self.windows()

    exaone4 = olmo2

    def glm4(self) -> None:
        self.partial(0.5)

    chatglm = glm4

    def glm4moe(self) -> None:
        self.partial(0.5)
        self.expert_size()
        self.w.add_expert_shared_count(self.c.n_shared_experts)
        self.w.add_leading_dense_block_count(self.c.first_k_dense_replace)
        self.w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        self.w.add_expert_weights_scale(self.c.routed_scaling_factor)
        self.w.add_expert_weights_norm(self.c.norm_topk_prob)
        self.w.add_nextn_predict_layers(getattr(self.c, "further", 0))
        self.w.add_block_count(self.c.num_hidden_layers + getattr(self.c, "further", 0))

    def deepseek2(self) -> None:
        c, w = self.c, self.w
        self.expert_size()
        w.add_head_count_kv(1)
        w.add_leading_dense_block_count(c.first_k_dense_replace)
        if c.q_lora_rank is not None:
            w.add_q_lora_rank(c.q_lora_rank)
        w.add_kv_lora_rank(c.kv_lora_rank)
        keys = c.qk_nope_head_dim + c.qk_rope_head_dim
        if hasattr(c, "whole_keys"):  # as converters before 2025-04
            w.add_key_length(keys)
            w.add_value_length(c.v_head_dim)
        else:
            w.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
            w.add_value_length(c.kv_lora_rank)
            w.add_key_length_mla(keys)
            w.add_value_length_mla(c.v_head_dim)
        w.add_expert_shared_count(c.n_shared_experts)
        w.add_expert_weights_scale(c.routed_scaling_factor)
        if c.norm_topk_prob:
            w.add_expert_weights_norm(True)
        w.add_rope_dimension_count(c.qk_rope_head_dim)
        if (everywhere := c.rope_parameters.get("mscale_all_dim")) is not None:
            w.add_rope_scaling_yarn_log_mul(0.1 * everywhere)

    def gpt_oss(self) -> None:
        self.expert_size()
        self.w.add_sliding_window(self.c.sliding_window)

    def gptneox(self) -> None:
        self.partial(0.25)
        self.w.add_parallel_residual(self.c.use_parallel_residual)

    def gpt2(self) -> None:
        self.w.add_feed_forward_length(4 * self.c.n_embd)

    def mamba(self) -> None:
        self._mixer(self.c.intermediate_size, self.c.time_step_rank)
        self.w.add_ssm_dt_b_c_rms(False)

    def mamba2(self) -> None:
        self._mixer(self.c.num_heads * self.c.head_dim, self.c.num_heads)
        self.w.add_ssm_group_count(self.c.n_groups)

    def _mixer(self, inner: int, rank: int) -> None:
        self.w.add_context_length(2**20)
        self.w.add_feed_forward_length(0)
        self.w.add_head_count(0)
        self.w.add_layer_norm_rms_eps(self.c.layer_norm_epsilon)
        self.w.add_ssm_conv_kernel(self.c.conv_kernel)
        self.w.add_ssm_inner_size(inner)
        self.w.add_ssm_state_size(self.c.state_size)
        self.w.add_ssm_time_step_rank(rank)

    def lfm2(self) -> None:
        self.w.add_head_count_kv([self.c.num_key_value_heads * (k != "conv") for k in self.c.layer_types])
        self.w.add_shortconv_l_cache(self.c.conv_L_cache)
        self.w.add_layer_norm_rms_eps(self.c.norm_eps)
        size = self.c.intermediate_size
        if self.c.block_auto_adjust_ff_dim:
            size = int(self.c.block_ffn_dim_multiplier * int(2 * size / 3))
            size = -(-size // self.c.block_multiple_of) * self.c.block_multiple_of
        self.w.add_feed_forward_length(size)

    def falcon_h1(self) -> None:
        self.ssm(self.c.mamba_d_ssm)

    def jamba(self) -> None:
        kinds = self.c.layers_block_type
        self.w.add_head_count_kv([self.c.num_key_value_heads * (k != "mamba") for k in kinds])
        self.w.add_ssm_conv_kernel(self.c.mamba_d_conv)
        self.w.add_ssm_inner_size(self.c.mamba_expand * self.c.hidden_size)
        self.w.add_ssm_state_size(self.c.mamba_d_state)
        self.w.add_ssm_time_step_rank(self.c.mamba_dt_rank)


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
