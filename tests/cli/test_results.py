"""OUT of `generate --file`: neighbours, and two processes that rewrite it."""

from __future__ import annotations

from pathlib import Path

import pytest

from exactkv.cli.lines import error_line, id_of
from exactkv.cli.results import Results
from exactkv.errors import InputError


def test_rewriting_touches_no_neighbour(tmp_path: Path) -> None:
    out, neighbour = tmp_path / "b.jsonl", tmp_path / "b.jsonl.new"
    neighbour.write_text("precious")
    out.write_bytes(error_line(1, 1, InputError("no")))
    results = Results(out)
    results.prepare()
    results.add(b"{}\n")
    results.close()
    assert neighbour.read_text() == "precious" and out.read_bytes() == b"{}\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.jsonl", "b.jsonl.new"]


def test_a_file_that_was_replaced_while_it_was_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b.jsonl"
    out.write_bytes(error_line(1, 1, InputError("no")))
    lock = Results._lock

    def late(self: Results, file: object) -> None:
        monkeypatch.setattr(Results, "_lock", lock)
        first = Results(out)  # comes between, drops the error and ends
        first.prepare()
        first.close()
        self._lock(file)  # type: ignore[arg-type]

    monkeypatch.setattr(Results, "_lock", late)
    with pytest.raises(InputError, match="rewritten"):
        Results(out)


def test_a_failure_while_rewriting_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "b.jsonl"
    out.write_bytes(error_line(1, 1, InputError("no")))
    before = out.read_bytes()
    results = Results(out)
    monkeypatch.setattr("exactkv.cli.results.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        results.prepare()
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]


def test_an_id_of_null_is_none_given() -> None:
    assert id_of({"id": None}, 7) == 7 == id_of({}, 7)
