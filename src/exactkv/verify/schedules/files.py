"""Saved, loaded, continued: as if never stopped."""

from __future__ import annotations

from exactkv.verify.operations import Damaged, Elsewhere, Feed, New, Rewind, SaveLoad
from exactkv.verify.schedules.feeding import CACHE
from exactkv.verify.schedules.world import Case, Schedule, World, steps


def save_and_load(world: World) -> list[Case]:
    cases, text = [], world.text
    for i, place in enumerate(world.places(1, 5)):
        case: Case = [New(CACHE)]
        case += steps(CACHE, text[:place]) if i % 2 and world.small else [Feed(CACHE, text[:place])]
        if i % 3 == 2:
            case += [Rewind(CACHE, 1)]
        other = world.other(5, f"loaded {place}")
        case += [SaveLoad(CACHE, "loaded"), *steps("loaded", text[place : place + 5]), Feed("loaded", text[:3])]
        case += [Feed(CACHE, other[:3]), *steps(CACHE, other[3:])]
        if i == 1:
            case += [Rewind("loaded", 2), *steps("loaded", other[:3])]
        cases.append(case)
    return cases


def new_process(world: World) -> list[Case]:
    cases, text = [], world.text
    for place in world.places(1)[::2]:
        case: Case = [New(CACHE), Feed(CACHE, text[:place])]
        case += steps(CACHE, text[place : place + 2])
        cases.append([*case, Elsewhere(CACHE, text[place + 2 : place + 7])])
    return cases


def damaged(world: World) -> list[Case]:
    end = min(len(world.text), world.bound + 4)
    head: Case = [New(CACHE), Feed(CACHE, world.text[:end])]
    return [[*head, Damaged(CACHE, how)] for how in ("truncated", "altered", "foreign")]


SCHEDULES = [
    Schedule("save and load", "O", "saved and loaded at every telling length, both go on", save_and_load),
    Schedule("new process", "O", "saved, loaded and continued in a new process", new_process),
    Schedule("damaged files", "GO", "truncated, altered and other models' files are refused", damaged, on="first"),
]
