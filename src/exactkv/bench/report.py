"""What was measured, for programs (one JSON object, docs/bench.md) and for people (a table)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from exactkv import __version__
from exactkv.bench.ceilings import Ceilings
from exactkv.bench.machine import device_name
from exactkv.bench.measure import Measurement, Plan, Startup
from exactkv.cache.report import human_bytes
from exactkv.models.model import Model

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
NARROW = 100
"""Columns below which a table would break its cells: then some lines for each measurement instead."""


@dataclass(frozen=True)
class Result:
    """All of one run. ``name``: of the model; ``random_weights``: whether only its shape is a known model's."""

    name: str
    random_weights: bool
    model: Model
    plan: Plan
    ceilings: Ceilings
    startup: Startup
    measurements: Sequence[Measurement]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of docs/bench.md."""
        m, c, s = self.model, self.ceilings, self.startup
        return {
            "schema": SCHEMA,
            "exactkv": __version__,
            "torch": torch.__version__,
            "machine": {
                "device": str(m.device),
                "name": device_name(m.device),
                "threads": torch.get_num_threads() if m.device.type == "cpu" else None,
            },
            "model": {
                "name": self.name,
                "family": m.spec.family,
                "random_weights": self.random_weights,
                "layers": len(m.spec.layers),
                "parameters": sum(w.numel() for w in m.decoder.weights.values()),
                "dtype": dtype_name(m),
                "weights_bytes": m.nbytes,
                "max_length": m.spec.max_length,
                "not_captured_because": None if m.decode_path is None else m.decode_path.unsupported,
            },
            "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.plan).items()},
            "ceilings": {
                "reading_bytes_per_second": c.reading,
                "reading_by": c.reading_by,
                "matmul_flops_per_second": c.matmul,
                "matmul_side": c.matmul_side,
                "seconds": c.seconds,
            },
            "startup": {
                "weights_seconds": s.weights,
                "prompt_tokens": s.prompt_tokens,
                "first_token_seconds": s.first_token,
                "second_token_seconds": s.second_token,
                "process_to_first_token_seconds": s.process,
            },
            "measurements": [_measured(x, self.plan) for x in self.measurements],
        }

    def print_table(self, console: Console) -> None:
        """The figures for people."""
        from rich import box
        from rich.table import Table

        if console.width < NARROW:
            console.print("\n".join([*self._heading(), "", *self._lines()]), highlight=False)
        else:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("")
            for column in ("context", "batch", "tokens/s", "runs", "reads a token", "ceiling", "of it", "peak memory"):
                table.add_column(column, justify="right")
            for x in self.measurements:
                table.add_row(*_cells(x))
            console.print("\n".join(self._heading()), highlight=False)
            console.print(table)
        console.print("\n".join(self._notes()), style="dim", highlight=False)

    def _heading(self) -> list[str]:
        m, c, s = self.model, self.ceilings, self.startup
        kind = "random weights" if self.random_weights else m.spec.family
        where = device_name(m.device)
        if m.device.type == "cpu":
            where += f", {torch.get_num_threads()} thread{'s' if torch.get_num_threads() != 1 else ''}"
        since = "" if s.process is None else f" ({s.process:.1f} s after the start)"
        return [
            f"{self.name} ({kind}), {len(m.spec.layers)} layers, {dtype_name(m)}, {human_bytes(m.nbytes)} of weights",
            f"on {where}",
            f"reads {human_bytes(int(c.reading))}/s (by {c.reading_by}), matrix products {human_flops(c.matmul)}",
            f"weights {s.weights:.1f} s, then the first token {s.first_token:.2f} s{since}, the second "
            f"{s.second_token:.2f} s",
        ]

    def _lines(self) -> list[str]:
        found = []
        for x in self.measurements:
            what, context, batch, rate, runs, read, ceiling, share, peak = _cells(x)
            found.append(f"{what} at {context}, batch {batch}: {rate} tokens/s ({runs})")
            found.append(f"  {share} of {ceiling} · {read} a token · peak {peak}")
        return found

    def _notes(self) -> list[str]:
        plan, m = self.plan, self.model
        runs = f"median of {plan.repeat} runs" if plan.repeat > 1 else "one run"
        notes = [
            f"tokens/s: of all rows, {runs}, slowest and fastest beside it; decode: {plan.tokens} tokens a row after "
            "the context. ceiling: what the rates above allow, by bytes read or, marked ×, by multiplications. peak "
            "memory: over the weights."
        ]
        if plan.synthetic_kv:
            notes.append("Contexts were filled with random rows (--synthetic-kv), not by a forward pass.")
        reasons = dict.fromkeys(x.plain_because for x in self.measurements if x.plain_because)
        if m.device.type == "cuda" and reasons:
            notes.append(f"Steps were not captured: {'; '.join(map(str, reasons))}.")
        return notes


def _measured(x: Measurement, plan: Plan) -> dict[str, Any]:
    done = x.failed is None
    return {
        "what": x.what,
        "context": x.context,
        "batch": x.batch,
        "tokens": x.tokens,
        "seconds": list(x.seconds),
        "tokens_per_second": x.rate if done else None,
        "slowest": min(x.rates) if done else None,
        "fastest": max(x.rates) if done else None,
        "weight_bytes_per_token": x.work.weight_bytes / x.tokens,
        "cache_bytes_per_token": x.work.cache_bytes / x.tokens,
        "flops_per_token": x.work.flops / x.tokens,
        "ceiling_tokens_per_second": x.ceiling,
        "ceiling": x.limit,
        "of_ceiling": x.rate / x.ceiling if done else None,
        "peak_bytes_over_weights": x.peak_bytes,
        "synthetic_kv": plan.synthetic_kv and x.what != "prefill",
        "plain_because": x.plain_because,
        "failed": x.failed,
    }


def _cells(x: Measurement) -> tuple[str, ...]:
    limit = human_rate(x.ceiling) + (" ×" if x.limit == "matmul" else "")
    read = human_bytes(int(x.work.bytes / x.tokens))
    case = (x.what, f"{x.context:,}", str(x.batch))
    if x.failed is not None:
        return (*case, x.failed, "–", read, limit, "–", "–")
    spread = f"{human_rate(min(x.rates))} to {human_rate(max(x.rates))}"
    peak = "–" if x.peak_bytes is None else human_bytes(x.peak_bytes)
    return (*case, human_rate(x.rate), spread, read, limit, f"{x.rate / x.ceiling:.0%}", peak)


def dtype_name(model: Model) -> str:
    return str(model.dtype).removeprefix("torch.")


def human_rate(rate: float) -> str:
    """A number of tokens a second, to three digits or to whole ones."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def human_flops(rate: float) -> str:
    """Operations a second."""
    for unit in ("GFLOP/s", "TFLOP/s"):
        rate /= 1e9 if unit[0] == "G" else 1e3
        if rate < 1000 or unit[0] == "T":
            break
    return f"{rate:.1f} {unit}"
