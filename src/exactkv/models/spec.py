"""A decoder as data: what a family's file makes of a config, and all that the decoder is built from."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from math import isfinite

from exactkv.cache import AttentionPattern, CacheSpec


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths slowed by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by its own factor, as GGUF files store them."""

    factors: tuple[float, ...]


RopeScaling = Llama3Scaling | LinearScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions. ``interleaved``: a pair is (2i, 2i + 1), else (i, i + dim / 2)."""

    dim: int
    base: float
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class QueryTemperature:
    """Queries at position p are scaled by 1 + scale · log1p(floor((p + 1) / floor_scale)) (Llama 4)."""

    scale: float
    floor_scale: float


@dataclass(frozen=True)
class AttentionSpec:
    """``scale`` multiplies q·k. ``qk_norm``: None, "weighted" (a norm with weights before rope) or "unit"
    (without weights, after rope). ``bias``, ``output_bias``: on the projections."""

    pattern: AttentionPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    qk_norm: str | None = None
    temperature: QueryTemperature | None = None
    bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP: down(act(gate x) · up x)."""

    intermediate_size: int
    activation: str
    bias: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts beside a shared one. The router's sigmoid multiplies an expert's *input*."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    activation: str


@dataclass(frozen=True)
class LayerSpec:
    """``post_norms``: norms also after attention and after the MLP, before the residual is added."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    post_norms: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder. ``norm_offset`` is added to every norm's weight; ``embedding_scale`` multiplies the
    embeddings, after it is rounded to the weights' dtype; ``max_length`` is the most tokens a row may have."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_length: int
    tied_head: bool
    norm_offset: float = 0.0
    embedding_scale: float | None = None

    def cache_spec(self, identity: str) -> CacheSpec:
        """What a cache of this decoder holds: "k" and "v" of each layer."""
        layers = []
        for layer in self.layers:
            a = layer.attention
            shape = (a.num_kv_heads, a.head_dim)
            layers.append((a.pattern, {"k": shape, "v": shape}))
        return CacheSpec(layers, identity, self.max_length)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rope variants in use, each once."""
        return tuple(dict.fromkeys(x.attention.rope for x in self.layers if x.attention.rope is not None))


def check_spec(part: object, name: str = "decoder") -> None:
    """Raise ValueError where a number of a spec is of another kind than declared, not finite, or has no meaning:
    sizes and counts are integers of 1 or more, factors are above 0, offsets and scales of terms 0 or more."""
    may_be_zero = {"anchors", "norm_offset", "QueryTemperature.scale"}
    for f in fields(part):  # type: ignore[arg-type]
        value, where = getattr(part, f.name), f"{name}.{f.name}"
        if isinstance(value, tuple):
            for i, item in enumerate(dict.fromkeys(value)):
                if is_dataclass(item):
                    check_spec(item, f"{where}[{i}]")
        elif is_dataclass(value):
            check_spec(value, where)
        elif str(f.type).startswith(("int", "float")) and value is not None:
            whole, number = isinstance(value, int), isinstance(value, int | float)
            zero = f.name in may_be_zero or f"{type(part).__name__}.{f.name}" in may_be_zero
            fits = (whole if str(f.type).startswith("int") else number) and not isinstance(value, bool)
            if not fits or not isfinite(value) or value < 0 or (value == 0 and not zero):
                raise ValueError(f"{where} would be {value!r}")


@dataclass(frozen=True)
class Parameter:
    """A tensor of the decoder. ``parts``: rows of each of the tensors that are stacked in it along its first
    axis, or None if it is one."""

    shape: tuple[int, ...]
    parts: tuple[int, ...] | None = None


def parameters(spec: DecoderSpec) -> dict[str, Parameter]:
    """Every parameter of the decoder by our name. Matrices are [out, in]; experts [E, out, in]."""
    hidden = spec.hidden_size
    found = {"embedding.weight": Parameter((spec.vocab_size, hidden)), "final_norm.weight": Parameter((hidden,))}
    if not spec.tied_head:
        found["head.weight"] = Parameter((spec.vocab_size, hidden))
    for i, layer in enumerate(spec.layers):
        block = {**_attention(layer.attention, hidden), **_mlp(layer.mlp, hidden)}
        for name in ("attention", "mlp"):
            block[f"{name}.norm.weight"] = Parameter((hidden,))
            if layer.post_norms:
                block[f"{name}.post_norm.weight"] = Parameter((hidden,))
        found |= {f"layers.{i}.{name}": p for name, p in block.items()}
    return found


def _attention(a: AttentionSpec, hidden: int) -> dict[str, Parameter]:
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    found = {
        "attention.qkv.weight": Parameter((q + 2 * kv, hidden), (q, kv, kv)),
        "attention.out.weight": Parameter((hidden, q)),
    }
    if a.bias:
        found["attention.qkv.bias"] = Parameter((q + 2 * kv,), (q, kv, kv))
    if a.output_bias:
        found["attention.out.bias"] = Parameter((hidden,))
    if a.qk_norm == "weighted":
        found["attention.q_norm.weight"] = Parameter((a.head_dim,))
        found["attention.k_norm.weight"] = Parameter((a.head_dim,))
    return found


def _mlp(mlp: MlpSpec | MoeSpec, hidden: int) -> dict[str, Parameter]:
    n = mlp.intermediate_size
    if isinstance(mlp, MlpSpec):
        found = {
            "mlp.gate_up.weight": Parameter((2 * n, hidden), (n, n)),
            "mlp.down.weight": Parameter((hidden, n)),
        }
        if mlp.bias:
            found["mlp.gate_up.bias"] = Parameter((2 * n,), (n, n))
            found["mlp.down.bias"] = Parameter((hidden,))
        return found
    shared = mlp.shared_intermediate_size
    return {
        "mlp.router.weight": Parameter((mlp.num_experts, hidden)),
        "mlp.experts.gate_up.weight": Parameter((mlp.num_experts, 2 * n, hidden)),
        "mlp.experts.down.weight": Parameter((mlp.num_experts, hidden, n)),
        "mlp.shared.gate_up.weight": Parameter((2 * shared, hidden), (shared, shared)),
        "mlp.shared.down.weight": Parameter((hidden, shared)),
    }
