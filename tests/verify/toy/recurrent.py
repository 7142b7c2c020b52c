"""What a recurrent layer remembers: a decaying state and the convolution's tail, and those of a few tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.verify.toy.model import CONV, DECAY, STATE_DIM, STATE_HEADS, Model

Array = np.ndarray


@dataclass(frozen=True)
class Moment:
    """The state after so many tokens of a row, by which a rewind goes back."""

    state: Array
    tail: Array


class Recurrent:
    """``state`` [B, heads, D, D], ``tail`` [B, CONV - 1, inner], ``moments[r]``: position -> Moment."""

    def __init__(self, rows: int, slack: int):
        self.slack = slack
        self.state = np.zeros((rows, STATE_HEADS, STATE_DIM, STATE_DIM))
        self.tail = np.zeros((rows, CONV - 1, STATE_HEADS * STATE_DIM))
        self.moments: list[dict[int, Moment]] = [{} for _ in range(rows)]

    @property
    def nbytes(self) -> int:
        kept = sum(m.state.nbytes + m.tail.nbytes for row in self.moments for m in row.values())
        return self.state.nbytes + self.tail.nbytes + kept

    def feed(self, model: Model, i: int, u: Array, lengths: Sequence[int], counts: Sequence[int]) -> Array:
        """Run the recurrence over ``u`` [B, T, inner], each row over its valid tokens: [B, T, inner]."""
        whole = np.concatenate([self.tail, u], 1)
        q, k, v = model.convolved(i, whole)
        out = np.zeros_like(v)
        state = self.state.copy()
        for t in range(u.shape[1]):
            valid = self.valid(counts, t)
            state = np.where(valid[:, None, None, None], DECAY * state + k[:, t, :, :, None] * v[:, t, :, None], state)
            out[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
            for r in np.flatnonzero(valid):
                if counts[r] - t - 1 <= self.slack:
                    self.keep(int(r), lengths[r] + t + 1, state[r], whole[r, t + 1 : t + CONV])
        self.state = state
        self.tail = np.stack([self.tail_after(whole[r], n) for r, n in enumerate(counts)])
        for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.forget(r, length + count)
        return out.reshape(*u.shape[:2], -1)

    def valid(self, counts: Sequence[int], t: int) -> Array:
        return np.array(counts) > t

    def tail_after(self, whole: Array, count: int) -> Array:
        """The last three inputs after ``count`` new ones; ``whole``: the tail before, then the new ones."""
        return whole[count : count + CONV - 1].copy()

    def keep(self, r: int, position: int, state: Array, tail: Array) -> None:
        self.moments[r][position] = Moment(state.copy(), tail.copy())

    def forget(self, r: int, length: int) -> None:
        for position in [p for p in self.moments[r] if p < length - self.slack]:
            del self.moments[r][position]

    def can_stand(self, r: int, position: int) -> bool:
        return position == 0 or position in self.moments[r]

    def rewind(self, r: int, position: int) -> None:
        moment = self.moments[r].get(position)
        self.state[r] = moment.state if position and moment else 0
        self.tail[r] = moment.tail if position and moment else 0
        for later in [p for p in self.moments[r] if p > position or not position]:
            del self.moments[r][later]

    def clear(self) -> None:
        for r in range(len(self.moments)):
            self.rewind(r, 0)

    def take(self, rows: Sequence[int]) -> Recurrent:
        made = Recurrent(0, self.slack)
        order = list(rows)
        made.state, made.tail = self.state[order], self.tail[order]
        made.moments = [dict(self.moments[r]) for r in order]
        return made

    @staticmethod
    def joined(parts: Sequence[Recurrent], lengths: Sequence[Sequence[int]]) -> Recurrent:
        made = Recurrent(0, max(p.slack for p in parts))
        made.state = np.concatenate([p.state for p in parts])
        made.tail = np.concatenate([p.tail for p in parts])
        made.moments = [dict(row) for p in parts for row in p.moments]
        return made

    # As plain values, for files.

    def arrays(self) -> dict[str, Array]:
        found = {"state": self.state, "tail": self.tail}
        for r, row in enumerate(self.moments):
            for position, moment in row.items():
                found |= {f"{r}.{position}.state": moment.state, f"{r}.{position}.tail": moment.tail}
        return found

    def facts(self) -> dict[str, object]:
        return {"slack": self.slack, "moments": [sorted(row) for row in self.moments]}

    def restore(self, arrays: dict[str, Array], facts: dict[str, object]) -> None:
        self.state, self.tail, self.slack = arrays["state"], arrays["tail"], facts["slack"]
        self.moments = [
            {p: Moment(arrays[f"{r}.{p}.state"], arrays[f"{r}.{p}.tail"]) for p in positions}
            for r, positions in enumerate(facts["moments"])
        ]
