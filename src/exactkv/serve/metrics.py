"""What `/metrics` tells, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from exactkv.cache.store.report import StoreStats
from exactkv.generation.engine import Engine
from exactkv.generation.loop import Stats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class EngineState:
    """How an engine stands between two steps."""

    waiting: int
    rows: int
    max_rows: int
    nbytes: int
    preemptions: int

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        return cls(engine.waiting, engine.rows, engine.max_rows, engine.nbytes, engine.preemptions)


class Metrics:
    """Counts of one server. ``state`` and ``store`` are set before each reading."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.state: EngineState | None = None
        self.store: StoreStats | None = None
        registry = self.registry
        self.requests = Counter(
            "exactkv_http_requests", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self.open = Gauge("exactkv_texts_open", "Texts that wait or are generated.", registry=registry)
        self._prompt = Counter(
            "exactkv_prompt_tokens", "Tokens of prompts, by where their rows came from.", ["source"], registry=registry
        )
        self._generated = Counter("exactkv_generated_tokens", "Tokens generated.", registry=registry)
        self._texts = Counter("exactkv_texts", "Texts that have ended, by reason.", ["reason"], registry=registry)
        self._queue = Histogram("exactkv_queue_seconds", "Before a text had a row.", buckets=SECONDS, registry=registry)
        self._first = Histogram(
            "exactkv_time_to_first_token_seconds", "From a text's coming.", buckets=SECONDS, registry=registry
        )
        self._token = Histogram(
            "exactkv_time_per_output_token_seconds", "After the first.", buckets=TOKEN_SECONDS, registry=registry
        )
        self._whole = Histogram(
            "exactkv_text_seconds", "From a text's coming to its end.", buckets=SECONDS, registry=registry
        )
        registry.register(_Now(self))

    def ended(self, stats: Stats, reason: str) -> None:
        """A text has ended."""
        self._texts.labels(reason).inc()
        self._prompt.labels("cached").inc(stats.cached_tokens)
        self._prompt.labels("fed").inc(stats.fed_tokens)
        self._generated.inc(stats.generated_tokens)
        if stats.first_token_seconds is None:
            return
        self._first.observe(stats.first_token_seconds)
        self._queue.observe(max(0.0, stats.first_token_seconds - stats.prefill_seconds))
        self._whole.observe(stats.first_token_seconds + stats.decode_seconds)
        if stats.generated_tokens > 1:
            self._token.observe(stats.decode_seconds / (stats.generated_tokens - 1))

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)


class _Now:
    """What is read at the moment of asking."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        state, store = self._metrics.state, self._metrics.store
        if state is not None:
            yield GaugeMetricFamily("exactkv_queue_texts", "Texts without a row.", state.waiting)
            yield GaugeMetricFamily("exactkv_batch_rows", "Rows of the batch in use.", state.rows)
            yield GaugeMetricFamily("exactkv_batch_rows_max", "Rows that the batch may have.", state.max_rows)
            yield GaugeMetricFamily("exactkv_cache_bytes", "Bytes of the rows' caches.", state.nbytes)
            yield CounterMetricFamily("exactkv_preemptions", "Rows that gave their memory back.", state.preemptions)
        if store is None:
            return
        lookups = CounterMetricFamily("exactkv_prompt_cache_lookups", "Lookups by what they found.", labels=["found"])
        lookups.add_metric(["memory"], store.hits - store.disk_hits)
        lookups.add_metric(["disk"], store.disk_hits)
        lookups.add_metric(["nothing"], store.misses)
        yield lookups
        held = GaugeMetricFamily("exactkv_prompt_cache_bytes", "Bytes of the prompt cache.", labels=["tier"])
        held.add_metric(["memory"], store.bytes)
        held.add_metric(["disk"], store.disk_bytes)
        yield held
        gone = CounterMetricFamily("exactkv_prompt_cache_evictions", "What went for want of room.", labels=["tier"])
        gone.add_metric(["memory"], store.evictions)
        gone.add_metric(["disk"], store.disk_evictions)
        yield gone
        yield CounterMetricFamily("exactkv_prompt_cache_disk_errors", "Reads and writes that failed.",
                                  store.disk_errors)  # fmt: skip
