"""Text <-> token ids, and chat templates.

The work is done by a `tokenizers.Tokenizer` (the Rust library) and, for chat templates, jinja2's immutable
sandbox; this module adds what lies around them: special tokens, files, errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exactkv.errors import InputError, LoadError
from exactkv.models.text_stream import TextStream

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

# Files of tokenizers that transformers can convert to tokenizer.json.
_CONVERTIBLE = (
    "tokenizer.model",
    "spiece.model",
    "*.bpe.model",
    "*.tiktoken",
    "tekken.json",
    "merges.txt",
    "vocab.txt",
)


class Tokenizer:
    """A model's tokenizer.

    bos_token_id: the token that begins a text, or None. eos_token_ids: tokens that end a text or a turn, the
    main one first. chat_template: jinja source, or None. vocab_size: number of tokens, added ones included (a
    model's embedding may have more rows). special_tokens: role ("bos_token", …) -> text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        pad_token_id: int | None = None,
        unk_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        # Some tokenizer.json files bring the settings of somebody's training run, which would cut texts
        # short.
        backend.no_truncation()
        backend.no_padding()
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_ids = list(eos_token_ids)
        self.pad_token_id = pad_token_id
        eos = self.eos_token_ids[0] if self.eos_token_ids else None
        roles = {
            "bos_token": bos_token_id,
            "eos_token": eos,
            "pad_token": pad_token_id,
            "unk_token": unk_token_id,
        }
        texts = {role: backend.id_to_token(token) for role, token in roles.items() if token is not None}
        named = {role: text for role, text in texts.items() if text is not None}
        self.special_tokens: dict[str, str] = {**named, **(special_tokens or {})}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face model directory, or None if it holds no tokenizer files.

        Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja (which
        wins over the config's field). Without tokenizer.json, other tokenizer files are converted by
        transformers, if it is installed. Raises LoadError if a file can't be read or converted, saying what
        to do.
        """
        directory = Path(path)
        if (directory / "tokenizer.json").is_file():
            return _from_tokenizer_json(directory)
        if any(any(directory.glob(pattern)) for pattern in _CONVERTIBLE):
            return _converted(directory)
        return None

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The tokens that stand for one byte each and are written as <0xE6>; () where the decoder knows no such."""
        if self.backend.decoder is None or "ByteFallback" not in repr(self.backend.decoder):
            return frozenset()
        ids = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that are written out in the text become the tokens themselves.

        add_special_tokens: also add what the model expects around a text (usually a bos token in front).
        Raises InputError if `text` is no string of valid Unicode.
        """
        return self._encoded(text, add_special_tokens).ids

    def encode_with_spans(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode`, and for each token where what it stands for begins and ends among the text's characters: twice
        the same place where it stands for none, and the whole character where for a part of one."""
        encoded = self._encoded(text, add_special_tokens)
        return encoded.ids, encoded.offsets

    def _encoded(self, text: str, add_special_tokens: bool) -> Encoding:
        if not isinstance(text, str):
            raise InputError(f"encode takes a str, given {type(text).__name__}; for many texts call it once each.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text holds half of a surrogate pair at character {error.start}, which is not valid "
                "Unicode; decode it properly or replace it first."
            ) from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that make no whole character come out as U+FFFD. Ids that have no text,
        such as the rows by which an embedding is padded, give none. Raises InputError for a negative id.
        """
        ids = list(ids)
        if ids and min(ids) < 0:
            raise InputError(f"token ids are 0 or more, given {min(ids)}.")
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A new incremental detokenizer: its pieces, joined, are the text."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's own format.

        messages: mappings with "role" and what the template uses, usually "content". add_generation_prompt:
        end with what begins the assistant's answer. tools: JSON schemas of functions. variables: passed to
        the template (`enable_thinking`, `documents`, …). Raises InputError if the model has no template or
        the template refuses the conversation.
        """
        text = self.render_chat_template(messages, add_generation_prompt, tools, **variables)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text that `apply_chat_template` encodes. Arguments and errors are the same."""
        if self.chat_template is None:
            raise InputError(
                "this model has no chat template, so it can't be given messages (base models usually have "
                "none). Give it a text instead, or set tokenizer.chat_template to a jinja template."
            )
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InputError(
                'messages must be a list of mappings such as {"role": "user", "content": "Hello"}; given '
                f"{str(messages)[:80]!r}."
            )
        context: dict[str, Any] = {
            **self.special_tokens,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
        }
        context |= {"add_generation_prompt": add_generation_prompt, **variables}
        try:
            return compile_chat_template(self.chat_template).render(**context)
        except InputError:
            raise
        except Exception as error:  # templates run arbitrary expressions on what the caller gave
            roles = [message.get("role") for message in messages]
            raise InputError(
                f"the model's chat template refused these messages (roles {roles}): {error or type(error).__name__}"
            ) from error


@lru_cache(maxsize=8)
def compile_chat_template(source: str) -> Template:
    """A chat template, ready to render, in a sandbox in which it can change nothing. The environment is that
    of transformers: trimmed blocks, `break` and `continue`, `raise_exception(message)`,
    `strftime_now(format)`, a `tojson` that keeps characters as they are, and `generation` blocks. Raises
    InputError for invalid jinja.
    """
    import datetime

    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """{% generation %} marks what the assistant wrote, for training; it renders its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise InputError(f"the model's chat template refused these messages: {message}")

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template is not valid jinja, line {error.lineno}: {error}") from error


def _from_tokenizer_json(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = directory / "tokenizer.json"
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise LoadError(f"can't read {file}: {error}. Download it again, or update the package tokenizers.") from error
    config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    _add_missing_tokens(backend, config)
    special = {role: text for role in config if role.endswith("_token") and (text := _token_text(config[role]))}
    ids = {role: backend.token_to_id(text) for role, text in special.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    _set_surroundings(backend, config, bos, eos)
    return Tokenizer(
        backend,
        chat_template=_chat_template(directory, config),
        bos_token_id=bos,
        eos_token_ids=[] if eos is None else [eos],
        pad_token_id=ids.get("pad_token"),
        unk_token_id=ids.get("unk_token"),
        special_tokens=special,
    )


def _converted(directory: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise LoadError(
            f"{directory} has a tokenizer but no tokenizer.json; converting it needs transformers: "
            "`pip install transformers sentencepiece tiktoken protobuf`, or add a tokenizer.json."
        ) from None
    try:
        slow = AutoTokenizer.from_pretrained(str(directory))
        backend = slow.backend_tokenizer
    except Exception as error:  # whatever a converter trips over
        raise LoadError(
            f"{directory} has a tokenizer but no tokenizer.json, and transformers can't convert it: {error}. "
            "Install what it asks for (usually sentencepiece, tiktoken or protobuf), or add a tokenizer.json."
        ) from error
    return Tokenizer(
        backend,
        chat_template=_chat_template(directory, _read_json(directory / "tokenizer_config.json")),
        bos_token_id=slow.bos_token_id,
        eos_token_ids=[] if slow.eos_token_id is None else [slow.eos_token_id],
        pad_token_id=slow.pad_token_id,
        unk_token_id=slow.unk_token_id,
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise LoadError(f"{file} holds a JSON {type(content).__name__}, expected an object. Download it again.")
    return content


def _token_text(value: Any) -> str | None:
    """Special tokens are written as a string or as an object with "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows of, and roles whose tokens are not marked as special."""
    from tokenizers import AddedToken

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token in (config.get("added_tokens_decoder") or {}).values():
        if (text := _token_text(token)) and text not in present:
            backend.add_tokens([AddedToken(text, **{flag: bool(token.get(flag, False)) for flag in flags})])
            present.add(text)
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if (text := _token_text(config.get(role))) and text not in present:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])
            present.add(text)


def _set_surroundings(backend: Backend, config: Mapping[str, Any], bos: int | None, eos: int | None) -> None:
    """Put bos and eos around texts as the config says; where it says nothing, tokenizer.json decides."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    backend.no_padding()
    now = backend.encode("", add_special_tokens=True).ids
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    add_bos = bos in now if add_bos is None else add_bos
    add_eos = eos in now if add_eos is None else add_eos
    surround(backend, bos if add_bos else None, eos if add_eos else None)


def surround(backend: Backend, first: int | None, last: int | None) -> None:
    """Make `backend` put these tokens (None: nothing) around each text it encodes with special tokens."""
    from tokenizers import processors

    around = {name: token for name, token in (("first", first), ("last", last)) if token is not None}
    special = [{"id": n, "ids": [i], "tokens": [backend.id_to_token(i)]} for n, i in around.items()]
    single = [name for name in ("first", "$A", "last") if name == "$A" or name in around]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the config's field: a template, or several by name, of which "default" is
    taken.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    field = config.get("chat_template")
    if isinstance(field, list):
        field = {entry.get("name"): entry.get("template") for entry in field if isinstance(entry, dict)}
    if isinstance(field, dict):
        field = field.get("default")
    return field if isinstance(field, str) else None
