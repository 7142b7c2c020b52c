"""Which kind of fault a violation looks like: by what fails, what does not, and what the wrong row depended on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exactkv.verify import operations as ops
from exactkv.verify.localize import Seen
from exactkv.verify.probe import reach
from exactkv.verify.report import EXACT, NOT_SUPPORTED, VIOLATION, Report
from exactkv.verify.run import Evidence, Run
from exactkv.verify.schedules import SCHEDULES
from exactkv.verify.shadow import Violation

Answer = tuple[str, str]
"""A letter, and why."""

FEEDING = ("steps", "one feed", "prefill then decode", "pieces", "random pieces", "warm pieces", "positions",
           "allocation", "long", "capacity")  # fmt: skip


@dataclass(frozen=True)
class Clues:
    """What is known of a violation. ``layer``: the first wrong one. ``seen``: what the row depended on."""

    run: Run
    report: Report
    evidence: Evidence
    cache: str
    violation: Violation
    layer: int | None
    seen: Seen | None

    def status(self, schedule: str, cache: str | None = None) -> str:
        """How another schedule fared on the same cache (on any, if it has none)."""
        wanted = self.cache if cache is None else cache
        for outcome in self.report.outcomes:
            if outcome.schedule == schedule and outcome.cache in (wanted, ""):
                return outcome.status
        return NOT_SUPPORTED

    def failed(self, *schedules: str) -> bool:
        return any(self.status(s) == VIOLATION for s in schedules)

    def layer_kind(self) -> str:
        layers = self.run.target.layers
        return layers[self.layer].kind if self.layer is not None and self.layer < len(layers) else ""


def classify(clues: Clues) -> Answer:
    """The letter of the kind (`KINDS`), and the reason."""
    if clues.violation.hint:
        return clues.violation.hint, _HINTED[clues.violation.hint]
    schedule = clues.evidence.schedule.name
    inherited = _inherited(clues)
    if inherited is not None:
        return inherited
    for names, judge in _BY_SCHEDULE:
        if schedule in names:
            return judge(clues)
    return clues.evidence.schedule.kinds[0], "it is what this schedule is there for"


_HINTED = {
    "E": "what the rewind reports is not what the cache then holds",
    "F": "the store gave a cache that is not of the prompt's own tokens",
    "G": "what belongs to other weights or another owner was given out or loaded",
    "I": "the cache left behind by speculation claims tokens that were not accepted",
    "O": "a damaged file was taken",
    "Q": "a limit of memory or length is not kept",
    "S": "the text does not end where it should",
    "T": "what is reported of reuse, or of the work done, is not true",
}


def _feeding(clues: Clues) -> Answer:
    violation, run = clues.violation, clues.run
    if violation.how in ("crash", "memory"):
        if violation.how == "memory" or clues.evidence.schedule.name in ("long", "capacity"):
            return "Q", "it fails where the text outgrows what was allocated, or memory grows without need"
        if any(isinstance(op, ops.New) and op.step is not None for op in clues.evidence.case):
            return "A", "it fails with another allocation step"
    if run.target.length_dependent and run.judge.by_length:
        return "L", "the rope depends on the length of the text, and what was fed before the switch is not made anew"
    allocated = _allocation(clues)
    if allocated is not None:
        return allocated
    if clues.evidence.schedule.name == "positions" and not clues.failed(*FEEDING[:6]):
        return "L", "only where the caller names the positions"
    if _differs_from_its_like(clues):
        return "M", f"layer {clues.layer} is the first wrong one, and a layer of the same sort before it is right"
    if clues.layer_kind() not in ("sliding", "chunked", "full", "recurrent", ""):
        return "M", f"the first wrong layer ({clues.layer}) remembers in a way of its own"
    if clues.layer_kind() == "recurrent":
        if clues.failed("steps"):
            return "H", "the first wrong layer is recurrent, token by token too: its state is not that of the text"
        return "D", "the first wrong layer is recurrent, and only several tokens at once fail"
    if clues.status("positions") == EXACT and clues.failed("steps"):
        return "L", "it is right as soon as the caller names the positions"
    return _by_sight(clues)


def _allocation(clues: Clues) -> Answer | None:
    """A if the same text fails or not, or elsewhere, with other allocation steps."""
    run = clues.run
    schedule = next((s for s in SCHEDULES if s.name == "allocation"), None)
    if schedule is None or clues.cache not in run.target.caches or clues.status("allocation") == NOT_SUPPORTED:
        return None
    found = [run.session(clues.cache, doubt=False).run(c) for c in run.cases(schedule, clues.cache, run.world)]
    first = [r.violations[0].position if r.violations else None for r in found]
    if len(set(first)) > 1:
        return "A", f"the same steps are first wrong at {first} (None: nowhere) with other allocation steps"
    for result in found[1:]:
        for position, difference in result.differences.items():
            before = found[0].differences.get(position, difference)
            if abs(difference - before) > 10 * run.judge.tolerance:
                return "A", f"the row at {position} is wrong by other amounts with other allocation steps"
    return None


def _differs_from_its_like(clues: Clues) -> bool:
    layers, wrong = clues.run.target.layers, clues.layer
    if wrong is None or wrong >= len(layers):
        return False
    return any(layer == layers[wrong] for layer in layers[:wrong])


def _by_sight(clues: Clues) -> Answer:
    """By the tokens that the wrong row ignored, or took in though they are out of its reach."""
    found, bounds = clues.seen, clues.run.world.bounds
    position = clues.violation.position or 0
    past = bool(bounds) and position >= bounds[0]
    if not clues.failed("steps"):
        if bounds and all(_end(e) >= bounds[0] for e in _failing(clues)):
            return "B", "token by token it is right; with pieces it goes wrong once a window or chunk is full"
        return "D", "token by token it is right, several tokens at once onto a warm cache are not"
    late = _late(clues, position)
    if found is not None and (found.missing or found.extra) and late:
        return "B", f"the row at {position} takes in other tokens than it should, but only {late} tokens after the " \
            "window was first full: what lies where is mixed up"  # fmt: skip
    if found is not None and found.missing and not _at_the_edge(clues, found, position):
        return "B", f"the row at {position} ignores {_some(found.missing)}, which it may see: they were overwritten " \
            "or read out of order"  # fmt: skip
    if found is not None and found.missing:
        return "C", f"the row at {position} ignores {_some(found.missing)}, the first that it may see"
    if found is not None and found.extra:
        return "C", f"the row at {position} depends on {_some(found.extra)}, which are out of its reach"
    if found is not None and not past and clues.layer:
        return "M", f"the layers before layer {clues.layer} are right, and no window or chunk is full yet: its own " \
            "sizes, rope or sharing"  # fmt: skip
    if found is not None:
        return "L", f"the row at {position} depends on the right tokens, but not in the right way: their positions"
    if past:
        return "C", f"it goes wrong at position {position}, once a window or chunk is full"
    return "L", f"it goes wrong at position {position}, before any window or chunk is full"


def _at_the_edge(clues: Clues, found: Seen, position: int) -> bool:
    """Whether what is missing begins with the first token within reach and is one stretch."""
    first, last = found.missing[0], found.missing[-1]
    return first == _first_within(clues, position) and last - first + 1 == len(found.missing) and last < position


def _late(clues: Clues, position: int) -> int:
    """How many tokens after its window was first full the first wrong layer goes wrong, if more than one."""
    layers = clues.run.target.layers
    size = layers[clues.layer].size if clues.layer is not None and clues.layer < len(layers) else None
    if size is None or clues.layer_kind() != "sliding" or position <= size + 1:
        return 0
    return position - size


def _end(evidence: Evidence) -> int:
    """The length of the text after the feed that went wrong."""
    op = evidence.case[evidence.violation.operation]
    fed = len(op.tokens) if isinstance(op, ops.Feed) else 1
    held = sum(len(x.tokens) for x in evidence.case[: evidence.violation.operation] if isinstance(x, ops.Feed))
    return held + fed


def _failing(clues: Clues) -> list[Evidence]:
    """What went wrong in plain feeding on this cache."""
    return [e for (s, c), e in clues.run.evidence.items() if s in FEEDING[:6] and c == clues.cache]


def _first_within(clues: Clues, position: int) -> int | None:
    layer = clues.layer if clues.layer is not None else len(clues.run.target.layers) - 1
    within = reach(clues.run.target.layers[: layer + 1], position + 1)[position]
    return next((j for j in range(position + 1) if within[j]), None)


def _rewinding(clues: Clues) -> Answer:
    if clues.layer_kind() == "recurrent":
        return "H", "feeding is right; a recurrent layer does not stand at the position that was rewound to"
    return "E", "feeding is right; after taking tokens back it is not"


def _drafting(clues: Clues) -> Answer:
    if clues.failed("rewind", "prepared rewind"):
        return _rewinding(clues)
    return "I", "rewinding alone is right; rounds of drafts that are taken back in part are not"


def _isolating(clues: Clues) -> Answer:
    return "P", "each text alone is right; what came before or beside it shows"


def _saving(clues: Clues) -> Answer:
    return "O", "it is right until it is saved; loaded, something is missing"


def _batching(clues: Clues) -> Answer:
    schedule = clues.evidence.schedule.name
    if schedule in ("leaving rows", "joining rows", "extracted rows", "empty rows") and not clues.failed(
        "batch", "ragged batch", "ragged pieces"
    ):
        return "K", "a batch whose rows stay is right; with rows that join or leave it is not"
    if schedule == "rewound rows" and not clues.failed("batch", "ragged batch"):
        return "I", "rows that are taken back by different counts"
    return "J", "rows are right alone and wrong in a batch"


def _storing(clues: Clues) -> Answer:
    if any(layer.kind == "recurrent" for layer in clues.run.target.layers) and clues.layer_kind() == "recurrent":
        return "H", "the recurrent state that was given out is not that of the tokens reused"
    return "F", "the cache that was given out is not that of the tokens it is said to hold"


def _generating(clues: Clues) -> Answer:
    generator = next((g for g in clues.run.target.generators if g.name == clues.cache), None)
    kind = generator.kind if generator is not None else "plain"
    schedule = clues.evidence.schedule.name
    if schedule != "generate" and kind == "plain" and clues.failed("generate"):
        return "D", "feeding is right; the engine's own loop is not"
    if schedule == "stops" and not clues.failed("generate"):
        return "S", "greedy decoding is right without stop tokens"
    if kind == "speculative":
        return "I", "plain decoding is right; with drafts it is not"
    if kind == "batch":
        if any(clues.status(s, clues.run.target.caches[0]) == VIOLATION for s in ("batch", "ragged batch")):
            return "J", "rows are right alone and wrong in a batch"
        return "R", "each request alone is right; among others that come and go it is not"
    return "D", "feeding is right; the engine's own loop is not"


def _quantized(clues: Clues) -> Answer:
    return "N", "with the same storage, one pass and other ways to feed differ"


def _inherited(clues: Clues) -> Answer | None:
    """The answer for plain feeding of the same cache, if that fails already: the rest follows from it. (Of the
    usual cache, for a generator.)"""
    schedule, target = clues.evidence.schedule, clues.run.target
    if schedule.name in FEEDING or clues.cache in target.quantized_caches:
        return None
    cache = target.caches[0] if schedule.on == "generators" else clues.cache
    for outcome in clues.report.violations:
        root = outcome.schedule in FEEDING[:6] and outcome.cache == cache
        if root and outcome.diagnosis is not None:
            return outcome.diagnosis.kind, f"it follows from what is wrong in {outcome.schedule!r}"
    return None


def _some(positions: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, positions[:4])) + (", …" if len(positions) > 4 else "")
    return f"token{'s' if len(positions) > 1 else ''} {shown}"


_BY_SCHEDULE: tuple[tuple[tuple[str, ...], Callable[[Clues], Answer]], ...] = (
    (FEEDING, _feeding),
    (("rewind", "prepared rewind"), _rewinding),
    (("draft rounds",), _drafting),
    (("fork", "two caches", "reset"), _isolating),
    (("save and load", "new process", "damaged files", "saved batch"), _saving),
    (
        ("batch", "ragged batch", "ragged pieces", "empty rows", "leaving rows", "joining rows", "extracted rows",
         "rewound rows"),
        _batching,
    ),
    (("prefix store", "prefix reuse", "random prefixes", "owners"), _storing),
    (("generate", "caps", "closed streams", "stops", "requests"), _generating),
)  # fmt: skip
