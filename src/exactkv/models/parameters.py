"""Every tensor that a decoder needs, by our names, from its spec."""

from __future__ import annotations

from dataclasses import dataclass

from exactkv.models.recurrent.parameters import shapes
from exactkv.models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, MoeSpec


@dataclass(frozen=True)
class Parameter:
    """A tensor of the decoder. ``parts``: sizes of the tensors that are stacked in it along ``axis``, or None if
    it is one."""

    shape: tuple[int, ...]
    parts: tuple[int, ...] | None = None
    axis: int = 0


def parameters(spec: DecoderSpec) -> dict[str, Parameter]:
    """Every parameter of the decoder by our name. Matrices are [out, in]; experts [E, out, in]."""
    hidden = spec.hidden_size
    found = {"embedding.weight": Parameter((spec.vocab_size, hidden)), **_norm("final_norm", spec)}
    if spec.learned_positions:
        found["positions.weight"] = Parameter((spec.max_length, hidden))
    if not spec.tied_head:
        found["head.weight"] = Parameter((spec.vocab_size, hidden))
    if spec.head_bias:
        found["head.bias"] = Parameter((spec.vocab_size,))
    if spec.per_layer is not None:
        size = len(spec.layers) * spec.per_layer.size
        found["per_layer.embedding.weight"] = Parameter((spec.per_layer.vocab_size, size))
        found["per_layer.norm.weight"] = Parameter((spec.per_layer.size,))
        found |= _linear("per_layer.projection", size, hidden)
    if spec.streams > 1:
        others = (hidden,) * (spec.streams - 1)
        found |= _linear("streams.into", others, hidden) | _linear("streams.out", others, hidden)
    for i, layer in enumerate(spec.layers):
        found |= {f"layers.{i}.{name}": p for name, p in _layer(layer, spec).items()}
    return found


def _norm(name: str, spec: DecoderSpec) -> dict[str, Parameter]:
    found = {f"{name}.weight": Parameter((spec.hidden_size,))}
    return {**found, f"{name}.bias": Parameter((spec.hidden_size,))} if spec.norm_bias else found


def _layer(layer: LayerSpec, spec: DecoderSpec) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for name, part in (("attention", layer.attention), ("recurrent", layer.recurrent), ("mlp", layer.mlp)):
        if layer.pre_norms and part is not None:
            found |= _norm(f"{name}.norm", spec)
    for name in ("attention", "mlp") if layer.post_norms else ():
        found |= _norm(f"{name}.post_norm", spec)
    attention = _attention if isinstance(layer.attention, AttentionSpec) else _latent_attention
    mlp = _mlp if isinstance(layer.mlp, MlpSpec) else _moe
    if layer.attention is not None:
        found |= {f"attention.{n}": p for n, p in attention(layer.attention, spec.hidden_size).items()}  # type: ignore[arg-type]
    if layer.recurrent is not None:
        found |= {f"recurrent.{n}": Parameter(s) for n, s in shapes(layer.recurrent, spec.hidden_size).items()}
    if layer.mlp is not None:
        found |= {f"mlp.{n}": p for n, p in mlp(layer.mlp, spec.hidden_size).items()}  # type: ignore[arg-type]
    if layer.beside is not None:
        found |= _norm("mlp.own_norm", spec) | _norm("beside.norm", spec) | _norm("beside.own_norm", spec)
        found |= {f"beside.{n}": p for n, p in _moe(layer.beside, spec.hidden_size).items()}
    if layer.laurel_rank is not None:
        found |= _norm("laurel.norm", spec) | _norm("laurel.post_norm", spec)
        found |= _linear("laurel.down", layer.laurel_rank, spec.hidden_size)
        found |= _linear("laurel.up", spec.hidden_size, layer.laurel_rank)
    if spec.per_layer is not None:
        found |= _linear("per_layer.gate", spec.per_layer.size, spec.hidden_size)
        found |= _linear("per_layer.out", spec.hidden_size, spec.per_layer.size) | _norm("per_layer.post_norm", spec)
    if spec.streams > 1:
        found |= _norm("streams.norm", spec) | _linear("streams.router", spec.streams, spec.hidden_size)
        found |= _linear("streams.predict", spec.streams**2, spec.streams)
        found |= _linear("streams.correct", spec.streams, spec.streams)
        found["streams.scale"] = Parameter((spec.hidden_size,))
    if layer.scaled:
        found["scale"] = Parameter((1,))
    return found


def _linear(
    name: str, rows: int | tuple[int, ...], inputs: int, bias: bool = False, experts: int | None = None
) -> dict[str, Parameter]:
    """A matrix, of ``rows`` stacked if they are several, and its bias."""
    parts = rows if isinstance(rows, tuple) else None
    total = sum(rows) if isinstance(rows, tuple) else rows
    first, axis = ((), 0) if experts is None else ((experts,), 1)
    found = {f"{name}.weight": Parameter((*first, total, inputs), parts, axis)}
    return {**found, f"{name}.bias": Parameter((*first, total), parts, axis)} if bias else found


def _attention(a: AttentionSpec, hidden: int) -> dict[str, Parameter]:
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    kept = 0 if a.shares is not None else 1 if a.keys_as_values else 2
    found = _linear("qkv", (2 * q if a.gated else q, *(kv,) * kept), hidden, a.bias)
    found |= _linear("out", hidden, q, a.output_bias)
    if a.qk_norm in ("head", "width"):
        for name, width in [("q_norm", q), ("k_norm", kv)][: 1 if a.shares is not None else 2]:
            found[f"{name}.weight"] = Parameter((a.head_dim if a.qk_norm == "head" else width,))
    if a.sinks:
        found["sinks"] = Parameter((a.num_heads,))
    return found


def _latent_attention(a: LatentAttentionSpec, hidden: int) -> dict[str, Parameter]:
    q, kv = a.num_heads * (a.nope_dim + a.rope_dim), a.num_heads * (a.nope_dim + a.v_dim)
    found = _linear("kv_down", a.kv_rank + a.rope_dim, hidden, a.bias) | _linear("kv_up", kv, a.kv_rank)
    found["kv_norm.weight"] = Parameter((a.kv_rank,))
    if a.q_rank is None:
        found |= _linear("q", q, hidden)
    else:
        found |= _linear("q_down", a.q_rank, hidden, a.bias) | _linear("q_up", q, a.q_rank)
        found["q_norm.weight"] = Parameter((a.q_rank,))
    return found | _linear("out", hidden, a.num_heads * a.v_dim, a.output_bias)


def _mlp(mlp: MlpSpec, hidden: int) -> dict[str, Parameter]:
    n = mlp.intermediate_size
    up = _linear("gate_up", (n, n), hidden, mlp.bias) if mlp.gated else _linear("up", n, hidden, mlp.bias)
    return up | _linear("down", hidden, n, mlp.bias)


def _moe(moe: MoeSpec, hidden: int) -> dict[str, Parameter]:
    n, shared, count = moe.intermediate_size, moe.shared_intermediate_size, moe.num_experts
    found = _linear("router", count, hidden, moe.router_bias)
    found |= _linear("experts.gate_up", (n, n), hidden, moe.bias, count)
    found |= _linear("experts.down", hidden, n, moe.bias, count)
    if moe.router_norm:
        found["router.scale"] = Parameter((hidden,))
    if moe.expert_scale:
        found["expert_scale"] = Parameter((count,))
    if moe.score_bias:
        found["score_bias"] = Parameter((count,))
    if shared:
        found |= _linear("shared.gate_up", (shared, shared), hidden) | _linear("shared.down", hidden, shared)
    if moe.shared_gate:
        found |= _linear("shared_gate", 1, hidden)
    return found
