"""The first look: two real models generate, then decoding is compared with one forward pass.

Run by `make demo`. It uses the embedded models, so it needs no network; on two CPU cores it takes about two
minutes. Exit code 1 where the comparison is beyond the bound.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.rule import Rule
from rich.table import Table

import exactkv
from exactkv.cache.report import human_bytes
from exactkv.generation import Generation
from exactkv.models import embedded

QUESTION = "Explain in two sentences why the sky is blue."
OPENING = "The history of the lighthouse begins"
NUM_TOKENS = 700
"""More than Gemma's window of 512, so that windowed layers must forget."""
BOUND = 5e-6
"""The largest difference allowed in float32, as a part of the largest logit."""

console = Console(highlight=False)


def main() -> int:
    answer_a_question()
    tokens = write_past_the_window(exactkv.load(embedded.find("gemma3")))
    return compare(exactkv.load(embedded.find("gemma3"), dtype="float32"), tokens)


def answer_a_question() -> None:
    headline("SmolLM2-135M-Instruct answers")
    model = exactkv.load(embedded.find("smollm2"))
    console.print(QUESTION, style="bold")
    show(exactkv.stream(model, [{"role": "user", "content": QUESTION}], max_tokens=120))


def write_past_the_window(model: exactkv.Model) -> list[int]:
    """Let the model write on; returns all tokens, those of the opening first."""
    headline(f"Gemma 3 270M writes {NUM_TOKENS} tokens, past its window of 512")
    console.print(OPENING, style="bold", end="")
    sampling = exactkv.Sampling(temperature=0.9, top_p=0.9, seed=2)
    generation = exactkv.stream(model, OPENING, max_tokens=NUM_TOKENS, sampling=sampling, stop_token_ids=())
    show(generation)
    console.print(str(generation.cache), style="dim")
    return [*generation.prompt, *generation.tokens]


class Comparison(NamedTuple):
    """``difference``: the largest absolute one of any two logits, found at ``position``; ``largest``: of all
    logits of the forward pass, the greatest absolute value."""

    difference: float
    position: int
    largest: float
    cache: exactkv.Cache

    @property
    def ratio(self) -> float:
        return self.difference / self.largest


def compare(model: exactkv.Model, tokens: Sequence[int]) -> int:
    headline("The same text in float32: token by token, and in one forward pass")
    found = decode_against_forward(model, tokens)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("tokens, logits compared", f"{len(tokens)}, {len(tokens) * model.spec.vocab_size:,}")
    table.add_row("largest difference of two logits", f"{found.difference:.2e} (at position {found.position})")
    table.add_row("largest logit", f"{found.largest:.2f}")
    table.add_row("ratio", f"[bold]{found.ratio:.1e}[/] (bound {BOUND:.0e})")
    console.print(table)
    console.print()
    console.print(memory(model, found.cache))
    if not found.ratio <= BOUND:  # NaN is beyond it, too
        console.print("\nDecoding and forward pass DIFFER.", style="bold red")
        return 1
    console.print("\nDecoding through the cache equals one forward pass.", style="bold green")
    return 0


def decode_against_forward(model: exactkv.Model, tokens: Sequence[int]) -> Comparison:
    expected = model([tokens])  # [1, T, V], 0.7 GB
    assert expected is not None
    cache = model.new_cache()
    difference, position = 0.0, 0
    for p, token in enumerate(track(tokens, "decoding", console=console, transient=True)):
        logits = model([[token]], cache=cache, logits="last")
        assert logits is not None
        here = float((logits[0] - expected[0, p]).abs().max())
        if not here <= difference:
            difference, position = here, p
    return Comparison(difference, position, float(expected.abs().max()), cache)


def memory(model: exactkv.Model, cache: exactkv.Cache) -> Table:
    """What the cache takes now, and at most at the model's maximum; beside it, what every row would take."""
    now, most = cache.lengths[0], model.spec.max_length
    table = Table("cache", "with windows", "without", "saved", box=None, pad_edge=False)
    for name, length, held in (
        (f"now, {now:,} tokens", now, cache.nbytes),
        (f"at {most:,} tokens", most, row_bytes(model, most, windows=True)),
    ):
        full = row_bytes(model, length, windows=False)
        table.add_row(name, human_bytes(held), human_bytes(full), f"[bold]{1 - held / full:.0%}[/]")
    return table


def row_bytes(model: exactkv.Model, length: int, windows: bool) -> int:
    """Bytes of keys and values of ``length`` tokens. A windowed layer takes at most 1.25 times its window."""
    total = 0
    for layer in (layer.attention for layer in model.spec.layers):
        bound = layer.pattern.bound
        rows = min(length, bound + bound // 4) if windows and bound is not None else length
        total += rows * 2 * layer.num_kv_heads * layer.head_dim * model.dtype.itemsize
    return total


def show(generation: Generation) -> None:
    """Print the text as it comes, then its speed."""
    for piece in generation:
        console.out(piece.text, end="", highlight=False)
    stats = generation.stats
    console.print(
        f"\n\n{stats.prompt_tokens} + {stats.generated_tokens} tokens, {stats.decode_rate or 0:.1f} tokens/s",
        style="dim",
    )


def headline(text: str) -> None:
    console.print()
    console.print(Rule(text, align="left"))


if __name__ == "__main__":
    started = time.perf_counter()
    code = main()
    console.print(f"({time.perf_counter() - started:.0f} s)", style="dim")
    sys.exit(code)
