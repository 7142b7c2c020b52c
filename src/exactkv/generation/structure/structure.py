"""What a text must look like, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exactkv.errors import InputError
from exactkv.generation.structure.vocabulary import llguidance

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer

WHITESPACE = r"( |\r?\n{1,2}[ \t]{0,40})"
"""Between the parts of a JSON value. JSON allows any, and small models then write line breaks without end."""
UNTIL = "until_"
OPTIONS = '%llguidance {"no_forcing": true}'
"""Allow every token that fits. Else, where only one text can follow, llguidance allows just the token with which the
tokenizer would begin it; if that one was banned, nothing would be left."""


@dataclass(frozen=True)
class Structure:
    """What a text must look like. Made by one of the constructors, which check what they are given.

    ``kind``: "json_schema", "grammar" or "regex"; ``source``: the schema, grammar or expression. ``tokens``: pairs of a
    name and the text of a token, which a grammar may use by that name: the token itself where it is a special one of
    the model's, else its text. A name that begins with ``until_`` means any text up to and with the first such token.
    """

    kind: str
    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "grammar", "regex"):
            raise InputError(f"a structure's kind is {self.kind!r}; expected json_schema, grammar or regex")
        package = llguidance()
        if message := package.LLMatcher.validate_grammar(self.compiled(None)):
            raise InputError(f"the {self.kind.replace('_', ' ')} is refused: {message.strip()}")

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Structure:
        """A JSON value that satisfies ``schema``, a mapping or its JSON text. Properties come in the schema's order.
        Raises InputError for what is no schema, and for keywords that llguidance cannot enforce."""
        try:
            content = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(content, Mapping):
                raise InputError(f"the JSON schema is {schema!r:.80}; expected an object such as {{'type': 'object'}}")
            return cls("json_schema", json.dumps(content, allow_nan=False, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the JSON schema is not JSON: {error}") from None

    @classmethod
    def grammar(cls, text: str) -> Structure:
        """A text of the Lark grammar ``text``, in llguidance's dialect, from its rule ``start``."""
        return cls("grammar", _checked("grammar", text))

    @classmethod
    def regex(cls, text: str) -> Structure:
        """A text all of which matches the regular expression (Rust's syntax: no look-around, no backreferences)."""
        return cls("regex", _checked("regex", text))

    def compiled(self, tokenizer: Tokenizer | None, spaced: bool = False) -> str:
        """The grammar in llguidance's own form. ``tokenizer``: whose special tokens are meant; None: none are.
        ``spaced``: with one space in front."""
        matcher = llguidance().LLMatcher
        if self.kind == "json_schema":
            options = {"whitespace_pattern": WHITESPACE}
            inner = json.loads(matcher.grammar_from_json_schema(self.source, defaults=options))["grammars"][0]
        elif self.kind == "regex":
            inner = json.loads(matcher.grammar_from_regex(self.source))["grammars"][0]
        else:
            named = [_rule(name, text, tokenizer) for name, text in self.tokens]
            inner = {"lark_grammar": "\n".join([self.source, *named])}
        start = 'start: " " @inner' if spaced else "start: @inner"
        outer = {"name": "outer", "lark_grammar": f"{OPTIONS}\n{start}"}
        return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]}, ensure_ascii=False)


def _checked(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"the {name} is {text!r:.80}; expected a text that is not empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the {name} holds half of a surrogate pair at character {error.start}") from None
    return text


def _rule(name: str, text: str, tokenizer: Tokenizer | None) -> str:
    """A grammar's rule for a token, or for any text up to and with it."""
    token = _token(text, tokenizer)
    if not name.startswith(UNTIL):
        return f"{name}: {token}"
    # A lexer takes as much as it can, so that a text's end must be named with it, unless it is no text.
    return rf"{name}: /(.|\n)*/ {token}" if token.startswith("<") else rf"{name}[suffix={token}]: /(.|\n)*/"


def _token(text: str, tokenizer: Tokenizer | None) -> str:
    """A grammar's term for a token."""
    if tokenizer is not None:
        token = tokenizer.backend.token_to_id(text)
        added = tokenizer.backend.get_added_tokens_decoder()
        if token in added and added[token].special:
            return f"<[{token}]>"
    return json.dumps(text, ensure_ascii=False)
