"""How probable a prompt's own tokens are, as they become known while it is fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exactkv.generation.sampling.choice import Ranked, ranked

LOGITS_AT_ONCE = 1 << 24
"""Numbers of a piece's logits: 64 MB in float32."""
_ROWS_AT_ONCE = 1 << 22
"""Numbers of those that are made probabilities of at once, in float64."""


class PromptScores:
    """Log-probabilities of the tokens of ``prompt``, each after those before it; the first has none.

    ``top``: of how many of the most probable tokens to tell it beside. ``told``: of ``prompt[1:]`` as far as is known,
    the token's own and the ranked ones (the most probable first, of equal ones the lowest id).
    """

    def __init__(self, prompt: Sequence[int], top: int):
        self.prompt, self.top = tuple(prompt), top
        self.told: list[tuple[float, Ranked]] = []

    @property
    def complete(self) -> bool:
        """Whether all of the prompt has been told of."""
        return len(self.told) >= len(self.prompt) - 1

    def take(self, first: int, logits: Tensor) -> None:
        """Take ``logits`` [T, V], those made at the positions from ``first`` on. What is known already is left out."""
        known = len(self.told) - first
        assert known >= 0, "logits of a position in between are missing"
        targets = self.prompt[first + 1 + known : first + 1 + logits.shape[0]]
        rows = logits[known : known + len(targets)]
        count = max(1, _ROWS_AT_ONCE // max(1, logits.shape[-1]))
        told: list[tuple[float, Ranked]] = []
        for begin in range(0, len(targets), count):
            told += self._told(rows[begin : begin + count], targets[begin : begin + count])
        self.told += told

    def _told(self, rows: Tensor, targets: Sequence[int]) -> list[tuple[float, Ranked]]:
        logs = torch.log_softmax(rows.double(), dim=-1)
        own = logs.gather(-1, torch.tensor(targets, device=logs.device)[:, None])[:, 0].tolist()
        return [(value, ranked(row, self.top)) for value, row in zip(own, logs, strict=True)]
