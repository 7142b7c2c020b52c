"""|difference| in colours: by position for each schedule, and by layer for each finding. HTML with inline SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from exactkv.verify.report import EXACT, NOT_SUPPORTED, UNDECIDED, VIOLATION, Diagnosis, Outcome, Report
from exactkv.verify.show.words import (
    SYMBOLS,
    Boundary,
    boundaries,
    clean,
    label,
    number,
    times,
    times_text,
    tolerance_of,
)

BELOW, ABOVE = 4, 7
"""Colours up to the tolerance, and beyond it. One more is for what is not finite."""
NOT_FINITE = BELOW + ABOVE
MOST_COLUMNS = 160
"""Longer texts show the worst of several positions in a cell."""
ROW_HEIGHT = 16
FIRST = ' class="first"'
ORDER = (VIOLATION, UNDECIDED, EXACT)


def _logarithmic(value: float, low: float, high: float, steps: int) -> int:
    """Which of ``steps`` equal parts of log(low) ... log(high) holds ``value``."""
    if high <= low or value >= high:
        return steps - 1
    part = math.log(max(value, low) / low) / math.log(high / low)
    return min(steps - 1, int(part * steps))


@dataclass(frozen=True)
class Scale:
    """From a difference in tolerances to a colour: ``noise`` to 1 are healthy, 1 to ``worst`` are not."""

    noise: float
    worst: float

    def color(self, ratio: float) -> int:
        if not math.isfinite(ratio):
            return NOT_FINITE
        if ratio <= 1:
            return _logarithmic(ratio, self.noise, 1.0, BELOW)
        return BELOW + _logarithmic(ratio, 1.0, self.worst, ABOVE)

    def starts(self) -> list[float]:
        """Where each finite color begins."""
        below = [self.noise ** (1 - i / BELOW) for i in range(BELOW)]
        return below + [self.worst ** (i / ABOVE) for i in range(ABOVE)]


def scale_of(report: Report) -> Scale:
    noise = times(report.noise, report.tolerance) or 0.1
    finite = [
        ratio
        for outcome in report.outcomes
        for value in outcome.differences
        if (ratio := _ratio(value, outcome, report)) is not None and math.isfinite(ratio)
    ]
    return Scale(min(max(noise, 1e-6), 0.5), max([10.0, *finite]))


def _ratio(value: float | None, outcome: Outcome, report: Report) -> float | None:
    """In tolerances. Where there is no tolerance, a difference of any size is beyond it."""
    if value is None:
        return None
    ratio = times(value, tolerance_of(outcome, report))
    if ratio is None:
        return 0.0 if value == 0 else 10.0 if math.isfinite(value) else math.inf
    return ratio


# By position.


def position_map(report: Report) -> str:
    """A table: a schedule a row, its positions as one drawing. "" where nothing was compared by position.

    Schedules on texts of far more than ``report.length`` tokens have a table of their own: on one scale with them
    the others would be a few pixels wide."""
    compared = [o for o in report.outcomes if o.status != NOT_SUPPORTED and any(v is not None for v in o.differences)]
    rows = sorted(compared, key=lambda o: ORDER.index(o.status) if o.status in ORDER else len(ORDER))
    usual = [o for o in rows if len(o.differences) <= 2 * report.length]
    longer = [o for o in rows if len(o.differences) > 2 * report.length]
    if not rows:
        return ""
    scale = scale_of(report)
    tables = [_table(group, name, report, scale) for group, name in ((usual, ""), (longer, "longer texts")) if group]
    return f'{_legend(scale, report)}{"".join(tables)}<output class="told" aria-live="polite"></output>'


def _table(rows: list[Outcome], name: str, report: Report, scale: Scale) -> str:
    count = max(len(o.differences) for o in rows)
    grid = _Grid.of(count, boundaries(report.layers, count))
    title = "Differences by position" + (f": {name}" if name else "")
    body = "".join(_map_row(outcome, report, grid, scale) for outcome in rows)
    return (
        (f"<h3>{name.capitalize()}</h3>" if name else "")
        + _rules(grid)
        + f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table class="map"><caption class="unseen">{title}</caption>'
        f'<thead><tr><th scope="col">schedule [cache]</th><th scope="col">{_axis(grid)}</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


@dataclass(frozen=True)
class _Grid:
    """How positions lie on the drawing. ``bucket``: positions in a cell; ``cell``: its width."""

    count: int
    bucket: int
    cell: int
    rules: tuple[Boundary, ...]

    @staticmethod
    def of(count: int, rules: list[Boundary]) -> _Grid:
        bucket = math.ceil(count / MOST_COLUMNS)
        columns = math.ceil(count / bucket)
        return _Grid(count, bucket, max(6, min(14, 900 // columns)), tuple(r for r in rules if r.position < count))

    @property
    def width(self) -> int:
        return math.ceil(self.count / self.bucket) * self.cell

    def x(self, position: int) -> float:
        return round(position / self.bucket * self.cell, 1)

    def lines(self, height: int) -> str:
        """Windows and chunks, as vertical rules."""
        paths = []
        for kind in ("sliding", "chunked"):
            places = sorted({r.position for r in self.rules if r.kind == kind})
            if places:
                path = "".join(f"M{self.x(place):g} 0v{height}" for place in places)
                paths.append(f'<path class="rule {kind}" d="{path}"/>')
        return "".join(paths)


def _svg(grid: _Grid, height: int, title: str, content: str) -> str:
    return (
        f'<svg width="{grid.width}" height="{height}" viewBox="0 0 {grid.width} {height}" role="img" '
        f'aria-label="{escape(title)}">{content}</svg>'
    )


def _axis(grid: _Grid) -> str:
    """Positions along the top: powers of two, as windows are, at least 60 pixels apart."""
    wanted = 60 / grid.cell * grid.bucket
    step = 1 << max(0, math.ceil(math.log2(wanted)))
    marks = "".join(
        f'<text x="{grid.x(place) + 2:g}" y="11">{place}</text><path class="tick" d="M{grid.x(place):g} 0v15"/>'
        for place in range(0, grid.count, step)
    )
    return _svg(grid, ROW_HEIGHT, f"positions 0 to {grid.count - 1}", marks)


def _map_row(outcome: Outcome, report: Report, grid: _Grid, scale: Scale) -> str:
    cells = []
    for start in range(0, len(outcome.differences), grid.bucket):
        seen = [v for v in outcome.differences[start : start + grid.bucket] if v is not None]
        if seen:
            worst = max(seen, key=lambda v: v if math.isfinite(v) else math.inf)
            cells.append(_cell(start, worst, outcome, report, grid, scale))
    drawing = _svg(grid, ROW_HEIGHT, _in_words(outcome, report), "".join(cells) + grid.lines(ROW_HEIGHT))
    name = escape(label(outcome))
    return (
        f'<tr data-status="{escape(outcome.status)}"><th scope="row" title="{name}">'
        f'<span class="status {_css(outcome.status)}">'
        f"{SYMBOLS.get(outcome.status, '')}</span> {name}</th><td>{drawing}</td></tr>"
    )


def _css(status: str) -> str:
    """A class name; unknown statuses have none."""
    return status.replace(" ", "-") if status in SYMBOLS else ""


def _cell(start: int, value: float, outcome: Outcome, report: Report, grid: _Grid, scale: Scale) -> str:
    ratio = _ratio(value, outcome, report) or 0.0
    last = min(start + grid.bucket, len(outcome.differences)) - 1
    where = f"position {start}" if last == start else f"positions {start} to {last}"
    gap = 1 if grid.cell > 7 else 0
    return (
        f'<rect class="c{scale.color(ratio)}" x="{grid.x(start):g}" width="{grid.cell - gap}" height="{ROW_HEIGHT}">'
        f"<title>{where}: {_amount(value, tolerance_of(outcome, report))}</title></rect>"
    )


def _amount(value: float, tolerance: float) -> str:
    """Such as "1.2e-3 (400 × tolerance)"."""
    if not math.isfinite(value):
        return "not finite"
    ratio = times_text(value, tolerance)
    return f"{number(value)} ({ratio.rstrip('×')} × tolerance)" if ratio else number(value)


def _in_words(outcome: Outcome, report: Report) -> str:
    """What the colours of a row say, for those who do not see them."""
    tolerance = tolerance_of(outcome, report)
    seen = [(i, v) for i, v in enumerate(outcome.differences) if v is not None]
    wrong = [i for i, v in seen if not v <= tolerance]
    position, worst = max(seen, key=lambda p: p[1] if math.isfinite(p[1]) else math.inf)
    return (
        f"{label(outcome)}: {clean(outcome.status)}; {len(seen)} positions compared, worst at {position}: "
        f"{_amount(worst, tolerance)}; beyond the tolerance: {_spans(wrong) or 'none'}"
    )


def _spans(places: list[int]) -> str:
    """Such as "9 to 15, 20"."""
    spans: list[list[int]] = []
    for place in places:
        if spans and spans[-1][1] == place - 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    words = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:12]]
    return ", ".join(words) + (", …" if len(spans) > 12 else "")


def _legend(scale: Scale, report: Report) -> str:
    """The colours, as one bar."""
    steps = "".join(
        f'<li><svg width="26" height="14" aria-hidden="true"><rect class="c{i}" width="26" height="14"/></svg>'
        f"<span>{words}</span></li>"
        for i, words in enumerate([*(_step_words(i, s, report) for i, s in enumerate(scale.starts())), "NaN, ∞"])
    )
    return f'<ul class="legend steps" aria-label="Colours, in tolerances">{steps}</ul>'


def _rules(grid: _Grid) -> str:
    """What the vertical rules are, and what has no colour."""
    rules = "".join(
        f'<li><svg width="26" height="14" aria-hidden="true"><path class="rule {kind}" d="M13 0v14"/></svg>'
        f"<span>{words}: {escape(', '.join(layers))}</span></li>"
        for kind, words in (("sliding", "the window is full"), ("chunked", "a chunk begins"))
        if (layers := list(dict.fromkeys(r.layer for r in grid.rules if r.kind == kind)))
    )
    bucket = f"<li><span>a cell is the worst of {grid.bucket} positions</span></li>" if grid.bucket > 1 else ""
    return f'<ul class="legend">{rules}<li><span>no colour: not compared</span></li>{bucket}</ul>'


def _step_words(index: int, start: float, report: Report) -> str:
    if index == 0:
        return f"noise {number(report.noise)}"
    if index == BELOW:
        return f"tolerance {number(report.tolerance)}"
    return f"{number(start)}×"


# By layer.


def layer_map(diagnosis: Diagnosis, layers: list[str]) -> str:
    """A box a layer, coloured from the least to the largest difference. "" where the target shows none."""
    values = diagnosis.layer_differences
    if not values:
        return ""
    finite = [v for v in values if math.isfinite(v) and v > 0]
    high = max(finite, default=1.0)
    low = max(min(finite, default=high), high * 1e-8)
    boxes = "".join(_layer_box(i, value, low, high, diagnosis, layers) for i, value in enumerate(values))
    return (
        "<h4>Difference of hidden states, by layer</h4>"
        f'<ol class="layers" aria-label="Largest difference of hidden states after each layer">{boxes}</ol>'
    )


def _layer_box(index: int, value: float, low: float, high: float, diagnosis: Diagnosis, layers: list[str]) -> str:
    """``index`` 0 is what goes into layer 0."""
    color = NOT_FINITE if not math.isfinite(value) else _logarithmic(value, low, high, NOT_FINITE) if value > 0 else 0
    layer = index - 1
    kind = clean(layers[layer]) if 0 <= layer < len(layers) else ""
    is_first = layer >= 0 and layer == diagnosis.first_layer
    return (
        f'<li{FIRST if is_first else ""}><svg width="100%" height="10" aria-hidden="true">'
        f'<rect class="c{color}" width="100%" height="10"/></svg>'
        f"<b>{'input' if layer < 0 else f'layer {layer}'}</b> <span>{escape(kind)}</span> "
        f"<span>{number(value)}</span>{' <em>first wrong</em>' if is_first else ''}</li>"
    )
