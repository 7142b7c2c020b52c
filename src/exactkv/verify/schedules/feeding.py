"""The same text fed in every way: decoding equals one forward pass."""

from __future__ import annotations

from exactkv.verify.operations import Bytes, Feed, New, Overfill
from exactkv.verify.schedules.world import Case, Schedule, World, pieces, steps, walk

CACHE = "cache"


def token_by_token(world: World) -> list[Case]:
    return [[New(CACHE), *walk(world, CACHE, world.text)]]


def one_feed(world: World) -> list[Case]:
    return [[New(CACHE), Feed(CACHE, world.text)]]


def fixed_pieces(world: World) -> list[Case]:
    bound = world.bound
    sizes = {2, 3, 5, bound - 1, bound, bound + 1, 2 * bound + 1} if world.small else {bound - 1, bound + 1, 37}
    return [
        [New(CACHE), *pieces(CACHE, world.text, [n] * (len(world.text) // n))] for n in sorted(sizes - {0, 1})
    ]  # fmt: skip


def random_pieces(world: World) -> list[Case]:
    cases = []
    for i in range(4 if world.small else 2):
        drawn = world.random(f"pieces {i}")
        most = (4, 7, 2 * world.bound, 3)[i] if world.small else max(64, world.bound)
        sizes = [drawn.randint(1, most) for _ in world.text]
        cases.append([New(CACHE), *pieces(CACHE, world.text, sizes)])
    return cases


def warm_pieces(world: World) -> list[Case]:
    """A piece onto a cache that has wrapped or is about to, then single tokens, then pieces again."""
    cases, bound, text = [], world.bound, world.text
    widths = [2, bound - 1, bound, bound + 1, 2 * bound + 2, 3]
    for i, place in enumerate(world.places(3)):
        width = max(2, widths[i % len(widths)])
        case: Case = [New(CACHE)]
        case += steps(CACHE, text[:place]) if world.small else [Feed(CACHE, text[:place])]
        case += pieces(CACHE, text[place:][: width + 9], [width, 1, 1, 2, 1, 3])
        cases.append(case)
    return cases


def prefill_then_decode(world: World) -> list[Case]:
    cases = []
    for place in world.places(1, 2, 4):
        end = min(len(world.text), place + world.bound + 4 if world.small else place + 8)
        cases.append([New(CACHE), Feed(CACHE, world.text[:place]), *steps(CACHE, world.text[place:end])])
    return cases


def explicit_positions(world: World) -> list[Case]:
    text, bound = world.text, world.bound
    head = [New(CACHE), Feed(CACHE, text[: bound + 2], positions=True)]
    end = len(text) if world.small else bound + 16
    mixed = pieces(CACHE, text[:end], [3, 1, 1, bound, 1, 2, 1, 1, bound + 1, 1], positions=True)
    return [[*head, *steps(CACHE, text[bound + 2 : end], positions=True)], [New(CACHE), *mixed]]


def allocation(world: World) -> list[Case]:
    """Memory that grows by other steps: what it holds is the same."""
    grown = (1, 4, 8, 256) if world.small else (16,)
    end = min(len(world.text), 2 * world.bound + 6)
    return [[New(CACHE, step=n), *walk(world, CACHE, world.text[:end])] for n in grown]


def long_run(world: World) -> list[Case]:
    """Past the usual allocation steps, and with an eye on memory."""
    length = min(600, world.target.max_length, 600 if world.small else len(world.text))
    text = (*world.text, *world.other(length, "long"))[:length]
    case: Case = [New(CACHE)]
    at = min(world.bounds[0] if world.bounds else 8, 16)
    case += [Feed(CACHE, text[:at]), Bytes(CACHE)]
    # Recurrent layers hold as much after one token as ever.
    growing = [layer.kind in ("full", "other") for layer in world.target.layers if layer.kind != "recurrent"]
    growth = (sum(growing) / max(1, len(growing))) if world.target.layers else None
    while at < length:
        near = at % 256 in range(250, 256) or at % 256 in range(6) or at % 64 in range(3)
        size = 1 if near else min(16, 250 - at % 256 if at % 256 < 250 else 1)
        case.append(Feed(CACHE, text[at : at + size]))
        at += size
        if at % 256 == 8 and at > 256:
            case.append(Bytes(CACHE, growth if at > 512 else None))
    case.append(Bytes(CACHE, growth if length >= 520 else None))
    return [case]


def capacity(world: World) -> list[Case]:
    """A cache made for L tokens takes L; one more is refused (or right)."""
    cases = []
    for length in (world.bound + 3, 3 * world.bound):
        text = world.text[: length + 2]
        if len(text) == length + 2:
            # The second shows what the first has overwritten.
            over: Case = [Overfill(CACHE, text[length : length + 1]), Overfill(CACHE, text[length + 1 :])]
            full: Case = [New(CACHE, max_length=length), Feed(CACHE, text[: length - 3])]
            cases.append([*full, *steps(CACHE, text[length - 3 : length]), *over])
            cases.append([*full, Overfill(CACHE, text[length - 3 : length + 1])])
    return cases


SCHEDULES = [
    Schedule("steps", "ABCDLM", "token by token from an empty cache", token_by_token),
    Schedule("one feed", "CM", "the whole text at once into an empty cache, as without one", one_feed),
    Schedule("prefill then decode", "ABCDL", "prompts of telling lengths, then token by token", prefill_then_decode),
    Schedule("pieces", "BCDH", "pieces of fixed sizes, smaller and larger than window and chunk", fixed_pieces),
    Schedule("random pieces", "BCDH", "pieces of random sizes", random_pieces),
    Schedule("warm pieces", "BCDH", "pieces onto a cache that has wrapped, and single tokens between", warm_pieces),
    Schedule("positions", "L", "the same with positions named by the caller", explicit_positions),
    Schedule("allocation", "A", "memory that grows by 1, 4, 8 and 256 rows", allocation),
    Schedule("long", "AQ", "600 tokens: past allocation steps, memory within its bound", long_run),
    Schedule("capacity", "Q", "a cache made for L tokens, L fed, then one more", capacity),
]
