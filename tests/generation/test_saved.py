"""Saving a conversation: what others keep in the directory, saves that are killed, and what a load must not forget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exactkv.cli.options import sampling_from
from exactkv.errors import InputError, LoadError
from exactkv.generation import Sampling
from exactkv.generation.conversation import Conversation
from exactkv.models.tokenizer import _read_json
from exactkv.verify.configs import read_config
from tests.generation.test_conversation import chat_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = chat_model("full")
KILLED = """
import os, sys
from pathlib import Path
from exactkv.cache import container
from exactkv.generation.conversation import Conversation
from tests.generation.test_conversation import chat_model
talk = Conversation(chat_model("full"), "s", max_tokens=3)
talk.reply("x").close()
die = lambda *_: os._exit(9)
if sys.argv[2] == "cache":
    os.fsync = die
else:
    real = Path.replace
    Path.replace = lambda self, to: die() if self.name.startswith("conversation") else real(self, to)
talk.save(sys.argv[1])
"""


def killed(directory: Path, when: str) -> None:
    """A save in another process that ends there, as by a kill."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run([sys.executable, "-c", KILLED, str(directory), when], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 9


def talk_of() -> Conversation:
    talk = Conversation(MODEL, "s", max_tokens=3)
    list(talk.reply("One."))
    return talk


def test_files_of_others_stay(tmp_path: Path) -> None:
    names = ["cache-mine.safetensors", "cache-20260101.safetensors", "cache-deadbeef.safetensors", "notes.txt"]
    talk = talk_of()
    talk.save(tmp_path / "talk")
    for name in names:
        (tmp_path / "talk" / name).write_text("mine")
    for _ in range(2):
        talk.save(tmp_path / "talk")
    assert all((tmp_path / "talk" / name).read_text() == "mine" for name in names)
    assert len(list((tmp_path / "talk").iterdir())) == len(names) + 2


@pytest.mark.parametrize("named", ["notes.txt", "../notes.txt", "cache-mine.safetensors"])
def test_a_conversation_that_names_another_file_as_its_cache(named: str, tmp_path: Path) -> None:
    talk, place = talk_of(), tmp_path / "talk"
    talk.save(place)
    file = place / "conversation.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "cache": named}))
    (place / named).write_text("mine")
    talk.save(place)
    assert (place / named).read_text() == "mine" and Conversation.load(place, MODEL).refused is None


@pytest.mark.parametrize("text", ["[]", '{"format": 3}', "not JSON", '{"messages": []}'])
def test_a_conversation_of_another_program_is_not_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / "conversation.json").write_text(text)
    with pytest.raises(InputError, match="something else"):
        talk_of().save(tmp_path)
    assert [p.read_text() for p in tmp_path.iterdir()] == [text]


@pytest.mark.parametrize("when", ["cache", "conversation"])
def test_a_save_that_is_killed(when: str, tmp_path: Path) -> None:
    """The first one and a later one: the directory can be used, and nothing is left behind."""
    place = tmp_path / "talk"
    killed(place, when)
    assert list(place.iterdir())
    with pytest.raises(LoadError, match="no saved conversation"):
        Conversation.load(place, MODEL)
    talk = talk_of()
    talk.save(place)
    assert len(list(place.iterdir())) == 2
    killed(place, when)
    assert len(list(place.iterdir())) > 2
    assert Conversation.load(place, MODEL).messages == talk.messages
    talk.save(place)
    assert len(list(place.iterdir())) == 2 and Conversation.load(place, MODEL).refused is None


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    talk = talk_of()
    talk.save(tmp_path)
    theirs = tmp_path / f".cache-{os.getppid()}-{'0' * 16}.safetensors.{os.getppid()}.0a.tmp"
    theirs.write_text("x")
    talk.save(tmp_path)
    assert theirs.exists()
    os.utime(theirs, (0, 0))
    talk.save(tmp_path)
    assert not theirs.exists()


def test_no_answer_is_drawn_twice_from_a_seed(tmp_path: Path) -> None:
    """Also after undo, clear, an edit, and a save."""
    talk = Conversation(MODEL, "s", Sampling(temperature=1.0, seed=3), max_tokens=8)
    seeds = [talk.reply("One.").generation.sampling.seed]

    def again() -> None:
        reply = talk.regenerate()
        list(reply)
        seeds.append(reply.generation.sampling.seed)

    again()
    talk.save(tmp_path)
    talk = Conversation.load(tmp_path, MODEL)
    again()
    talk.reply("Another.").close()
    talk.undo()
    again()
    talk.clear()
    talk.reply("One.").close()
    again()
    talk.edit(-2, "One.").close()
    again()
    assert len(set(seeds)) == len(seeds)


DEEP = "[" * 100_000


def test_nesting_without_end_is_an_error_in_words(tmp_path: Path) -> None:
    file = tmp_path / "conversation.json"
    file.write_text(DEEP)
    config = tmp_path / "config.json"
    config.write_text(DEEP)
    calls: list[Any] = [
        lambda: Conversation.load(tmp_path, MODEL), lambda: _read_json(config), lambda: read_config(str(config)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(LoadError, match="json"):
            call()
    with pytest.raises(InputError, match="--sampling"):
        sampling_from({}, DEEP)
