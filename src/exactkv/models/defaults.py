"""What a field that a config does not have means, where transformers' config classes differ between model types.

The values are those of transformers 5.17; tests/models/test_defaults.py compares them with the installed version. What
all model types of a family share is in the family's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BY_MODEL_TYPE: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {"max_position_embeddings": 8192},
    "deepseek_v2": {"n_shared_experts": 2},
    "deepseek_v3": {
        "first_k_dense_replace": 3, "max_position_embeddings": 4096, "n_group": 8, "n_shared_experts": 1,
        "routed_scaling_factor": 2.5, "topk_group": 4,
    },
    "exaone4": {"num_key_value_heads": 32},
    "falcon_h1": {"max_position_embeddings": 8192, "num_key_value_heads": 8},
    "gemma": {"head_dim": 256, "max_position_embeddings": 8192, "num_key_value_heads": 16},
    "gemma2": {"head_dim": 256, "max_position_embeddings": 8192, "num_key_value_heads": 4},
    "gemma3n_text": {"head_dim": 256, "max_position_embeddings": 32_768, "num_key_value_heads": 2},
    "gemma4_text": {"head_dim": 256, "max_position_embeddings": 131_072, "num_key_value_heads": 4},
    "glm": {"head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2},
    "glm4": {"head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2},
    "glm4_moe": {
        "max_position_embeddings": 131_072, "n_shared_experts": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    "gpt_oss": {"head_dim": 64, "max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "granitemoehybrid": {"rms_norm_eps": 1e-6},
    "jamba": {"num_key_value_heads": 8},
    "lfm2": {"intermediate_size": 12_288, "max_position_embeddings": 128_000, "num_key_value_heads": 8},
    "llama4_text": {"head_dim": 128, "num_key_value_heads": 8},
    "ministral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "ministral3": {
        "head_dim": 128, "max_position_embeddings": 262_144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "mixtral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "nemotron": {"max_position_embeddings": 4096},
    "olmoe": {"max_position_embeddings": 4096},
    "phi3": {"max_position_embeddings": 4096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen2_moe": {"max_position_embeddings": 32_768, "num_key_value_heads": 16},
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3_moe": {"max_position_embeddings": 32_768, "num_key_value_heads": 4},
    "qwen3_next": {"head_dim": 256, "max_position_embeddings": 32_768, "num_key_value_heads": 2},
    "seed_oss": {"head_dim": 128, "max_position_embeddings": 524_288, "num_key_value_heads": 8},
    "smollm3": {"max_position_embeddings": 32_768, "num_key_value_heads": 4},
    "starcoder2": {"max_position_embeddings": 4096, "num_key_value_heads": 2},
}  # fmt: skip
