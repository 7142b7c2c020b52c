"""The formats in which models call tools and reason, as a table, and which of them a model's is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exactkv.errors import InputError
from exactkv.generation.tools.calls import Reader, functions, read_bare, read_json, read_mistral, read_pythonic

if TYPE_CHECKING:
    from exactkv.generation.structure import Structure
    from exactkv.generation.tools.harmony import HarmonyParser
    from exactkv.generation.tools.parser import MarkedParser
    from exactkv.models.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]] | None
THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Block:
    """Calls between two markers; ``close`` None: up to the reply's end."""

    open: str
    close: str | None
    read: Reader


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls and reasoning.

    ``reasoning``: the markers around it, at the reply's beginning. ``blocks``: markers of calls. ``bare``: reads a
    reply that is nothing but calls, without a marker; ``bare_starts``: with what it begins. ``forced``: the kind of
    grammar that makes a model call. ``id_length``: of calls' ids, where the template is strict; 0: "call_" and 24
    digits.
    Markers may be special tokens: generate with ``show_special_tokens=True``.
    """

    name: str
    reasoning: tuple[str, str] | None = THINK
    blocks: tuple[Block, ...] = ()
    bare: Reader | None = None
    bare_starts: tuple[str, ...] = ()
    forced: str | None = None
    id_length: int = 0

    @classmethod
    def of(cls, given: Tokenizer | str | None) -> ToolFormat | None:
        """The format of a model with this tokenizer or chat template, or the one of this name; None where it shows
        neither calls nor reasoning."""
        if given is None:
            return None
        if isinstance(given, str):
            if given in FORMATS:
                return FORMATS[given]
            if re.fullmatch(r"[\w-]*", given):
                raise InputError(f"there is no tool format {given!r}; there are: {', '.join(FORMATS)}")
            template, tokens = given, ""
        else:
            added = given.backend.get_added_tokens_decoder().values()
            template, tokens = given.chat_template or "", "\n".join(token.content for token in added)
        return next((FORMATS[name] for name, shows in SIGNS if shows(template, template + tokens)), None)

    def parser(self, tools: Tools = None, after: str = "", seed: str | None = None) -> MarkedParser | HarmonyParser:
        """A new parser for one reply. ``tools``: what may be called: text that calls others stays text, and replies
        without markers are looked at only where there are tools. None: any name. ``after``: how the prompt ends, for
        templates that begin the reasoning themselves. ``seed``: ids of calls follow from it; None: they are random.
        Raises InputError where tools are none."""
        from exactkv.generation.tools.harmony import HarmonyParser
        from exactkv.generation.tools.parser import MarkedParser

        names = None if tools is None else functions(tools).keys()
        return (HarmonyParser if self.name == "harmony" else MarkedParser)(self, names, after, seed)

    def structure(self, tools: Tools, choice: str | Mapping[str, Any] = "required", after: str = "") -> Structure:
        """What a reply must look like to be a call: of any of ``tools`` for "required", or of the function that
        ``choice`` names. ``after``: as for ``parser``. Raises InputError where there is no such tool, or where the
        format knows no calls."""
        from exactkv.generation.tools.forced import forced_call

        return forced_call(self, functions(tools), choice, after)

    def begins_reasoning(self, after: str) -> bool:
        """Whether a prompt that ends so has begun the reasoning."""
        return self.reasoning is not None and after.rstrip().endswith(self.reasoning[0])


FORMATS = {
    made.name: made
    for made in (
        ToolFormat("hermes", blocks=(Block("<tool_call>", "</tool_call>", read_json),), forced="hermes"),
        ToolFormat(
            "mistral", ("[THINK]", "[/THINK]"), (Block("[TOOL_CALLS]", None, read_mistral),), forced="mistral",
            id_length=9,
        ),
        ToolFormat(
            "mistral_args", ("[THINK]", "[/THINK]"), (Block("[TOOL_CALLS]", None, read_mistral),),
            forced="mistral_args", id_length=9,
        ),
        ToolFormat(
            "llama3_json", blocks=(Block("<|python_tag|>", None, read_bare),), bare=read_bare, bare_starts=("{", "["),
            forced="json",
        ),
        ToolFormat(
            "pythonic",
            blocks=(Block("<|python_start|>", "<|python_end|>", read_pythonic),
                    Block("<|python_tag|>", None, read_pythonic)),
            bare=read_bare, bare_starts=("[", "{"), forced="pythonic",
        ),
        ToolFormat("harmony", None, forced="harmony"),
        ToolFormat("think"),
    )
}  # fmt: skip
"""By name. "hermes": Qwen too; "mistral_args": from Mistral's tokenizer version 11 on; "pythonic": Llama 4, and Llama
3.2 where it is asked for it; "harmony": GPT-OSS; "think": reasoning alone."""

SIGNS: tuple[tuple[str, Any], ...] = (
    ("harmony", lambda template, all: "<|channel|>" in all and "<|message|>" in all),
    ("mistral_args", lambda template, all: "[TOOL_CALLS]" in all and "[ARGS]" in all),
    ("mistral", lambda template, all: "[TOOL_CALLS]" in all),
    ("hermes", lambda template, all: "<tool_call>" in template),
    ("pythonic", lambda template, all: bool(re.search(r"func_name1?\(|pythonic", template))),
    ("llama3_json", lambda template, all: '"parameters"' in template and "tools" in template),
    ("pythonic", lambda template, all: "<|python_start|>" in all),
    ("llama3_json", lambda template, all: "<|python_tag|>" in template),
    ("hermes", lambda template, all: "<tool_call>" in all and "tools" in template),
    ("think", lambda template, all: "<think>" in all),
)
"""(format, whether a template and, in all, the tokens' names show it); the first counts."""
