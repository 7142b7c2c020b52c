"""What is shown of a report: on terminals of any width, in HTML that nothing can break, and described in the docs."""

from __future__ import annotations

import io
import math
import re
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from exactkv.verify.kinds import KINDS
from exactkv.verify.report import Diagnosis, Outcome, Report
from exactkv.verify.show.heatmap import ABOVE, BELOW, NOT_FINITE, Scale
from exactkv.verify.show.html import html
from exactkv.verify.show.terminal import render, verdict
from exactkv.verify.show.words import boundaries, clean, findings, layers_words, number, script_of, times_text
from tests.verify import reports

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
NAMES = ["é漢字🙂 ragged", "a" * 300, "two\nlines\x1b[31m and \x00 escapes", "[bold]markup[/] :smile:", "lone \udcff"]
CASES = {
    "mixed": reports.mixed(),
    "exact": reports.report(),
    "nothing": reports.report([], layers=[], judged_by=[], versions={}),
    "all unsupported": reports.report([reports.unsupported("fork")]),
    "no tolerance": reports.report(
        [reports.exact(tolerance=None), reports.violation()], tolerance=0.0, scale=0.0, noise=0.0,
    ),
    "not finite": reports.report(
        [reports.violation(worst=math.inf, differences=[math.nan, None, math.inf, -0.0])], noise=math.nan,
        tolerance=math.nan, scale=math.inf,
    ),
    "names": reports.report([reports.exact(n, n) for n in NAMES] + [reports.violation(n, n, reason=n) for n in NAMES]),
    "injection": reports.report(
        [
            reports.violation(
                reports.INJECTION, reports.INJECTION, kinds=reports.INJECTION, reason=reports.INJECTION,
                diagnosis=reports.diagnosis(
                    **{f.name: reports.INJECTION for f in fields(Diagnosis) if f.type == "str"},
                    operations=[reports.INJECTION],
                ),
            ),
            reports.violation(reports.INJECTION, diagnosis=None, reason=reports.INJECTION),
            Outcome("a", "b", "C", reports.INJECTION),
        ],
        target=reports.INJECTION, model=reports.INJECTION, engine=reports.INJECTION, dtype=reports.INJECTION,
        layers=["chunked 8" + reports.INJECTION] * 4, versions={reports.INJECTION: reports.INJECTION},
        judged_by=[reports.INJECTION], notes=[reports.INJECTION], config={"a": reports.INJECTION},
    ),
    "long": reports.report([reports.violation(differences=reports.differences(9, 3000))], length=3000),
}  # fmt: skip
every = pytest.mark.parametrize("report", CASES.values(), ids=CASES.keys())


def shown(report: Report, width: int = 80, **options: Any) -> str:
    stream = io.StringIO()
    render(report, Console(file=stream, width=width, **options))
    return stream.getvalue()


# Terminal.


@every
@pytest.mark.parametrize("width", [40, 80, 160])
def test_any_report_fits_any_terminal(report: Report, width: int) -> None:
    text = shown(report, width)
    console = Console(width=width)
    assert "\x1b" not in text and "\x00" not in text
    assert all(console.measure(line).maximum <= width for line in text.splitlines() if "[" not in line)


def test_at_80_columns() -> None:
    text = shown(reports.mixed())
    lines = [line.rstrip() for line in text.splitlines()]
    assert "pieces                    static   ✗ violation  ABD       3.1   3.0e5    56  0.6" in lines
    assert "✗ steps [static]: position 9 differs by 3.1e-2" in lines
    assert "  dynamic  batches (ragged batch, join, leave); a prefix store (prompt store)" in lines
    assert "✗ A  allocated size taken for live length" in lines
    assert "  first layer     1 (chunked 8)" in lines
    assert "    3. Feed('a', 12)" in lines
    assert "  layers       4: 2 × chunked 8, sliding 12, full" in lines
    assert " ".join(lines[-2:]) == "✗ " + reports.mixed().summary()


def test_wide_terminals_have_reasons_in_the_table() -> None:
    text = shown(reports.mixed(), 160)
    assert re.search(r"^save and load +static .* NaN at position 20 *$", text, re.MULTILINE)
    assert "✗ save and load [static]:" not in text


def test_each_distinct_fault_has_one_section() -> None:
    text = shown(reports.mixed(), 160)
    assert text.count("allocated size taken for live length") == 1
    assert "seen by         steps [static], pieces [static]" in text
    assert "--script FILE writes it" in text
    assert "NOT shown by a second seed" in text


def test_colour_only_where_asked_for() -> None:
    assert "\x1b[1;31m✗ violation" in shown(reports.mixed(), force_terminal=True, color_system="standard", _environ={})


def test_a_terminal_of_ascii_confuses_nothing() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    render(reports.mixed(), Console(file=stream, width=80))
    stream.seek(0)
    text = stream.read()
    assert re.findall(r"(.) (exact|violation|undecided) ", text)[0] == ("+", "exact")
    assert "x violation" in text and "? violation" not in text and text.count("? undecided") == 1


def test_the_verdict_alone() -> None:
    stream = io.StringIO()
    verdict(reports.report(), Console(file=stream, width=200))
    assert stream.getvalue() == "✓ Llama4ForCausalLM, shrunk: exact (1 exact; tolerance 1.0e-05)\n"


# Words.


def test_numbers() -> None:
    given = [None, math.nan, math.inf, 0.0, 1.234e-7, 0.0123, 3.14159, 42.0, 400.0, 31000.0]
    assert [number(value) for value in given] == ["–", "NaN", "∞", "0", "1.2e-7", "0.012", "3.1", "42", "400", "3.1e4"]
    assert times_text(4e-3, 1e-5) == "400×" and times_text(1.0, 0.0) == times_text(math.nan, 1.0) == ""


def test_what_moves_the_cursor_is_taken_out() -> None:
    assert clean("two\n lines\t\x1b[31m\udcff") == "two lines �[31m�"


def test_layers_are_told_in_order_while_that_is_short() -> None:
    assert layers_words(["sliding 8", "sliding 8", "full"]) == "3: 2 × sliding 8, full"
    assert layers_words(["sliding 8", "full"] * 9) == "18: 9 × sliding 8, 9 × full"
    assert layers_words([]) == "not told by the target"


def test_boundaries() -> None:
    found = boundaries(["full", "sliding 8", "chunked 16", "chunked 16", "sliding 0", "recurrent", "chunked 1"], 50)
    assert [(b.position, b.kind) for b in found] == [(8, "sliding"), *((p, "chunked") for p in (16, 32, 48))]
    assert boundaries(["sliding 64 + 4 anchors"], 64) == []


def test_the_best_evidence_is_shown() -> None:
    weak = reports.violation("first", diagnosis=reports.diagnosis(confirmed=False))
    bare = reports.violation("second", diagnosis=reports.diagnosis(script=""))
    long = reports.violation("third", diagnosis=reports.diagnosis(operations=["x"] * 9))
    best = reports.violation("fourth")
    (finding,) = findings(reports.report([weak, bare, long, best]))
    assert finding.outcome is best and len(finding.outcomes) == 4
    found = script_of(reports.report([bare, best]))
    assert found is not None and found[0] is best
    assert script_of(reports.report([bare])) is None


# HTML.

VOID = {"meta", "br", "path", "rect", "img", "input"}


class Page(HTMLParser):
    """Elements as a browser sees them; that they nest is checked on the way."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in attributes.items())]


@every
def test_any_report_is_a_whole_page_that_loads_nothing(report: Report) -> None:
    text = html(report)
    page = Page(text)
    text.encode()
    assert "://" not in text and "\x00" not in text and "\x1b" not in text
    assert len(page.all("script")) == 1 and not page.all("img") and not page.all("link")
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)
    assert clean(report.summary()) in "".join(page.text)


def test_injection_is_shown_as_it_is() -> None:
    page = Page(html(CASES["injection"]))
    assert "".join(page.text).count(clean(reports.INJECTION)) > 20


def test_the_map_of_positions() -> None:
    text = html(reports.mixed())
    page = Page(text)
    rows = [a["aria-label"] or "" for a in page.all("svg", role="img")]
    assert rows[0] == "positions 0 to 63"
    assert rows[1].startswith("steps [static]: violation; 60 positions compared, worst at 61: 1.0e-3 (97 × tolerance)")
    assert rows[1].endswith("beyond the tolerance: 9 to 63")
    assert rows[3].endswith("worst at 20: not finite; beyond the tolerance: 20 to 21")
    assert "<title>position 21: not finite</title>" in text
    assert re.search(r"<title>position 4: \S+e-7 \(0\.\d+ × tolerance\)</title>", text)
    assert "<title>position 3:" not in text  # not compared
    assert 'class="rule chunked" d="M112 0v16M224 0v16' in text and 'class="rule sliding" d="M168 0v16"' in text
    assert "the window is full: sliding 12" in text and "a chunk begins: chunked 8" in text


def test_long_texts_are_drawn_in_buckets() -> None:
    text = html(CASES["long"])
    assert "<title>positions 0 to 18: " in text and "<title>positions 2983 to 2999: " in text
    assert "a cell is the worst of 19 positions" in text
    assert len(text) < 100_000


def test_longer_texts_do_not_squeeze_the_others() -> None:
    long = reports.exact("long", differences=reports.differences(length=600))
    page = Page(html(reports.report([reports.exact(), long, reports.exact("pieces")])))
    labels = [(a["aria-label"] or "").split(":")[0] for a in page.all("svg", role="img")]
    assert labels == [
        "positions 0 to 63",
        "steps [dynamic]",
        "pieces [dynamic]",
        "positions 0 to 599",
        "long [dynamic]",
    ]
    assert len(page.all("table", **{"class": "map"})) == 2


def test_colours_are_in_order() -> None:
    scale = Scale(noise=0.1, worst=1e6)
    ratios = [0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 1.001, 10.0, 1e3, 1e5, 1e6, math.inf]
    colours = [scale.color(ratio) for ratio in ratios]
    assert colours == sorted(colours) and colours[0] == 0 and colours[-1] == NOT_FINITE
    assert colours[5] == BELOW - 1 and colours[6] == BELOW and colours[-2] == BELOW + ABOVE - 1
    assert len(scale.starts()) == NOT_FINITE and scale.starts() == sorted(scale.starts())


def test_the_map_of_layers_marks_the_first_wrong_one() -> None:
    page = html(reports.mixed())
    boxes = re.findall(r"<li( class=\"first\")?><svg width=\"100%\".*?<b>(.*?)</b> <span>(.*?)</span>", page)
    assert boxes == [
        ("", "input", ""), ("", "layer 0", "chunked 8"), (' class="first"', "layer 1", "chunked 8"),
        ("", "layer 2", "sliding 12"), ("", "layer 3", "full"),
    ]  # fmt: skip


def test_tables_have_headers_and_captions() -> None:
    page = Page(html(reports.mixed()))
    assert len(page.all("caption")) == len(page.all("table")) == 2
    assert len(page.all("th", scope="row")) == len(reports.mixed().outcomes) + 5
    assert len(page.all("tr", **{"data-status": "not supported"})) == 4


def test_the_script_is_in_the_page_word_for_word() -> None:
    page = Page(html(reports.mixed()))
    assert reports.diagnosis().script in "".join(page.text)


# Docs.


@pytest.mark.parametrize("record", [Report, Outcome, Diagnosis])
def test_the_docs_name_every_field(record: type) -> None:
    sections = {Report: "The report:", Outcome: "An outcome,", Diagnosis: "A diagnosis:"}
    section = DOCS.split(sections[record])[1].split("\n\n")[1]
    names = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in section.splitlines())))
    assert names - {"format", "exact"} == {f.name for f in fields(record)}
    if record is Report:
        assert names == set(reports.mixed().to_json())


def test_the_docs_tell_the_kinds() -> None:
    assert all(f"| {letter} | {title} |" in DOCS for letter, title in KINDS.items())


def test_the_docs_example_of_an_engine_runs(capsys: pytest.CaptureFixture[str]) -> None:
    engine, use = re.findall(r"```python\n(.*?)```", DOCS.split("## An engine of your own")[1], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(engine, "docs/verify.md", "exec"), names)
    exec(compile(use, "docs/verify.md", "exec"), names)
    assert names["report"].exact and len(names["report"].of("exact")) > 10
    assert "toy: exact" in capsys.readouterr().out


def test_the_docs_three_lines_are_a_test() -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", DOCS.split("## In your own test suite")[1].split("##")[0], re.DOTALL)
    engine = re.findall(r"```python\n(.*?)```", DOCS.split("## An engine of your own")[1], re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(engine, "docs/verify.md", "exec"), names)
    names["target"] = names["Toy"]()
    exec(compile(lines, "docs/verify.md", "exec"), names)
    names["test_exact"]()
