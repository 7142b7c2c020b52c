"""The cache of one model: rows of all its layers, one length a row, every change committed at once.

A row's state is an immutable record; the cache holds a tuple of them and every operation ends in one
assignment of that tuple. So an operation either happened or did not, wherever it was interrupted.
Rows may be referred to by several caches (``select``, ``fork``, ``join``); the first that writes while
another refers to the same row takes private memory for what it adds. Not for use from several threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

from exactkv.cache import checkpoint, file, integrity, recurrent, report
from exactkv.cache import row as records
from exactkv.cache.checkpoint import CheckpointPolicy
from exactkv.cache.checks import check_lengths, check_rows, check_targets, is_int, require
from exactkv.cache.layer import AttentionLayer
from exactkv.cache.place import Policy
from exactkv.cache.row import CacheSpec, Owner, Row
from exactkv.cache.storage import Storage
from exactkv.cache.view import Step
from exactkv.errors import InputError, IntegrityError


class Cache:
    """KV cache of a batch of rows. Made by ``model.new_cache``; see there for the arguments."""

    def __init__(
        self, spec: CacheSpec, batch_size: int, storage: Storage, slack: int = 0, step: int = 256,
        max_length: int | None = None, checkpoints: CheckpointPolicy | None = None,
    ):  # fmt: skip
        require(is_int(batch_size) and batch_size >= 0, "batch_size", batch_size, "an integer >= 0")
        require(is_int(slack) and slack >= 0, "slack", slack, "an integer >= 0")
        require(is_int(step) and step >= 1, "step", step, "an integer >= 1")
        limit = spec.max_length
        fits = max_length is None or (is_int(max_length) and 1 <= max_length <= (limit or max_length))
        require(fits, "max_length", max_length, f"an integer from 1 to {limit or 'any'}: the model's limit")
        for layer in spec.layers:
            storage.layout(layer.parts)  # raises where it cannot keep such rows
        self.spec = spec
        self.max_length = limit if max_length is None else max_length
        self._policy = Policy(storage, step, slack, self.max_length, reserve=max_length is not None)
        self._rows: tuple[Row, ...] = ()
        self.checkpoint_policy = CheckpointPolicy() if checkpoints is None else checkpoints
        self._step: Step | None = None
        self._exclusive = True
        self._hold(tuple(self._new_row() for _ in range(batch_size)))

    # What it is.

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        return self.spec.layers

    @property
    def storage(self) -> Storage:
        return self._policy.storage

    @property
    def batch_size(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """Positions fed so far, one a row."""
        return [row.length for row in self._rows]

    def tokens(self, row: int) -> list[int]:
        """The token ids that row was fed, as many as its length."""
        (index,) = check_rows([row], self.batch_size)
        state = self._rows[index]
        return state.owner.log[: state.length]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory allocated for rows; what rows share is counted once."""
        states = sum(state.nbytes for state in records.state_tensors(self._rows))
        return states + sum(memory.nbytes for memory in records.memories(self._rows))

    def most_nbytes(self, length: int, slack: int | None = None) -> int:
        """The most bytes that a row of ``length`` tokens takes, checkpoints apart. ``slack``: default, the cache's."""
        policy = self._policy if slack is None else replace(self._policy, slack=slack)
        return records.most_nbytes(self.spec, policy, length)

    @property
    def most_checkpoint_nbytes(self) -> int:
        """The most bytes that one checkpoint takes, wherever it is; 0 where no layer needs any."""
        return records.most_checkpoint_nbytes(self.spec, self.storage)

    @property
    def checkpoint_nbytes(self) -> int:
        """Bytes that checkpoints refer to, what they share counted once; part of ``nbytes``."""
        return checkpoint.nbytes(c for row in self._rows for c in row.checkpoints)

    @property
    def checkpoint_policy(self) -> CheckpointPolicy:
        """When checkpoints are filed by themselves and how many are kept. Set, it holds from then on, and for those
        that are there."""
        return self._checkpoint_policy

    @checkpoint_policy.setter
    def checkpoint_policy(self, value: CheckpointPolicy) -> None:
        require(isinstance(value, CheckpointPolicy), "checkpoints", value, "an exactkv.CheckpointPolicy")
        self._checkpoint_policy = value
        self._rows = tuple(
            replace(row, checkpoints=checkpoint.thinned(row.checkpoints, value.max_bytes)) for row in self._rows
        )

    @property
    def slack(self) -> int:
        """How many rows more than the pattern needs bounded layers keep: ``slack`` + 1 tokens can be rewound.
        Recurrent layers keep as many states, and two more. It can be raised at any time, and holds for what is fed
        from then on."""
        return self._policy.slack

    @slack.setter
    def slack(self, value: int) -> None:
        require(is_int(value) and value >= self.slack, "slack", value, f"{self.slack} or more: it is only raised")
        self._policy = replace(self._policy, slack=value)

    def __repr__(self) -> str:
        return report.describe(self)

    def check_integrity(self) -> None:
        """Raise IntegrityError where the cache breaks its contract (DESIGN section 2)."""
        integrity.check(self)

    # A forward pass: begin, each layer's extend, commit.

    def begin(self, width: int, lengths: Sequence[int] | None = None,
              tokens: Sequence[Sequence[int]] | None = None) -> Step:  # fmt: skip
        """Make room for a call of ``width`` tokens a row, of which ``lengths`` (default: all) are valid.

        ``tokens``: the ids of each row's valid tokens. Until ``commit`` the cache stands where it stood; a
        step that is not committed costs nothing and is void as soon as another begins.
        Raises InputError where lengths do not fit, or a row would pass ``max_length``.
        """
        counts = check_lengths(lengths, self.batch_size, width)
        for r, (row, count) in enumerate(zip(self._rows, counts, strict=True)):
            if self.max_length is not None and row.length + count > self.max_length:
                raise InputError(
                    f"row {r} holds {row.length} tokens and was given {count} more; this cache takes at most "
                    f"{self.max_length}. Start a new cache, or load the model with a larger maximum."
                )
        self._take_ownership()
        self._rows, placements = records.placed(self.spec, self._policy, self._rows, counts)
        if self.storage.poison:
            records.poison(self.spec, self.storage, self._rows)
        starts = tuple(row.length for row in self._rows)
        given = [list(t) for t in tokens] if tokens is not None else [[] for _ in starts]
        self._void_step()
        step = Step(starts, counts, width, placements, self.storage, given)
        if self.spec.recurrent:
            step.before = tuple(row.states[-1] if row.length else None for row in self._rows)
            step.keeps = tuple(
                recurrent.kept_offsets(start, count, self.slack) for start, count in zip(starts, counts, strict=True)
            )
        step.stretches = recurrent.stretches(step.keeps, counts, width)
        self._step = step
        return step

    def commit(self, step: Step) -> None:
        """End the step: all layers have been extended or written, and every row has its new length, at once."""
        if step.void or step is not self._step:
            raise IntegrityError("commit of a step that is void: another step or operation came after its begin")
        if len(step.extended) != len(self.layers):
            missing = sorted(set(range(len(self.layers))) - step.extended)
            raise IntegrityError(f"commit before the layers {missing} were extended")
        rows = []
        for r, (row, count) in enumerate(zip(self._rows, step.counts, strict=True)):
            if count:
                row = records.fed(self.spec, self._policy, row, step, r)
                if self._checkpoint_policy.every and row.length % self._checkpoint_policy.every == 0:
                    row = records.checkpointed(self.spec, self._policy, row, "", self._checkpoint_policy)
            rows.append(row)
        self._rows, self._step = tuple(rows), None

    # Rewinding.
    def standing(self, to: int | Sequence[int]) -> list[int]:
        """For each row the greatest position <= ``to`` from which going on is exact: what ``rewind`` would
        reach. ``to``: an int for all rows, or one a row; each from 0 to the row's length."""
        targets = check_targets(to, self.lengths)
        return [records.standing(self.spec, *at) for at in zip(self._rows, targets, strict=True)]

    def rewind(self, to: int | Sequence[int]) -> list[int]:
        """Leave every layer at one same position ``reached`` <= ``to``, from which going on is exact.

        Returns ``reached`` for each row; feed ``tokens[reached:]`` again. All rows are rewound or none.
        Raises InputError where ``to`` is negative or more than a row's length.
        """
        reached = self.standing(to)
        rows = tuple(records.rewound(self.spec, self._policy, *at) for at in zip(self._rows, reached, strict=True))
        self._void_step()
        self._rows = rows
        return reached

    # Checkpoints.

    def checkpoint(self, rows: Iterable[int] | None = None, label: str = "") -> list[int]:
        """File a checkpoint of each row, or of ``rows``, at its length; returns those positions. Nothing is filed where
        every layer can stand without one (full layers always, chunked ones at a boundary) or one is filed already.
        ``label``: such as "message"; labelled ones are kept longest where ``checkpoint_policy`` has a limit.
        All are filed or none."""
        require(isinstance(label, str), "label", label, "a text")
        chosen = check_rows(range(self.batch_size) if rows is None else rows, self.batch_size)
        made = list(self._rows)
        for r in dict.fromkeys(chosen):
            made[r] = records.checkpointed(self.spec, self._policy, made[r], label, self._checkpoint_policy)
        self._rows = tuple(made)
        return [made[r].length for r in chosen]

    def checkpoints(self, row: int) -> list[int]:
        """The positions of that row's checkpoints, in order."""
        (index,) = check_rows([row], self.batch_size)
        return [c.position for c in self._rows[index].checkpoints]

    def next_checkpoint(self, row: int) -> int | None:
        """Where a call has to end for ``checkpoint_policy.every`` to file that row's next checkpoint; None if there
        is none to come."""
        (index,) = check_rows([row], self.batch_size)
        every = self._checkpoint_policy.every
        if every is None or not self.spec.forgets:
            return None
        position = (self._rows[index].length // every + 1) * every
        return position if self.max_length is None or position <= self.max_length else None

    # Batches.

    def __copy__(self) -> Cache:
        """A cache of the same rows that goes its own way, as ``select`` makes it."""
        return self.select(range(self.batch_size))

    def __deepcopy__(self, memo: object) -> Cache:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise InputError("a cache cannot be pickled: what it holds is not for another process as it lies")

    def select(self, rows: Iterable[int]) -> Cache:
        """A cache of these rows, in this order; a row named twice goes on twice. References are moved, rows
        are not copied; both caches can be used from then on, each on its own."""
        return self._like(tuple(self._rows[r] for r in check_rows(rows, self.batch_size)), [self])

    def drop(self, rows: Iterable[int]) -> Cache:
        """A cache without these rows."""
        dropped = set(check_rows(rows, self.batch_size))
        return self.select([r for r in range(self.batch_size) if r not in dropped])

    def fork(self, n: int) -> Cache:
        """A cache in which every row comes ``n`` times, one after the other: row r becomes rows r·n … r·n + n - 1."""
        require(is_int(n) and n >= 1, "n", n, "an integer >= 1")
        return self.select([r for r in range(self.batch_size) for _ in range(n)])

    def _like(self, rows: tuple[Row, ...], sources: Sequence[Cache]) -> Cache:
        made = Cache.__new__(Cache)
        made.spec, made.max_length = self.spec, self.max_length
        made._policy = replace(self._policy, slack=max(c.slack for c in sources))
        made._checkpoint_policy = self._checkpoint_policy
        made._step = None
        for source in sources:
            source._exclusive = False
        made._exclusive = False
        made._hold(rows)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one file, from which ``exactkv.load_cache(path, model)`` goes on bit for bit, also in
        another process; a file that is there is replaced when all is written. Checkpoints are saved with it.
        Raises InputError where there is no such directory, OSError where it cannot be written."""
        file.save(self, path)

    # Within.

    def _hold(self, rows: tuple[Row, ...]) -> None:
        for row in rows:
            row.owner.caches.add(self)
        self._rows = rows

    def _new_row(self) -> Row:
        return Row(Owner([]), 0, tuple(self._policy.new_run(zone) for zone in self.spec.zones))

    def _take_ownership(self) -> None:
        """Give each row that something else refers to memory of its own for what comes."""
        if self._exclusive:
            return
        rows = list(self._rows)
        for r, row in enumerate(rows):
            if self._is_shared(r, rows):
                runs = tuple(
                    self._policy.detached(zone, run, row.length)
                    for zone, run in zip(self.spec.zones, row.runs, strict=True)
                )
                rows[r] = replace(row, owner=Owner(row.owner.log[: row.length]), runs=runs)
        self._hold(tuple(rows))
        self._exclusive = True

    def _is_shared(self, r: int, rows: Sequence[Row] | None = None) -> bool:
        """Whether something else refers to row ``r`` (of ``rows``, by default its own), so that it must not write
        where it stands."""
        rows = self._rows if rows is None else rows
        row = rows[r]
        return not self._exclusive and (
            any(run.memory.shared for run in row.runs)
            or any(other.owner is row.owner for c in row.owner.caches if c is not self for other in c._rows)
            or any(other.owner is row.owner for i, other in enumerate(rows) if i != r)
        )

    def _void_step(self) -> None:
        if self._step is not None:
            self._step.void = True
            self._step = None
