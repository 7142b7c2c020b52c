"""Runs operations on a target beside a shadow that knows what every cache should hold, and compares.

The shadow is a list of token ids for each row: that is all that a cache may depend on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exactkv.verify import operations as ops
from exactkv.verify.generating import check_generation
from exactkv.verify.judge import Judge
from exactkv.verify.target import Array, NotSupported, Refused, Target
from exactkv.verify.worker import Elsewhere


@dataclass
class Violation:
    """Something that is not as it must be. ``how``: "logits", "count", "crash", "accepted", "memory", "tokens",
    "usage" or "reuse"."""

    how: str
    message: str
    operation: int
    position: int | None = None
    difference: float = 0.0
    tokens: tuple[int, ...] = ()
    hint: str = ""
    """A letter of the kinds of fault, where what happened names it."""


@dataclass
class Held:
    """A handle of the target's with its shadow. ``rows``: of a cache one, of a batch several."""

    handle: Any
    rows: list[list[int]]
    batch: bool = False
    foreseen: bool = False
    readings: list[tuple[int, int]] = field(default_factory=list)
    """(tokens held, bytes) as noted."""


@dataclass
class Store:
    handle: Any
    held: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """What was put, by salt."""
    limited: bool = False


@dataclass
class Result:
    """What came of a sequence of operations."""

    differences: dict[int, float] = field(default_factory=dict)
    compared: int = 0
    violations: list[Violation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    not_supported: str = ""
    tied: int = 0
    not_finite: int = 0
    wrong: bool = False
    """Whether wrong logits have been reported; later ones follow from them."""

    @property
    def worst(self) -> float:
        return max(self.differences.values(), default=0.0)


class Session:
    """One run. ``kind``: of the caches it makes. ``elsewhere``: gives the second process, started when first
    needed. ``stop``: end at the first violation. ``doubt``: look whether the first wrong row is a near-tie.
    ``latest``: what was compared last, (start, logits [n, V])."""

    def __init__(
        self,
        target: Target,
        judge: Judge,
        kind: str,
        elsewhere: Callable[[], Elsewhere | None] = lambda: None,
        stop: bool = False,
        doubt: bool = True,
    ):
        self.target, self.judge, self.kind, self.elsewhere = target, judge, kind, elsewhere
        self.stop, self.doubt = stop, doubt
        self.held: dict[str, Held] = {}
        self.stores: dict[str, Store] = {}
        self.result = Result()
        self.at = 0
        self.latest: tuple[int, Array] | None = None

    def run(self, operations: Sequence[ops.Operation]) -> Result:
        """All of ``operations``, until one is not supported, or fails in a way that leaves nothing to go on with."""
        with ExitStack() as stack:
            self.files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exactkv-verify-")))
            for self.at, operation in enumerate(operations):
                self._foresee(operations)
                do: Callable[[Any], None] = getattr(self, "_" + type(operation).__name__.lower())
                try:
                    do(operation)
                except NotSupported as error:
                    self.result.not_supported = str(error)
                    break
                except Refused as error:
                    self.result.refused.append(str(error))
                except _Ended:
                    break
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except Exception as error:  # whatever an engine under test comes up with
                    self._violation("crash", f"{type(operation).__name__} failed with {_brief(error)}")
                    break
                if self.stop and self.result.violations:
                    break
        return self.result

    def _foresee(self, operations: Sequence[ops.Operation]) -> None:
        """Make the one pass over all that a cache is about to be fed, of which each feed needs a part."""
        operation = operations[self.at]
        if not isinstance(operation, ops.Feed | ops.FeedBatch) or operation.name not in self.held:
            return
        held = self.held[operation.name]
        if held.foreseen:
            return
        held.foreseen = True
        rows = [list(row) for row in held.rows]
        for later in operations[self.at :]:
            if isinstance(later, ops.Feed) and later.name == operation.name and not held.batch:
                rows[0] += later.tokens
            elif isinstance(later, ops.FeedBatch) and later.name == operation.name:
                for row, tokens in zip(rows, later.rows, strict=False):  # a case made smaller may not fit
                    row += tokens
            elif not isinstance(later, _LEAVING_AS_IT_IS) and operation.name in _named(later):
                break
        for row in rows:
            self.judge.foresee(self.kind, row)

    # What is found.

    def _violation(self, how: str, message: str, position: int | None = None, difference: float = 0.0,
                   tokens: Sequence[int] = (), hint: str = "") -> None:  # fmt: skip
        self.result.violations.append(
            Violation(how, message, self.at, position, difference, tuple(tokens), hint)
        )  # fmt: skip

    def compare(self, logits: Array, tokens: Sequence[int], start: int, what: str = "") -> None:
        """``logits`` [n, V] of the positions from ``start`` of ``tokens``."""
        wanted = len(tokens) - start
        if len(logits) != wanted:
            self._violation("count", f"{len(logits)} rows of logits came for {wanted} tokens", start, np.inf, tokens)
            return
        self.latest = (start, logits)
        differences = self.judge.differences(logits, tokens, start, self.kind)
        self.result.compared += len(differences)
        self.result.not_finite += int(np.isinf(differences).sum())
        for i, difference in enumerate(differences.tolist()):
            position = start + i
            if difference > self.judge.tolerance and not self.result.wrong:
                if self.doubt and self.judge.near_tie(tokens, position, difference):
                    self.result.tied += 1
                    break  # what comes after a tie may follow from it
                self.result.wrong = True
                shown = "not a number" if not np.isfinite(logits[i]).all() else f"off by {difference:.1e}"
                self._violation("logits", f"position {position} is {shown}{what}", position, difference, tokens)
            self.result.differences[position] = max(self.result.differences.get(position, 0.0), difference)

    def _check_length(self, name: str) -> None:
        held = self.held[name]
        try:
            if held.batch:
                said, true = self.target.lengths(held.handle), [len(r) for r in held.rows]
            else:
                said, true = [self.target.length(held.handle)], [len(held.rows[0])]
        except NotSupported:
            return
        self.result.compared += 1
        if list(said) != true:
            self._violation("count", f"the cache says it holds {said} tokens; it was fed {true}", min(true), hint="")
            raise _Ended

    # One cache.

    def _hold(self, name: str, handle: Any, rows: Sequence[Sequence[int]], batch: bool = False) -> None:
        self.held[name] = Held(handle, [list(r) for r in rows], batch)

    def _new(self, op: ops.New) -> None:
        if op.rewinds is not None:
            handle = self.target.rewindable(self.kind, op.rewinds)
        else:
            handle = self.target.new_cache(self.kind, step=op.step, max_length=op.max_length)
        self._hold(op.name, handle, [[]])

    def _feed(self, op: ops.Feed) -> None:
        held = self.held[op.name]
        logits = self.target.feed(held.handle, list(op.tokens), positions=op.positions)
        start = len(held.rows[0])
        held.rows[0] += op.tokens
        self.compare(logits, held.rows[0], start)
        self._check_length(op.name)

    def _overfill(self, op: ops.Overfill) -> None:
        held = self.held[op.name]
        try:
            logits = self.target.feed(held.handle, list(op.tokens))
        except NotSupported:
            raise
        except Exception as error:  # an error is right here; which one is the engine's affair
            self.result.compared += 1
            self.result.refused.append(_brief(error))
            self._blame("Q", self._check_length, op.name)
            return
        start = len(held.rows[0])
        held.rows[0] += op.tokens
        before = len(self.result.violations)
        self.compare(logits, held.rows[0], start, " past what the cache was made for, instead of an error")
        for violation in self.result.violations[before:]:
            violation.hint = "Q"

    def _rewind(self, op: ops.Rewind) -> None:
        held = self.held[op.name]
        row = held.rows[0]
        length = len(row)
        removed = self.target.rewind(held.handle, op.count)
        if not 0 <= removed <= length:
            self._violation("count", f"rewinding {op.count} of {length} tokens reported {removed}", length, hint="E")
            raise _Ended
        missing = row[length - removed : length - op.count] if removed > op.count else []
        del row[length - removed :]
        held.foreseen = False
        self._blame("E", self._check_length, op.name)
        if missing:
            self._feed(ops.Feed(op.name, tuple(missing)))

    def _blame(self, kind: str, check: Callable[[str], None], name: str) -> None:
        """What ``check`` finds is of this kind."""
        before = len(self.result.violations)
        try:
            check(name)
        finally:
            for violation in self.result.violations[before:]:
                violation.hint = kind

    def _settle(self, op: ops.Settle) -> None:
        self.target.settle(self.held[op.name].handle)
        self._check_length(op.name)

    def _fork(self, op: ops.Fork) -> None:
        held = self.held[op.name]
        self._hold(op.into, self.target.fork(held.handle), held.rows)
        self._check_length(op.into)

    def _reset(self, op: ops.Reset) -> None:
        held = self.held[op.name]
        self._hold(op.name, self.target.reset(held.handle), [[]])
        self._check_length(op.name)

    # Files.

    def _saved(self, name: str) -> Path:
        path = self.files / f"{name}-{self.at}"
        self.target.save(self.held[name].handle, path)
        return path

    def _saveload(self, op: ops.SaveLoad) -> None:
        loaded = self.target.load(self._saved(op.name))
        self._hold(op.into, loaded, self.held[op.name].rows)
        self._check_length(op.into)

    def _elsewhere(self, op: ops.Elsewhere) -> None:
        tokens = self.held[op.name].rows[0]
        saved = self._saved(op.name)
        elsewhere = self.elsewhere()
        if elsewhere is None:
            raise NotSupported("a second process")
        logits = elsewhere.feed(saved, op.tokens)
        self.compare(logits, [*tokens, *op.tokens], len(tokens), " in a new process")

    def _damaged(self, op: ops.Damaged) -> None:
        path = self._saved(op.name)
        target = self.target
        if op.how == "foreign":
            target = target.reseeded(self.judge.seed + 101)
        if op.how in ("foreign", "altered") and not target.identifies_model():
            raise NotSupported("files that know what they are of")
        files = [path] if path.is_file() else [f for f in self.files.glob(path.name + "*") if f.is_file()]
        if op.how != "foreign":
            file = max(files, key=lambda f: f.stat().st_size)
            content = bytearray(file.read_bytes())
            if op.how == "truncated":
                del content[-max(1, len(content) // 5) :]
            else:
                content[-max(1, len(content) // 10)] ^= 0x20
            file.write_bytes(content)
        self.result.compared += 1
        try:
            target.load(path)
        except NotSupported:
            raise
        except Exception as error:  # that it is refused is what matters
            self.result.refused.append(_brief(error))
            return
        kind = "G" if op.how == "foreign" else "O"
        what = {"foreign": "a cache of other weights", "altered": "an altered file", "truncated": "a truncated file"}
        self._violation("accepted", f"{what[op.how]} was loaded without an error", hint=kind)

    # Batches.

    def _newbatch(self, op: ops.NewBatch) -> None:
        self._hold(op.name, self.target.new_batch(op.rows, self.kind), [[] for _ in range(op.rows)], batch=True)

    def _feedbatch(self, op: ops.FeedBatch) -> None:
        held = self.held[op.name]
        given = self.target.feed_batch(held.handle, [list(r) for r in op.rows])
        for r, (row, new, logits) in enumerate(zip(held.rows, op.rows, given, strict=True)):
            start = len(row)
            row += new
            if new:
                self.compare(logits, row, start, f" in row {r} of {len(op.rows)}")
        self._check_length(op.name)

    def _rewindbatch(self, op: ops.RewindBatch) -> None:
        held = self.held[op.name]
        removed = self.target.rewind_batch(held.handle, list(op.counts))
        for row, count, said in zip(held.rows, op.counts, removed, strict=True):
            if not 0 <= said <= len(row):
                self._violation("count", f"rewinding {count} of {len(row)} tokens reported {said}", hint="E")
                raise _Ended
            del row[len(row) - said :]
        self._blame("E", self._check_length, op.name)

    def _select(self, op: ops.Select) -> None:
        held = self.held[op.name]
        handle = self.target.select(held.handle, list(op.rows))
        self._hold(op.name, handle, [held.rows[r] for r in op.rows], batch=True)
        self._check_length(op.name)

    def _join(self, op: ops.Join) -> None:
        sources = [self.held.pop(name) for name in op.names]
        handle = self.target.join([s.handle for s in sources])
        self._hold(op.into, handle, [row for s in sources for row in s.rows], batch=True)
        self._check_length(op.into)

    def _extract(self, op: ops.Extract) -> None:
        held = self.held[op.name]
        self._hold(op.into, self.target.extract(held.handle, op.row), [held.rows[op.row]])
        self._check_length(op.into)

    # Stores.

    def _newstore(self, op: ops.NewStore) -> None:
        self.stores[op.name] = Store(self.target.new_store(op.entries), limited=op.entries is not None)

    def _put(self, op: ops.Put) -> None:
        store, held = self.stores[op.store], self.held.pop(op.name)
        self.target.put(store.handle, held.rows[0], held.handle, salt=op.salt)
        store.held.setdefault(op.salt, []).append(tuple(held.rows[0]))
        self._check_store(store)

    def _get(self, op: ops.Get) -> None:
        store = self.stores[op.store]
        hit = self.target.get(store.handle, list(op.tokens), salt=op.salt)
        self.result.compared += 1
        if not 0 <= hit.length <= len(op.tokens):
            self._violation("count", f"asked for {len(op.tokens)} tokens, the store gave {hit.length}", hint="F")
            raise _Ended
        if op.foreign and hit.length:
            self._violation("reuse", f"{hit.length} tokens of another owner's cache were given out", hint="G")
        shared = max((_common(op.tokens, t) for t in store.held.get(op.salt, [])), default=0)
        if hit.length > shared and not op.foreign:
            message = f"{hit.length} tokens were given as reused; no entry shares more than {shared} with the prompt"
            # Nearly all of it is of another text: not a prefix cut in the wrong place, but another entry's identity.
            self._violation("reuse", message, hint="G" if 2 * shared < hit.length else "F")
        if hit.reported is not None and hit.reported != hit.length:
            self._violation("usage", f"{hit.reported} tokens reported as reused, {hit.length} were", hint="T")
        if hit.length < op.least:
            message = f"{hit.length} tokens were reused where {op.least} could be"
            self._violation("reuse", message, hint="T")
        handle = hit.cache if hit.length else self.target.new_cache(self.kind)
        self._hold(op.into, handle, [op.tokens[: hit.length]])
        self._blame("F", self._check_length, op.into)
        rest = (*op.tokens[hit.length :], *op.then)
        if rest:
            self._feed(ops.Feed(op.into, rest))
        self._check_store(store)

    def _check_store(self, store: Store) -> None:
        try:
            said, true = self.target.store_nbytes(store.handle)
        except NotSupported:
            return
        self.result.compared += 1
        if said != true:
            self._violation("memory", f"the store says it holds {said} bytes; its caches hold {true}", hint="Q")

    # Memory, generation.

    def _bytes(self, op: ops.Bytes) -> None:
        held = self.held[op.name]
        now = (len(held.rows[0]), self.target.nbytes(held.handle))
        if op.growth is not None and held.readings and self.kind not in self.target.unbounded_caches:
            self.result.compared += 1
            (first, first_bytes), (last, last_bytes) = held.readings[0], held.readings[-1]
            allowed = 1.3 * op.growth * first_bytes / first * (now[0] - last) + 0.3 * last_bytes
            if now[1] - last_bytes > allowed:
                message = (
                    f"from {last} to {now[0]} tokens the cache grew from {last_bytes} to {now[1]} bytes; "
                    f"its layers' windows allow {allowed:.0f} more"
                )
                self._violation("memory", message, now[0], hint="Q")
        held.readings.append(now)

    def _generate(self, op: ops.Generate) -> None:
        check_generation(self, op)


_LEAVING_AS_IT_IS = (ops.Bytes, ops.Fork, ops.SaveLoad, ops.Settle, ops.Extract)


def _named(operation: ops.Operation) -> tuple[str, ...]:
    """The caches that an operation works on."""
    return (getattr(operation, "name", ""), *getattr(operation, "names", ()))


class _Ended(Exception):
    """What was found leaves nothing to go on with."""


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
