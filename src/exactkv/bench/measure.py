"""The measuring: prefill and decode of a model at several contexts and batch sizes, each several times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exactkv.bench.ceilings import Ceilings
from exactkv.bench.machine import PeakMemory, process_seconds, seconds
from exactkv.bench.work import Formula, Work
from exactkv.cache import Cache
from exactkv.errors import InputError, IntegrityError
from exactkv.generation.reuse import PREFILL_WIDTH
from exactkv.models.decode import greedy
from exactkv.models.model import Model

CONTEXTS = (512, 2048)
FIRST_PROMPT = 16
"""Tokens of the prompt by which the wait for the first token is measured."""
WARM_UP = 2
"""Tokens decoded before the clock is looked at."""
FILLED = 4096
"""Positions that are filled with random rows at a time."""

Tell = Callable[[str, int, int], None]
"""Is told what is measured next, how many measurements are done, and how many there are."""


@dataclass(frozen=True)
class Plan:
    """What is measured. ``contexts``: tokens that a row holds when it begins to decode; ``batches``: rows at once;
    ``tokens``: decoded for each row, each of ``repeat`` times; ``prefill``: lengths of prompts; ``piece``: tokens of a
    prompt a call; ``synthetic_kv``: contexts are filled with random rows, without a forward pass."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    tokens: int = 64
    prefill: tuple[int, ...] = ()
    piece: int = PREFILL_WIDTH
    repeat: int = 3
    synthetic_kv: bool = False

    def check(self, limit: int) -> None:
        """Raise InputError where it is more than a model of rows of at most ``limit`` tokens takes."""
        numbers = (*self.contexts, *self.prefill, *self.batches, self.tokens, self.piece, self.repeat)
        if (least := min(numbers)) < 1:
            raise InputError(f"one of the numbers to measure by is {least}; expected 1 or more")
        longest = max((context + self.tokens for context in self.contexts), default=0)
        if longest > limit:
            raise InputError(
                f"a context of {longest - self.tokens} and {self.tokens} tokens after it are {longest}; this model "
                f"takes at most {limit}. Give smaller --contexts, or fewer --tokens."
            )
        if max(self.prefill, default=0) > limit:
            raise InputError(f"a prompt of {max(self.prefill)} tokens; this model takes at most {limit}")


def default_contexts(limit: int, tokens: int) -> tuple[int, ...]:
    """Those of CONTEXTS that leave room for ``tokens`` more; half of what there is if none does."""
    return tuple(n for n in CONTEXTS if n + tokens <= limit) or (max(1, (limit - tokens) // 2),)


@dataclass(frozen=True)
class Startup:
    """The wait before there is text, in seconds. ``weights``: until they are in memory; then ``first_token`` of a
    prompt of ``prompt_tokens``, cache included; then ``second_token``, on CUDA with kernels compiled and the step
    captured. ``process``: of all, from the process's beginning to the first token; None where the system does not
    say."""

    weights: float
    prompt_tokens: int
    first_token: float
    second_token: float
    process: float | None


@dataclass(frozen=True)
class Measurement:
    """One thing measured. ``what``: "prefill" (the context is the prompt), "decode" (a call for each token, which the
    host reads) or "decode ahead" (each step is launched before the token that it feeds is read). ``tokens``: of all
    rows, in each run; ``seconds``: of each run; ``work``: of one run; ``peak_bytes``: over the weights, None where
    it is not known; ``plain_because``: why steps were not captured ones, None if they were or if it is a prefill;
    ``failed``: why there are no figures."""

    what: str
    context: int
    batch: int
    tokens: int
    work: Work
    least_seconds: float
    limit: str
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    plain_because: str | None = None
    failed: str | None = None

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [self.tokens / taken for taken in self.seconds]

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def ceiling(self) -> float:
        """Tokens a second that the machine's ceilings allow."""
        return self.tokens / self.least_seconds


def measure_startup(model: Model, weights: float) -> Startup:
    """To be called first: the waits of a process that has done nothing else. ``weights``: what loading them took."""
    count = max(1, min(FIRST_PROMPT, model.spec.max_length - 1))
    prompt = random_prompt(1, count, model.spec.vocab_size)
    cache, token = None, 0

    def first() -> None:
        nonlocal cache, token
        cache = model.new_cache()
        token = _best(model(prompt, cache=cache, logits="last"))[0]

    def second() -> None:
        _best(model([[token]], cache=cache, logits="last"))

    waited = seconds(first, model.device)
    process = process_seconds()
    return Startup(weights, count, waited, seconds(second, model.device), process)


def measure(model: Model, plan: Plan, ceilings: Ceilings, memory: PeakMemory, tell: Tell) -> Iterator[Measurement]:
    """Each measurement of the plan as it is made, prefills first. A batch or context for which the device's memory
    does not suffice is told as failed. Raises InputError where the plan is more than the model takes."""
    plan.check(model.spec.max_length)
    formula = Formula(model.spec, model.dtype)
    prefills = [(n, batch) for n in plan.prefill for batch in plan.batches]
    decodes = [(n, batch) for n in plan.contexts for batch in plan.batches]
    total = len(prefills) + len(decodes)

    def planned(what: str, context: int, batch: int) -> Measurement:
        if what == "prefill":
            work, tokens = formula.prompt(batch, pieces(context, plan.piece)), context * batch
        else:
            work, tokens = formula.steps(batch, context, plan.tokens), plan.tokens * batch
        return Measurement(what, context, batch, tokens, work, ceilings.least_seconds(work), ceilings.limit(work))

    for done, (what, (context, batch)) in enumerate(
        [*(("prefill", case) for case in prefills), *(("decode", case) for case in decodes)]
    ):
        tell(f"{what} at {context:,}, batch {batch}", done, total)
        case = planned(what, context, batch)
        run = _Prefill(model, plan) if what == "prefill" else _Decode(model, plan)
        try:
            yield from run(case, memory)
        except torch.OutOfMemoryError:
            yield replace(case, failed="out of memory")
    tell("done", total, total)


class _Prefill:
    def __init__(self, model: Model, plan: Plan):
        self.model, self.plan = model, plan

    def __call__(self, case: Measurement, memory: PeakMemory) -> Iterator[Measurement]:
        prompt = random_prompt(case.batch, case.context, self.model.spec.vocab_size)

        def once(width: int = case.context) -> None:
            cache = self.model.new_cache(case.batch)
            _best(feed(self.model, cache, prompt[:, :width], self.plan.piece))

        once(min(case.context, self.plan.piece))
        memory.reset()
        taken = tuple(seconds(once, self.model.device) for _ in range(self.plan.repeat))
        yield replace(case, seconds=taken, peak_bytes=memory.over())


class _Decode:
    """Rows are filled once; each run goes back to where they stood then, by a checkpoint where a layer forgets."""

    def __init__(self, model: Model, plan: Plan):
        self.model, self.plan = model, plan

    def __call__(self, case: Measurement, memory: PeakMemory) -> Iterator[Measurement]:
        cache = self.model.new_cache(case.batch)
        prompt = random_prompt(case.batch, case.context, self.model.spec.vocab_size)
        if self.plan.synthetic_kv:
            fill_with_random_rows(cache, prompt)
        else:
            feed(self.model, cache, prompt, self.plan.piece, logits="none")
        self.cache, self.context = cache, case.context
        self.first = random_prompt(case.batch, 1, self.model.spec.vocab_size, seed=1)[:, 0].tolist()
        cache.checkpoint()
        self._calls(min(WARM_UP, self.plan.tokens))
        yield self._measured(case, memory, self._calls)
        path = self.model.decode_path
        if case.batch == 1 and path is not None and path.unsupported is None:
            yield self._measured(replace(case, what="decode ahead"), memory, self._ahead)

    def _measured(self, case: Measurement, memory: PeakMemory, run: Callable[[int], float]) -> Measurement:
        memory.reset()
        taken = tuple(run(self.plan.tokens) for _ in range(self.plan.repeat))
        peak, path = memory.over(), self.model.decode_path
        return replace(
            case,
            seconds=taken,
            peak_bytes=None if peak is None else max(0, peak - self.cache.checkpoint_nbytes),
            plain_because="the decode path is switched off" if path is None else path.declined,
        )

    def _calls(self, count: int) -> float:
        self._back()

        def run() -> None:
            tokens = self.first
            for _ in range(count):
                tokens = _best(self.model([[t] for t in tokens], cache=self.cache, logits="last"))

        return seconds(run, self.model.device)

    def _ahead(self, count: int) -> float:
        self._back()
        path, limit = self.model.decode_path, self.model.spec.max_length
        assert path is not None

        def run() -> None:
            for _ in greedy(path, self.cache, self.first[0], count, limit):
                pass

        return seconds(run, self.model.device)

    def _back(self) -> None:
        reached = self.cache.rewind(self.context)
        if set(reached) != {self.context}:
            raise IntegrityError(f"rows that were to stand at {self.context} stand at {reached}")


def pieces(length: int, width: int) -> list[int]:
    """How many tokens each call is fed of a prompt."""
    return [min(width, length - start) for start in range(0, length, width)]


def random_prompt(batch: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Random token ids [B, T], the same for the same arguments."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def feed(model: Model, cache: Cache, prompt: Tensor, width: int, logits: str = "last") -> Tensor | None:
    """Feed ``prompt`` [B, T] in pieces; the logits of its last token [B, V], or None for ``logits`` "none"."""
    start, found = 0, None
    for size in pieces(prompt.shape[1], width):
        last = start + size == prompt.shape[1]
        found = model(prompt[:, start : start + size], cache=cache, logits=logits if last else "none")
        start += size
    return found


def fill_with_random_rows(cache: Cache, tokens: Tensor) -> None:
    """Put random rows and states into ``cache`` as if it had been fed ``tokens`` [B, T], without a forward pass."""
    storage = cache.storage
    generator = torch.Generator(device=storage.device).manual_seed(0)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=storage.device).normal_(generator=generator)

    for part in tokens.split(FILLED, dim=1):
        batch, width = part.shape
        step = cache.begin(width, [width] * batch, part.tolist())
        for layer in cache.layers:
            rows = {n: drawn((batch, heads, width, size), storage.dtype) for n, (heads, size) in layer.parts.items()}
            layer.extend(step, rows)
        for offset in sorted(set().union(*step.keeps)):
            for recurrent in cache.spec.recurrent:
                state = {n: drawn((batch, *p.shape), p.dtype(storage)) for n, p in recurrent.parts.items()}
                recurrent.write(step, offset, state)
        cache.commit(step)


def _best(logits: Tensor | None) -> list[int]:
    """The best token of each row, read by the host."""
    assert logits is not None
    found: list[int] = logits.argmax(-1).tolist()
    return found


def load_seconds(load: Callable[[], Model]) -> tuple[Model, float]:
    """A model, and how long it took until its weights were in memory."""
    started = time.perf_counter()
    model = load()
    seconds(lambda: None, model.device)
    return model, time.perf_counter() - started
