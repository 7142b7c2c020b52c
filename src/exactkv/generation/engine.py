"""Many texts at once: rows join as others leave, prompts are fed in pieces between the steps of those that generate.

One forward pass serves all rows that generate, each with its own length, sampling, stops and draft; what a row says is
what it says alone. Two budgets hold at every moment: tokens a forward pass, and bytes of caches. Where rows grow past
the bytes, the newest gives its own back, waits, and goes on later where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from exactkv.cache import Cache, CheckpointPolicy, join
from exactkv.cache.checks import is_int, require
from exactkv.cache.row import most_checkpoint_nbytes, most_nbytes
from exactkv.errors import InputError
from exactkv.generation.draft import Draft, DraftLength
from exactkv.generation.loop import PREFILL_WIDTH
from exactkv.generation.request import Request, Update
from exactkv.generation.reuse import next_stop
from exactkv.generation.text import Text
from exactkv.models.model import Model

if TYPE_CHECKING:
    from exactkv.cache.store import PromptStore

STORED_PIECE = 512
"""Tokens of a store's piece, all of which a row holds that refers to some of it."""


class Engine:
    """Runs requests on one model. Not for several threads at once.

    ``max_rows``: requests under way at once; others wait in order. ``step_tokens``: the most tokens, padding included,
    that one forward pass is given. ``max_bytes``: the most bytes that the caches of requests hold; None for no limit.
    ``draft_tokens``: the most guesses of a request with a draft that are checked in one pass. ``store``: a prompt
    store, where prompts are looked up and what was computed is kept.
    Raises InputError where a value does not fit.
    """

    def __init__(
        self,
        model: Model,
        max_rows: int = 32,
        step_tokens: int = PREFILL_WIDTH,
        max_bytes: int | None = None,
        draft_tokens: int = 12,
        store: PromptStore | None = None,
    ):
        require(isinstance(model, Model), "model", model, "one made by exactkv.load")
        require(is_int(max_rows) and max_rows >= 1, "max_rows", max_rows, "an integer >= 1")
        require(is_int(step_tokens) and step_tokens >= max_rows, "step_tokens", step_tokens,
                f"an integer >= max_rows, which is {max_rows}")  # fmt: skip
        require(max_bytes is None or (is_int(max_bytes) and max_bytes > 0), "max_bytes", max_bytes,
                "a number of bytes, or None")  # fmt: skip
        require(is_int(draft_tokens) and draft_tokens >= 1, "draft_tokens", draft_tokens, "an integer >= 1")
        self.model, self.max_rows, self.step_tokens, self.max_bytes = model, max_rows, step_tokens, max_bytes
        self.draft_tokens, self.store = draft_tokens, store
        self.preemptions = 0
        self._added = 0
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._running: list[Request] = []
        self._cache = model.new_cache(0)
        self._drafts = False

    # Requests.

    def add(self, text: Text, draft: Draft | None = None, salt: str = "") -> Request:
        """Take on a text. ``salt``: in the store it shares nothing with texts of another one. Raises InputError where
        it can never fit."""
        if draft is not None and not self._drafts:
            self._drafts = True
            self._cache.slack = max(self._cache.slack, self.draft_tokens)
        self._check_fits(text)
        request = Request(self._added, text, draft, salt, length=DraftLength(self.draft_tokens))
        self._added += 1
        text.ending.start()
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> bool:
        """End a request and free its row at once; False where it has ended already, or is another engine's."""
        for rows in (self._waiting, self._prefilling):
            if request in rows:
                rows.remove(request)
                request.end()
                return True
        if request in self._running:
            self._leave([request])
            request.end()
            return True
        return False

    @property
    def busy(self) -> bool:
        """Whether any request waits or is under way."""
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def waiting(self) -> int:
        """Requests that have no row yet, or had to give it back."""
        return len(self._waiting)

    @property
    def rows(self) -> int:
        """Requests under way."""
        return len(self._prefilling) + len(self._running)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches of requests."""
        return self._cache.nbytes + sum(r.cache.nbytes for r in self._prefilling if r.cache is not None)

    def run(self) -> Iterator[Update]:
        """Step until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Update]:
        """Admit what fits, feed a piece of the prompts, and give every row that generates its next tokens."""
        updates = self._late()
        self._make_room()
        self._admit()
        updates += self._prefill()
        self._make_room()
        return updates + self._decode()

    # Bytes.

    def _check_fits(self, text: Text) -> None:
        longest = min(len(text.prompt) + text.stopping.max_tokens, self.model.spec.max_length)
        needed = self._most(longest + (self.draft_tokens if self._drafts else 0))
        if self.max_bytes is not None and needed > self.max_bytes:
            raise InputError(
                f"a prompt of {len(text.prompt)} tokens with max_tokens {text.stopping.max_tokens} may take {needed:,} "
                f"bytes of cache; max_bytes is {self.max_bytes:,}. Shorten it, or allow more."
            )

    def _most(self, length: int) -> int:
        """The most bytes of a row of that length, its checkpoint included, and what it refers to of the store's."""
        spec, policy = self._cache.spec, self._cache._policy
        most = most_nbytes(spec, policy, length + (STORED_PIECE if self.store is not None else 0))
        return most + self._checkpoint_bytes

    @property
    def _checkpoint_bytes(self) -> int:
        """What the checkpoints of one row may hold: for a store, one before its prompt's last token."""
        wanted = self.store is not None and self._cache.spec.forgets
        return most_checkpoint_nbytes(self._cache.spec, self._cache.storage) if wanted else 0

    def _next_most(self, request: Request) -> int:
        """The most that its row holds after the next step."""
        return self._most(len(request.text.ids) + (self.draft_tokens if self._drafts else 0))

    def _make_room(self) -> None:
        """Let the newest give their rows back until the others may take a step."""
        if self.max_bytes is None:
            return
        while sum(map(self._next_most, self._under_way())) > self.max_bytes:
            newest = max(self._under_way(), key=lambda request: request.number)
            self._preempt(newest)

    def _under_way(self) -> list[Request]:
        return [*self._prefilling, *self._running]

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        request.preemptions += 1
        if request in self._running:
            self._leave([request])
        else:
            self._prefilling.remove(request)
            self._keep(request, request.cache)
            request.cache = None
        self._waiting.appendleft(request)

    def _admit(self) -> None:
        held = sum(map(self._next_most, self._under_way()))
        while self._waiting and self.rows < self.max_rows:
            request = self._waiting[0]
            held += self._next_most(request)
            if self.max_bytes is not None and held > self.max_bytes and self.rows:
                return
            self._waiting.popleft()
            self._begin(request)
            self._prefilling.append(request)

    def _begin(self, request: Request) -> None:
        """Give it a cache: what the store holds of its text, or a new one."""
        slack = self.draft_tokens if self._drafts else 0
        cache = None
        if self.store is not None:
            found = self.store.lookup(self.model, list(request.text.ids), salt=request.salt, slack=slack)
            cache = found.cache
            cache.checkpoint_policy = CheckpointPolicy(max_bytes=self._checkpoint_bytes)
        request.cache = cache if cache is not None else self.model.new_cache(slack=slack)
        stands = request.cache.lengths[0]
        if request.began is None:
            request.begin()
            request.cached_tokens = min(stands, len(request.text.prompt))

    # Steps.

    def _late(self) -> list[Update]:
        """End those whose deadline is over before there is another token."""
        late = [r for r in (*self._waiting, *self._under_way()) if r.text.ending.late]
        updates = [Update(request, request.text.give_up()) for request in late]
        for request in late:
            self.cancel(request)
        return updates

    def _prefill(self) -> list[Update]:
        """One forward pass over the next pieces of as many prompts as fit; those that end choose their first token."""
        group: list[tuple[Request, int]] = []
        width, left = 0, max(1, self.step_tokens - len(self._running))
        for request in self._prefilling:
            assert request.cache is not None
            ids, marks = request.text.ids, self._marks(request)
            if request.cache.lengths[0] >= len(ids):  # it was interrupted before it had chosen
                request.cache.rewind(len(ids) - 1)
            size = next_stop(request.cache, len(ids), left, marks) - request.cache.lengths[0]
            if group and (len(group) + 1) * max(width, size) > left:
                break
            width = max(width, size)
            group.append((request, size))
        if not group:
            return []
        caches, ends = [], []
        for request, size in group:
            assert request.cache is not None
            ends.append(request.cache.lengths[0] + size)
            caches.append(request.cache)
            request.cache = None
        pieces = [list(r.text.ids[end - size : end]) for (r, size), end in zip(group, ends, strict=True)]
        whole = [end == len(request.text.ids) for (request, _), end in zip(group, ends, strict=True)]
        try:
            logits, fed = self._fed(caches, pieces, "last" if any(whole) else "none")
        except BaseException:
            for (request, _), cache in zip(group, caches, strict=True):
                request.cache = cache
            raise
        for i, ((request, size), end) in enumerate(zip(group, ends, strict=True)):
            request.fed_tokens += max(0, min(end, len(request.text.prompt)) - (end - size))
            request.cache = fed[i]
            if end in self._marks(request):
                fed[i].checkpoint(label="prompt")
        done = [i for i, ended in enumerate(whole) if ended]
        if logits is None or not done:
            return []
        return self._first_tokens([group[i][0] for i in done], logits[done])

    def _fed(self, caches: list[Cache], pieces: list[list[int]], logits: str) -> tuple[Tensor | None, list[Cache]]:
        """Feed each cache its piece, all in one pass. Returns logits, and the caches of one row that came of it."""
        if len(caches) == 1:
            return self.model(pieces, cache=caches[0], logits=logits), caches
        joined = join(caches)
        width = max(map(len, pieces))
        padded = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
        out = self.model(padded, cache=joined, lengths=[len(p) for p in pieces], logits=logits)
        return out, [joined.select([i]) for i in range(len(pieces))]

    def _marks(self, request: Request) -> list[int]:
        """Where a store wants a checkpoint: before the last token, whose logits anyone who comes back will want."""
        wanted = self.store is not None and self._cache.spec.forgets
        return [len(request.text.prompt) - 1] if wanted else []

    def _first_tokens(self, requests: list[Request], logits: Tensor) -> list[Update]:
        """Prompts that are fed choose from ``logits`` [B, V], and run among the others from now on."""
        caches = [request.cache for request in requests]
        updates = self._taken(requests, logits, [[]] * len(requests))
        joining = []
        for request, cache in zip(requests, caches, strict=True):
            assert cache is not None
            request.note_first_token()
            request.cache = None
            self._prefilling.remove(request)
            if request.finished:
                self._keep(request, cache)
            else:
                joining.append(cache)
                self._running.append(request)
        if joining:
            self._cache = join([self._cache, *joining])
        return updates

    def _decode(self) -> list[Update]:
        """One forward pass for all rows that generate: the last token of each and its guess of what follows."""
        if not self._running:
            return []
        rows = list(self._running)
        self._settle(rows)  # where it was interrupted before all had chosen
        guesses = self._guesses(rows)
        pieces = [[request.text.ids[-1], *guess] for request, guess in zip(rows, guesses, strict=True)]
        width = max(map(len, pieces))
        padded = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
        lengths = [len(piece) for piece in pieces]
        out = self.model(padded, cache=self._cache, lengths=lengths, logits="last" if width == 1 else "all")
        assert out is not None
        updates = self._taken(rows, out if width == 1 else [out[i, :n] for i, n in enumerate(lengths)], guesses)
        self._settle(rows)
        self._leave([request for request in rows if request.finished])
        return updates

    def _settle(self, rows: Sequence[Request]) -> None:
        """Leave the cache with all tokens of each row but the last."""
        held = [len(request.text.ids) - 1 for request in rows]
        if self._cache.lengths != held:
            self._cache.rewind([min(pair) for pair in zip(held, self._cache.lengths, strict=True)])

    def _guesses(self, rows: Sequence[Request]) -> list[list[int]]:
        """What rows with a draft guess, as far as the tokens of one pass allow."""
        guesses: list[list[int]] = []
        most = max(0, self.step_tokens // len(rows) - 1)
        for request in rows:
            size = 0 if request.draft is None else min(most, request.length.next(), request.text.room - 1)
            guess = []
            if request.draft is not None and size > 0:
                guess = list(request.draft.propose(tuple(request.text.ids), size))[:size]
            request.drafted_tokens += len(guess)
            guesses.append(guess)
        return guesses

    def _taken(self, rows: list[Request], logits: Tensor | list[Tensor], guesses: list[list[int]]) -> list[Update]:
        """Choose for each row: from [B, V] where there are no guesses, else from its own [1 + guess, V]. A row that
        cannot choose ends with its error."""
        if isinstance(logits, Tensor):
            choices = Text.choose_each([request.text for request in rows], logits).each()
        else:
            choices = [r.text.choose(own, guess) for r, own, guess in zip(rows, logits, guesses, strict=True)]
        updates = []
        for request, choice, guess in zip(rows, choices, guesses, strict=True):
            try:
                tokens = choice.ids()
            except InputError as error:
                request.error = error
                updates.append(Update(request, None, error))
                request.end()
                continue
            before = len(request.text.generated)
            piece = request.text.take(tokens, choice.logprobs, guess)
            if guess:
                accepted = len(request.text.generated) - before - 1
                request.accepted_tokens += accepted
                request.length.learn(len(guess), accepted)
            if piece is not None:
                updates.append(Update(request, piece))
            if request.text.ending.reason is not None:
                request.end()
        return updates

    def _leave(self, requests: Sequence[Request]) -> None:
        """Take rows out of those that run."""
        if not requests:
            return
        for request in requests:
            if self.store is not None:
                self._keep(request, self._cache.select([self._running.index(request)]))
        left = [i for i, request in enumerate(self._running) if request not in requests]
        self._cache = self._cache.select(left)
        self._running = [self._running[i] for i in left]

    def _keep(self, request: Request, cache: Cache | None) -> None:
        """Give the store what was computed."""
        if self.store is not None and cache is not None and cache.lengths[0]:
            self.store.insert(cache, salt=request.salt)
