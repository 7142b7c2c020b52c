"""Many texts at once: rows join as others leave, prompts are fed in pieces between the steps of those that generate.

One forward pass serves all rows that generate, each with its own length, sampling, stops and draft; what a row says is
what it says alone. Two budgets hold at every moment: tokens a forward pass, and bytes of caches. Where rows grow past
the bytes, the newest gives its own back, waits, and goes on later where it was.

Where a request stands is never stored apart from its text and its cache: a prompt is fed up to its last token, and the
last token of each text is what the next pass of all rows begins with. So a step that is interrupted anywhere is made
good by the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exactkv.cache import Cache, CheckpointPolicy, join
from exactkv.cache.checks import is_int, require
from exactkv.errors import InputError
from exactkv.generation.draft import Draft, DraftLength, ModelDraft, guess_of
from exactkv.generation.request import Request, Update
from exactkv.generation.reuse import PREFILL_WIDTH, next_stop
from exactkv.generation.sampling import Choice
from exactkv.generation.scores import LOGITS_AT_ONCE
from exactkv.generation.text import Text
from exactkv.models.model import Model

if TYPE_CHECKING:
    from exactkv.cache.store import PromptStore

STORED_PIECE = 512
"""Tokens of a store's piece, all of which a row holds that refers to some of it."""


class Engine:
    """Runs requests on one model. Not for several threads at once.

    ``max_rows``: requests under way at once; others wait in order. ``step_tokens``: the most tokens, padding included,
    that one forward pass is given. ``max_bytes``: the most bytes that the caches of requests hold, those of draft
    models too; None for no limit. ``draft_tokens``: the most guesses of a request that are checked in one pass; 0: no
    request may have a draft. ``store``: a prompt store, where prompts are looked up and what was computed is kept.
    ``storage``: how caches keep keys and values, as for `Model.new_cache`; those of draft models are dense.
    Raises InputError where a value does not fit.
    """

    def __init__(
        self,
        model: Model,
        max_rows: int = 32,
        step_tokens: int = PREFILL_WIDTH,
        max_bytes: int | None = None,
        draft_tokens: int = 0,
        store: PromptStore | None = None,
        storage: str = "dense",
    ):
        require(isinstance(model, Model), "model", model, "one made by exactkv.load")
        require(is_int(max_rows) and max_rows >= 1, "max_rows", max_rows, "an integer >= 1")
        require(is_int(step_tokens) and step_tokens >= max_rows, "step_tokens", step_tokens,
                f"an integer >= max_rows, which is {max_rows}")  # fmt: skip
        require(max_bytes is None or (is_int(max_bytes) and max_bytes > 0), "max_bytes", max_bytes,
                "a number of bytes, or None")  # fmt: skip
        require(is_int(draft_tokens) and draft_tokens >= 0, "draft_tokens", draft_tokens, "an integer >= 0")
        self.model, self.max_rows, self.step_tokens, self.max_bytes = model, max_rows, step_tokens, max_bytes
        self.draft_tokens, self.store, self.storage = draft_tokens, store, storage
        self.preemptions = 0
        self._added = 0
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._running: list[Request] = []
        self._cache = model.new_cache(0, storage, slack=draft_tokens)
        self._to_tell: dict[Request, None] = {}  # in order; what there is to tell is the text's
        self._told = False  # whether the last step returned, with all of it

    # Requests.

    def add(self, text: Text, draft: Draft | None = None, salt: str = "") -> Request:
        """Take on a text. ``salt``: in the store it shares nothing with texts of another one. Raises InputError where
        it can never fit, and for a draft where ``draft_tokens`` is 0."""
        if draft is not None and not self.draft_tokens:
            raise InputError("a request has a draft, and this engine checks none; make it with draft_tokens=12, say")
        self.check_fits(text, draft)
        request = Request(self._added, text, draft, salt, length=DraftLength(max(1, self.draft_tokens)))
        self._added += 1
        text.ending.start()
        self._waiting.append(request)
        return request

    def check_fits(self, text: Text, draft: Draft | None = None) -> None:
        """Raise InputError where ``text`` could not be generated within ``max_bytes`` even if it were alone."""
        longest = min(len(text.prompt) + text.stopping.max_tokens, self.model.spec.max_length)
        needed = self._most(longest, draft)
        if self.max_bytes is not None and needed > self.max_bytes:
            raise InputError(
                f"a prompt of {len(text.prompt)} tokens with max_tokens {text.stopping.max_tokens} may take {needed:,} "
                f"bytes of cache; max_bytes is {self.max_bytes:,}. Shorten it, or allow more."
            )

    def cancel(self, request: Request, keep: bool = True) -> bool:
        """End a request and free its row at once; False where it has ended already, or is another engine's. ``keep``:
        the store gets what was computed."""
        if request.finished or request not in (*self._waiting, *self._under_way()):
            return False
        request.kept = keep
        request.end()
        self._sort()
        return True

    @property
    def busy(self) -> bool:
        """Whether any request waits, is under way, or has something left to tell."""
        return bool(self._waiting or self._prefilling or self._running or (self._to_tell and not self._told))

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
        """Bytes of all caches of requests, draft models' among them."""
        drafts = sum(r.draft.nbytes for r in self._under_way() if isinstance(r.draft, ModelDraft))
        return self._cache.nbytes + drafts + sum(r.cache.nbytes for r in self._prefilling if r.cache is not None)

    def run(self) -> Iterator[Update]:
        """Step until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Update]:
        """Admit what fits, feed a piece of the prompts, and give every row that generates its next tokens. An update
        for each request that has something to say, in which its text goes on or ends."""
        self._forget_told()
        self._sort()
        self._end_late()
        self._make_room()
        self._admit()
        self._prefill()
        self._make_room()
        self._decode()
        return self._tell()

    def _tell(self) -> list[Update]:
        """Changes nothing but that it was told, and that last: what an interruption keeps back is told by the next
        step."""
        updates = []
        for request in self._to_tell:
            piece = request.text.piece()
            if piece is not None or request.error is not None:
                updates.append(Update(request, piece, request.error))
        self._told = True
        return updates

    def _forget_told(self) -> None:
        """What the last step has told, if it returned."""
        if self._told:
            for request in self._to_tell:
                request.text.tell()
            self._to_tell, self._told = {}, False

    # Bytes.

    def _most(self, length: int, draft: Draft | None = None) -> int:
        """The most bytes of a row of that length: with guesses that are checked, its checkpoint, what it refers to of
        the store's, and its draft model's."""
        most = self._cache.most_nbytes(length + self.draft_tokens + (STORED_PIECE if self.store is not None else 0))
        if isinstance(draft, ModelDraft):
            most += draft.most_nbytes(length, self.draft_tokens)
        return most + self._checkpoint_bytes

    @property
    def _checkpoint_bytes(self) -> int:
        """What the checkpoints of one row may hold: for a store, one before its prompt's last token."""
        return self._cache.most_checkpoint_nbytes if self.store is not None else 0

    def _next_most(self, request: Request) -> int:
        """The most that its row holds after the next step."""
        return self._most(len(request.text.ids), request.draft)

    def _make_room(self) -> None:
        """Let the newest give their rows back until the others may take a step."""
        while self.max_bytes is not None and sum(map(self._next_most, self._under_way())) > self.max_bytes:
            newest = max(self._under_way(), key=lambda request: request.number)
            self._waiting.appendleft(newest)
            self._free([newest])
            self.preemptions += 1
            newest.preemptions += 1

    def _under_way(self) -> list[Request]:
        return [*self._prefilling, *self._running]

    def _admit(self) -> None:
        held = sum(map(self._next_most, self._under_way()))
        while self._waiting and self.rows < self.max_rows:
            request = self._waiting[0]
            held += self._next_most(request)
            if self.max_bytes is not None and held > self.max_bytes:
                return
            request.cache = self._cache_for(request)
            self._prefilling.append(request)
            self._waiting.popleft()
        self._sort()

    def _cache_for(self, request: Request) -> Cache:
        """What the store holds of its text, or a new one."""
        options: dict[str, Any] = {"storage": self.storage, "slack": self.draft_tokens}
        cache = self.model.new_cache(**options)
        if self.store is not None and not request.text.unscored:  # scores take all of the prompt's logits
            found = self.store.lookup(self.model, request.text.ids, salt=request.salt, **options)
            cache = found.cache
        if self.store is not None:
            cache.checkpoint_policy = CheckpointPolicy(max_bytes=self._checkpoint_bytes)
        if request.began is None:
            request.begin(cached=min(cache.lengths[0], len(request.text.prompt)))
        return cache

    # Rows.

    def _sort(self) -> None:
        """Rows that have ended leave, and those whose text is fed up to its last token run among the others."""
        self._prefilling = [request for request in self._prefilling if request not in self._running]
        under_way = self._under_way()
        for request in under_way:
            if request.text.ending.reason is not None and not request.finished:
                request.end()
        self._waiting = deque(r for r in self._waiting if not r.finished and r not in under_way)
        self._free([request for request in self._under_way() if request.finished])
        ready = [r for r in self._prefilling if r.cache is not None and not r.text.unscored
                 and r.cache.lengths[0] >= len(r.text.ids) - 1]  # fmt: skip
        if ready:
            joined = join([self._cache, *(r.cache for r in ready if r.cache is not None)])
            self._cache, self._running = joined, [*self._running, *ready]
            self._prefilling = [request for request in self._prefilling if request not in ready]
            for request in ready:
                request.cache = None

    def _free(self, requests: Sequence[Request]) -> None:
        """Take the rows of ``requests`` away; the store keeps what was computed."""
        if not requests:
            return
        for request in requests:
            place = self._running.index(request) if request in self._running else None
            cache = request.cache if place is None else self._cache.select([place])
            if self.store is not None and request.kept and cache is not None and cache.lengths[0]:
                self.store.insert(cache, salt=request.salt)
            if isinstance(request.draft, ModelDraft):
                request.draft.release()
        left = [i for i, request in enumerate(self._running) if request not in requests]
        self._cache, self._running = self._cache.select(left), [self._running[i] for i in left]
        self._prefilling = [request for request in self._prefilling if request not in requests]
        for request in requests:
            request.cache = None

    # Steps.

    def _end_late(self) -> None:
        """End those whose deadline is over before there is another token."""
        for request in (*self._waiting, *self._under_way()):
            if request.text.ending.late:
                self._to_tell[request] = None
                request.text.give_up()
                request.end()  # it may wait
        self._sort()

    def _prefill(self) -> None:
        """One forward pass over the next pieces of as many prompts as fit; those that are scored among themselves."""
        group: list[Request] = []
        caches: list[Cache] = []
        pieces: list[list[int]] = []
        width, left = 0, max(1, self.step_tokens - len(self._running))
        scored = bool(self._prefilling) and self._prefilling[0].text.unscored
        if scored:
            left = min(left, max(1, LOGITS_AT_ONCE // self.model.spec.vocab_size))
        for request in self._prefilling:
            assert request.cache is not None
            at, last = _stand(request, request.cache), len(request.text.ids) - 1
            size = next_stop(request.cache, last, left, self._marks(request)) - at
            if request.text.unscored != scored or (group and (len(group) + 1) * max(width, size) > left):
                break
            width = max(width, size)
            group.append(request)
            caches.append(request.cache)
            pieces.append(list(request.text.ids[at : at + size]))
        if not group:
            return
        fed, logits = self._fed(caches, pieces, "all" if scored else "none")
        for row, (request, cache, piece) in enumerate(zip(group, fed, pieces, strict=True)):
            request.cache = cache
            at = cache.lengths[0]
            if request.text.scores is not None and logits is not None:
                request.text.scores.take(at - len(piece), logits[row, : len(piece)])
            request.fed_tokens += max(0, min(at, len(request.text.prompt)) - (at - len(piece)))
            if at in self._marks(request):
                cache.checkpoint(label="prompt")
        self._sort()

    def _fed(self, caches: list[Cache], pieces: list[list[int]], logits: str) -> tuple[list[Cache], Tensor | None]:
        """Feed each cache its piece, all in one pass. Returns the caches of one row that came of it, and logits."""
        if len(caches) == 1:
            return caches, self.model(pieces, cache=caches[0], logits=logits)
        joined = join(caches)
        out = self.model(_padded(pieces), cache=joined, lengths=[len(p) for p in pieces], logits=logits)
        return [joined.select([i]) for i in range(len(pieces))], out

    def _marks(self, request: Request) -> list[int]:
        """Where a store wants a checkpoint: before the last token, whose logits anyone who comes back will want."""
        return [len(request.text.prompt) - 1] if self._checkpoint_bytes else []

    def _decode(self) -> None:
        """One forward pass for all rows that generate: the last token of each and its guess of what follows."""
        self._settle()
        guesses = self._guesses()
        if not self._running:
            return
        rows = list(self._running)
        pieces = [[request.text.ids[-1], *guess] for request, guess in zip(rows, guesses, strict=True)]
        lengths = [len(piece) for piece in pieces]
        some = max(lengths) > 1
        out = self.model(_padded(pieces), cache=self._cache, lengths=lengths, logits="all" if some else "last")
        assert out is not None
        for request, choice, guess in zip(rows, self._choices(rows, out, guesses, some), guesses, strict=True):
            self._take(request, choice, guess)
        self._settle()
        self._sort()

    def _settle(self) -> None:
        """Leave the cache with all tokens of each row but the last, also where a step was interrupted."""
        held = [len(request.text.ids) - 1 for request in self._running]
        if self._cache.lengths != held:
            self._cache.rewind([min(pair) for pair in zip(held, self._cache.lengths, strict=True)])

    def _guesses(self) -> list[list[int]]:
        """What rows with a draft guess, as far as one pass's tokens allow. One whose draft fails ends with that."""
        guesses: list[list[int]] = []
        most = max(0, self.step_tokens // max(1, len(self._running)) - 1)
        for request in self._running:
            size = 0 if request.draft is None else min(most, request.length.next(), request.text.room - 1)
            try:
                guess = guess_of(request.draft, request.text.ids, size, self.model.spec.vocab_size)
            except InputError as error:
                self._fail(request, error)
                continue
            request.drafted_tokens += len(guess)
            guesses.append(guess)
        self._free([request for request in self._running if request.finished])
        return guesses

    def _choices(self, rows: list[Request], logits: Tensor, guesses: list[list[int]], some: bool) -> list[Choice]:
        """For each row its next tokens: from [B, V] where nobody guessed, else from [B, T, V]."""
        if not some:
            return Text.choose_each([request.text for request in rows], logits).each()
        pairs = enumerate(zip(rows, guesses, strict=True))
        return [request.text.choose(logits[i, : len(guess) + 1], guess) for i, (request, guess) in pairs]

    def _take(self, request: Request, choice: Choice, guess: list[int]) -> None:
        """Add to a text what was chosen; a row that cannot choose ends with its error."""
        try:
            tokens = request.text.chosen(choice)
        except InputError as error:
            self._fail(request, error)
            return
        if request.first_token is None:
            request.note_first_token()
        self._to_tell[request] = None
        before = len(request.text.generated)
        request.text.take(tokens, choice.logprobs, guess)
        if guess:
            accepted = len(request.text.generated) - before - 1
            request.accepted_tokens += accepted
            request.length.learn(len(guess), accepted)

    def _fail(self, request: Request, error: InputError) -> None:
        self._to_tell[request] = None
        request.end(error)


def _stand(request: Request, cache: Cache) -> int:
    """Where the next piece of its prompt begins: where the cache stands, or where logits are wanted that a step which
    was interrupted had made already."""
    if request.text.scores is not None and request.text.unscored:
        known = len(request.text.scores.told)
        if cache.lengths[0] > known:
            return cache.rewind(known)[0]
    return cache.lengths[0]


def _padded(pieces: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of one width; what is added is not valid."""
    width = max(map(len, pieces))
    return [[*piece, *[0] * (width - len(piece))] for piece in pieces]
