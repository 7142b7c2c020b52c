"""The figures as a picture: rates over contexts, a line for each batch size, the ceilings dashed. SVG, written by hand:
a library for two charts would be the largest dependency of all."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

from exactkv.bench.measure import Measurement
from exactkv.bench.report import Result, dtype_name, human_rate

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, KEY = 460, 320, 70, 64, 48, 22
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people tell apart who do not see all colors."""
KINDS = ("prefill", "decode", "decode ahead")


def svg(result: Result) -> str:
    """A picture of ``result``, a chart for each kind of measurement that has figures."""
    kinds = [kind for kind in KINDS if any(_is(x, kind) for x in result.measurements)]
    charts = [[x for x in result.measurements if _is(x, kind)] for kind in kinds]
    rows = max((len({x.batch for x in chart}) for chart in charts), default=0)
    width, height = max(1, len(charts)) * WIDTH, TOP + HEIGHT + BOTTOM + KEY * (rows + 1)
    title = f"{result.name}, {dtype_name(result.model)}, on {result.as_dict()['machine']['name']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="24" font-size="15">{escape(title)}</text>',
    ]
    for i, (kind, chart) in enumerate(zip(kinds, charts, strict=True)):
        parts.append(f'<g transform="translate({i * WIDTH},0)">')
        parts += _chart(kind, chart)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _is(x: Measurement, kind: str) -> bool:
    return x.what == kind and x.failed is None


def _chart(kind: str, chart: Sequence[Measurement]) -> list[str]:
    contexts = sorted({x.context for x in chart})
    values = [value for x in chart for value in (*x.rates, x.ceiling)]
    low, high = 10 ** floor(log10(min(values))), 10 ** ceil(log10(max(values)))
    high = high if high > low else low * 10

    def x_of(context: int) -> float:
        if len(contexts) == 1:
            return LEFT + (WIDTH - LEFT - 20) / 2
        first, last = log10(contexts[0]), log10(contexts[-1])
        return LEFT + 16 + (WIDTH - LEFT - 52) * (log10(context) - first) / (last - first)

    def y_of(rate: float) -> float:
        return TOP + HEIGHT * (1 - (log10(rate) - log10(low)) / (log10(high) - log10(low)))

    parts = [f'<text x="{LEFT}" y="{TOP - 14}" font-weight="bold">{kind}, tokens/s</text>']
    for power in range(round(log10(low)), round(log10(high)) + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g}</text>')
    for context in contexts:
        parts.append(f'<text x="{x_of(context):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{context:,}</text>')
    what = "prompt tokens" if kind == "prefill" else "tokens of context"
    parts.append(f'<text x="{(LEFT + WIDTH - 20) / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{what}</text>')
    for i, batch in enumerate(sorted({x.batch for x in chart})):
        mine = sorted((x for x in chart if x.batch == batch), key=lambda x: x.context)
        color, y = COLORS[i % len(COLORS)], TOP + HEIGHT + BOTTOM + KEY * (i + 0.5)
        parts.append(_line([(x_of(x.context), y_of(x.ceiling)) for x in mine], color, ' stroke-dasharray="5 4"'))
        parts.append(_line([(x_of(x.context), y_of(x.rate)) for x in mine], color))
        parts += [_point(x_of(x.context), y_of(x.rate), color, x) for x in mine]
        parts += [
            f'<line x1="{x_of(x.context):.1f}" y1="{y_of(min(x.rates)):.1f}" x2="{x_of(x.context):.1f}" '
            f'y2="{y_of(max(x.rates)):.1f}" stroke="{color}" stroke-width="5" stroke-opacity="0.35"/>'
            for x in mine
        ]
        parts.append(f'<circle cx="{LEFT + 6}" cy="{y - 4:.1f}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{y:.1f}">batch {batch}; dashed: its ceiling</text>')
    return parts


def _line(points: Sequence[tuple[float, float]], color: str, more: str = "") -> str:
    if len(points) == 1:  # a line of one point is not seen: a short one through it
        ((x, y),) = points
        points = [(x - 14, y), (x + 14, y)]
    given = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{given}" fill="none" stroke="{color}" stroke-width="1.5"{more}/>'


def _point(x: float, y: float, color: str, m: Measurement) -> str:
    said = f"{human_rate(m.rate)} tokens/s, {m.rate / m.ceiling:.0%} of the ceiling"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{said}</title></circle>'
