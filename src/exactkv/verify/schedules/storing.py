"""Prefix reuse: hot equals cold, and what is reported is true."""

from __future__ import annotations

from exactkv.verify.operations import Feed, Get, New, NewStore, Operation, Put
from exactkv.verify.schedules.feeding import CACHE
from exactkv.verify.schedules.world import Case, Schedule, World, steps

STORE = "store"


def _stored(text: tuple[int, ...], name: str = CACHE, salt: str = "") -> list[Operation]:
    return [New(name), Feed(name, text[:-2]), *steps(name, text[-2:]), Put(STORE, name, salt)]


def prompts(world: World) -> list[Case]:
    """One entry; prompts that are shorter, equal, longer, diverging; each alone and one after the other."""
    cases, text = [], world.text
    for length in sorted({min(20, len(text) - 12), min(len(text) - 12, 2 * world.bound + 4)}):
        stored = text[:length]
        other = world.other(8, f"asked {length}")
        asked = [
            stored[:5], stored[: length - 2], stored, (*stored, *other[:3]), (*stored[: length // 2], *other[:4]),
            (*stored[: length - 1], *other[:2]), other, stored[:1],
        ]  # fmt: skip
        sibling = (*stored[: length // 2], *world.other(length - length // 2, f"sibling {length}"))
        head = [NewStore(STORE), *_stored(stored)]
        cases += [[*head, Get(STORE, prompt, "hit", other[4:7])] for prompt in asked]
        together: Case = [*head]
        for i, prompt in enumerate((*asked, asked[3], stored, sibling, sibling, stored)):
            together += [Get(STORE, prompt, f"hit{i}", other[4:6]), Put(STORE, f"hit{i}")]
        cases.append(together)
    return cases


def reuse(world: World) -> list[Case]:
    """What is stored to its end is reused to its end by a longer prompt, also a second time."""
    stored, more = world.text[: 2 * world.bound + 3], world.other(6, "more")
    head = [NewStore(STORE), *_stored(stored)]
    again = Get(STORE, (*stored, *more[:3]), "hit", (), least=len(stored))
    return [[*head, again, Get(STORE, (*stored, *more[3:]), "hit2", more[:2], least=len(stored))]]


def random_prompts(world: World) -> list[Case]:
    """Many prompts over three symbols through a small store."""
    cases = []
    for entries in (6, None):
        drawn = world.random(f"store {entries}")
        case: Case = [NewStore(STORE, entries)]
        for i in range(30 if world.small else 6):
            prompt = tuple(drawn.randint(1, 3) for _ in range(drawn.randint(1, 2 * world.bound)))
            case += [Get(STORE, prompt, f"c{i}", (drawn.randint(1, 3),)), Put(STORE, f"c{i}")]
        cases.append(case)
    return cases


def owners(world: World) -> list[Case]:
    text = world.text[:12]
    head = [NewStore(STORE), *_stored(text)]
    theirs = Get(STORE, (*text, 5, 6), "theirs", salt="another", foreign=True)
    return [[*head, theirs, Get(STORE, (*text, 5), "mine")]]


SCHEDULES = [
    Schedule("prefix store", "FH", "prompts shorter, equal, longer and diverging from an entry", prompts, on="first"),
    Schedule("prefix reuse", "HT", "a longer prompt reuses all of an entry", reuse, on="first"),
    Schedule("random prefixes", "FGHQ", "many prompts of three symbols through a small store", random_prompts, "first"),
    Schedule("owners", "G", "what is stored for another model or tenant is not given out", owners, on="first"),
]
