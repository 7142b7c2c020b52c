"""Evicting from the index: in order of use, in time that grows with what goes, in transactions that others wait for."""

from __future__ import annotations

import sqlite3
import threading
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.cache.store import evict
from exactkv.cache.store.disk import DiskTier
from exactkv.cache.store.index import Entry, Index
from exactkv.cache.store.tree import Namespace

SPACE = Namespace("a" * 64, "dense", "float32", "cpu", "")


def entered(made: Index, pieces: list[tuple[int, float, list[float]]]) -> None:
    """Pieces of one token: (which earlier one it hangs from, 0 for none; when used; when its checkpoints were)."""
    space = made.space(SPACE, {"name": "tiny"})
    assert space is not None
    ids, depth, number = [0], [0], 0
    with made.writing():
        for number, (above, used, marks) in enumerate(pieces, 1):
            names = [f"{number:016x}{i:016x}.safetensors" for i in range(len(marks) + 1)]
            for name in names:
                made.reserve(name, 100)
            start = depth[above]
            piece = made.enter_piece(space, ids[above], start, array("q", [number]), names[0], 100)
            assert piece is not None
            ids.append(piece)
            depth.append(start + 1)
            made.touch({(True, piece): used})
            for at, (name, when) in enumerate(zip(names[1:], marks, strict=True)):
                mark = made.enter_mark(piece, start + 1 + at, name, 100)
                assert mark is not None
                made.touch({(False, mark): when})


def left(made: Index) -> tuple[set[int], set[int]]:
    rows = made._db.execute
    return {i for (i,) in rows("SELECT id FROM pieces")}, {i for (i,) in rows("SELECT id FROM marks")}


def oldest_first(made: Index, goal: int, keep: set[int], before: float) -> int:
    """The specification: the oldest of all that may go, looked for anew each time."""
    count = 0
    while made.total() - made.going_bytes() > goal:
        rows = made._db.execute(
            "SELECT used, 0, id FROM pieces p WHERE NOT EXISTS (SELECT 1 FROM pieces c WHERE c.parent = p.id) "
            "UNION ALL SELECT used, 1, id FROM marks ORDER BY 1, 2, 3"
        ).fetchall()
        may = [(kind, id_) for used, kind, id_ in rows if used < before and (kind or id_ not in keep)]
        if not may:
            break
        made.forget(Entry(may[0][1], 0, 0, "", not may[0][0]))
        count += 1
    return count


TREES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=2)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(TREES, st.integers(0, 4000), st.sets(st.integers(1, 30), max_size=4), st.sampled_from([1e300, 6.0]))
def test_what_goes_is_what_was_used_longest_ago(tmp_path_factory, tree, goal, keep, before):
    pieces = [(above % (i + 1), float(used), [float(m) for m in marks]) for i, (above, used, marks) in enumerate(tree)]
    for page in (1, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evict, "PAGE", page)
            made = Index(tmp_path_factory.mktemp("index") / "index.sqlite")
            entered(made, pieces)
            other = made.copy()
            held = made.total()
            with made.writing():
                count, freed = evict.evict(made, held - goal, keep, (), before)
            assert (count, left(made)) == (oldest_first(other, goal, keep, before), left(other))
            assert freed == held - (made.total() - made.going_bytes())
            made.close()
            other.close()


def steps_of(directory, count: int) -> float:
    """SQLite's own steps an entry, for pruning so many: texts of eight pieces, each newer than what it hangs from."""
    tier = DiskTier(directory)
    entered(tier.index, [(i if i % 8 else 0, float(i), [float(i)]) for i in range(count // 2)])
    steps = 0

    def stepped() -> int:
        nonlocal steps
        steps += 100
        return 0

    tier.index._db.set_progress_handler(stepped, 100)
    gone, freed = tier.prune(0)
    tier.index._db.set_progress_handler(None, 0)
    assert count // 2 <= gone <= count and freed == count * 100 + count // 2 * 8 and tier.index.counts() == (0, 0)
    tier.close()
    return steps / count


def test_pruning_takes_steps_in_proportion_to_what_goes(tmp_path):
    few, many = steps_of(tmp_path / "few", 1000), steps_of(tmp_path / "many", 10_000)
    assert many < 1.5 * few and many < 2000, f"{few} and {many} steps an entry"


def test_others_write_while_much_is_pruned(tmp_path, monkeypatch):
    """No transaction has more than a batch, and one who waits gets its turn before the end."""
    monkeypatch.setattr(evict, "BATCH", 20)
    tier = DiskTier(tmp_path)
    entered(tier.index, [(0, float(i), []) for i in range(2000)])
    turns: list[int] = []

    def other() -> None:
        db = sqlite3.connect(tmp_path / "index.sqlite", timeout=30, isolation_level=None)
        while True:
            db.execute("BEGIN IMMEDIATE")
            turns.append(db.execute("SELECT COUNT(*) FROM pieces").fetchone()[0])
            db.execute("COMMIT")
            if not turns[-1]:
                return
            threading.Event().wait(0.001)

    thread = threading.Thread(target=other)
    thread.start()
    tier.prune(0)
    thread.join()
    assert len(set(turns)) > 5 and set(turns) <= set(range(0, 2001, 20))
    tier.close()


def test_opening_with_a_lower_limit_and_making_room_go_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(evict, "BATCH", 7)
    tier = DiskTier(tmp_path, 3000)
    entered(tier.index, [(0, float(i), []) for i in range(100)])
    taken = []
    real = evict.evict
    monkeypatch.setattr(evict, "evict", lambda *given: taken.append(real(*given)) or taken[-1])
    assert tier._reserved(500, set(), set()) is not None
    assert max(count for count, _ in taken) <= 7 and tier.index.total() <= 3000
    tier.max_bytes = 1000
    tier.tidy()
    assert max(count for count, _ in taken) <= 7 and tier.index.total() <= 1000
    tier.close()
