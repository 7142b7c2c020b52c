"""The measuring feeds what it says that it does, from where it says, and its figures fit together."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from exactkv.bench import machine
from exactkv.bench.ceilings import Ceilings, Sizes, measure_ceilings
from exactkv.bench.machine import PeakMemory, process_seconds
from exactkv.bench.measure import (
    Measurement,
    Plan,
    default_contexts,
    feed,
    fill_with_random_rows,
    measure,
    measure_startup,
    random_prompt,
)
from exactkv.bench.plot import svg
from exactkv.bench.report import Result, human_flops, human_rate
from exactkv.bench.work import Formula, Work
from exactkv.errors import InputError
from exactkv.models.model import Model
from tests.hybrid import hybrid_model
from tests.tiny import FULL, chunk, tiny_llama4, tiny_model, window

CEILINGS = Ceilings(1e9, "a test", 1e12, 16, 0.0)
CPU = torch.device("cpu")
PLAN = Plan((11, 30), (1, 3), 5, (7, 24), 8, 2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int]]:
    """(starts, width) of every walk of a decoder."""
    from exactkv.models.decoder import Decoder

    seen: list[tuple[tuple[int, ...], int]] = []
    original = Decoder.__call__

    def counted(self: Decoder, tokens: torch.Tensor, step: Any, *rest: Any) -> Any:
        seen.append((step.starts, tokens.shape[1]))
        return original(self, tokens, step, *rest)

    monkeypatch.setattr(Decoder, "__call__", counted)
    return seen


class NotAsked(PeakMemory):
    """Memory that is not measured, which takes longer than what tiny models do."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def over(self) -> int | None:
        return 1000 * self.resets


def run(model: Model, plan: Plan) -> list[Measurement]:
    return list(measure(model, plan, CEILINGS, NotAsked(), lambda *_: None))


MODELS = {
    "full, window and chunk": lambda: tiny_model([FULL, window(6), chunk(8)], torch.float32),
    "llama4": lambda: tiny_llama4(8),
    "hybrid": lambda: hybrid_model(dtype=torch.float32),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_is_given_what_is_told(name: str, calls: list[tuple[tuple[int, ...], int]]) -> None:
    model = MODELS[name]()
    found = run(model, PLAN)
    assert [(x.what, x.context, x.batch) for x in found] == [
        (what, n, b) for what, lengths in (("prefill", (7, 24)), ("decode", (11, 30))) for n in lengths for b in (1, 3)
    ]
    expected = 0
    for x in found:
        assert len(x.seconds) == 2 and min(x.seconds) > 0 and x.failed is None
        if x.what == "prefill":
            assert x.tokens == x.context * x.batch
            expected += 2 * x.tokens + x.batch * min(x.context, 8)  # and the first piece once before
        else:
            assert x.tokens == 5 * x.batch
            expected += 2 * x.tokens + x.batch * (2 + x.context)
    assert sum(len(starts) * width for starts, width in calls) == expected
    decoded = [starts for starts, width in calls if width == 1 and starts[0] >= 30 and len(starts) == 3]
    assert decoded == [(p,) * 3 for p in (30, 31)] + [(p,) * 3 for p in range(30, 35)] * 2


def test_work_and_ceilings_are_the_formulas() -> None:
    model = tiny_model([FULL, window(6)], torch.float32)
    formula = Formula(model.spec, model.dtype)
    for x in run(model, PLAN):
        pieces = [8] * (x.context // 8) + ([x.context % 8] if x.context % 8 else [])
        work = formula.prompt(x.batch, pieces) if x.what == "prefill" else formula.steps(x.batch, x.context, 5)
        assert x.work == work and x.ceiling == x.tokens / max(work.bytes / 1e9, work.flops / 1e12)
        assert x.rate == pytest.approx(sum(x.rates) / 2) and x.rates == [x.tokens / s for s in x.seconds]


def test_the_limit_is_the_one_that_takes_longer() -> None:
    assert CEILINGS.limit(Work(1e9, 0, 1e10)) == "reading" and CEILINGS.limit(Work(1e6, 0, 1e10)) == "matmul"
    assert CEILINGS.least_seconds(Work(1e9, 1e9, 1e10)) == 2.0 and CEILINGS.least_seconds(Work(0, 0, 1e12)) == 1.0


@pytest.mark.parametrize("name", MODELS)
def test_random_rows_stand_where_fed_ones_do(name: str, calls: list[tuple[tuple[int, ...], int]]) -> None:
    model = MODELS[name]()
    prompt = random_prompt(2, 30, model.spec.vocab_size)
    filled, fed = model.new_cache(2), model.new_cache(2)
    fill_with_random_rows(filled, prompt)
    assert calls == []
    feed(model, fed, prompt, 30, "none")
    filled.check_integrity()
    assert filled.lengths == fed.lengths == [30, 30] and filled.tokens(1) == fed.tokens(1) == prompt[1].tolist()
    assert filled.nbytes == fed.nbytes
    logits = model([[1], [2]], cache=filled, logits="last")
    assert logits is not None and bool(logits.isfinite().all())


def test_synthetic_contexts_are_not_fed(calls: list[tuple[tuple[int, ...], int]]) -> None:
    found = run(tiny_model([FULL, chunk(8)], torch.float32), replace(PLAN, synthetic_kv=True, prefill=()))
    assert {width for _, width in calls} == {1} and [x.what for x in found] == ["decode"] * 4
    assert {min(starts) for starts, _ in calls} == {*range(11, 16), *range(30, 35)}


def test_feeding_in_pieces_is_feeding_at_once() -> None:
    model = tiny_model([FULL, window(6)])
    prompt = random_prompt(2, 21, 97)
    logits = feed(model, model.new_cache(2), prompt, 4)
    whole = model(prompt)
    assert logits is not None and whole is not None
    assert torch.allclose(logits, whole[:, -1], rtol=1e-10, atol=1e-10)


def test_the_first_token_is_waited_for_once(calls: list[tuple[tuple[int, ...], int]]) -> None:
    startup = measure_startup(tiny_model([FULL], torch.float32), 1.5)
    assert calls == [((0,), 16), ((16,), 1)] and startup.prompt_tokens == 16 and startup.weights == 1.5
    assert startup.first_token > 0 < startup.second_token
    assert startup.process is None or startup.process > startup.first_token


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contexts": (60,)}, "a context of 60 and 5 tokens after it are 65; this model takes at most 64"),
        ({"prefill": (65,)}, "a prompt of 65 tokens; this model takes at most 64"),
        ({"batches": (0,)}, "one of the numbers to measure by is 0"),
    ],
)
def test_a_plan_that_does_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(tiny_model([FULL], max_length=64), replace(PLAN, **changes))
    run(tiny_model([FULL], torch.float32, max_length=64), replace(PLAN, contexts=(59,), prefill=(64,)))


def test_contexts_by_default_fit() -> None:
    assert default_contexts(1 << 17, 64) == (512, 2048) and default_contexts(1024, 64) == (512,)
    assert default_contexts(576, 64) == (512,) and default_contexts(575, 64) == (255,)


def test_memory_that_does_not_suffice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model([FULL], torch.float32)
    original = Model.__call__

    def limited(self: Model, tokens: Any, *rest: Any, **named: Any) -> Any:
        if len(tokens) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, tokens, *rest, **named)

    monkeypatch.setattr(Model, "__call__", limited)
    found = run(model, PLAN)
    assert {x.batch: x.failed for x in found} == {1: None, 3: "out of memory"} and len(found) == 8
    assert json.loads(json.dumps(result(model, found).as_dict()))["measurements"][1]["tokens_per_second"] is None
    assert "out of memory" in shown(result(model, found), 120)


def test_measured_ceilings_are_of_this_machine() -> None:
    sizes = Sizes(1 << 22, 64, 2, 2, 0.0)
    for dtype in (torch.float32, torch.bfloat16):
        found = measure_ceilings(CPU, dtype, sizes)
        assert 1e7 < found.reading < 1e13 and 1e6 < found.matmul < 1e15 and found.matmul_side == 64
        assert found.seconds > 0 and "triton" not in found.reading_by


@pytest.mark.skipif(machine._of_process("VmHWM") is None, reason="the system does not say what a process takes")
def test_the_peak_is_of_what_was_taken_since() -> None:
    memory = PeakMemory(CPU, 0)
    taken = torch.ones(100 << 20, dtype=torch.uint8)
    del taken
    if (peak := memory.over()) is not None:
        assert peak > 90 << 20
    memory.reset()
    assert memory.over() is None or memory.over() < 90 << 20  # type: ignore[operator]


def test_the_process_has_an_age() -> None:
    age = process_seconds()
    assert age is None or 0 < age < 1e6


def result(model: Model, found: list[Measurement]) -> Result:
    return Result("<tiny & model>", True, model, PLAN, CEILINGS, measure_startup(model, 0.1), found)


def shown(made: Result, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    made.print_table(console)
    return console.export_text()


def test_the_report_says_what_was_measured() -> None:
    model = tiny_model([FULL, window(6)], torch.float32)
    found = run(model, PLAN)
    made = result(model, found)
    told = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert told["schema"] == 1 and told["model"]["weights_bytes"] == model.nbytes
    assert told["settings"]["contexts"] == [11, 30] and told["settings"]["repeat"] == 2
    for x, row in zip(found, told["measurements"], strict=True):
        assert row["slowest"] <= row["tokens_per_second"] <= row["fastest"]
        assert row["of_ceiling"] == pytest.approx(row["tokens_per_second"] / row["ceiling_tokens_per_second"])
        per_token = row["weight_bytes_per_token"] + row["cache_bytes_per_token"]
        assert per_token * row["tokens"] == pytest.approx(x.work.bytes)
        assert row["ceiling_tokens_per_second"] <= 1e9 / per_token * (1 + 1e-9)
    for width in (40, 80, 120):
        text = shown(made, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(human_rate(x.rate) in text for x in found)


def test_the_picture_is_well_formed() -> None:
    model = tiny_model([FULL], torch.float32)
    found = run(model, PLAN)
    tree = ET.fromstring(svg(result(model, found)))
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in tree.iter(f"{space}text")]
    assert texts[0] is not None and "<tiny & model>" in texts[0] and "decode, tokens/s" in texts
    titles = [t.text for t in tree.iter(f"{space}title")]
    expected = [f"{human_rate(x.rate)} tokens/s, {x.rate / x.ceiling:.0%} of the ceiling" for x in found]
    assert sorted(map(str, titles)) == sorted(expected)
    for element in tree.iter():
        for key in ("x", "y", "cx", "cy", "x1", "y1", "x2", "y2"):
            if (value := element.get(key)) is not None:
                assert math.isfinite(float(value)) and 0 <= float(value) <= float(tree.get("height", 0)) * 2
    few = [replace(x, failed="out of memory", seconds=()) for x in found]
    ET.fromstring(svg(result(model, few)))
    ET.fromstring(svg(result(model, found[:1])))


def test_rates_in_words() -> None:
    assert [human_rate(x) for x in (0.123, 12.34, 99.96, 123.4, 54321.0)] == ["0.12", "12.3", "100.0", "123", "54,321"]
    assert human_flops(12.3e9) == "12.3 GFLOP/s" and human_flops(765.4e12) == "765.4 TFLOP/s"
