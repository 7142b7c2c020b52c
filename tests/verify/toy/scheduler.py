"""Several texts at once: requests take slots of one batch, share prefixes, give way to others, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.verify.toy.cache import Cache, feed, join
from tests.verify.toy.generate import Plain
from tests.verify.toy.model import Model
from tests.verify.toy.store import Store

SLOTS = 3
TURN = 4
"""Steps after which the row that has had its slot longest gives way, if others wait."""


@dataclass(eq=False)
class Running:
    """A request on its way. ``parked``: its cache while it has no slot. ``pending``: the token to feed next."""

    prompt: list[int]
    max_tokens: int
    stop: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    parked: Cache | None = None
    cached: int = 0
    forwarded: int = 0
    steps: int = 0
    """Since it has its slot."""

    @property
    def pending(self) -> int:
        return self.tokens[-1]


class Scheduler:
    """``active``: who has which row of ``batch``. ``slots``: the fixed buffer from which a step's tokens are read."""

    def __init__(self, model: Model):
        self.model = model
        self.store = Store(entries=4)
        self.waiting: list[Running] = []
        self.active: list[Running] = []
        self.batch = Cache(model, rows=0, slack=Plain.SLACK)
        self.slots = [0] * SLOTS

    def run(self, requests: Sequence[Running]) -> None:
        self.waiting = list(requests)
        while self.waiting or self.active:
            while self.waiting and len(self.active) < SLOTS:
                self.admit(self.waiting.pop(0))
            if self.active:
                self.step()
            self.retire()
            self.preempt()

    def admit(self, request: Running) -> None:
        """Give a request a slot: with the cache it was parked with, or after its prompt has been computed."""
        cache = request.parked
        if cache is None:
            cache = self.prefilled(request)
            if request.finish_reason:
                return
        request.parked, request.steps = None, 0
        self.batch = join([self.batch, cache])
        self.active.append(request)
        self.seat(len(self.active) - 1, request)

    def prefilled(self, request: Running) -> Cache:
        """Compute what no stored prefix covers; at least the last token, whose logits are needed."""
        hit = self.store.get(request.prompt[:-1])
        cache = hit.cache or Cache(self.model, slack=Plain.SLACK)
        request.cached = hit.reported
        rest = request.prompt[hit.length :]
        (logits,) = feed(cache, [rest])
        request.forwarded += len(rest)
        self.store.put(request.prompt, cache.fork())
        self.emit(request, int(logits[-1].argmax()))
        return cache

    def step(self) -> None:
        """One token for each row."""
        logits = feed(self.batch, [[token] for token in self.slots[: len(self.active)]])
        for slot, (request, row) in enumerate(zip(self.active, logits, strict=True)):
            request.steps += 1
            self.emit(request, int(row[-1].argmax()))
            self.seat(slot, request)

    def seat(self, slot: int, request: Running) -> None:
        self.slots[slot] = request.pending

    def emit(self, request: Running, token: int) -> None:
        request.tokens.append(token)
        if token in self.stops(request):
            request.finish_reason = "stop"
        elif len(request.tokens) >= request.max_tokens:
            request.finish_reason = "length"

    def stops(self, request: Running) -> frozenset[int]:
        return request.stop

    def retire(self) -> None:
        self.keep([r for r, request in enumerate(self.active) if not request.finish_reason])

    def preempt(self) -> None:
        """Who has had its turn parks its cache and waits, if somebody waits."""
        if not self.waiting or len(self.active) < SLOTS:
            return
        r = max(range(len(self.active)), key=lambda i: self.active[i].steps)
        if self.active[r].steps >= TURN:
            self.park(r)
            self.waiting.append(self.active[r])
            self.keep([i for i in range(len(self.active)) if i != r])

    def park(self, r: int) -> None:
        self.active[r].parked = self.batch.select([r])

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, in the slots 0, 1, …"""
        if len(rows) < len(self.active):
            self.batch = self.batch.select(rows)
            self.active = [self.active[r] for r in rows]
            for slot, request in enumerate(self.active):
                self.seat(slot, request)
