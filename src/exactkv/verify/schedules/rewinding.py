"""Tokens taken back, others fed, forked, reset: a cache is where it says it is."""

from __future__ import annotations

from exactkv.verify.operations import Feed, Fork, New, Reset, Rewind, Settle
from exactkv.verify.schedules.feeding import CACHE
from exactkv.verify.schedules.world import Case, Schedule, World, pieces, steps


def rewinding(world: World) -> list[Case]:
    """To every telling length, back by 1 … all, forward with the same and with other tokens, and back again."""
    cases, bound, text = [], world.bound, world.text
    counts = [1, 2, bound - 1, bound, 3, bound + 1]
    for i, place in enumerate(world.places(3, 6)):
        count = min(place, max(1, counts[i % len(counts)]))
        other = world.other(4, f"rewind {place}")
        case: Case = [New(CACHE)]
        if place > count:
            case += [Feed(CACHE, text[: place - count])]
        taken = text[place - count : place]
        case += steps(CACHE, taken) if i % 2 else [Feed(CACHE, taken)]
        if i % 3:
            case += [Rewind(CACHE, count), Feed(CACHE, taken)]
        case += [Rewind(CACHE, count), *steps(CACHE, other[:3])]
        case += [Rewind(CACHE, 2), Feed(CACHE, other[1:]), *steps(CACHE, other)]
        cases.append(case)
    cases.append([New(CACHE), Feed(CACHE, text[:5]), Rewind(CACHE, 5), *steps(CACHE, text[2:8])])
    return cases


def rewinding_prepared(world: World) -> list[Case]:
    """The same in rounds: feed, take back some of what was just fed, settle."""
    cases, bound, text = [], world.bound, world.text
    counts = [1, 2, bound - 1, bound, 3, bound + 1]
    for i, place in enumerate(world.places(3, 6)):
        count = min(place, max(1, counts[i % len(counts)]))
        other = world.other(6, f"prepared {place}")
        rounds: list[tuple[tuple[int, ...], int]] = [(text[: place - count], 0)] if place > count else []
        taken = text[place - count : place]
        rounds += [(taken, count), (taken, count // 2), ((other[0],), 0), (other, min(count, 5))]
        rounds += [((t,), 0) for t in other[:3]]
        rounds += [((other[3],), 1), (text[:2], 0)]
        case: Case = [New(CACHE, rewinds=max(count, 5))]
        for tokens, back in rounds:
            case += [Feed(CACHE, tokens), *([Rewind(CACHE, back)] if back else []), Settle(CACHE)]
        cases.append(case)
    return cases


def draft_rounds(world: World) -> list[Case]:
    """As speculation does it: a piece of one token and three drafts, of which some are taken back."""
    cases, text = [], world.text
    patterns = [(3, 0, 1, 2), (0, 0, 0, 0, 3), (1, 3, 3, 2), (2, 1, 0, 3)]
    starts = world.places(2, 3)
    for i, accepted in enumerate(patterns):
        start = starts[(i * 2 + 1) % len(starts)]
        case: Case = [New(CACHE, rewinds=4), Feed(CACHE, text[:start]), Settle(CACHE)]
        at = start
        for r, taken in enumerate(accepted):
            drafts = world.other(3, f"draft {i} {r}")
            piece = (text[at], *text[at + 1 : at + 1 + taken], *drafts[taken:])
            case.append(Feed(CACHE, piece))
            if taken < 3:
                case.append(Rewind(CACHE, 3 - taken))
            case.append(Settle(CACHE))
            at += 1 + taken
        for token in text[at : at + 4]:
            case += [Feed(CACHE, (token,)), Settle(CACHE)]
        cases.append(case)
    return cases


def forking(world: World) -> list[Case]:
    cases, text = [], world.text
    for place in world.places(3)[::2]:
        a, b = world.other(6, f"fork a {place}"), world.other(6, f"fork b {place}")
        case: Case = [New(CACHE), Feed(CACHE, text[:place]), Fork(CACHE, "twin")]
        for x, y in zip(a, b, strict=True):
            case += [Feed(CACHE, (x,)), Feed("twin", (y,))]
        case += [*pieces("twin", text[:6], [3, 3]), *steps(CACHE, text[:3])]
        cases.append(case)
    return cases


def two_caches(world: World) -> list[Case]:
    """Two texts in turn, in steps and pieces: neither knows of the other."""
    a, b = world.text, world.other(len(world.text), "second")
    end = min(len(a), 2 * world.bound + 8)
    turns: Case = [New(CACHE), New("second")]
    at, sizes = 0, [1, 2, 1, world.bound, 1, 1, 3, 1, 1]
    for i in range(end):
        size = sizes[i % len(sizes)]
        if at >= end:
            break
        turns += [Feed(CACHE, a[at : at + size]), Feed("second", b[at : at + size])]
        at += size
    after: Case = [New(CACHE), Feed(CACHE, a[:end]), New("second"), Feed("second", b[: world.bound + 2]),
                   *steps("second", b[world.bound + 2 : end][:8])]  # fmt: skip
    return [turns, after]


def resetting(world: World) -> list[Case]:
    """X, emptied, then Y: as Y alone."""
    cases = []
    for place in world.places(3)[::3]:
        other = world.other(world.bound + 6, f"reset {place}")
        case: Case = [New(CACHE), Feed(CACHE, world.text[:place]), *steps(CACHE, world.text[place : place + 2])]
        cases.append([*case, Reset(CACHE), Feed(CACHE, other[:3]), *steps(CACHE, other[3:])])
    return cases


SCHEDULES = [
    Schedule("rewind", "E", "back by 1 … all, then the same and other tokens", rewinding),
    Schedule("prepared rewind", "E", "the same on a cache that was told that it will be rewound", rewinding_prepared),
    Schedule("draft rounds", "I", "pieces of drafts of which some are taken back, as in speculation", draft_rounds),
    Schedule("fork", "P", "a copy and its original go on with other tokens", forking),
    Schedule("two caches", "P", "two texts in turn through one model", two_caches),
    Schedule("reset", "P", "a cache emptied for another text", resetting),
]
