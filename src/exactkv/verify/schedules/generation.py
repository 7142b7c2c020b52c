"""Greedy generation: the engine's own loops, with drafts, batches, stops and streams closed early.

Here a generator takes the place of a kind of cache: ``world.generator``."""

from __future__ import annotations

from exactkv.verify.operations import Generate
from exactkv.verify.schedules.world import Case, Schedule, World
from exactkv.verify.target import Request


def _prompts(world: World) -> list[tuple[int, ...]]:
    """Short, at and past the bounds, and one that repeats itself, for drafts by lookup."""
    bound, text = world.bound, world.text
    repeating = (*text[:6], *text[:6], *text[:3])
    lengths = (2, bound - 1, bound + 2, 2 * bound + 3) if world.small else (bound + 2,)
    return [*(text[:n] for n in lengths if n >= 1), repeating]


def greedy(world: World) -> list[Case]:
    count = 12 if world.small else 6
    name = world.generator.name
    if world.generator.kind == "batch":
        return [[Generate(name, tuple(Request(p, count) for p in _prompts(world)[:3]))]]
    return [[Generate(name, (Request(p, count),))] for p in _prompts(world)]


def caps(world: World) -> list[Case]:
    """Every small limit: the cap falls inside an accepted draft."""
    if world.generator.kind != "speculative":
        return []
    prompt = _prompts(world)[-1]
    return [[Generate(world.generator.name, (Request(prompt, n),))] for n in range(1, 8)]


def closing(world: World) -> list[Case]:
    if not world.generator.closes:
        return []
    prompts = _prompts(world)
    cases: list[Case] = []
    for n in range(1, 6):
        cases.append([Generate(world.generator.name, (Request(prompts[(n + 1) % len(prompts)], 12),), close_after=n)])
    return cases


def stopping(world: World) -> list[Case]:
    """A stop token that greedy decoding meets: at once, in the middle, and just where the limit is. In a batch all
    have it; or only one has, and it is another row that meets it."""
    generator = world.generator
    if not generator.stops:
        return []
    cases: list[Case] = []
    prompts = _prompts(world)
    for prompt in (prompts[0], prompts[-1]):
        told = world.greedy(prompt, 9)
        new = [i for i in range(9) if told[i] not in told[:i]]  # where a token is met for the first time
        for place, limit in ((new[0], 12), *((i, 12) for i in new[1:4]), (new[-1], new[-1] + 1)):
            stop = (told[place],)
            others = prompts[1:3] if generator.kind == "batch" else []
            asked = [Request(prompt, limit, stop), *(Request(p, 7, stop) for p in others)]
            cases.append([Generate(generator.name, tuple(asked))])
    if generator.kind == "batch":
        own, theirs = world.greedy(prompts[0], 8), world.greedy(prompts[1], 7)
        for token in [t for t in dict.fromkeys(theirs) if t not in own][:2]:
            asked = [Request(prompts[0], 8, (token,)), Request(prompts[1], 8), Request(prompts[-1], 8)]
            cases.append([Generate(generator.name, tuple(asked))])
    return cases


def requests(world: World) -> list[Case]:
    """More requests than fit at once, of different lengths: rows leave and join all the time."""
    if world.generator.kind != "batch":
        return []
    drawn = world.random("requests")
    cases: list[Case] = []
    for count in (2, 5, 9) if world.small else (3,):
        lengths = [drawn.randint(1, 2 * world.bound + 2 if world.small else 24) for _ in range(count)]
        limits = [drawn.randint(1, 12 if world.small else 5) for _ in range(count)]
        texts = [world.other(n, f"request {count} {i}") for i, n in enumerate(lengths)]
        cases.append([Generate(world.generator.name, tuple(map(Request, texts, limits)))])
    return cases


SCHEDULES = [
    Schedule("generate", "DILT", "greedy generation from every telling prompt", greedy, on="generators"),
    Schedule("caps", "IS", "limits that fall inside an accepted draft", caps, on="generators"),
    Schedule("closed streams", "I", "streams closed after 1 to 5 tokens; the cache goes on", closing, on="generators"),
    Schedule("stops", "S", "a stop token at once, and in the middle", stopping, on="generators"),
    Schedule("requests", "KR", "more requests than fit, leaving and joining", requests, on="generators"),
]
