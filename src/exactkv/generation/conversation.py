"""A conversation: messages, the cache that goes with them, and turns that feed only what is new.

Each turn renders the whole history by the model's chat template and compares its tokens with those in the cache. So
nothing is assumed about a template: one that drops earlier thinking costs what comes after the place where it changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from exactkv.cache import CheckpointPolicy
from exactkv.cache.checks import is_int, require
from exactkv.cache.store import PromptStore
from exactkv.errors import InputError, LoadError
from exactkv.generation import saved
from exactkv.generation.loop import Generation, Stats, stream
from exactkv.generation.reuse import CHECKPOINTS, common_prefix
from exactkv.generation.sampling import GREEDY, Sampling
from exactkv.generation.stopping import Stopping
from exactkv.generation.structure import Structure
from exactkv.generation.text import Piece
from exactkv.models.model import Model

Message = dict[str, str]
WORTH_A_LOOKUP = 64
"""A store is asked where the conversation's own cache leaves more tokens than this to feed."""


class Reply(Iterator[Piece]):
    """An answer as it comes: an iterator of pieces. What has come is in the conversation at every moment, also after
    Ctrl-C or an error. ``generation`` has the tokens, ``stats`` the counts."""

    def __init__(self, generation: Generation, message: Message, store: PromptStore | None = None):
        self.generation, self._message, self._store = generation, message, store

    def __next__(self) -> Piece:
        try:
            piece = next(self.generation)
        except StopIteration:
            self._keep()
            raise
        self._message["content"] += piece.text
        return piece

    def close(self) -> None:
        """End it here. What has come is the answer."""
        self.generation.close()
        self._keep()

    def _keep(self) -> None:
        """Give the store, once, what was computed."""
        store, self._store = self._store, None
        if store is not None:
            store.insert(self.generation.cache)

    @property
    def text(self) -> str:
        """What has come so far."""
        return self._message["content"]

    @property
    def stats(self) -> Stats:
        return self.generation.stats


class Conversation:
    """Messages with a model that has a chat template, and their cache.

    ``messages``: {"role", "content"}, the system's first if there is one; every question has an answer, empty where it
    was stopped before its first word. ``cache``: one row; what it holds never changes an answer, only its cost.
    ``storage``: how it keeps keys and values, as for `Model.new_cache`.
    ``checkpoints``: which states of windowed and recurrent layers it keeps to go back to, beside those at the ends of
    messages. ``store``: where long texts are looked up and what was computed is kept. ``refused``: after ``load``, why
    the saved cache could not be used, else None. ``structure``: what answers must look like; ``tools``: JSON schemas of
    functions for the template; answers then tell special tokens too, as calls are written with them. Neither is saved.
    Raises InputError where the model has no chat template.
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        sampling: Sampling = GREEDY,
        max_tokens: int = 1024,
        checkpoints: CheckpointPolicy = CHECKPOINTS,
        store: PromptStore | None = None,
        structure: Structure | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        storage: str = "dense",
    ):
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            raise InputError(
                f"{model.name or 'this model'} has no chat template, so it cannot hold a conversation (base models "
                "usually have none). Take an instruct or chat model, or give it a text: exactkv generate MODEL TEXT."
            )
        self.model, self.sampling, self.max_tokens = model, sampling, max_tokens
        self.messages: list[Message] = []
        self.store, self.structure, self.tools = store, structure, tools
        self.cache = model.new_cache(storage=storage, checkpoints=checkpoints)
        self.refused: str | None = None
        self._regenerated = 0  # never set back, so that no answer comes from a seed twice
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message, or None. Set, it holds from the next turn on."""
        first = self.messages[0] if self.messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[self.system is not None :]
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]

    def reply(self, text: str) -> Reply:
        """Say ``text``; returns the answer. Raises InputError, the conversation as it was, where it does not fit."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Reply:
        """Another answer to the last question; with temperature 0 it is the same one."""
        reply = self._answer(self.messages[: self._question() + 1], self._regenerated + 1)
        self._regenerated += 1
        return reply

    def edit(self, index: int, text: str) -> Reply:
        """Say ``text`` instead of the question ``messages[index]``; what came after it is dropped."""
        questions = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        place = range(len(self.messages))[index] if -len(self.messages) <= index < len(self.messages) else None
        if place not in questions:
            raise InputError(f"message {index} is none of yours; expected one of {questions or 'none: say something'}")
        return self._answer([*self.messages[:place], {"role": "user", "content": text}])

    def undo(self) -> str:
        """Drop the last question and its answer; returns the question."""
        place = self._question()
        text = self.messages[place]["content"]
        del self.messages[place:]
        return text

    def clear(self) -> None:
        """Drop all messages but the system's."""
        del self.messages[self.system is not None :]

    def save(self, directory: str | Path) -> None:
        """Write messages, settings and cache into a directory. One that holds a saved conversation is replaced, all at
        once: whoever is interrupted has the earlier one."""
        content = {
            "model": self.model.name,
            "sampling": asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "storage": self.cache.storage.name,
            "messages": self.messages,
            "regenerated": self._regenerated,
        }
        saved.write(Path(directory), content, self.cache)

    @classmethod
    def load(
        cls, directory: str | Path, model: Model, store: PromptStore | None = None, storage: str | None = None
    ) -> Conversation:
        """A saved conversation. A cache that does not fit ``model``, or is not of the ``storage`` that is asked for
        (default: as saved), is left aside, ``refused`` says why, and the first turn feeds the messages anew. Raises
        LoadError where the messages cannot be read."""
        content = saved.read(Path(directory))
        try:
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in content["messages"]]
            sampling, max_tokens = Sampling.from_dict(content["sampling"]), content["max_tokens"]
            Stopping(max_tokens)
            regenerated = content["regenerated"]
            require(is_int(regenerated) and regenerated >= 0, "regenerated", regenerated, "an integer >= 0")
            if wrong := [m["role"] for m in messages if m["role"] not in ("system", "user", "assistant")]:
                raise InputError(f"the role {wrong[0]!r}")
        except (KeyError, TypeError, ValueError, OverflowError, InputError) as error:
            raise LoadError(f"{directory} holds no conversation as exactkv saves it: {error!r}") from error
        wanted = content.get("storage", "dense") if storage is None else storage
        made = cls(model, None, sampling, max_tokens, store=store, storage=wanted)
        made.messages, made._regenerated = messages, regenerated
        cache, made.refused = saved.read_cache(Path(directory), content, model)
        if cache is not None and cache.storage != made.cache.storage:
            made.refused = f"its storage is {cache.storage.name}, not {made.cache.storage.name}"
        elif cache is not None:
            made.cache = cache
        return made

    # Within.

    def _question(self) -> int:
        for place in reversed(range(len(self.messages))):
            if self.messages[place]["role"] == "user":
                return place
        raise InputError("there is no question yet; say something first")

    def _answer(self, messages: list[Message], again: int = 0) -> Reply:
        tokens = self._rendered(messages, True)
        self._look_up(tokens)
        sampling = replace(self.sampling, seed=(self.sampling.seed + again) % (1 << 63))
        generation = stream(
            self.model, tokens, self.max_tokens, sampling, cache=self.cache, checkpoints=self._ends(messages, tokens),
            structure=self.structure, show_special_tokens=self.tools is not None,
        )  # fmt: skip
        answer = {"role": "assistant", "content": ""}
        self.messages = [*messages, answer]
        return Reply(generation, answer, self.store)

    def _look_up(self, tokens: Sequence[int]) -> None:
        """Take the store's cache, where it saves more than copying it costs."""
        if self.store is None:
            return
        options: dict[str, Any] = {"storage": self.cache.storage.name, "checkpoints": self.cache.checkpoint_policy}
        stands = self.cache.standing(min(common_prefix(self.cache.tokens(0), tokens), len(tokens) - 1))[0]
        if len(tokens) - stands > WORTH_A_LOOKUP:
            found = self.store.lookup(self.model, tokens, **options)
            if found.cached > stands:
                self.cache = found.cache

    def _rendered(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> list[int]:
        assert self.model.tokenizer is not None
        return self.model.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tools=self.tools)

    def _ends(self, messages: Sequence[Message], tokens: Sequence[int]) -> list[int]:
        """Where later turns will part from ``tokens``, as far as the cache does not hold them: where each message but
        the first would begin with other words, and where the next turn goes on. Each found by rendering such a turn, so
        that what a template drops or opens is known; one token before, which may join with the words that come."""
        if not self.cache.spec.forgets:
            return []
        stands = self.cache.standing(common_prefix(self.cache.tokens(0), tokens))[0]
        ends: list[int] = []
        for count in range(len(messages), 0, -1):
            try:
                end = common_prefix(self._rendered(_parting(messages, count), False), tokens) - 1
            except InputError:  # a template may refuse such a conversation
                continue
            if end <= stands:
                break
            ends.append(end)
        return [end for end in ends if end < len(tokens) - 1]  # there the prompt's own checkpoint is


def _parting(messages: Sequence[Message], count: int) -> list[Message]:
    """The first ``count`` messages and another than the next; after all of them, the next turn."""
    if count == len(messages):
        return [*messages, {"role": "assistant", "content": "0"}, {"role": "user", "content": "0"}]
    replaced = messages[count]
    other = next(c for c in map(chr, range(ord("0"), sys.maxunicode)) if c not in replaced["content"])
    return [*messages[:count], {"role": replaced["role"], "content": other}]
