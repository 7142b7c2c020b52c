"""Loading from directories: what is refused and how it says so, dtypes, shards, tied heads, configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import exactkv
from exactkv import InputError, LoadError
from exactkv.cache import ChunkedAttention, FullAttention, SlidingWindow
from exactkv.models.families import find_family
from exactkv.models.load import read_spec
from exactkv.models.source import DirectorySource, SafetensorsFile
from exactkv.models.spec import Llama3Scaling
from tests.models.saved import change_config, change_tensors, refusal, safetensors_torch, save

# dtypes and layouts


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32", torch.float64])
def test_every_dtype_is_read_into_every_other(tmp_path: Path, stored: torch.dtype, wanted: Any) -> None:
    directory = save(tmp_path, stored)
    model = exactkv.load(directory, dtype=wanted, device="cpu")
    kept = safetensors_torch.load_file(directory / "model.safetensors")
    weights, layer = model.decoder.weights, "model.layers.1.self_attn"
    stacked = torch.cat([kept[f"{layer}.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(weights["layers.1.attention.qkv.weight"], stacked.to(model.dtype))
    assert torch.equal(weights["embedding.weight"], kept["model.embed_tokens.weight"].to(model.dtype))
    assert {w.dtype for w in weights.values()} == {model.dtype}


def test_auto_dtype_is_the_configs_then_that_of_most_bytes(model_dir: Path) -> None:
    assert exactkv.load(model_dir).dtype == torch.float32
    assert exactkv.load(change_config(model_dir, dtype=None, torch_dtype="bfloat16")).dtype == torch.bfloat16
    change_config(model_dir, dtype=None, torch_dtype=None)

    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({n: t.to(torch.float16) for n, t in tensors.items() if "norm" not in n})

    assert exactkv.load(change_tensors(model_dir, halve)).dtype == torch.float16


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int64, "", 16])
def test_other_dtypes_are_refused(saved: Path, dtype: Any) -> None:
    with pytest.raises(InputError, match="'auto', 'bfloat16', 'float16', 'float32', 'float64'"):
        exactkv.load(saved, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "cpu:x"])
def test_other_devices_are_refused(saved: Path, device: str) -> None:
    with pytest.raises(InputError, match="device is .*expected"):
        exactkv.load(saved, device=device)


def test_shards_give_what_a_single_file_gives(saved: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    single, several = exactkv.load(saved), exactkv.load(sharded)
    assert single.fingerprint == several.fingerprint
    assert several.name == "sharded"


def test_big_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a single row is larger than a piece, into another dtype, and across strides."""
    monkeypatch.setattr("exactkv.models.source._PIECE", 64)
    tensors = {
        "a": torch.randn(3, 5, 40),
        "b": torch.randn(7, 4),
        "c": torch.randn(()),
        "d": torch.randn(0, 4),
    }
    safetensors_torch.save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        for dtype in (torch.float32, torch.float64):
            out = torch.empty(tensor.shape, dtype=dtype)
            file.read(file.tensors[name], out)
            assert torch.equal(out, tensor.to(dtype))
    out = torch.empty(3, 40, 5)
    file.read(file.tensors["a"], out.transpose(1, 2))
    assert torch.equal(out.transpose(1, 2), tensors["a"])
    with pytest.raises(LoadError, match=r"has the shape \[7, 4\].*\[4, 7\]"):
        file.read(file.tensors["b"], torch.empty(4, 7))


def test_generation_config(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert exactkv.load(model_dir).generation_config == {"eos_token_id": [5, 6]}
    (model_dir / "generation_config.json").unlink()
    assert exactkv.load(model_dir).generation_config["eos_token_id"] == 2, "config.json's own"


def test_without_tokenizer_files_there_is_no_tokenizer(saved: Path) -> None:
    assert exactkv.load(saved).tokenizer is None


# tied heads, tensors that do not fit


def test_tied_head(tmp_path: Path) -> None:
    directory = save(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in DirectorySource(directory).shapes()
    model = exactkv.load(directory)
    assert model.decoder.head is model.decoder.embedding

    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert exactkv.load(change_tensors(directory, add_head)).fingerprint == model.fingerprint

    def alter_head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][-1, -1] += 1

    message = refusal(change_tensors(directory, alter_head))
    assert "tie_word_embeddings" in message and "lm_head.weight with other values" in message


def test_all_that_does_not_fit_is_in_one_error(model_dir: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(15, 32)

    message = refusal(change_tensors(model_dir, spoil))
    for part in (
        "2 missing: ",
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "1 unknown: model.layers.0.self_attn.q_proj.bias",
        "1 of another shape: model.layers.1.self_attn.k_proj.weight is [15, 32], expected [16, 32]",
        "llama",
    ):
        assert part in message


def test_long_lists_are_cut(model_dir: Path) -> None:
    message = refusal(change_config(model_dir, num_hidden_layers=4))
    assert "18 missing: model.layers.2." in message and "and 8 more" in message


def test_buffers_of_old_files_are_left_aside(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    exactkv.load(change_tensors(model_dir, lambda tensors: tensors.update({name: torch.zeros(4)})))


# configs


def test_unsupported_architecture_names_the_supported(model_dir: Path) -> None:
    unknown = {"architectures": ["NovelForCausalLM"], "model_type": "novel", "router_bend": 0.5}
    message = refusal(change_config(model_dir, **unknown))
    assert "'NovelForCausalLM'" in message and "Llama4ForCausalLM" in message and "Gemma3ForCausalLM" in message
    assert "nearest supported family by the config's fields is llama" in message
    assert "give a meaning to: router_bend." in message


def test_a_value_that_the_nearest_family_does_not_know_is_named(model_dir: Path) -> None:
    novel = {"architectures": ["NovelForCausalLM"], "model_type": "novel", "hidden_act": "bent_relu"}
    message = refusal(change_config(model_dir, **novel))
    assert "is llama; a family for it would have to give a meaning to: hidden_act = 'bent_relu'." in message


def test_unknown_fields_are_refused_or_accepted_by_name(model_dir: Path) -> None:
    message = refusal(change_config(model_dir, residual_multiplier=0.2))
    assert "residual_multiplier = 0.2" in message and "accept_fields" in message
    exactkv.load(model_dir, accept_fields=["residual_multiplier"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        ({"num_hidden_layers": "two"}, "is 'two', expected an integer from 1"),
        ({"num_attention_heads": 0, "head_dim": None}, "makes no sense"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "'mrope' is not supported"),
        ({"rope_parameters": [1]}, "makes no sense"),
        ({"architectures": 5, "model_type": 5}, "unsupported architecture"),
        ({"rms_norm_eps": "1e-6"}, "norm_eps would be '1e-6'"),
        ({"vocab_size": "97"}, "vocab_size would be '97'"),
        ({"max_position_embeddings": "256"}, "max_length would be '256'"),
        ({"intermediate_size": 48.0}, "intermediate_size would be 48.0"),
        ({"num_key_value_heads": True}, "num_kv_heads would be True"),
        ({"rope_parameters": None, "rope_theta": 0}, "base would be 0.0"),
        ({"rope_parameters": None, "rope_theta": float("nan")}, "base would be nan"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": 777}, "rope_theta is 777 and"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 0}, "window is 0"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized (bitsandbytes)"),
        ({"architectures": ["Llama4ForConditionalGeneration"], "text_config": 3}, "expected an object"),
    ],
)
def test_config_errors(model_dir: Path, fields: dict[str, Any], expected: str) -> None:
    assert expected in refusal(change_config(model_dir, **fields))


def hub_config(**fields: Any) -> dict[str, Any]:
    shared = {
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "bfloat16",
    }
    return {**shared, "attention_dropout": 0.0, "use_cache": True, "transformers_version": "4.50.0", **fields}


def spec_of(config: dict[str, Any]) -> Any:
    return read_spec(find_family(config), config)


def test_configs_as_the_hub_has_them() -> None:
    """Fields as published for Llama 3.2 1B, SmolLM2 135M, Mistral 7B, Gemma 3 1B and Llama 4 Scout."""
    llama = spec_of(
        hub_config(
            architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, bos_token_id=128000,
            eos_token_id=[128001, 128008, 128009], head_dim=64, hidden_size=2048, intermediate_size=8192,
            max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=16,
            num_key_value_heads=8, pretraining_tp=1, rope_theta=500000.0, tie_word_embeddings=True,
            vocab_size=128256,
            rope_scaling={"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        )
    )  # fmt: skip
    rope = llama.layers[0].attention.rope
    assert rope.base == 500000.0 and rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)

    smollm = spec_of(
        hub_config(
            architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, bos_token_id=1,
            eos_token_id=2, pad_token_id=2, hidden_size=576, intermediate_size=1536, is_llama_config=True,
            max_position_embeddings=8192, mlp_bias=False, num_attention_heads=9, num_hidden_layers=30,
            num_key_value_heads=3, pretraining_tp=1, rope_interleaved=False, rope_scaling=None,
            rope_theta=100000, tie_word_embeddings=True, vocab_size=49152,
            **{"transformers.js_config": {"dtype": "q4"}},
        )
    )  # fmt: skip
    assert smollm.layers[0].attention.head_dim == 64 and smollm.tied_head

    mistral = spec_of(
        hub_config(
            architectures=["MistralForCausalLM"], model_type="mistral", bos_token_id=1, eos_token_id=2,
            hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=8, rope_theta=10000.0, sliding_window=4096,
            tie_word_embeddings=False, vocab_size=32000,
        )
    )  # fmt: skip
    assert {layer.attention.pattern for layer in mistral.layers} == {SlidingWindow(window=4096)}

    gemma_fields = hub_config(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", attention_bias=False,
        attn_logit_softcapping=None, bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 106],
        final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=1152,
        intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=26,
        num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rope_local_base_freq=10000,
        rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
        vocab_size=262144,
    )  # fmt: skip
    del gemma_fields["hidden_act"]
    gemma = spec_of(gemma_fields)
    assert [i for i, layer in enumerate(gemma.layers) if layer.attention.pattern == FullAttention()] == [
        5,
        11,
        17,
        23,
    ]
    assert gemma.tied_head and {rope.base for rope in gemma.ropes} == {1e6, 1e4}

    scout = spec_of(
        hub_config(
            model_type="llama4_text", _attn_implementation_autoset=True, attention_bias=False,
            attention_chunk_size=8192, attn_scale=0.1, attn_temperature_tuning=4, bos_token_id=200000,
            cache_implementation="hybrid", eos_token_id=[200001, 200007, 200008], floor_scale=8192,
            for_llm_compressor=False, head_dim=128, hidden_size=5120, interleave_moe_layer_step=1,
            intermediate_size=8192, intermediate_size_mlp=16384, max_position_embeddings=10485760,
            moe_layers=list(range(48)), no_rope_layers=[1, 1, 1, 0] * 12, num_attention_heads=40,
            num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8, num_local_experts=16,
            output_router_logits=False, pad_token_id=200018, rope_theta=500000.0, router_aux_loss_coef=0.001,
            router_jitter_noise=0.0, use_qk_norm=True, vocab_size=202048,
            rope_scaling={"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        )
    )  # fmt: skip
    assert scout.layers[0].attention.pattern == ChunkedAttention(chunk_size=8192)
    assert scout.layers[3].attention.pattern == FullAttention() and scout.layers[3].attention.temperature is not None


# files


def test_truncated_and_damaged_files_are_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for damaged in (
        b"",
        whole[:5],
        whole[:100],
        whole[:-1],
        whole + b"\0",
        whole[: len(whole) // 2],
        b"\xff" * 64 + whole[64:],
        whole[:8] + b"{" * header + whole[8 + header :],
        whole.replace(b'"F32"', b'"X32"'),
        whole.replace(b'"F32"', b'"F64"'),
        whole.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ):
        file.write_bytes(damaged)
        message = refusal(model_dir)
        assert str(file) in message and "truncated or damaged" in message


def test_a_file_that_shrinks_after_it_was_opened(model_dir: Path) -> None:
    source = DirectorySource(model_dir)
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4000])
    with pytest.raises(LoadError, match="truncated or damaged"):
        for name, shape in source.shapes().items():
            source.read(name, torch.empty(shape))


def test_of_a_stale_index_the_files_that_are_there_are_named(sharded: Path, saved: Path) -> None:
    for file in sharded.glob("model-*.safetensors"):
        file.unlink()
    (sharded / "model-00001-of-00001.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    message = refusal(sharded)
    assert "model.safetensors.index.json names are missing" in message
    assert "It holds model-00001-of-00001.safetensors. If those are the whole model, the index is an older" in message
    (sharded / "model.safetensors.index.json").unlink()
    exactkv.load(sharded, device="cpu")


def test_a_directory_in_place_of_the_weights_is_called_so(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors").mkdir()
    assert "model.safetensors is a directory, expected a file" in refusal(model_dir)


def test_missing_shards_are_listed(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    first.unlink()
    second.unlink()
    message = refusal(sharded)
    assert first.name in message and second.name in message and "2 of" in message


def test_tensors_that_a_shard_lacks_are_listed(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    assert "model.ghost.weight" in refusal(sharded)
    content["weight_map"]["model.ghost.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    assert "outside" in refusal(sharded)
    index.write_text('{"metadata": {}}')
    assert "weight_map" in refusal(sharded)


def test_integer_weights_are_refused(model_dir: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 48, dtype=torch.int8)

    message = refusal(change_tensors(model_dir, quantize))
    assert "model.layers.0.mlp.down_proj.weight (I8)" in message and "Quantized weights" in message

    def to_fp8(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 48).to(torch.float8_e4m3fn)

    assert "(F8_E4M3)" in refusal(change_tensors(model_dir, to_fp8))


def test_pickles_are_never_read(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(model_dir)
    (model_dir / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'false'\ntR.")
    message = refusal(model_dir)
    assert "pytorch_model.bin" in message and "never read" in message


def test_paths_that_are_no_model(tmp_path: Path, model_dir: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "give one of them: x.gguf" in refusal(tmp_path)
    assert "truncated" in refusal(tmp_path / "x.gguf")
    assert "give the directory" in refusal(model_dir / "model.safetensors")
    assert "not a GGUF file" in refusal(model_dir / "config.json")
    (model_dir / "config.json").write_text("{")
    assert "not valid JSON" in refusal(model_dir)
    (model_dir / "config.json").write_text("[]")
    assert "expected an object" in refusal(model_dir)


@pytest.mark.parametrize(
    "path",
    [
        "./nothing",
        "/no/such/dir",
        "../x/y",
        "a/b/c",
        "~/no-such",
        "x.gguf",
        "org/x.gguf",
        "",
        "gpt2",
        "x" * 5000,
        "~nobody-here/x",
    ],
)
def test_paths_that_are_not_there(path: str) -> None:
    message = refusal(path)
    assert f"no file or directory {path!r}" in message and "smollm2" in message and "org/name" in message


def test_a_path_object_is_never_a_hub_id() -> None:
    assert "no file or directory" in refusal(Path("org/name"))
    with pytest.raises(InputError, match="expected a str or a Path"):
        exactkv.load(3)  # type: ignore[arg-type]
