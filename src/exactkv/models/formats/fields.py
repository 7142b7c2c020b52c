"""Every field of "quantization_config" is accounted for, as config.json's own are: one that nobody knows may change
what the weights stand for (a transform of the activations, say, or other settings for some layers)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.config import Config

# What readers take; what says which weights are quantized, as the files do too; what tells how the weights were made or
# how kernels run. Quantized activations and caches are not copied: here both keep the model's dtype.
_ALL = """quant_method modules_to_not_convert ignored_layers ignore kv_cache_scheme kv_cache_quant_method dequantize
quantization_status quantize is_checkpoint_fp8_serialized activation_scheme"""
_INTEGERS = """bits w_bit group_size q_group_size zero_point sym desc_act backend version lm_head meta exllama_config
use_exllama disable_exllama max_input_length dataset tokenizer model_name_or_path model_file_base_name model_seqlen
block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize batch_size pad_token_id
damp_percent damp_auto_increment true_sequential static_groups use_cuda_fp16 cache_block_outputs act_group_aware mse"""
KNOWN: Mapping[str, frozenset[str]] = {
    "fp8": frozenset(f"{_ALL} weight_block_size".split()),
    "mxfp4": frozenset(_ALL.split()),
    "awq": frozenset(f"{_ALL} {_INTEGERS} do_fuse fuse_max_seq_len modules_to_fuse".split()),
    "gptq": frozenset(f"{_ALL} {_INTEGERS}".split()),
    "compressed-tensors": frozenset(
        f"{_ALL} format config_groups global_compression_ratio sparsity_config version".split()
    ),
}
_GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHTS = frozenset(
    """num_bits type symmetric strategy group_size block_structure dynamic actorder observer observer_kwargs scale_dtype
    zp_dtype""".split()  # noqa: SIM905
)
_SPARSITY = {"format", "targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass"}


def check_fields(method: str, fields: Mapping[str, Any], accepted: Collection[str] = ()) -> None:
    """Raise LoadError where a field of a "quantization_config" is unknown, or has a value that is not supported."""
    config = Config(fields, f"{method}-quantized", accepted)
    config.ignore(*KNOWN[method])
    match method:
        case "fp8":
            config.expect("fmt", "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", default="e4m3")
            config.expect("scale_fmt", "float", "ue8m0", default="float")
        case "awq" | "gptq":
            config.expect("pack_dtype", "int32", default="int32")
            other = "gemm" if method == "awq" else "gptq_v2"
            for name in ("format", "checkpoint_format"):
                config.expect(name, method, other, default=method)
            _check_overrides(config)
        case "compressed-tensors":
            if config.take("transform_config", {}):
                raise LoadError(
                    f"config of a {config.family} model: transform_config = {fields['transform_config']!r:.80} is not "
                    "supported: the weights are those of transformed activations. Take a version without transforms."
                )
            for group in _objects(fields.get("config_groups")):
                _finish(group, _GROUP, config, accepted)
                for weights in _objects({"weights": group.get("weights")}):
                    _finish(weights, _WEIGHTS, config, accepted)
            for sparsity in _objects({"": fields.get("sparsity_config")}):
                _finish(sparsity, _SPARSITY, config, accepted)
    config.finish()


def _objects(given: Any) -> list[dict[str, Any]]:
    """The objects of an object; what is none the format's reader refuses."""
    return [value for value in given.values() if isinstance(value, dict)] if isinstance(given, dict) else []


def _finish(fields: Mapping[str, Any], known: Collection[str], config: Config, accepted: Collection[str]) -> None:
    inner = Config(fields, config.family, accepted)
    inner.ignore(*known)
    inner.finish()


def _check_overrides(config: Config) -> None:
    """Gptqmodel's settings for some layers, by regular expression; "-:…" means a layer that is not quantized."""
    dynamic = config.take("dynamic", {})
    if not isinstance(dynamic, dict) or any(not str(name).startswith("-:") for name in dynamic):
        raise LoadError(
            f"config of a {config.family} model: dynamic = {dynamic!r:.80} is not supported: other settings for some "
            "layers; expected the same for all"
        )
