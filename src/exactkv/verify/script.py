"""A reproduction as a script of a few lines, in the target's own library: the operations, and what should come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from exactkv.verify import operations as ops
from exactkv.verify.target import Target

_CHECK = """
def check(what, logits, tokens, start):
    right = full([tokens])[0][start : start + len(logits)]
    print(f"{what}: logits off by {abs(logits - right).max():.1e} (largest logit {abs(right).max():.1f})")
"""


def script(target: Target, operations: Sequence[ops.Operation], kind: str) -> str:
    """The script. Raises NotSupported where the target cannot be written down."""
    writer = _Writer(kind if kind in (*target.caches, *target.quantized_caches) else target.caches[0])
    lines: list[str] = []
    for op in operations:
        write: Callable[[Any], list[str]] = getattr(writer, "_" + type(op).__name__.lower())
        lines += write(op)
    head = target.preamble(frozenset({"full", *writer.used}))
    return "\n".join([head.rstrip(), _CHECK, *lines, ""])


class _Writer:
    """Each operation as lines of Python over the functions of the preamble, which it notes in ``used``."""

    def __init__(self, kind: str):
        self.kind = kind
        self.used: set[str] = set()

    def _call(self, function: str, *arguments: object) -> str:
        self.used.add(function)
        return f"{function}({', '.join(map(str, arguments))})"

    def _new(self, op: ops.New) -> list[str]:
        if op.rewinds is not None:
            made = self._call("rewindable", repr(self.kind), op.rewinds)
        else:
            options = [f"{n}={v}" for n in ("step", "max_length") if (v := getattr(op, n)) is not None]
            made = self._call("new_cache", repr(self.kind), *options)
        return [f"{op.name}, {op.name}_text = {made}, []"]

    def _fed(self, name: str, tokens: Sequence[int], positions: bool = False) -> list[str]:
        call = self._call("feed", name, list(tokens), *(["positions=True"] if positions else []))
        return [
            f"logits = {call}",
            f"{name}_text += {list(tokens)}",
            f'check(f"{len(tokens)} tokens after {{len({name}_text) - {len(tokens)}}}", logits, {name}_text, '
            f"len({name}_text) - {len(tokens)})",
        ]

    def _feed(self, op: ops.Feed) -> list[str]:
        return self._fed(op.name, op.tokens, op.positions)

    def _overfill(self, op: ops.Overfill) -> list[str]:
        return [
            "try:  # more than the cache was made for: expected is an error and nothing changed, or the right logits",
            *(f"    {line}" for line in self._fed(op.name, op.tokens)),
            "except Exception as error:",
            '    print("refused:", error)',
            *self._length(op.name),
        ]

    def _rewind(self, op: ops.Rewind) -> list[str]:
        lines = [
            f"removed = {self._call('rewind', op.name, op.count)}",
            f'print("asked to take back {op.count} tokens, took back", removed)',
            f"del {op.name}_text[len({op.name}_text) - removed :]",
        ]
        return [*lines, *self._length(op.name)]

    def _length(self, name: str) -> list[str]:
        return [f'print("the cache says it holds", {self._call("length", name)}, "of", len({name}_text), "tokens")']

    def _settle(self, op: ops.Settle) -> list[str]:
        return [self._call("settle", op.name)]

    def _fork(self, op: ops.Fork) -> list[str]:
        return [f"{op.into}, {op.into}_text = {self._call('fork', op.name)}, list({op.name}_text)"]

    def _reset(self, op: ops.Reset) -> list[str]:
        made = f"{op.name}, {op.name}_text = {self._call('reset', op.name)}, []"
        return [made, *self._length(op.name)]

    def _saveload(self, op: ops.SaveLoad) -> list[str]:
        return [
            "import pathlib, tempfile",
            'path = pathlib.Path(tempfile.mkdtemp()) / "cache"',
            self._call("save", op.name, "path"),
            f"{op.into}, {op.into}_text = {self._call('load', 'path')}, list({op.name}_text)",
        ]

    def _elsewhere(self, op: ops.Elsewhere) -> list[str]:
        return [*self._saveload(ops.SaveLoad(op.name, "loaded")), *self._fed("loaded", op.tokens)]

    def _damaged(self, op: ops.Damaged) -> list[str]:
        return [f"# Then the file is damaged ({op.how}); loading it should be refused."]

    def _newbatch(self, op: ops.NewBatch) -> list[str]:
        made = self._call("new_batch", op.rows, repr(self.kind))
        return [f"{op.name}, {op.name}_texts = {made}, [[] for _ in range({op.rows})]"]

    def _feedbatch(self, op: ops.FeedBatch) -> list[str]:
        rows = [list(r) for r in op.rows]
        return [
            f"rows = {rows}",
            f"for r, logits in enumerate({self._call('feed_batch', op.name, 'rows')}):",
            f"    {op.name}_texts[r] += rows[r]",
            "    if rows[r]:",
            f'        check(f"row {{r}}", logits, {op.name}_texts[r], len({op.name}_texts[r]) - len(rows[r]))',
        ]

    def _rewindbatch(self, op: ops.RewindBatch) -> list[str]:
        return [
            f"for text, removed in zip({op.name}_texts, {self._call('rewind_batch', op.name, list(op.counts))}):",
            "    del text[len(text) - removed :]",
        ]

    def _select(self, op: ops.Select) -> list[str]:
        return [
            f"{op.name} = {self._call('select', op.name, list(op.rows))}",
            f"{op.name}_texts = [list({op.name}_texts[r]) for r in {list(op.rows)}]",
        ]

    def _join(self, op: ops.Join) -> list[str]:
        batches = {"batch", "other"}
        texts = " + ".join(f"{n}_texts" if n in batches else f"[{n}_text]" for n in op.names)
        return [
            f"{op.into}, {op.into}_texts = {self._call('join', '[' + ', '.join(op.names) + ']')}, {texts}",
        ]

    def _extract(self, op: ops.Extract) -> list[str]:
        taken = self._call("extract", op.name, op.row)
        return [f"{op.into}, {op.into}_text = {taken}, list({op.name}_texts[{op.row}])"]

    def _newstore(self, op: ops.NewStore) -> list[str]:
        return [f"{op.name} = {self._call('new_store', *([op.entries] if op.entries else []))}"]

    def _put(self, op: ops.Put) -> list[str]:
        salt = [f"salt={op.salt!r}"] if op.salt else []
        return [self._call("put", op.store, f"{op.name}_text", op.name, *salt)]

    def _get(self, op: ops.Get) -> list[str]:
        salt = [f"salt={op.salt!r}"] if op.salt else []
        asked = list(op.tokens)
        return [
            f"prompt = {asked}",
            f"got = {self._call('get', op.store, 'prompt', *salt)}",
            'print("reused", got.length, "of", len(prompt), "tokens")',
            f"{op.into} = got.cache if got.length else {self._call('new_cache', repr(self.kind))}",
            f"{op.into}_text, rest = prompt[: got.length], prompt[got.length :] + {list(op.then)}",
            "if rest:",
            f"    logits = {self._call('feed', op.into, 'rest')}",
            f"    {op.into}_text = {op.into}_text + rest",
            f'    check("what is left of the prompt", logits, {op.into}_text, len({op.into}_text) - len(rest))',
        ]

    def _bytes(self, op: ops.Bytes) -> list[str]:
        return [f'print("bytes of the cache:", {self._call("nbytes", op.name)})']

    def _generate(self, op: ops.Generate) -> list[str]:
        asked = ", ".join(
            f"Request(prompt={list(r.prompt)}, max_tokens={r.max_tokens}, stop={list(r.stop)})" for r in op.requests
        )
        close = [f"close_after={op.close_after}"] if op.close_after else []
        return [
            f"requests = [{asked}]",
            f"for request, done in zip(requests, {self._call('generate', repr(op.generator), 'requests', *close)}):",
            "    text = list(request.prompt)",
            "    for _ in done.tokens:  # greedy decoding by one full pass after another",
            "        text.append(int(full([text])[0][-1].argmax()))",
            '    print("generated", done.tokens, "expected", text[len(request.prompt) :])',
            "    if done.cache is not None:",
            f"        held = {self._call('length', 'done.cache')}",
            "        whole = list(request.prompt) + list(done.tokens)",
            "        rest = whole[held:] + [1, 2, 3]",
            f"        logits = {self._call('feed', 'done.cache', 'rest')}",
            '        check(f"on from the cache left behind ({held} held)", logits, whole[:held] + rest, held)',
        ]
