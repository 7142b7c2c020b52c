"""Decoding on CUDA: one token a row, the whole step captured once a batch size as a CUDA graph.

Kernels find rows only through tables on the device (`cache.RowTables`), so a captured step stays right while rows
grow, move, fork, leave and join. What such a step cannot do goes the plain way (`Decoder`), which is its reference.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exactkv.cache import Cache, CacheSpec, RowTables, Step
from exactkv.errors import IntegrityError
from exactkv.models.decoder import Decoder, Layer
from exactkv.models.norm import RMSNorm
from exactkv.models.spec import AttentionSpec, MlpSpec, MoeSpec, RopeSpec
from exactkv.ops import TORCH
from exactkv.ops.packed import Packed

if TYPE_CHECKING:
    from exactkv.models.captured import CapturedStep

MAX_ROWS = 32
"""The most rows of a captured step."""


class DecodePath:
    """A decoder's captured steps. ``unsupported``: why there are none; None if there are. ``declined``: why the last
    step that was offered went the plain way; None if it did not. ``captures``: batch sizes captured so far, each once.
    """

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.unsupported = _why_not(decoder)
        self.declined: str | None = None
        self._steps: dict[int, CapturedStep] = {}

    @property
    def captures(self) -> list[int]:
        return list(self._steps)

    def accepts(self, step: Step) -> bool:
        """Whether `run` can do this step; if not, `declined` says why."""
        self.declined = self.unsupported or RowTables.why_not(step)
        if self.declined is None and len(step.counts) > MAX_ROWS:
            self.declined = f"a step of {len(step.counts)} rows, more than {MAX_ROWS}"
        return self.declined is None

    def run(self, step: Step, tokens: list[int], cache: CacheSpec, max_length: int) -> Tensor:
        """Launch a step that `accepts` has allowed, not yet committed; ``tokens``: one a row. Returns logits [B, V],
        NaN for rows without a token. They are overwritten by the next step."""
        rows = len(step.counts)
        captured = self._captured(rows, cache)
        captured.replay(step, tokens, self._frequencies(max_length))
        step.extended.update(range(len(cache.layers)))
        logits = captured.logits[:rows]
        if not all(step.counts):
            idle = torch.tensor([not count for count in step.counts]).to(logits.device, non_blocking=True)
            logits = logits.masked_fill(idle[:, None], torch.nan)
        return logits

    def chosen(self, rows: int) -> Tensor:
        """The best token of each row in the last step of so many: [B] int64 on the device, overwritten by the next."""
        return self._steps[_size(rows)].chosen[:rows]

    def _captured(self, rows: int, cache: CacheSpec) -> CapturedStep:
        from exactkv.models.captured import CapturedStep

        size = _size(rows)
        if size not in self._steps:
            self._steps[size] = CapturedStep(self.decoder, cache, size)
        return self._steps[size]

    def _frequencies(self, max_length: int) -> tuple[RopeSpec, ...]:
        return tuple(rope.settled(max_length) for rope in self.decoder.ropes)


def greedy(path: DecodePath, cache: Cache, token: int, count: int, max_length: int) -> Iterator[int]:
    """The ``count`` best tokens after ``token``, which is not in ``cache`` yet, of one row.

    Each step is launched before the token that it feeds is read: the device takes its own last choice. It is
    committed when that token is known, so whoever stops early finds in the cache the tokens up to the last one that was
    given out, that one apart. Raises InputError where a row would pass the cache's maximum, IntegrityError where a
    step is not one that can be captured.
    """
    step = cache.begin(1, [1], [[token]])
    _launch(path, step, token, cache.spec, max_length)
    cache.commit(step)
    landing = [torch.zeros(1, dtype=torch.int64, pin_memory=True) for _ in range(2)]
    arrived = [torch.cuda.Event() for _ in range(2)]
    for i in range(count):
        landing[i % 2].copy_(path.chosen(1), non_blocking=True)
        arrived[i % 2].record()
        ahead = i + 1 < count and (cache.max_length is None or cache.lengths[0] < cache.max_length)
        if ahead:
            step = cache.begin(1, [1], [[-1]])
            _launch(path, step, -1, cache.spec, max_length)
        arrived[i % 2].synchronize()
        found = int(landing[i % 2])
        yield found
        if not ahead:
            return
        step.tokens = [[found]]
        cache.commit(step)


def _launch(path: DecodePath, step: Step, token: int, cache: CacheSpec, max_length: int) -> None:
    if not path.accepts(step):
        raise IntegrityError(f"this step cannot be captured: {path.declined}")
    path.run(step, [token], cache, max_length)


def _size(rows: int) -> int:
    """The captured batch size for so many rows: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


def _why_not(decoder: Decoder) -> str | None:
    """What of a decoder no captured step can do yet; None if it can do all."""
    spec = decoder.spec
    if decoder.device.type != "cuda":
        return f"the model is on {decoder.device.type}, not on CUDA"
    if decoder.ops is not TORCH:
        return f"the {decoder.ops.name} implementation was asked for"
    if decoder.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no kernels for {decoder.dtype}"
    if any(isinstance(weight, Packed) for weight in decoder.weights.values()):
        return "packed weights (int8, int4): no kernels yet"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    for what, given in (
        ("a layer norm", not isinstance(decoder.final_norm, RMSNorm)),
        ("learned positions", decoder.positions is not None),
        ("per-layer inputs", spec.per_layer is not None),
        ("several streams", spec.streams > 1),
    ):
        if given:
            return f"{what}: not captured yet"
    for layer in decoder.layers:
        found = _why_not_layer(layer) if isinstance(layer, Layer) else "streams"
        if found:
            return f"{found}: not captured yet"
    return None


def _why_not_layer(layer: Layer) -> str | None:
    from exactkv.ops.triton.launch import ACTIVATIONS

    spec, a, m = layer.spec, layer.spec.attention, layer.spec.mlp
    if not isinstance(a, AttentionSpec):
        return "a layer without plain attention"
    if m is None:
        return "a layer without an MLP"
    found = {
        "recurrence": spec.recurrent is not None,
        "a mixture beside the MLP": spec.beside is not None,
        "a low-rank path": spec.laurel_rank is not None,
        "parallel blocks": spec.parallel,
        "no norm before a block": not spec.pre_norms,
        "a learned scale of a layer": spec.scaled,
        f"the activation {m.activation}": m.activation not in ACTIVATIONS,
        "anchors": a.pattern.anchors > 0,
        f"q/k norm over {a.qk_norm}": a.qk_norm not in (None, "head", "unit"),
        "a norm after a scaled rotation": a.qk_norm == "unit" and a.rope is not None and a.rope.amplitude != 1.0,
        "a norm of values": a.v_norm,
        "keys as values": a.keys_as_values,
        "shared keys and values": a.shares is not None,
        "gated attention": a.gated,
        "heads of a width that memory is not aligned to": a.head_dim % 8 != 0,
        **(_why_not_mlp(m) if isinstance(m, MlpSpec) else _why_not_moe(m)),
    }
    return next((what for what, is_so in found.items() if is_so), None)


def _why_not_mlp(m: MlpSpec) -> dict[str, bool]:
    return {"an MLP without a gate": not m.gated, "a sparse gate": bool(m.sparsity)}


def _why_not_moe(m: MoeSpec) -> dict[str, bool]:
    return {
        "groups of experts": m.groups > 1,
        "a bias of the choice of experts": m.score_bias,
        "biases of experts": m.bias,
        "a gate of the shared expert": m.shared_gate,
        "a norm of the router's": m.router_norm,
        "learned factors of scores": m.expert_scale,
    }
