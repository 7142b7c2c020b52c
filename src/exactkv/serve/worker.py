"""The thread that owns the engine: texts are handed in and what comes of them is handed out, and nobody waits for it.

Everything that is said to it is a function in a queue, called between two steps. Everything that it says is called in
the event loop's thread. So the engine is the thread's alone, and calls are the loop's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import torch

from exactkv.errors import InputError
from exactkv.generation.engine import Engine
from exactkv.generation.request import Request
from exactkv.serve.call import Call, News
from exactkv.serve.errors import Refusal

T = TypeVar("T")
log = logging.getLogger("exactkv.serve")

NO_MEMORY = Refusal(
    503, "there was not enough memory for this request; send it again later, or a shorter one", code="out_of_memory",
    retry_after=5,
)  # fmt: skip
FAILED = Refusal(500, "the server failed while it made this reply; its log has the reason", code="engine_failed")


class Worker:
    """Runs an engine in a thread of its own. Its methods are for the event loop's thread.

    ``make_engine``: a new engine; asked again where a step has failed for another reason than memory.
    """

    def __init__(self, make_engine: Callable[[], Engine], loop: asyncio.AbstractEventLoop):
        self._make_engine, self._loop = make_engine, loop
        self._engine = make_engine()
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._under_way: dict[Request, tuple[Call, int]] = {}
        self._thread = threading.Thread(target=self._run, name="exactkv-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive()

    def add(self, call: Call) -> None:
        """Take on the texts of a call, all or none; its news tell."""
        self._commands.put(lambda: self._add(call))

    def cancel(self, call: Call, error: Refusal | None = None) -> None:
        """End what is left of a call, whose rows are free before the next step. ``error``: what it is told."""
        self._commands.put(lambda: self._cancel(call, error))

    async def ask(self, question: Callable[[Engine], T], seconds: float = 10.0) -> T:
        """What ``question`` says of the engine, between two steps. Raises TimeoutError."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def tell() -> None:
            said = question(self._engine)
            self._call(lambda: None if answer.done() else answer.set_result(said))

        self._commands.put(tell)
        return await asyncio.wait_for(answer, seconds)

    def stop(self) -> None:
        """End the thread after the step that it is in, and wait for that. Texts are left as they are."""
        self._commands.put(None)
        self._thread.join()

    # The thread's own.

    def _run(self) -> None:
        while self._obey():
            if self._engine.busy:
                self._step()

    def _obey(self) -> bool:
        """Do what was asked for; with nothing to generate, wait for that. False: it was to stop."""
        while not self._engine.busy or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            try:
                command()
            except Exception as error:
                self._recover(error)
        return True

    def _add(self, call: Call) -> None:
        requests: list[Request] = []
        try:
            for text in call.texts:
                requests.append(self._engine.add(text, salt=call.salt))
        except InputError as error:
            for request in requests:
                self._engine.cancel(request)
            refusal = Refusal(400, str(error))
            self._tell([(call, News(i, error=refusal)) for i in range(len(call.texts))])
            return
        self._under_way.update((request, (call, i)) for i, request in enumerate(requests))
        self._call(call.accept)

    def _cancel(self, call: Call, error: Refusal | None) -> None:
        for request in [request for request, (of, _) in self._under_way.items() if of is call]:
            self._end(request, error)

    def _end(self, request: Request, error: Refusal | None, keep: bool = True) -> None:
        call, index = self._under_way.pop(request)
        try:
            self._engine.cancel(request, keep)
        except Exception as failure:  # it has ended; what is left to do the next step does
            if not is_out_of_memory(failure):
                raise
            request.kept = False
        self._tell([(call, News(index, cached=request.cached_tokens, stats=request.stats, error=error, ended=True))])

    def _step(self) -> None:
        try:
            updates = self._engine.step()
        except Exception as error:
            self._recover(error)
            return
        told = []
        for request, piece, failure in updates:
            if request not in self._under_way:
                continue
            ended = request.finished
            call, index = self._under_way.pop(request) if ended else self._under_way[request]
            refusal = None if failure is None else row_failed(request, failure)
            told.append((call, News(index, piece, request.cached_tokens, request.stats if ended else None, refusal,
                                    ended)))  # fmt: skip
        self._tell(told)

    def _recover(self, error: Exception) -> None:
        """After a failure: want of memory ends the newest request that has a row, anything else all of them."""
        if is_out_of_memory(error):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            unkept = [request for request in self._under_way if request.finished and request.kept]
            if unkept:  # what was to be stored did not fit: they go without
                for request in unkept:
                    request.kept = False
                return
            going = [request for request in self._under_way if not request.finished]
            begun = [request for request in going if request.began is not None]
            newest = max(begun, default=min(going, default=None, key=number), key=number)
            if newest is not None:
                log.warning("out of memory: request %d is refused", newest.number)
                try:
                    self._end(newest, NO_MEMORY, keep=False)
                    return
                except Exception as another:
                    log.error("and its row cannot be freed", exc_info=another)
        log.error("the engine failed; all its requests end, and a new one begins", exc_info=error)
        lost = list(self._under_way.values())
        self._under_way.clear()
        self._engine = self._make_engine()
        refusal = NO_MEMORY if is_out_of_memory(error) else FAILED
        self._tell([(call, News(index, error=refusal, ended=True)) for call, index in lost])

    def _tell(self, told: list[tuple[Call, News]]) -> None:
        if told:
            self._call(lambda: _deliver(told))

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: there is nobody left to tell
            log.debug("the event loop is closed")


def row_failed(request: Request, failure: InputError) -> Refusal:
    """What a request is told whose row cannot choose: it lies with its structure, if it has one, or with the model."""
    if request.text.structure is not None:
        return Refusal(400, str(failure), code="structure_failed")
    return Refusal(500, str(failure), code="not_finite")


def _deliver(told: list[tuple[Call, News]]) -> None:
    for call, news in told:
        call.take(news)


def number(request: Request) -> int:
    """Its place in the order in which requests came."""
    return request.number


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was wanting; torch raises a plain RuntimeError for the host's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("can't allocate memory", "not enough memory", "out of memory")
    )
