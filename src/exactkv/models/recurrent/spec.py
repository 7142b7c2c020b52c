"""Recurrent mixers as data: the words of LayerSpec.recurrent. ``parts`` is what the cache keeps of a row: of a
convolution of width K the K - 1 newest inputs ("tail"), of a recurrence its state."""

from __future__ import annotations

from dataclasses import dataclass

from exactkv.cache import StatePart


@dataclass(frozen=True)
class MambaSpec:
    """Mamba (arXiv 2312.00752, figure 3): two branches of ``inner_size``, one through a convolution and the selective
    scan with ``state_size`` numbers a channel, the other, through silu, its gate. ``activation``: after the
    convolution. Δ comes from a projection of ``dt_rank``. ``bias``: on the projections in and out.
    ``inner_norm_eps``: norms of Δ's projection, B and C (Jamba), if any."""

    inner_size: int
    state_size: int
    conv_width: int
    dt_rank: int
    activation: str = "silu"
    bias: bool = False
    conv_bias: bool = True
    inner_norm_eps: float | None = None

    @property
    def parts(self) -> dict[str, StatePart]:
        return {
            "tail": StatePart((self.conv_width - 1, self.inner_size)),
            "state": StatePart((self.inner_size, self.state_size), wide=True),
        }


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba-2 (arXiv 2405.21060, figure 6): ``num_heads`` heads of ``head_dim``, each group of heads with a B and a C
    of ``state_size``; x, B and C go through the convolution and ``activation``; the gate through silu. Δ is kept
    within ``dt_min`` and ``dt_max``.

    ``gated_norm``: the norm before the projection out: None, "after" the gate is multiplied, or "before" it; of
    ``norm_groups`` equal parts by themselves. ``scales``: multiply what the projection in gives for gate, x, B, C, Δ
    (Falcon-H1)."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    norm_eps: float
    activation: str = "silu"
    gated_norm: str | None = "after"
    norm_groups: int = 1
    bias: bool = False
    conv_bias: bool = True
    output_bias: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    scales: tuple[float, ...] | None = None

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def sections(self) -> tuple[int, ...]:
        """Widths of what the projection in gives: gate, x, B, C, Δ."""
        each = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, each, each, self.num_heads

    @property
    def parts(self) -> dict[str, StatePart]:
        return {
            "tail": StatePart((self.conv_width - 1, sum(self.sections[1:4]))),
            "state": StatePart((self.num_heads, self.head_dim, self.state_size), wide=True),
        }


@dataclass(frozen=True)
class ShortConvSpec:
    """LFM2's short convolution: C · conv(B · x), all three projections of the input, ``size`` wide. ``bias``: on
    projections and convolution."""

    size: int
    conv_width: int
    bias: bool = False

    @property
    def parts(self) -> dict[str, StatePart]:
        return {"tail": StatePart((self.conv_width - 1, self.size))}


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated delta net (arXiv 2412.06464, figure 1): keys and queries of ``key_dim`` for ``num_key_heads``, values of
    ``value_dim`` for ``num_value_heads``, a multiple; queries, keys and values go through the convolution and
    ``activation``. A norm with ``norm_eps`` of each value head, then its gate, through silu."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    activation: str = "silu"

    @property
    def sections(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def parts(self) -> dict[str, StatePart]:
        return {
            "tail": StatePart((self.conv_width - 1, sum(self.sections))),
            "state": StatePart((self.num_value_heads, self.key_dim, self.value_dim), wide=True),
        }


@dataclass(frozen=True)
class RgLruSpec:
    """Griffin's recurrent block (arXiv 2402.19427, section 2.4): a branch of ``size`` through the convolution and the
    RG-LRU, times one through the activation. The recurrence's gates are block-diagonal, of ``num_blocks`` blocks."""

    size: int
    num_blocks: int
    conv_width: int
    activation: str

    @property
    def parts(self) -> dict[str, StatePart]:
        return {
            "tail": StatePart((self.conv_width - 1, self.size)),
            "state": StatePart((self.size,), wide=True),
        }


RecurrentSpec = MambaSpec | Mamba2Spec | ShortConvSpec | GatedDeltaSpec | RgLruSpec
