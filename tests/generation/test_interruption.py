"""An interruption in any line of what takes and tells tokens: nothing is lost, nothing told twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from exactkv.generation import Engine, Piece, Sampling, Structure, make_text, stream
from tests.generation.test_conversation import chat_model

LINES = ("text.py", "stopping.py", "text_stream.py", "history.py", "matcher.py")
"""Files in any line of which a test interrupts."""


def interrupted_at(line: int, work: Callable[[], Any]) -> tuple[Any, bool]:
    """``work``, interrupted before the line-th line of LINES that it comes to: its result, and whether it was."""
    seen, hit = 0, False

    def each(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen, hit
        if event == "line":
            seen += 1
            if seen == line:
                hit = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return each

    def entered(frame: Any, event: str, _: Any) -> Any:
        return each if os.path.basename(frame.f_code.co_filename) in LINES else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        return work(), hit
    except KeyboardInterrupt:
        return None, hit
    finally:
        sys.settrace(before)


def test_interrupted_in_any_line_that_takes_or_tells_a_token() -> None:
    """Of the lines through which a token comes into its text, each in turn: tokens, text and reason are told once."""
    model = chat_model("sliding")
    asked: list[dict[str, Any]] = [
        {"prompt": [1, 2, 3] * 5, "max_tokens": 7, "stop": "q", "stop_token_ids": (), "logprobs": 1},
        {"prompt": [9, 8] * 4, "max_tokens": 5, "stop_token_ids": tuple(range(0, 200, 9)),
         "sampling": Sampling(temperature=1.0, seed=3, repetition_penalty=1.2)},
        {"prompt": [4, 5, 6], "max_tokens": 6, "structure": Structure.regex("[ab]{2,4}c")},
    ]  # fmt: skip
    expected = []
    for one in asked:
        plain = stream(model, **one)
        pieces = list(plain)
        expected.append((plain.tokens, plain.text, plain.finish_reason, plain.matched, len(plain.logprobs)))
        assert "".join(p.text for p in pieces) == plain.text
    line, hit = 0, True
    while hit:
        line += 7 if line > 100 else 1
        engine = Engine(model)
        made = [engine.add(make_text(model, **one)) for one in asked]
        told: dict[int, list[Piece]] = {r.number: [] for r in made}
        hit = False
        for _ in range(100):
            updates, now = interrupted_at(line if not hit else -1, engine.step)
            hit = hit or now
            for update in updates or []:
                told[update.request.number].append(update.piece)
            if not engine.busy:
                break
        found = []
        for request in made:
            pieces = told[request.number]
            tokens, text = [t for p in pieces for t in p.tokens], "".join(p.text for p in pieces)
            assert (tokens, text) == (request.text.generated, request.text.shown), line
            found.append(
                (tokens, text, pieces[-1].finish_reason, pieces[-1].matched, sum(len(p.logprobs) for p in pieces))
            )
        assert found == expected, line
    assert line > 150
