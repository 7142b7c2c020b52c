"""`exactkv chat`: a conversation in the terminal, or with lines from a pipe; a turn feeds only what is new."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactkv.cli.options import MODEL_FORMS, AcceptField, Device, Dtype, size_of
from exactkv.cli.reader import Reader
from exactkv.cli.structured import (
    Grammar,
    JsonSchema,
    Regex,
    Shown,
    ToolsFile,
    read_tools,
    structure_from,
    tool_format,
)
from exactkv.errors import ExactKVError, InputError

if TYPE_CHECKING:
    from exactkv.cache.store import PromptStore
    from exactkv.generation.conversation import Conversation, Reply
    from exactkv.models.model import Model

FAILED = 2
HELP = """\
/help                this
/undo                drop the last question and its answer
/regenerate          answer the last question again
/edit [n] TEXT       ask TEXT instead of the last question, or of question n (1 is the first)
/system TEXT         set the system message; without TEXT: drop it
/stats               what the conversation holds
/save DIR            save messages and cache
/load DIR            go on with a saved conversation
/clear               start anew
/quit                leave; so does Ctrl-D
A line that ends with a backslash goes on in the next; so does what begins with \"\"\", up to \"\"\" at a line's end.
To say something that begins with a slash, double it. Ctrl-C stops an answer, and keeps what was said so far."""


def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", show_default=False, help=f"{MODEL_FORMS} Default: the embedded model."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", show_default=False, help="System message.")] = None,
    load: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Go on with a conversation that /save saved there."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="At most this many tokens an answer. Default: 1024, or as saved."),
    ] = None,
    temp: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default=False,
            help="Sampling temperature; 0 takes the most probable token. Default: 0, or as saved.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            show_default=False, help="Choose among the most probable tokens that reach this. Default: 1, or as saved."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="Another seed, another sample. Default: 0, or as saved."),
    ] = None,
    prompt_cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Keep what was computed in a prompt store there, for later conversations too, with any model.",
        ),
    ] = None,
    prompt_cache_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that the prompt store may take, such as 500MB or 2GiB.")
    ] = "4GB",
    json_schema: JsonSchema = None,
    grammar: Grammar = None,
    regex: Regex = None,
    tools: ToolsFile = None,
    kv_storage: Annotated[
        str | None,
        typer.Option(
            metavar="dense|int8|int4",
            show_default=False,
            help="How the cache keeps keys and values; see exactkv generate --help. Default: dense, or as saved.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    accept_field: AcceptField = None,
) -> None:
    """Talk with a model.

    /help lists what can be said beside questions. Answers go to standard output, the rest to standard error. With
    standard input from a pipe, each line is a question, and the end of the input ends it.
    """
    from exactkv.generation import Sampling
    from exactkv.generation.conversation import Conversation
    from exactkv.models import embedded
    from exactkv.models.load import load as load_model

    given = {"temperature": temp, "top_p": top_p, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    sampling = Sampling(**chosen)  # before anything is loaded
    structure, given_tools = structure_from(json_schema, grammar, regex), read_tools(tools)
    store = _store(prompt_cache_dir, prompt_cache_bytes)
    name = model if model is not None else embedded.default()
    loaded = load_model(name, device=device, dtype=dtype, accept_fields=accept_field or ())
    if load is None:
        conversation = Conversation(
            loaded, system, sampling, max_tokens or 1024, store=store, storage=kv_storage or "dense"
        )
    else:
        conversation = Conversation.load(load, loaded, store, kv_storage)
        conversation.sampling = replace(conversation.sampling, **chosen)
        conversation.max_tokens = max_tokens or conversation.max_tokens
        if system is not None:
            conversation.system = system
    conversation.structure, conversation.tools = structure, given_tools
    session = Session(loaded, conversation, Reader())
    if load is not None:
        session.tell_loaded()
    session.run()
    if session.failed and not session.reader.interactive:
        raise typer.Exit(FAILED)


def _store(directory: Path | None, size: str) -> PromptStore | None:
    """A store on the disk alone: in memory the conversation has its own cache."""
    from exactkv.cache.store import PromptStore

    limit = size_of(size, "--prompt-cache-bytes")
    return None if directory is None else PromptStore(0, directory, limit)


class Session:
    """One run of the command: lines in, answers out."""

    def __init__(self, model: Model, conversation: Conversation, reader: Reader):
        self.model, self.conversation, self.reader = model, conversation, reader
        self._format = None if conversation.tools is None else tool_format(model)
        self.failed = False
        self._left = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: tell(HELP),
            "undo": self._undo,
            "regenerate": lambda _: self._answer(self.conversation.regenerate()),
            "edit": self._edit,
            "system": self._system,
            "stats": lambda _: self._stats(),
            "save": self._save,
            "load": self._load,
            "clear": self._clear,
            "quit": self._quit,
        }

    def run(self) -> None:
        """Read and answer until the input ends or /quit."""
        if self.reader.interactive:
            tell(f"{self.model.name or self.model.spec.family}: /help for help, Ctrl-D to leave")
        asked_to_leave = False
        while not self._left:
            try:
                text = self.reader.read()
            except KeyboardInterrupt:
                if not self.reader.interactive:
                    raise
                if asked_to_leave:
                    tell("")
                    return
                asked_to_leave = True
                tell("\nCtrl-C again or Ctrl-D leaves")
                continue
            except InputError as error:  # a line that is no text
                self.failed = True
                tell(f"exactkv: {error}")
                continue
            if text is None:
                return
            asked_to_leave = False
            try:
                self._take(text)
            except (ExactKVError, OSError) as error:
                self.failed = True
                tell(f"exactkv: {error}")
            except KeyboardInterrupt:  # while something else than an answer ran
                if not self.reader.interactive:
                    raise
                tell("interrupted")

    def _take(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            if name.strip() not in self._commands:
                known = ", ".join(f"/{known}" for known in self._commands)
                raise InputError(f"/{name} is no command; there are {known}. To say it to the model: //{name}")
            self._commands[name.strip()](rest.strip())
        elif text.strip():
            self._answer(self.conversation.reply(text[1:] if text.startswith("//") else text))

    def _answer(self, reply: Reply) -> None:
        """Print an answer as it comes. Ctrl-C ends it, and nothing else."""
        stopped = ""
        shown = self._shown(reply)
        try:
            for piece in reply:
                if shown is not None:
                    shown.feed(piece.text)
                else:
                    sys.stdout.write(piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = " · stopped"
        if shown is not None:
            shown.finish()
        reply.close()
        print(flush=True)
        tell(dim(figures(reply) + stopped))

    def _shown(self, reply: Reply) -> Shown | None:
        """What tells an answer with tools apart."""
        tokenizer, tools = self.model.tokenizer, self.conversation.tools
        if self._format is None or tools is None or tokenizer is None:
            return None
        after = tokenizer.decode(reply.generation.prompt[-16:], skip_special_tokens=False)
        return Shown(self._format, tools, sys.stdout.write, after)

    def _undo(self, _: str) -> None:
        tell(f"dropped: {_short(self.conversation.undo())}")

    def _edit(self, rest: str) -> None:
        number, _, text = rest.partition(" ")
        questions = [i for i, m in enumerate(self.conversation.messages) if m["role"] == "user"]
        if not questions:
            raise InputError("there is no question to edit yet")
        place = questions[-1]
        if number.isdecimal() and text.strip():
            if not 1 <= int(number) <= len(questions):
                raise InputError(f"there is no question {number}; there are 1 to {len(questions)}")
            place, rest = questions[int(number) - 1], text.strip()
        if not rest:
            raise InputError("/edit takes the new text: /edit TEXT, or /edit n TEXT for the n-th question")
        self._answer(self.conversation.edit(place, rest))

    def _system(self, text: str) -> None:
        self.conversation.system = text or None
        tell("the system message holds from the next answer on" if text else "there is no system message now")

    def _stats(self) -> None:
        from exactkv.cache.report import human_bytes

        cache, messages = self.conversation.cache, self.conversation.messages
        tell(f"{len(messages)} messages · {cache.lengths[0]} tokens in the cache · {human_bytes(cache.nbytes)}")
        tell(repr(cache))

    def _save(self, path: str) -> None:
        if not path:
            raise InputError("/save takes the directory to save to: /save DIR")
        self.conversation.save(_place(path))
        tell(f"saved in {path}")

    def _load(self, path: str) -> None:
        if not path:
            raise InputError("/load takes the directory of a saved conversation: /load DIR")
        structure, tools = self.conversation.structure, self.conversation.tools
        self.conversation = type(self.conversation).load(_place(path), self.model, self.conversation.store)
        self.conversation.structure, self.conversation.tools = structure, tools
        self.tell_loaded()

    def tell_loaded(self) -> None:
        """Say what was loaded, and why its cache was not used if so."""
        tell(f"{len(self.conversation.messages)} messages")
        if self.conversation.refused is not None:
            tell(f"the saved cache is left aside, the next answer feeds all anew: {self.conversation.refused}")

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        tell("a new conversation" + (", the same system message" if self.conversation.system is not None else ""))

    def _quit(self, _: str) -> None:
        self._left = True


def _place(path: str) -> Path:
    """What is typed after /save and /load."""
    try:
        place = Path(path).expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise InputError(f"{path!r} names no directory: {error}") from None
    if "\0" in path:
        raise InputError(f"{path!r} names no directory: it holds a zero byte")
    return place


def figures(reply: Reply) -> str:
    """What an answer cost, in one line."""
    stats = reply.stats
    parts = [f"{stats.generated_tokens} tokens"]
    if stats.decode_rate is not None:
        parts.append(f"{stats.decode_rate:.1f} tokens/s")
    if stats.first_token_seconds is not None:
        parts.append(f"first token after {stats.first_token_seconds:.2f} s")
    parts.append(f"prompt {stats.prompt_tokens} tokens: {stats.cached_tokens} cached, {stats.fed_tokens} fed")
    return " · ".join(parts)


def tell(text: str) -> None:
    """To standard error: what the model did not say."""
    print(text, file=sys.stderr, flush=True)


def dim(text: str) -> str:
    plain = os.environ.get("NO_COLOR") or not sys.stderr.isatty()
    return text if plain else f"\x1b[2m{text}\x1b[0m"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60]}…"
