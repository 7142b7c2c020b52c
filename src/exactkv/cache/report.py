"""A cache in words: for each kind of layer its span of positions and its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exactkv.cache.recurrent import tensors

if TYPE_CHECKING:
    from exactkv.cache.cache import Cache
    from exactkv.cache.checkpoint import Checkpoint


def describe(cache: Cache) -> str:
    """A line for the whole, a line for each kind of layer."""
    shown = _some([str(n) for n in cache.lengths])
    kept = "" if cache.storage.name == "dense" else f", {cache.storage.name}"
    lines = [f"Cache({cache.batch_size} rows of length [{shown}], {human_bytes(cache.nbytes)}{kept})"]
    table = []
    for z, zone in enumerate(cache.spec.zones):
        spans = []
        memories = {}
        for row in cache._rows:
            run = row.runs[z]
            spans.append(f"{run.start}..{zone.clip(row.length)}")
            for memory in (run.memory, *(s.memory for s in run.segments)):
                memories[id(memory)] = memory.nbytes
        kind = str(zone.pattern) if zone.high is None else f"anchors of {zone.pattern}"
        n = len(zone.layers)
        layers = f"{n} layer{'s' if n != 1 else ''}"
        table.append((kind, layers, f"positions {_some(spans)}", human_bytes(sum(memories.values()))))
    if cache.spec.recurrent:
        n = len(cache.spec.recurrent)
        spans = [f"{row.states[0].position}..{row.length}" if row.states else "0..0" for row in cache._rows]
        held = tensors(state for row in cache._rows for state in row.states)
        layers, size = f"{n} layer{'s' if n != 1 else ''}", sum(t.nbytes for t in held.values())
        table.append(("recurrent", layers, f"states at {_some(spans)}", human_bytes(size)))
    widths = [max(len(line[i]) for line in table) for i in range(4)] if table else []
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    if any(row.checkpoints for row in cache._rows):
        filed = ["[" + _some([_named(c) for c in row.checkpoints]) + "]" for row in cache._rows]
        lines.append(f"  checkpoints at {_some(filed)}  {human_bytes(cache.checkpoint_nbytes)}")
    return "\n".join(lines)


def _named(filed: Checkpoint) -> str:
    return f"{filed.position} {filed.label}".rstrip()


def human_bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _some(items: list[str], most: int = 8) -> str:
    return ", ".join(items) if len(items) <= most else ", ".join(items[:most]) + f", … {len(items) - most} more"
