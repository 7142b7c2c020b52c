"""One verification under way: what the schedules do with a target, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from exactkv.errors import InputError
from exactkv.verify import report as results
from exactkv.verify.judge import Judge
from exactkv.verify.layout import bounded_only
from exactkv.verify.probe import ENOUGH, probe
from exactkv.verify.report import Outcome, Report
from exactkv.verify.schedules import SCHEDULES, Case, Schedule, World
from exactkv.verify.schedules.world import random_text
from exactkv.verify.session import Session
from exactkv.verify.shadow import Result, Violation
from exactkv.verify.target import Layer, NotSupported, Target
from exactkv.verify.targets import from_recipe
from exactkv.verify.worker import Elsewhere

ONE_PASS, VISIBILITY = "one pass", "visibility"
"""Checks of the one pass itself, before any cache; they go by these names among the schedules."""
NOTHING = "nothing to try"
"""Reason of an outcome that says nothing: the schedule is not for this generator, or the text is too short."""
ABOUT = {
    ONE_PASS: ("CJL", "one pass over fewer tokens, in a batch, in a wider dtype, gives the same"),
    VISIBILITY: ("C", "each row depends on all tokens that it may see, and on no other"),
}


@dataclass(frozen=True)
class Evidence:
    """The first case of a schedule that went wrong, and how."""

    schedule: Schedule
    case: Case
    number: int
    violation: Violation


class Run:
    """One verification under way: its target, judge and world, and what was found by which case."""

    def __init__(self, target: Target, seed: int, length: int | None):
        self.target, self.seed = target, seed
        self.length = _length(target, length)
        self.text = random_text(target.vocab_size, self.length, f"{seed} text")
        self.judge = Judge(target, self.text, seed)
        self.world = World(target, self.text, seed, self.judge.greedy)
        self._elsewhere: Elsewhere | None = None
        self._other: Run | None = None
        self.evidence: dict[tuple[str, str], Evidence] = {}

    @property
    def other(self) -> Run:
        """The same with other weights, where the target can have others, and another text."""
        if self._other is None:
            seed = self.seed + 1
            try:
                target = self.target.reseeded(seed)
            except NotSupported:
                target = self.target
            self._other = Run(target, seed, self.length)
        return self._other

    def report(self, model: str) -> Report:
        target, judge = self.target, self.judge
        return Report(
            target=target.name, engine=target.engine, versions=dict(target.versions), model=model,
            dtype=target.dtype, seed=self.seed, layers=[_layer(x) for x in target.layers], length=self.length,
            noise=judge.noise, tolerance=judge.tolerance, scale=judge.scale, judged_by=judge.judged_by,
            config=getattr(target, "config", None),
        )  # fmt: skip

    def jobs(self, wanted: set[str]) -> list[tuple[str, Callable[[], Outcome]]]:
        jobs: list[tuple[str, Callable[[], Outcome]]] = []
        if ONE_PASS in wanted:
            jobs.append((ONE_PASS, self.one_pass))
        if VISIBILITY in wanted:
            jobs.append((VISIBILITY, self.visibility))
        for schedule in SCHEDULES:
            if schedule.name in wanted:
                for kind in self.kinds(schedule):
                    jobs.append((f"{schedule.name} [{kind}]", partial(self.outcome, schedule, kind)))
        return jobs

    def kinds(self, schedule: Schedule) -> Sequence[str]:
        """The kinds of cache (or generators) that a schedule runs on."""
        target = self.target
        usual: dict[str, Sequence[str]] = {
            "each": target.caches,
            "first": target.caches[:1],
            "quantized": target.quantized_caches,
            "generators": tuple(g.name for g in target.generators),
        }
        return usual[schedule.on]

    # The one pass itself.

    def one_pass(self) -> Outcome:
        judge = self.judge
        outcome = Outcome(ONE_PASS, "", ABOUT[ONE_PASS][0], results.EXACT, judge.noise, judge.tolerance)
        outcome.compared = len(self.text)
        if judge.inconsistencies:
            found = judge.inconsistencies[0]
            outcome.worst = found.difference
            outcome.reason = f"{found.what} differs by {found.difference:.1e}, first at position {found.position}"
            # An arithmetic that is said to depend on the length is not a fault of the pass over a shorter text.
            outcome.status = results.EXACT if found.kind == "L" else results.VIOLATION
        elif judge.tied.mean() > 0.2:
            outcome.status = results.UNDECIDED
            outcome.reason = f"{judge.tied.mean():.0%} of the positions stand at near-ties or are all noise"
        return outcome

    def visibility(self) -> Outcome:
        text = self.text[: 40 if self.world.small else 12]
        found = probe(self.target, self.judge, text)
        outcome = Outcome(VISIBILITY, "", "C", results.EXACT, None, self.judge.tolerance, compared=len(text) ** 2)
        if not found.wrong:
            found.wrong = self._bounded_alone(text)
        if found.wrong:
            outcome.status, (outcome.reason, _) = results.VIOLATION, found.wrong[0]
            outcome.worst = max(found.differences.values(), default=None)
            outcome.differences = _by_position(found.differences)
        elif found.share < ENOUGH:
            outcome.status = results.UNDECIDED
            outcome.reason = f"only {found.share:.0%} of the tokens that a row sees move it noticeably: a lost one " \
                "might not show"  # fmt: skip
        else:
            outcome.reason = f"{found.share:.0%} of the tokens that a row may see move it"
        return outcome

    def _bounded_alone(self, text: tuple[int, ...]) -> list[tuple[str, int]]:
        """What is wrong with the reach of windowed layers in a model that has no others, where one can be made."""
        with suppress(Exception):  # a config that the library cannot build says nothing
            recipe = self.target.recipe()
            config = bounded_only(recipe["config"])
            if config is not None:
                target = from_recipe({**recipe, "config": config})
                found = probe(target, Judge(target, self.text, self.seed), text).wrong
                return [(f"in a model of its windowed layers alone, {what}", i) for what, i in found]
        return []

    # Schedules.

    def cases(self, schedule: Schedule, kind: str, world: World) -> list[Case]:
        if schedule.on == "generators":
            world.generator = next(g for g in world.target.generators if g.name == kind)
        return schedule.build(world)

    def session(self, kind: str, stop: bool = False, doubt: bool = True) -> Session:
        """A session on this kind of cache (for a generator: the usual kind)."""
        known = (*self.target.caches, *self.target.quantized_caches)
        cache = kind if kind in known else self.target.caches[0]
        return Session(self.target, self.judge, cache, lambda: self.elsewhere, stop, doubt)

    def violation(self, schedule: Schedule, kind: str, first: int = 0) -> Violation | None:
        """A violation of a schedule, run from the case numbered ``first`` on until there is one."""
        cases = self.cases(schedule, kind, self.world)
        for case in [*cases[first:], *cases[:first]]:
            result = self.session(kind, stop=True).run(case)
            if result.violations:
                return result.violations[0]
        return None

    def outcome(self, schedule: Schedule, kind: str) -> Outcome:
        outcome = Outcome(schedule.name, kind, schedule.kinds, results.EXACT, None, self.judge.tolerance)
        merged = Result()
        unsupported: list[str] = []
        cases = self.cases(schedule, kind, self.world)
        for number, case in enumerate(cases):
            result = self.session(kind, doubt=not merged.violations).run(case)
            _merge(merged, result)
            if result.violations:
                found = Evidence(schedule, case, number, result.violations[0])
                self.evidence.setdefault((schedule.name, kind), found)
            if result.not_supported:
                unsupported.append(result.not_supported)
        self._judge(outcome, merged, unsupported, len(cases))
        if outcome.status != results.NOT_SUPPORTED:
            outcome.compared, outcome.differences = merged.compared, _by_position(merged.differences)
            outcome.worst = merged.worst if merged.differences else None
            outcome.not_finite = merged.not_finite
        return outcome

    def _judge(self, outcome: Outcome, merged: Result, unsupported: list[str], cases: int) -> None:
        if merged.violations:
            outcome.status, outcome.reason = results.VIOLATION, merged.violations[0].message
        elif len(unsupported) == cases or not merged.compared:
            outcome.status = results.NOT_SUPPORTED
            outcome.reason = unsupported[0] if unsupported else NOTHING
        elif merged.refused and outcome.schedule not in ("damaged files", "capacity"):
            outcome.reason = f"{len(merged.refused)} times refused: {merged.refused[0]}"
        if unsupported and outcome.status == results.EXACT:
            outcome.reason = f"in part not supported: {unsupported[0]}"
        if outcome.status == results.EXACT and self.judge.lax and merged.differences:
            outcome.status = results.UNDECIDED
            outcome.reason = f"the noise of {self.target.dtype} leaves a tolerance of " \
                f"{self.judge.tolerance / self.judge.scale:.0%} of the largest logit"  # fmt: skip
        if merged.tied and outcome.status == results.EXACT:
            outcome.reason = f"{merged.tied} near-ties left out. {outcome.reason}".strip()

    @property
    def elsewhere(self) -> Elsewhere | None:
        if self._elsewhere is None:
            with suppress(NotSupported):
                self._elsewhere = Elsewhere(self.target)
        return self._elsewhere

    def close(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()
        if self._other is not None:
            self._other.close()


def _merge(into: Result, result: Result) -> None:
    into.compared += result.compared
    into.violations += result.violations
    into.refused += result.refused
    into.tied += result.tied
    into.not_finite += result.not_finite
    for position, difference in result.differences.items():
        into.differences[position] = max(into.differences.get(position, 0.0), difference)


def _by_position(differences: dict[int, float]) -> list[float | None]:
    return [differences.get(p) for p in range(max(differences, default=-1) + 1)]


def _layer(layer: Layer) -> str:
    size = f" {layer.size}" if layer.size is not None else ""
    return f"{layer.kind}{size}" + (f" + {layer.anchors} anchors" if layer.anchors else "")


def _length(target: Target, wanted: int | None) -> int:
    """Tokens of the main text: several times the largest window, if that is not too much."""
    sizes = [layer.size for layer in target.layers if layer.size is not None]
    largest = max((s for s in sizes if s <= 1024), default=0)
    usual = max(64, min(4 * largest, largest + 96)) if target.small else max(64, largest + 64)
    chosen = usual if wanted is None else wanted
    if wanted is not None and not 16 <= wanted <= target.max_length:
        raise InputError(f"length is {wanted}; expected 16 to {target.max_length} tokens")
    return min(chosen, target.max_length)
