"""A decoder as data: what a family's file makes of a config, and all that the decoder is built from.

Every word has one meaning, whichever family uses it; what no family says is the plain case. The tensors
that a spec needs are in parameters.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from math import isfinite

from exactkv.cache import AttentionPattern, CacheSpec
from exactkv.models.recurrent.spec import RecurrentSpec


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths slowed by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: pairs that turn more than ``beta_fast`` times within the original length kept, those that turn less
    than ``beta_slow`` times slowed by ``factor``, a ramp between, its ends on whole pairs if ``truncate``."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by its own factor."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class Proportion:
    """Only the first ``pairs`` pairs turn, at the frequencies of the whole head, divided by ``factor``."""

    pairs: int
    factor: float = 1.0


@dataclass(frozen=True)
class LongRope:
    """``short`` factors for rows of at most ``original_max_position`` tokens, ``long`` ones for all others."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int


@dataclass(frozen=True)
class DynamicNtk:
    """A larger base for rows of more than ``original_max_position`` tokens, the larger the longer they are."""

    factor: float
    original_max_position: int


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | FrequencyFactors | Proportion | LongRope | DynamicNtk


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of the first ``dim`` numbers of a head. ``interleaved``: a pair is (2i, 2i + 1), else
    (i, i + dim / 2). ``amplitude`` multiplies what is rotated."""

    dim: int
    base: float
    interleaved: bool = False
    scaling: RopeScaling | None = None
    amplitude: float = 1.0

    def settled(self, max_length: int) -> RopeSpec:
        """The variant for rows of at most ``max_length`` tokens: the same but where scaling depends on length."""
        match self.scaling:
            case LongRope(short, long, original):
                return replace(self, scaling=FrequencyFactors(long if max_length > original else short))
            case DynamicNtk(factor, original):
                stretch = factor * max(max_length, original) / original - (factor - 1)
                return replace(self, base=self.base * stretch ** (self.dim / (self.dim - 2)), scaling=None)
        return self


@dataclass(frozen=True)
class QueryTemperature:
    """Queries at position p are scaled by 1 + scale · log1p(floor((p + first) / floor_scale)): Llama 4, whose
    first position counts as 1, and Ministral 3, whose first counts as 0."""

    scale: float
    floor_scale: float
    first: int = 1


@dataclass(frozen=True)
class AttentionSpec:
    """``scale`` multiplies q·k. ``bias``, ``output_bias``: on the projections.

    ``qk_norm``: None, "head" (each head of q and k, with weights, before rope), "width" (all heads of q as one
    vector, all of k as another, with weights, before rope) or "unit" (each head, no weights, after rope).
    ``v_norm``: each head of v, no weights. ``softcap`` c: scores s become c · tanh(s / c). ``sinks``: a learned
    logit a head, which takes part in the softmax and has no value. ``keys_as_values``: v is k before its norm.
    ``shares``: number of the earlier layer whose keys and values are read; this one has none of its own.
    ``gated``: what is attended times a sigmoid of a gate, which is projected as the queries are, and after them."""

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
    softcap: float | None = None
    sinks: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    shares: int | None = None
    gated: bool = False

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """What the cache keeps of a position: part -> (heads, size)."""
        return {"k": (self.num_kv_heads, self.head_dim), "v": (self.num_kv_heads, self.head_dim)}


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1): keys and values of all heads are
    projections of one latent vector of ``kv_rank``, beside one rotated key of ``rope_dim`` that all heads share.
    Queries come from a latent of ``q_rank``, or directly (None). A head's key is ``nope_dim`` + ``rope_dim`` wide,
    its value ``v_dim``. ``norm_eps``: of the norms of both latents. ``bias``: on the projections into latents."""

    pattern: AttentionPattern
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: RopeSpec
    norm_eps: float = 1e-6
    bias: bool = False
    output_bias: bool = False

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """What the cache keeps of a position: the normed latent, followed by the rotated key."""
        return {"latent": (1, self.kv_rank + self.rope_dim)}


@dataclass(frozen=True)
class MlpSpec:
    """down(act(gate x) · up x); not ``gated``: down(act(up x)). ``bias``: on all projections. ``sparsity``: so
    much of the gate, were it normally distributed, is cut off (Gemma 3n). ``gate_scale`` multiplies the gate before
    its activation."""

    intermediate_size: int
    activation: str
    bias: bool = False
    gated: bool = True
    sparsity: float = 0.0
    gate_scale: float = 1.0


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts, beside a shared one if ``shared_intermediate_size`` is not 0.

    ``scores``: "softmax" over all experts or "sigmoid" of each one's logit; the ``top_k`` best are chosen, and
    their scores, ``normalized`` to a sum of 1 and times ``score_scale``, multiply the experts' outputs, or their
    inputs (``scores_input``). ``groups`` > 1: the experts fall into so many groups, of which only the best
    ``top_groups`` take part; a group is as good as its ``group_best`` best experts together. ``score_bias``: a
    learned bias that counts for the choice alone. ``router_bias``, ``bias``: on the router's logits, on the
    experts' projections. ``shared_gate``: the shared expert's output times a sigmoid of its own. ``router_norm``: the
    router reads its input normed and times a learned vector; ``expert_scale``: a learned factor of each score."""

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str
    shared_intermediate_size: int = 0
    scores: str = "softmax"
    normalized: bool = False
    score_scale: float = 1.0
    scores_input: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    score_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    shared_gate: bool = False
    router_norm: bool = False
    expert_scale: bool = False


@dataclass(frozen=True)
class PerLayerSpec:
    """Every layer is also given an embedding of the token, of ``size``, out of a vocabulary that may be smaller;
    ``activation``: of the gate through which it comes."""

    size: int
    vocab_size: int
    activation: str


@dataclass(frozen=True)
class LayerSpec:
    """x + attention(norm x) + recurrent(norm x), then that + mlp(norm of it); what is None is left out.

    ``pre_norms``: the norms before; ``post_norms``: norms on what is added. ``parallel``: the MLP reads the
    layer's input, too. ``residual_scale`` multiplies what is added; ``attention_scale``, ``recurrent_scale``,
    ``mlp_scale`` what each gives. ``beside``: a mixture that reads what the MLP's norm reads; then both have norms
    of their own, and what they give together has the MLP's. ``laurel_rank``: of a low-rank path beside attention.
    ``scaled``: what comes out is multiplied by a learned number."""

    attention: AttentionSpec | LatentAttentionSpec | None
    mlp: MlpSpec | MoeSpec | None
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    residual_scale: float = 1.0
    recurrent: RecurrentSpec | None = None
    attention_scale: float = 1.0
    recurrent_scale: float = 1.0
    mlp_scale: float = 1.0
    beside: MoeSpec | None = None
    laurel_rank: int | None = None
    scaled: bool = False

    @property
    def shares(self) -> int | None:
        """Number of the layer whose rows in the cache this one reads; None if it has its own."""
        return self.attention.shares if isinstance(self.attention, AttentionSpec) else None

    @property
    def rope(self) -> RopeSpec | None:
        return None if self.attention is None else self.attention.rope


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder. ``norm``: "rms" or "layer"; ``norm_bias``: on a layer norm; ``norm_offset`` is added to
    every norm's weight. ``embedding_scale`` multiplies the embeddings, after it is rounded to the weights' dtype.
    ``learned_positions``: an embedding a position is added. Logits are multiplied by ``logit_scale``, then capped
    by ``logit_softcap``, as scores are. ``streams`` > 1: so many residual streams, of which each layer computes
    one. ``max_length`` is the most tokens a row may have."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_length: int
    tied_head: bool
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    norm: str = "rms"
    norm_bias: bool = False
    learned_positions: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer: PerLayerSpec | None = None
    streams: int = 1

    def cache_spec(self, identity: str) -> CacheSpec:
        """What a cache of this decoder holds: the parts of each layer that has rows of its own, or a state."""
        kept = [(x.attention.pattern, x.attention.parts) for x in self.layers if x.attention and x.shares is None]
        states = [x.recurrent.parts for x in self.layers if x.recurrent]
        return CacheSpec(kept, identity, self.max_length, states)

    @property
    def cache_slots(self) -> tuple[int | None, ...]:
        """For each layer, the number of the cache's layer that its attention reads; None without attention."""
        owners = [i for i, layer in enumerate(self.layers) if layer.attention and layer.shares is None]
        return tuple(
            owners.index(i if x.shares is None else x.shares) if x.attention else None
            for i, x in enumerate(self.layers)
        )

    @property
    def recurrent_slots(self) -> tuple[int | None, ...]:
        """For each layer, the number of the cache's recurrent layer that is its; None if it is not recurrent."""
        owners = [i for i, layer in enumerate(self.layers) if layer.recurrent]
        return tuple(owners.index(i) if x.recurrent else None for i, x in enumerate(self.layers))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rope variants in use, each once."""
        return tuple(dict.fromkeys(x.rope for x in self.layers if x.rope is not None))


def check_spec(part: object, name: str = "decoder") -> None:
    """Raise ValueError where a number of a spec is of another kind than declared, not finite, or has no meaning:
    sizes and counts are integers of 1 or more, factors are above 0, offsets and scales of terms 0 or more; and where
    a token would go to more experts than may be chosen."""
    may_be_zero = {
        "anchors", "first", "norm_offset", "shared_intermediate_size", "shares", "sparsity", "QueryTemperature.scale",
        "dt_min",
    }  # fmt: skip
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
    if isinstance(part, MoeSpec) and part.top_k > part.num_experts // part.groups * part.top_groups:
        best = f"the {part.top_groups} best of {part.groups} groups of " if part.groups > 1 else ""
        raise ValueError(f"num_experts_per_tok would be {part.top_k}, more than {best}{part.num_experts} experts hold")
