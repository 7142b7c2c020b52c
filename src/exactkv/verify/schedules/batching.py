"""Row i of a batch equals row i alone, whoever joins and leaves."""

from __future__ import annotations

from exactkv.verify.operations import Extract, Feed, FeedBatch, Ids, Join, New, NewBatch, RewindBatch, SaveLoad, Select
from exactkv.verify.schedules.world import Case, Schedule, World, steps

BATCH = "batch"


class Rows:
    """Rows of a batch, each with a text of its own, written down as operations."""

    def __init__(self, world: World, name: str, lengths: list[int]):
        self.world, self.name = world, name
        self.case: Case = []
        self.texts: list[Ids] = [world.other(160, f"{name} {i}") for i in range(len(lengths))]
        self.at = [0] * len(lengths)

    def feed(self, *counts: int) -> None:
        rows = []
        for i, count in enumerate(counts):
            rows.append(self.texts[i][self.at[i] : self.at[i] + count])
            self.at[i] += count
        self.case.append(FeedBatch(self.name, tuple(rows)))

    def step(self, times: int) -> None:
        for _ in range(times):
            self.feed(*[1] * len(self.texts))

    def select(self, *rows: int) -> None:
        self.case.append(Select(self.name, rows))
        self.texts, self.at = [self.texts[r] for r in rows], [self.at[r] for r in rows]


def _batch(world: World, lengths: list[int]) -> Rows:
    rows = Rows(world, BATCH, lengths)
    rows.case.append(NewBatch(BATCH, len(lengths)))
    if any(lengths):
        rows.feed(*lengths)
    return rows


def _long(world: World) -> int:
    return world.bound + 5 if world.small else min(world.bound + 5, 40)


def even(world: World) -> list[Case]:
    rows = _batch(world, [4, 4, 4])
    rows.step(world.bound + 4 if world.small else 4)
    pieces = _batch(world, [3, 3])
    pieces.feed(world.bound + 1, world.bound + 1)
    pieces.step(2)
    pieces.feed(3, 3)
    pieces.feed(2, 2)
    many = _batch(world, [3] * 5)
    many.step(2)
    return [rows.case, pieces.case, many.case]


def saved(world: World) -> list[Case]:
    """A batch saved and loaded goes on as it would have."""
    cases = []
    for lengths in ([3, 5, 2], [_long(world), 2, 6]):
        rows = _batch(world, lengths)
        rows.step(2)
        rows.case.append(SaveLoad(BATCH, BATCH))
        rows.step(3)
        cases.append(rows.case)
    return cases


def ragged(world: World) -> list[Case]:
    """Prompts of different lengths, then steps past every bound of each row."""
    cases = []
    for lengths in ([1, 3, 9], [_long(world), 2, world.bound], [2, _long(world)]):
        rows = _batch(world, lengths)
        rows.step(world.bound + 3 if world.small else 4)
        cases.append(rows.case)
    return cases


def ragged_pieces(world: World) -> list[Case]:
    rows = _batch(world, [3, 1, _long(world)])
    for counts in ((2, 5, 1), (1, 1, 1), (world.bound, 1, 3), (2 * world.bound + 2, 2, 1), (1, 2, 1), (1, 1, 1)):
        rows.feed(*counts)
    return [rows.case]


def empty_rows(world: World) -> list[Case]:
    rows = _batch(world, [4, 0, 7])
    rows.feed(1, 3, 1)
    rows.feed(0, 1, 2)
    rows.step(3)
    return [rows.case]


def leaving(world: World) -> list[Case]:
    """Rows leave (the longest, the shortest, one in the middle) and change places."""
    cases = []
    for keep in ([0, 1], [1, 2], [2, 0], [2], [1, 0, 2]):
        rows = _batch(world, [5, 2, _long(world)])
        rows.step(2)
        rows.select(*keep)
        rows.step(world.bound + 2 if world.small else 3)
        if len(keep) > 1:
            rows.select(0)
            rows.step(3)
        cases.append(rows.case)
    twice = _batch(world, [3, 3])
    twice.select(1, 0, 1)
    twice.texts = [world.other(40, f"twice {i}") for i in range(3)]
    twice.at = [0, 0, 0]
    twice.step(4)
    repeated = _batch(world, [3, 5])
    repeated.select(0, 0, 1, 1)
    repeated.texts = [world.other(40, f"repeated {i}") for i in range(4)]
    repeated.at = [0, 0, 0, 0]
    repeated.step(4)
    return [*cases, twice.case, repeated.case]


def joining(world: World) -> list[Case]:
    """Rows join a batch that is on its way: shorter, longer, empty; then others leave, and more join."""
    cases = []
    for first, second in (([6, 3], 2), ([3, 1], _long(world)), ([_long(world), 2], 5)):
        rows = _batch(world, first)
        rows.step(2)
        guest = world.other(80, f"guest {second}")
        rows.case += [New("guest"), Feed("guest", guest[:second]), Join((BATCH, "guest"), BATCH)]
        rows.texts.append(guest)
        rows.at.append(second)
        rows.step(3)
        rows.select(*([1, 2] if second % 2 else [0, 2]))
        rows.step(world.bound if world.small else 2)
        late = world.other(80, "late")
        rows.case += [New("late"), Feed("late", late[:4]), *steps("late", late[4:6]), Join((BATCH, "late"), BATCH)]
        rows.texts.append(late)
        rows.at.append(6)
        rows.step(3)
        cases.append(rows.case)
    other = _batch(world, [3, 5])
    two = Rows(world, "other", [2, 2])
    two.case.append(NewBatch("other", 2))
    two.feed(9, 2)
    other.case += [*two.case, Join((BATCH, "other"), BATCH)]
    other.texts, other.at = other.texts + two.texts, other.at + two.at
    other.step(4)
    other.select(3, 0)
    other.step(3)
    singles: Case = []
    made = Rows(world, BATCH, [4, 1, 7])
    for i, n in enumerate((4, 1, 7)):
        singles += [New(f"single{i}"), Feed(f"single{i}", made.texts[i][:n])]
        made.at[i] = n
    made.case = [*singles, Join(("single0", "single1", "single2"), BATCH)]
    made.step(world.bound + 2 if world.small else 3)
    return [*cases, other.case, made.case]


def extracting(world: World) -> list[Case]:
    cases = []
    for row in (0, 1, 2):
        rows = _batch(world, [3, _long(world), 6])
        rows.step(2)
        rows.case.append(Extract(BATCH, row, "alone"))
        rows.case += steps("alone", world.other(world.bound + 2 if world.small else 3, "alone"))
        rows.step(2)
        cases.append(rows.case)
    return cases


def rewinding_rows(world: World) -> list[Case]:
    cases = []
    for counts in ((1, 1, 1), (2, 0, 3)):
        rows = _batch(world, [4, 6, 5])
        rows.feed(3, 3, 3)
        rows.case.append(RewindBatch(BATCH, counts))
        rows.texts = [world.other(40, f"rewound {i}") for i in range(3)]
        rows.at = [0, 0, 0]
        rows.step(4)
        cases.append(rows.case)
    return cases


SCHEDULES = [
    Schedule("batch", "J", "rows of equal lengths, in steps and pieces", even),
    Schedule("ragged batch", "J", "rows of different lengths, then steps", ragged),
    Schedule("ragged pieces", "JD", "each row its own number of tokens, again and again", ragged_pieces),
    Schedule("empty rows", "JK", "rows that are given nothing at first, or in between", empty_rows),
    Schedule("leaving rows", "K", "rows leave and change places", leaving),
    Schedule("joining rows", "K", "rows join a batch on its way, and leave", joining),
    Schedule("extracted rows", "K", "a row taken out goes on alone", extracting),
    Schedule("saved batch", "O", "a batch saved, loaded and continued", saved),
    Schedule("rewound rows", "I", "rows taken back by different counts", rewinding_rows),
]
