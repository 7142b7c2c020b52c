"""The mixer of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from exactkv.models.call import Call
from exactkv.models.recurrent.delta import GatedDeltaNet
from exactkv.models.recurrent.mamba import Mamba, Mamba2
from exactkv.models.recurrent.rglru import RgLru
from exactkv.models.recurrent.shortconv import ShortConv
from exactkv.models.recurrent.spec import GatedDeltaSpec, Mamba2Spec, MambaSpec, RecurrentSpec, RgLruSpec, ShortConvSpec
from exactkv.models.spec import DecoderSpec
from exactkv.ops import Ops


class Recurrent(Protocol):
    """The norm before its projections is part of it. Its weights go by name within the layer; see parameters.py."""

    def __call__(self, x: Tensor, call: Call, queries: str = "all") -> Tensor | None:
        """``x`` [B, T, hidden] -> [B, T, hidden]. ``queries``: for which positions there is a result; states are
        kept whatever they are. "last": each row's last valid one, [B, 1, hidden]; "none": None."""
        ...


def make_recurrent(
    spec: RecurrentSpec, decoder: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, slot: int
) -> Recurrent:
    """``slot``: the layer's place among the cache's recurrent layers."""
    match spec:
        case MambaSpec():
            return Mamba(spec, decoder, weights, ops, slot)
        case Mamba2Spec():
            return Mamba2(spec, decoder, weights, ops, slot)
        case ShortConvSpec():
            return ShortConv(spec, decoder, weights, ops, slot)
        case GatedDeltaSpec():
            return GatedDeltaNet(spec, decoder, weights, ops, slot)
        case RgLruSpec():
            return RgLru(spec, decoder, weights, ops, slot)
