"""A report as one HTML file that stands alone: no other host, readable without scripts, on a phone, by ear."""

from __future__ import annotations

import json
from html import escape

from exactkv.verify.kinds import KINDS
from exactkv.verify.report import EXACT, UNDECIDED, VIOLATION, Diagnosis, Outcome, Report
from exactkv.verify.show.heatmap import layer_map, position_map
from exactkv.verify.show.style import CSS, SCRIPT
from exactkv.verify.show.words import (
    SYMBOLS,
    Finding,
    clean,
    facts,
    findings,
    label,
    layer_words,
    number,
    plain_lines,
    position_words,
    seed_words,
    times_text,
    tolerance_of,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser too is told to load nothing."""


def html(report: Report) -> str:
    """The whole page. Everything that comes from the report is escaped."""
    title = escape(clean(report.target))
    parts = [_head(report), _findings(report), _positions(report), _outcomes(report), _config(report)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>exactkv verify: {title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _css(status: str) -> str:
    return status.replace(" ", "-") if status in SYMBOLS else ""


def _pairs(rows: list[tuple[str, str]]) -> str:
    """Names and values, neither of them escaped yet."""
    return "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in rows if v) + "</dl>"


def _head(report: Report) -> str:
    status = EXACT if report.exact else VIOLATION if report.violations else UNDECIDED
    return (
        f"<header><h1>exactkv verify: {escape(clean(report.target))}</h1>"
        f'<p class="verdict {_css(status)}">{SYMBOLS[status]} {escape(clean(report.summary()))}</p>'
        f"{_pairs(facts(report))}</header>"
    )


def _positions(report: Report) -> str:
    drawn = position_map(report) or "<p>No logits were compared by position.</p>"
    return (
        '<section aria-labelledby="positions"><h2 id="positions">|difference| of logits by position</h2>'
        "<p>How far each schedule lies from one full pass, in tolerances, on a logarithmic scale.</p>"
        f"{drawn}</section>"
    )


# The table.

COLUMNS = (
    ("schedule", ""), ("cache", ""), ("status", ""), ("kinds", ""), ("worst", "num"), ("× tolerance", "num"),
    ("compared", "num"), ("seconds", "num"), ("reason", "reason"),
)  # fmt: skip


def _outcomes(report: Report) -> str:
    head = "".join(f'<th scope="col" class="{style}">{escape(name)}</th>' for name, style in COLUMNS)
    rows = "".join(_row(outcome, report) for outcome in report.outcomes)
    if not rows:
        rows = f'<tr><td colspan="{len(COLUMNS)}">No schedule was run.</td></tr>'
    return (
        '<section aria-labelledby="schedules"><h2 id="schedules">Schedules</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Schedules">'
        '<table class="outcomes"><caption class="unseen">Each schedule on each kind of cache</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{_kinds(report)}</section>"
    )


def _row(outcome: Outcome, report: Report) -> str:
    status = f"{SYMBOLS.get(outcome.status, '')} {clean(outcome.status)}"
    cells = [
        ("", clean(outcome.cache)),
        (f"status {_css(outcome.status)}", status),
        ("", clean(outcome.kinds)),
        ("num", number(outcome.worst)),
        ("num", times_text(outcome.worst, tolerance_of(outcome, report)) or "–"),
        ("num", str(outcome.compared)),
        ("num", f"{outcome.seconds:.1f}"),
        ("reason", clean(outcome.reason)),
    ]
    data = "".join(f'<td class="{style}">{escape(words)}</td>' for style, words in cells)
    name = escape(clean(outcome.schedule))
    return f'<tr data-status="{escape(clean(outcome.status))}"><th scope="row">{name}</th>{data}</tr>'


def _kinds(report: Report) -> str:
    """What the letters in the table stand for."""
    used = sorted({letter for outcome in report.outcomes for letter in outcome.kinds if letter in KINDS})
    if not used:
        return ""
    meanings = _pairs([(letter, KINDS[letter]) for letter in used])
    return f"<details><summary>What the letters of kinds mean</summary>{meanings}</details>"


# What is wrong.


def _findings(report: Report) -> str:
    found = findings(report)
    bare = [o for o in report.violations if o.diagnosis is None]
    if not found and not bare:
        return ""
    parts = [_finding(finding, report) for finding in found]
    if bare:
        items = "".join(f"<li>{escape(label(o))}: {escape(clean(o.reason) or 'no reason given')}</li>" for o in bare)
        parts.append(f'<article class="finding"><h3>Not diagnosed</h3><ul>{items}</ul></article>')
    return f'<section aria-labelledby="wrong"><h2 id="wrong">What is wrong</h2>{"".join(parts)}</section>'


def _finding(finding: Finding, report: Report) -> str:
    diagnosis = finding.diagnosis
    rows = [
        ("because", clean(diagnosis.because)),
        ("first position", position_words(diagnosis.first_position, diagnosis.relation)),
        ("first layer", layer_words(diagnosis)),
        ("seeds", seed_words(diagnosis)),
        ("seen by", finding.seen_by(most=40)),
        ("shown for", label(finding.outcome) if len(finding.outcomes) > 1 else ""),
    ]
    return (
        f'<article class="finding"><h3><span class="violation">{SYMBOLS[VIOLATION]} {escape(clean(diagnosis.kind))}'
        f"</span> {escape(clean(diagnosis.title))}</h3>{_pairs(rows)}"
        f"{_operations(diagnosis)}{layer_map(diagnosis, report.layers)}{_script(diagnosis)}</article>"
    )


def _operations(diagnosis: Diagnosis) -> str:
    if not diagnosis.operations:
        return ""
    items = "".join(f"<li><code>{escape(clean(operation))}</code></li>" for operation in diagnosis.operations)
    return f"<h4>Smallest operations that show it</h4><ol>{items}</ol>"


def _script(diagnosis: Diagnosis) -> str:
    if not diagnosis.script:
        return ""
    lines = escape(plain_lines(diagnosis.script))
    return f'<h4>A script that shows it without exactkv</h4><pre data-copy tabindex="0"><code>{lines}</code></pre>'


def _config(report: Report) -> str:
    if report.config is None:
        return ""
    lines = escape(plain_lines(json.dumps(report.config, indent=2, default=str, ensure_ascii=False)))
    return (
        "<section><details><summary>The shrunk config of which the model was made</summary>"
        f'<pre data-copy tabindex="0"><code>{lines}</code></pre></details></section>'
    )
