"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exactkv.cache import KVSegment, KVView
from exactkv.models.blocks import in_blocks
from exactkv.models.call import Call, last_of_rows
from exactkv.models.norm import RMSNorm, make_norm
from exactkv.models.rope import rotate
from exactkv.models.spec import DecoderSpec, LatentAttentionSpec
from exactkv.ops import Ops


class LatentAttention:
    """The matrix that makes keys and values from the latent is absorbed (section 2.1.2): its key half into the
    queries, its value half into what is attended. So the heads attend to the latents themselves: one key head of
    latent and rotated key, whose value is the latent."""

    def __init__(
        self, spec: LatentAttentionSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int
    ):
        self.spec, self.ops, self.slot, self.weights = spec, ops, slot, weights
        self.norm = make_norm(decoder, weights, "norm")
        self.kv_norm = RMSNorm(weights["kv_norm.weight"], spec.norm_eps)
        self.q_norm = RMSNorm(weights["q_norm.weight"], spec.norm_eps) if spec.q_rank is not None else None
        per_head = weights["kv_up.weight"].view(spec.num_heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
        self.key_up, self.value_up = per_head.split((spec.nope_dim, spec.v_dim), dim=1)  # [H, dim, kv_rank]

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        """See Attention."""
        s = self.spec
        q, row = in_blocks(self._project, x, *call.rotations[s.rope])  # [B, T, H, D], [B, T, 1, D]
        view = call.layers[self.slot].extend(call.step, {"latent": row.transpose(1, 2)})
        if queries == "none":
            return None
        if queries == "last":
            q, view = last_of_rows(q, call.step), view.last()
        nope, rotated = q.split((s.nope_dim, s.rope_dim), dim=-1)
        absorbed = torch.einsum("bthd,hdr->bhtr", nope, self.key_up)
        q = torch.cat((absorbed, rotated.transpose(1, 2)), dim=-1)
        latent = self.ops.attend(q, as_keys_and_values(view, s.kv_rank), s.scale)  # [B, H, T or 1, kv_rank]
        values = torch.einsum("bhtr,hdr->bthd", latent, self.value_up)
        return self.ops.linear(values.flatten(2), self.weights["out.weight"], self.weights.get("out.bias"))

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B, T, hidden] -> queries [B, T, H, nope + rope], and what the cache keeps, [B, T, 1, kv_rank + rope];
        both with rope."""
        s, weights = self.spec, self.weights
        normed = x if self.norm is None else self.norm(x)
        if self.q_norm is None:
            q = self.ops.linear(normed, weights["q.weight"])
        else:
            down = self.ops.linear(normed, weights["q_down.weight"], weights.get("q_down.bias"))
            q = self.ops.linear(self.q_norm(down), weights["q_up.weight"])
        nope, turned = q.unflatten(-1, (s.num_heads, -1)).split((s.nope_dim, s.rope_dim), dim=-1)
        down = self.ops.linear(normed, weights["kv_down.weight"], weights.get("kv_down.bias")).unsqueeze(2)
        latent, key = down.split((s.kv_rank, s.rope_dim), dim=-1)
        turned, key = (rotate(t, cos, sin, s.rope.interleaved) for t in (turned, key))
        return torch.cat((nope, turned), dim=-1), torch.cat((self.kv_norm(latent), key), dim=-1)


def as_keys_and_values(view: KVView, kv_rank: int) -> KVView:
    """A view of latents as one of keys, the latents with their rotated keys, and values, the latents."""

    def split(segment: KVSegment) -> KVSegment:
        as_stored = segment.reader

        def read(parts: Mapping[str, Tensor], part: str) -> Tensor:
            latent = parts["latent"] if as_stored is None else as_stored(parts, "latent")
            return latent if part == "k" else latent[..., :kv_rank]

        return segment._replace(reader=read)

    rows = (row._replace(segments=tuple(map(split, row.segments))) for row in view.rows)
    return view._replace(rows=tuple(rows))
