"""What llama.cpp's converter says of a model in its metadata, by the gguf package's writer."""

from __future__ import annotations

import math
from typing import Any

import gguf
import torch

from tests.models.oracle import VOCAB


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

    def nemotron(self) -> None:
        self.partial(0.5)
        self.w.add_layer_norm_eps(self.c.norm_eps)
        self.w.add_rope_scaling_type(gguf.RopeScalingType.NONE)

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
