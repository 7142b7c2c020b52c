"""By what logits are judged: the one pass, and a tolerance taken from the target's own rounding noise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from exactkv.verify.target import Array, NotSupported, Target, Tokens

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
MARGIN = 8.0
"""The tolerance is so many times the largest noise seen: noise is a maximum over few trials."""
CEILING = 2e-3
"""What exceeds this part of max |logit| is not rounding (float32; in float64 a two-hundredth of it, since engines
compute some parts in float32 all the same): the one pass itself is not one function."""
FLOOR_64_BIT = 1e-12
"""No fault is smaller than this part of max |logit|, and in float64 all rounding is: a few trials may underrate it."""
MARGIN_16_BIT = 4.0
"""In 16 bits noise is so large that more would hide faults."""
LAX = 0.1
"""A tolerance of more than this part of max |logit| decides nothing."""
JUMP = 1000.0
"""A position whose noise is so many times the median one stands at a near-tie (of a router, or a top-k)."""


@dataclass(frozen=True)
class Inconsistency:
    """The one pass disagrees with itself."""

    what: str
    position: int
    difference: float
    kind: str


class Judge:
    """The one pass of a target, its noise, and what follows for comparisons.

    ``text``: the tokens by which the noise is measured. ``by_length``: whether the one pass over a prefix
    differs from the prefix of one pass; then each text is compared with a pass over just it."""

    def __init__(self, target: Target, text: Tokens, seed: int = 0):
        self.target, self.text, self.seed = target, tuple(text), seed
        self._passes: dict[tuple[int, ...], Array] = {}
        self._lossy: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._greedy: dict[tuple[int, ...], list[int]] = {}
        self.judged_by: list[str] = []
        self.inconsistencies: list[Inconsistency] = []
        self.by_length = False
        whole = self.one_pass(self.text)
        self.scale = float(np.nanmax(np.abs(whole)))
        self.epsilon = EPSILON.get(target.dtype, EPSILON["float32"])
        self.ceiling = self.scale * min(0.2, CEILING * max(0.005, self.epsilon / EPSILON["float32"]))
        noise = self._measure(whole)
        median = float(np.median(noise))
        floor = 4 * self.epsilon * self.scale
        self.tied = noise > max(JUMP * max(median, floor / 4), 0.05 * self.ceiling)
        calm = noise[~self.tied]
        self.noise = float(calm.max()) if calm.size else float(noise.max())
        margin = MARGIN_16_BIT if self._coarse else MARGIN
        least = 0.0 if self._coarse else floor
        if target.dtype == "float64":
            least = FLOOR_64_BIT * self.scale
        self.tolerance = min(margin * self.noise + least, self.ceiling)

    @property
    def _coarse(self) -> bool:
        return self.epsilon > 1e-4

    @property
    def lax(self) -> bool:
        """Whether the noise is so large that nothing can be decided by it."""
        return self.tolerance > LAX * self.scale

    # Passes.

    def one_pass(self, tokens: Tokens) -> Array:
        """Logits [T, V] of one full pass over ``tokens``."""
        key = tuple(tokens)
        found = self._passes.get(key)
        if found is None:
            found = None if self.by_length else self._prefix(key)
            if found is None:
                found = self.target.forward([list(key)])[0]
                self._passes[key] = found
        return found

    def foresee(self, kind: str, tokens: Tokens) -> None:
        """Passes over parts of ``tokens`` will be asked for: one over all of it serves them."""
        if tokens and not self.by_length and kind not in self.target.quantized_caches:
            self.one_pass(tokens)
        elif tokens and kind in self.target.quantized_caches:
            self.lossy_pass(kind, tokens)

    def _prefix(self, key: tuple[int, ...]) -> Array | None:
        for known, logits in self._passes.items():
            if known[: len(key)] == key:
                return logits[: len(key)]
        return None

    def lossy_pass(self, kind: str, tokens: Tokens) -> Array:
        """Logits of one pass over ``tokens`` with rows as a kind of cache that stores with loss has them."""
        tokens = tuple(tokens)
        for (known_kind, known), logits in self._lossy.items():
            if known_kind == kind and known[: len(tokens)] == tokens:
                return logits[: len(tokens)]
        made = self._lossy[kind, tokens] = self.target.quantized(kind, tokens)
        return made

    def expected(self, kind: str | None, tokens: Tokens) -> Array:
        if kind in self.target.quantized_caches and kind is not None:
            return self.lossy_pass(kind, tokens)
        return self.one_pass(tokens)

    # Comparing.

    def differences(self, logits: Array, tokens: Tokens, start: int, kind: str | None = None) -> Array:
        """Largest |difference| of each row [n] of ``logits``, which claim to be of positions ``start`` … of
        ``tokens``. NaN and infinity count as infinite."""
        whole = self.expected(kind, tokens)[start : start + len(logits)]
        if logits.shape != whole.shape:
            return np.full(max(1, len(whole)), np.inf)
        with np.errstate(invalid="ignore"):
            found = np.abs(logits - whole).max(axis=-1)
        return np.where(np.isfinite(logits).all(axis=-1), found, np.inf)

    def near_tie(self, tokens: Tokens, position: int, difference: float, kind: str | None = None) -> bool:
        """Whether the one pass over ``tokens`` itself jumps at ``position`` by as much when it is disturbed by
        rounding: then the row stands at a tie, and proves nothing. (Of a router; or, where ``kind`` stores with loss,
        between two codes.)"""
        key = list(tokens)[: position + 1]
        try:
            calm = self.expected(kind, key)[position]
            for trial in range(12):
                shaken = self._shaken(kind, key, trial)
                if np.abs(shaken[position] - calm).max() > (0.5 if self._coarse else 0.2) * difference:
                    return True
        except NotSupported:
            pass
        return False

    def _shaken(self, kind: str | None, tokens: Tokens, trial: int) -> Array:
        scale, seed = self._shake(trial), self.seed + trial
        if kind is not None and kind in self.target.quantized_caches:
            return self.target.quantized(kind, tokens, scale, seed)
        shaken: Array = self.target.jittered([tokens], scale, seed)[0]
        return shaken

    def _shake(self, trial: int) -> float:
        """By how much embeddings are disturbed to see whether a row jumps."""
        return self.epsilon if self._coarse else 4 * self.epsilon * 2 ** (trial // 4)

    def greedy(self, prompt: Tokens, count: int) -> list[int]:
        """The next ``count`` tokens by one pass after another."""
        known = self._greedy.setdefault(tuple(prompt), [])
        while len(known) < count:
            logits = self.target.forward([[*prompt, *known]])[0]
            known.append(int(logits[-1].argmax()))
        return known[:count]

    def wrong_token(self, prompt: Tokens, tokens: Tokens, kind: str | None = None) -> tuple[int, int, float] | None:
        """The first of ``tokens`` that greedy decoding after ``prompt`` would not give: its index, the right
        token, and the margin. Near-ties (twice the tolerance) count as right."""
        if not tokens:
            return None
        whole = None if self.by_length else self.expected(kind, [*prompt, *tokens])
        for i, token in enumerate(tokens):
            row = self.expected(kind, [*prompt, *tokens[:i]])[-1] if whole is None else whole[len(prompt) + i - 1]
            best = int(row.argmax())
            if best != token and row[best] - row[token] > 2 * self.tolerance:
                return i, best, float(row[best] - row[token])
        return None

    # Noise.

    def _measure(self, whole: Array) -> Array:
        """The largest disagreement of equal computations, a position [T]."""
        length = len(whole)
        noise = np.zeros(length)
        for label, kind, count, logits in self._variants():
            apart = np.abs(logits - whole[:count]).max(axis=-1)
            apart = np.where(np.isfinite(apart), apart, np.inf)
            worst = int(apart.argmax())
            if kind and apart.max() > self.ceiling and not self._jumps(whole, worst, float(apart[worst])):
                self.inconsistencies.append(
                    Inconsistency(label, int(np.argmax(apart > self.ceiling)), float(apart.max()), kind)
                )
                self.by_length = self.by_length or "first" in label
                continue
            noise[:count] = np.maximum(noise[:count], apart)
            if (short := label.split(" (")[0]) not in self.judged_by:
                self.judged_by.append(short)
        if self.by_length:
            self._passes.clear()
        return noise

    def _jumps(self, whole: Array, position: int, difference: float) -> bool:
        try:
            for trial in range(8):
                shaken = self.target.jittered([self.text], self._shake(trial), trial)[0]
                if np.abs(shaken[position] - whole[position]).max() > 0.2 * difference:
                    return True
        except NotSupported:
            pass
        return False

    def _variants(self) -> Sequence[tuple[str, str, int, Array]]:
        """Computations that should give the same: what it is, the kind of fault if they do not by far ("" if
        that says nothing), how many positions, their logits."""
        target, text, length = self.target, list(self.text), len(self.text)
        other = [*text[length // 2 :], *text[: length // 2]]
        found = []
        for count in sorted({1, 2, length // 3, length - 7} - {0}):
            if 0 < count < length:
                label = f"the one pass over fewer tokens (the first {count})"
                found.append((label, "L" if target.length_dependent else "C", count, target.forward([text[:count]])[0]))
        for rows, place in (([text, other], 0), ([other, other, text], 2)):
            label = f"the one pass in a batch (row {place} of {len(rows)})"
            found.append((label, "J", length, target.forward(rows)[place]))
        with suppress(NotSupported):
            found.append(("the one pass in a wider dtype", "", length, target.precise([text])[0]))
        with suppress(NotSupported):
            for trial in range(0 if self._coarse else 3):
                shaken = target.jittered([text], self.epsilon, self.seed + trial)[0]
                found.append(("the one pass with embeddings disturbed in the last digit", "", length, shaken))
        return found
