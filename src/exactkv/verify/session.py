"""Runs operations on a target beside a shadow that knows what every cache should hold, and compares.

One method an operation, named after it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from exactkv.verify import operations as ops
from exactkv.verify.generating import check_generation
from exactkv.verify.judge import Judge
from exactkv.verify.patience import LIMIT, time_limit
from exactkv.verify.shadow import Ended, Result, Shadow, Store
from exactkv.verify.target import NotSupported, Refused, Target, brief
from exactkv.verify.worker import Elsewhere


class Session(Shadow):
    """One run. ``elsewhere``: gives the second process, started when first needed. ``stop``: end at the first
    violation."""

    def __init__(
        self,
        target: Target,
        judge: Judge,
        kind: str,
        elsewhere: Callable[[], Elsewhere | None] = lambda: None,
        stop: bool = False,
        doubt: bool = True,
    ):
        super().__init__(target, judge, kind, doubt)
        self.elsewhere, self.stop = elsewhere, stop

    def run(self, operations: Sequence[ops.Operation]) -> Result:
        """All of ``operations``, until one is not supported, or fails in a way that leaves nothing to go on with."""
        with ExitStack() as stack:
            self.files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exactkv-verify-")))
            for self.at, operation in enumerate(operations):
                self.foresee(operations)
                do: Callable[[Any], None] = getattr(self, "_" + type(operation).__name__.lower())
                try:
                    with time_limit(LIMIT):
                        do(operation)
                except NotSupported as error:
                    self.result.not_supported = str(error)
                    break
                except Refused as error:
                    self.result.refused.append(str(error))
                except Ended:
                    break
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except Exception as error:  # whatever an engine under test comes up with
                    self.violation("crash", f"{type(operation).__name__} failed with {brief(error)}")
                    break
                if self.stop and self.result.violations:
                    break
        return self.result

    # One cache.

    def _new(self, op: ops.New) -> None:
        if op.rewinds is not None:
            handle = self.target.rewindable(self.kind, op.rewinds)
        else:
            handle = self.target.new_cache(self.kind, step=op.step, max_length=op.max_length)
        self.hold(op.name, handle, [[]])

    def _feed(self, op: ops.Feed) -> None:
        held = self.held[op.name]
        logits = self.target.feed(held.handle, list(op.tokens), positions=op.positions)
        start = len(held.rows[0])
        held.rows[0] += op.tokens
        self.compare(logits, held.rows[0], start)
        self.check_length(op.name)

    def _overfill(self, op: ops.Overfill) -> None:
        held = self.held[op.name]
        try:
            logits = self.target.feed(held.handle, list(op.tokens))
        except NotSupported:
            raise
        except Exception as error:  # an error is right here; which one is the engine's affair
            self.result.compared += 1
            self.result.refused.append(brief(error))
            self.blame("Q", self.check_length, op.name)
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
            self.violation("count", f"rewinding {op.count} of {length} tokens reported {removed}", length, hint="E")
            raise Ended
        missing = row[length - removed : length - op.count] if removed > op.count else []
        del row[length - removed :]
        held.foreseen = False
        self.blame("E", self.check_length, op.name)
        if missing:
            self._feed(ops.Feed(op.name, tuple(missing)))

    def _settle(self, op: ops.Settle) -> None:
        self.target.settle(self.held[op.name].handle)
        self.check_length(op.name)

    def _fork(self, op: ops.Fork) -> None:
        held = self.held[op.name]
        self.hold(op.into, self.target.fork(held.handle), held.rows)
        self.check_length(op.into)

    def _reset(self, op: ops.Reset) -> None:
        held = self.held[op.name]
        self.hold(op.name, self.target.reset(held.handle), [[]])
        self.check_length(op.name)

    # Files.

    def _saved(self, name: str) -> Path:
        path = self.files / f"{name}-{self.at}"
        self.target.save(self.held[name].handle, path)
        return path

    def _saveload(self, op: ops.SaveLoad) -> None:
        held, path = self.held[op.name], self._saved(op.name)
        loaded = self.target.load_batch(path, len(held.rows)) if held.batch else self.target.load(path)
        self.hold(op.into, loaded, held.rows, held.batch)
        self.check_length(op.into)

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
            self.result.refused.append(brief(error))
            return
        kind = "G" if op.how == "foreign" else "O"
        what = {"foreign": "a cache of other weights", "altered": "an altered file", "truncated": "a truncated file"}
        self.violation("accepted", f"{what[op.how]} was loaded without an error", hint=kind)

    # Batches.

    def _newbatch(self, op: ops.NewBatch) -> None:
        self.hold(op.name, self.target.new_batch(op.rows, self.kind), [[] for _ in range(op.rows)], batch=True)

    def _feedbatch(self, op: ops.FeedBatch) -> None:
        held = self.held[op.name]
        given = self.target.feed_batch(held.handle, [list(r) for r in op.rows])
        for r, (row, new, logits) in enumerate(zip(held.rows, op.rows, given, strict=True)):
            start = len(row)
            row += new
            if new:
                self.compare(logits, row, start, f" in row {r} of {len(op.rows)}")
        self.check_length(op.name)

    def _rewindbatch(self, op: ops.RewindBatch) -> None:
        held = self.held[op.name]
        removed = self.target.rewind_batch(held.handle, list(op.counts))
        for row, count, said in zip(held.rows, op.counts, removed, strict=True):
            if not 0 <= said <= len(row):
                self.violation("count", f"rewinding {count} of {len(row)} tokens reported {said}", hint="E")
                raise Ended
            del row[len(row) - said :]
        self.blame("E", self.check_length, op.name)

    def _select(self, op: ops.Select) -> None:
        held = self.held[op.name]
        handle = self.target.select(held.handle, list(op.rows))
        self.hold(op.name, handle, [held.rows[r] for r in op.rows], batch=True)
        self.check_length(op.name)

    def _join(self, op: ops.Join) -> None:
        sources = [self.held.pop(name) for name in op.names]
        handle = self.target.join([s.handle for s in sources])
        self.hold(op.into, handle, [row for s in sources for row in s.rows], batch=True)
        self.check_length(op.into)

    def _extract(self, op: ops.Extract) -> None:
        held = self.held[op.name]
        self.hold(op.into, self.target.extract(held.handle, op.row), [held.rows[op.row]])
        self.check_length(op.into)

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
            self.violation("count", f"asked for {len(op.tokens)} tokens, the store gave {hit.length}", hint="F")
            raise Ended
        if op.foreign and hit.length:
            self.violation("reuse", f"{hit.length} tokens of another owner's cache were given out", hint="G")
        shared = max((_common(op.tokens, t) for t in store.held.get(op.salt, [])), default=0)
        if hit.length > shared and not op.foreign:
            message = f"{hit.length} tokens were given as reused; no entry shares more than {shared} with the prompt"
            # Nearly all of it is of another text: not a prefix cut in the wrong place, but another entry's identity.
            self.violation("reuse", message, hint="G" if 2 * shared < hit.length else "F")
        if hit.reported is not None and hit.reported != hit.length:
            self.violation("usage", f"{hit.reported} tokens reported as reused, {hit.length} were", hint="T")
        if hit.length < op.least:
            message = f"{hit.length} tokens were reused where {op.least} could be"
            self.violation("reuse", message, hint="T")
        handle = hit.cache if hit.length else self.target.new_cache(self.kind)
        self.hold(op.into, handle, [op.tokens[: hit.length]])
        self.blame("F", self.check_length, op.into)
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
            self.violation("memory", f"the store says it holds {said} bytes; its caches hold {true}", hint="Q")

    # Memory, generation.

    def _bytes(self, op: ops.Bytes) -> None:
        held = self.held[op.name]
        now = (len(held.rows[0]), self.target.nbytes(held.handle))
        with suppress(NotSupported):
            self.result.compared += 1
            if (said := self.target.reported_nbytes(held.handle)) != now[1]:
                self.violation("memory", f"the cache says it holds {said} bytes; it holds {now[1]}", hint="Q")
        if op.growth is not None and held.readings and self.kind not in self.target.unbounded_caches:
            self.result.compared += 1
            (first, first_bytes), (last, last_bytes) = held.readings[0], held.readings[-1]
            allowed = 1.3 * op.growth * first_bytes / first * (now[0] - last) + 0.3 * last_bytes
            if now[1] - last_bytes > allowed:
                message = (
                    f"from {last} to {now[0]} tokens the cache grew from {last_bytes} to {now[1]} bytes; "
                    f"its layers' windows allow {allowed:.0f} more"
                )
                self.violation("memory", message, now[0], hint="Q")
        held.readings.append(now)

    def _generate(self, op: ops.Generate) -> None:
        check_generation(self, op)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
