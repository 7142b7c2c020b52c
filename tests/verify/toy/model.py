"""A decoder in numpy, float64: its weights, its formulas, and the one full pass with plainly written masks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
CONV = 4
"""Width of the causal convolution of recurrent layers: a token and the three before it."""
STATE_HEADS, STATE_DIM = 2, 8
DECAY = np.array([0.8, 0.95])[:, None, None]


@dataclass(frozen=True)
class LayerConfig:
    """``kind``: full, sliding, chunked or recurrent. ``shares``: the earlier layer whose keys and values this one
    reads instead of its own (it then has that one's kind, size and head size)."""

    kind: str = "full"
    size: int | None = None
    shares: int | None = None
    head_dim: int = 8
    rope_base: float = 10_000.0


@dataclass(frozen=True)
class Config:
    """``long_after``: rope angles are a quarter if ``max_length`` is more than this, whatever the length of a text:
    the policy for length-dependent rope is that it follows what the model was loaded for."""

    layers: tuple[LayerConfig, ...]
    vocab_size: int = 97
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    max_length: int = 4096
    long_after: int | None = None
    slack: int = 4
    """Tokens that a cache can take back anywhere, unless it is made for more."""


class Model:
    """Weights and formulas. Shapes: x [B, T, width]; q [B, T, heads, D]; k, v [B, T, kv_heads, D]."""

    def __init__(self, config: Config, seed: int):
        self.config, self.seed = config, seed
        self._random = np.random.default_rng(seed)
        width = config.width
        self.embedding = self._drawn(config.vocab_size, width, scale=1.0)
        self.weights = [self._layer(layer) for layer in config.layers]
        self.head = self._drawn(width, config.vocab_size)
        self.fingerprint = self._fingerprint()

    def _drawn(self, rows: int, columns: int, scale: float | None = None) -> Array:
        return self._random.normal(size=(rows, columns)) * (1.5 * rows**-0.5 if scale is None else scale)

    def _layer(self, layer: LayerConfig) -> dict[str, Array]:
        c = self.config
        w = {"up": self._drawn(c.width, 48), "down": self._drawn(48, c.width)}
        if layer.kind == "recurrent":
            inner = STATE_HEADS * STATE_DIM
            return w | {
                "in": self._drawn(c.width, inner),
                "conv": self._drawn(CONV, inner),
                "qkv": self._drawn(inner, 3 * inner),
                "out": self._drawn(inner, c.width, 0.2),
            }
        w |= {
            "q": self._drawn(c.width, c.heads * layer.head_dim),
            "out": self._drawn(c.heads * layer.head_dim, c.width),
        }
        if layer.shares is None:
            w["kv"] = self._drawn(c.width, 2 * c.kv_heads * layer.head_dim)
        return w

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.config).encode())
        for name, weight in [("embedding", self.embedding), *(i for w in self.weights for i in sorted(w.items()))]:
            digest.update(name.encode() + weight.tobytes())
        return digest.hexdigest()

    # Formulas.

    def run(self, ids: Array, mix: Callable[[int, Array], Array], noise: Array | None = None,
            seen: list[Array] | None = None) -> Array:  # fmt: skip
        """Logits [B, T, V] of ``ids`` [B, T]. ``mix(i, h)``: what layer i's attention or recurrence makes of
        ``h``. ``noise`` [V, width]: factors of the embedding. ``seen``: takes the hidden states."""
        x = (self.embedding if noise is None else self.embedding * noise)[ids]
        if seen is not None:
            seen.append(x)
        for i, w in enumerate(self.weights):
            x = x + mix(i, norm(x)) @ w["out"]
            x = x + np.maximum(norm(x) @ w["up"], 0) @ w["down"]
            if seen is not None:
                seen.append(x)
        return norm(x) @ self.head

    def queries(self, i: int, h: Array, positions: Array, end: int) -> Array:
        """Rotated queries at ``positions`` [B, T]; ``end``: how long the longest text is after this call."""
        q = (h @ self.weights[i]["q"]).reshape(*h.shape[:2], self.config.heads, -1)
        return rotate(q, positions, self.frequencies(i, end))

    def keys_values(self, i: int, h: Array, positions: Array, end: int) -> tuple[Array, Array]:
        kv = (h @ self.weights[i]["kv"]).reshape(*h.shape[:2], 2 * self.config.kv_heads, -1)
        k, v = kv[:, :, : self.config.kv_heads], kv[:, :, self.config.kv_heads :]
        return rotate(k, positions, self.frequencies(i, end)), v

    def frequencies(self, i: int, end: int) -> Array:
        """Angles a position, [D / 2]. They follow the model's ``max_length``; ``end`` is what they must not follow."""
        return self.angles(i, stretched=self.stretched(self.config.max_length))

    def angles(self, i: int, stretched: bool) -> Array:
        layer = self.config.layers[i]
        angles = layer.rope_base ** -(np.arange(0, layer.head_dim, 2) / layer.head_dim)
        return angles / 4 if stretched else angles

    def stretched(self, length: int) -> bool:
        return self.config.long_after is not None and length > self.config.long_after

    def convolved(self, i: int, u: Array) -> tuple[Array, Array, Array]:
        """``u`` [B, CONV - 1 + T, inner], the tail of what came before in front: q, k, v [B, T, heads, D]."""
        conv = self.weights[i]["conv"]
        width = u.shape[1] - CONV + 1
        c = np.tanh(sum(conv[j] * u[:, j : j + width] for j in range(CONV)))
        qkv = (c @ self.weights[i]["qkv"]).reshape(*c.shape[:2], 3, STATE_HEADS, STATE_DIM)
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]

    # The one pass.

    def forward(self, ids: Array, noise: Array | None = None, seen: list[Array] | None = None) -> Array:
        """One full pass without a cache: logits [B, T, V] of ``ids`` [B, T]."""
        positions = np.arange(ids.shape[1])[None]
        length = ids.shape[1]
        held: dict[int, tuple[Array, Array]] = {}

        def mix(i: int, h: Array) -> Array:
            layer = self.config.layers[i]
            if layer.kind == "recurrent":
                return self._recurred(i, h)
            if layer.shares is None:
                held[i] = self.keys_values(i, h, positions, length)
            k, v = held[i if layer.shares is None else layer.shares]
            return attend(self.queries(i, h, positions, length), k, v, full_mask(layer, length)[None])

        return self.run(ids, mix, noise, seen)

    def _recurred(self, i: int, h: Array) -> Array:
        """The recurrence in closed form: out_t = Σ_{s ≤ t} decay^(t - s) (q_t · k_s) v_s."""
        u = h @ self.weights[i]["in"]
        q, k, v = self.convolved(i, np.concatenate([np.zeros_like(u[:, :1]).repeat(CONV - 1, 1), u], 1))
        t = np.arange(h.shape[1])
        weight = np.where(t[:, None] >= t, DECAY ** np.maximum(t[:, None] - t, 0), 0.0)  # [heads, T, T]
        scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1) * weight
        out = scores @ v.transpose(0, 2, 1, 3)
        return out.transpose(0, 2, 1, 3).reshape(*h.shape[:2], -1)


def norm(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotate(x: Array, positions: Array, frequencies: Array) -> Array:
    """Rotate pairs (a, b) of ``x`` [B, T, heads, D] by position times frequency."""
    angles = (positions[..., None] * frequencies)[:, :, None]
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Softmax attention, ``mask`` [B, T, S] True where a query sees a key: [B, T, heads * D]."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)  # [B, Hkv, G, T, D]
    scores = q @ k.transpose(0, 2, 3, 1)[:, :, None] * dim**-0.5
    scores = np.where(mask[:, None, None], scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v.transpose(0, 2, 1, 3)[:, :, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * dim)


def full_mask(layer: LayerConfig, length: int) -> Array:
    """[query, key] over the positions of a whole text."""
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = j <= i
    if layer.kind == "sliding":
        seen &= i - j < layer.size
    if layer.kind == "chunked":
        seen &= i // layer.size == j // layer.size
    return seen


def padded(rows: Sequence[Sequence[int]]) -> Array:
    """Rows of tokens as [B, T], shorter ones filled with 0 on the right."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)
