"""One model being served: its engine, its prompt cache, who is being answered, and when no more are taken on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import anyio.to_thread

from exactkv.cache.store import PromptStore
from exactkv.errors import InputError
from exactkv.generation.engine import Engine
from exactkv.generation.stopping import Stopping
from exactkv.generation.text import Text
from exactkv.models.model import Model
from exactkv.serve.call import Call
from exactkv.serve.errors import Refusal
from exactkv.serve.metrics import EngineState, Metrics
from exactkv.serve.options import ServeOptions
from exactkv.serve.texts import TextMaker
from exactkv.serve.worker import Worker

log = logging.getLogger("exactkv.serve")
BUSY_SECONDS, ENDING_SECONDS = 1, 10
"""What Retry-After says where the queue is full, and where the server ends."""


class Service:
    """What the endpoints share. Belongs to the event loop's thread, from ``start`` to ``stop``.

    ``store``: shared by all requests, closed by ``stop``; None for no prompt cache. Raises InputError where
    ``options`` do not suit the model.
    """

    def __init__(self, model: Model, options: ServeOptions, store: PromptStore | None = None):
        self.model, self.options, self.store = model, options, store
        self.names = options.names or (model.name or model.spec.family,)
        self.metrics = Metrics()
        self.created = int(time.time())
        self.ending = False
        self.maker = TextMaker(model, _limit(model, options, self._engine()), options.timeout)
        self._calls: set[Call] = set()
        self._worker: Worker | None = None

    def _engine(self) -> Engine:
        rows = self.options.max_batch
        return Engine(self.model, rows, step_tokens=max(512, rows), max_bytes=self.options.max_bytes, store=self.store)

    async def start(self) -> None:
        """Begin to serve."""
        self._worker = Worker(self._engine, asyncio.get_running_loop())
        self._worker.start()

    async def stop(self) -> None:
        """End what still runs, the engine's thread and the prompt cache."""
        self.ending = True
        self.end_all()
        if self._worker is not None:
            await anyio.to_thread.run_sync(self._worker.stop)
        if self.store is not None:
            await anyio.to_thread.run_sync(self.store.close)

    @property
    def worker(self) -> Worker:
        """The engine's thread. Raises Refusal where it does not work."""
        if self._worker is None or not self._worker.alive:
            raise Refusal(503, "the server's engine does not run", retry_after=ENDING_SECONDS)
        return self._worker

    @property
    def open(self) -> int:
        """Texts that have not ended."""
        return sum(call.open for call in self._calls)

    async def begin(self, texts: Sequence[Text], salt: str) -> Call:
        """Hand texts to the engine. Raises Refusal where there is no room for them, or they can never fit. Whoever
        calls it closes the call, however that ends."""
        worker = self.worker
        if self.ending:
            raise Refusal(503, "the server is ending and takes no more requests", retry_after=ENDING_SECONDS)
        room = self.options.max_batch + self.options.queue
        if len(texts) > room:
            raise Refusal(400, f"the request asks for {len(texts)} texts; this server takes {room} at once")
        if self.open + len(texts) > room:
            raise Refusal(
                429, f"{self.open} texts are under way or wait, and the queue has no more room; try again later",
                code="queue_full", retry_after=BUSY_SECONDS,
            )  # fmt: skip
        call = Call(texts, salt, self._forget)
        self._calls.add(call)
        self.metrics.open.set(self.open)
        worker.add(call)
        try:
            await call.accepted()
        except BaseException:
            self.close(call)
            raise
        return call

    def close(self, call: Call) -> None:
        """End what is left of a call, if anything: its rows are free before the engine's next step."""
        if call in self._calls and self._worker is not None:
            self._worker.cancel(call)

    def end_all(self) -> None:
        """End all that is under way, and tell whoever waits for it."""
        for call in list(self._calls):
            if self._worker is not None:
                self._worker.cancel(call, Refusal(503, "the server has ended", retry_after=ENDING_SECONDS))

    def _forget(self, call: Call) -> None:
        self._calls.discard(call)
        self.metrics.open.set(self.open)
        for text, stats in zip(call.texts, call.stats, strict=True):
            if stats is None:
                continue
            self.metrics.ended(stats, text.ending.reason or "cancelled")
            log.info("%d tokens after %d (%d cached): %s", stats.generated_tokens, stats.prompt_tokens,
                     stats.cached_tokens, text.ending.reason or "cancelled")  # fmt: skip
            if self.options.log_prompts and self.model.tokenizer is not None:
                said = [self.model.tokenizer.decode(ids, skip_special_tokens=False)
                        for ids in (text.prompt, text.generated)]  # fmt: skip
                log.info("prompt %r reply %r", *said)

    async def read_metrics(self) -> bytes:
        """What `/metrics` tells."""
        self.metrics.state = await self.worker.ask(EngineState.of)
        if self.store is not None:
            self.metrics.store = await anyio.to_thread.run_sync(self.store.stats)
        return self.metrics.text()

    def check_name(self, name: str | None) -> str:
        """The model's name as a response tells it. Raises Refusal for one that is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        if "*" in self.names:
            return name
        known = ", ".join(self.names)
        raise Refusal(404, f"there is no model {name[:200]!r} here; there is: {known}", "model", "model_not_found")


def _limit(model: Model, options: ServeOptions, engine: Engine) -> int:
    """The most tokens of a prompt with its reply: the model's maximum, what was asked for, and what memory has."""
    most = min(options.max_context or model.spec.max_length, model.spec.max_length)

    def fits(length: int) -> bool:
        try:
            engine.check_fits(Text(model, [0] * length, Stopping(1)))
        except InputError:
            return False
        return True

    if fits(most):
        return most
    return _greatest(fits, most)


def _greatest(fits: Callable[[int], bool], most: int) -> int:
    low, high = 0, most
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < 1:
        raise InputError("max_bytes leaves no room for a text of even one token; allow more")
    return low
