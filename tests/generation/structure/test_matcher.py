"""What a structure allows next, against an oracle: the texts of a finite language, and what the tokenizer says."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exactkv.errors import InputError
from exactkv.generation.structure import Matcher, Structure
from exactkv.generation.structure.vocabulary import vocabulary_of
from exactkv.models.tokenizer import Tokenizer
from tests.generation.structure.vocabularies import KINDS, sentencepiece

ROWS = 320
words = st.lists(st.text(" ab{é1", min_size=1, max_size=4), min_size=1, max_size=4)


@lru_cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def language(texts: list[str]) -> Structure:
    return Structure.regex("|".join(re.escape(text) for text in texts))


def end_of(tokenizer: Tokenizer) -> int:
    return tokenizer.eos_token_ids[0]


def shown(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    """The bytes of a reply, as its text will show them; characters may be cut."""
    vocabulary = vocabulary_of(tokenizer, ROWS)
    raw = b"".join(vocabulary.tokens[t] for t in tokens)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert text.encode() in (raw, raw.removeprefix(b" ")), "the oracle's own check: bytes are those of the text"
        return text.encode()
    return raw[1:] if vocabulary.space is not None and raw[:1] == b" " else raw


def expected(tokenizer: Tokenizer, texts: list[str], tokens: list[int]) -> tuple[set[int], bool]:
    vocabulary = vocabulary_of(tokenizer, ROWS)
    wanted = {text.encode() for text in texts}
    allowed = {
        t
        for t in range(tokenizer.vocab_size)
        if t not in vocabulary.special
        and (tokens or t not in vocabulary.odd_beginnings)
        and any(w.startswith(shown(tokenizer, [*tokens, t])) for w in wanted)
    }
    return allowed, (shown(tokenizer, tokens) if tokens else b"") in wanted


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(words, st.randoms(use_true_random=False))
@example([" a", "a"], None)
@example(["  a", " ", "é"], None)
def test_what_is_allowed_is_what_keeps_the_shown_text_within_the_language(kind, texts, random):
    tokenizer = tokenizer_of(kind)
    end = end_of(tokenizer)
    matcher = Matcher(language(texts), tokenizer, ROWS, {end})
    tokens: list[int] = []
    while not matcher.complete:
        allowed, may_end = expected(tokenizer, texts, tokens)
        mask = matcher.mask()
        assert set(mask.nonzero().flatten().tolist()) == allowed | ({end} if may_end else set()), tokens
        if not allowed:
            break
        token = sorted(allowed)[0] if random is None else random.choice(sorted(allowed))
        tokens.append(token)
        matcher.follow(tokens)
    assert shown(tokenizer, tokens) in {t.encode() for t in texts}


@pytest.mark.parametrize("kind", ["llama", "byte-level"])
@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 12), st.randoms(use_true_random=False)), max_size=8))
def test_going_back_is_exact(kind, jumps):
    """After any jumps, the masks are those of a matcher that went there at once."""
    tokenizer = tokenizer_of(kind)
    structure = Structure.json_schema({"type": "array", "items": {"enum": ["a", "ab", 10, 1]}, "maxItems": 3})
    matcher, tokens = Matcher(structure, tokenizer, ROWS, {2}), []
    for keep, random in jumps:
        tokens = tokens[:keep]
        matcher.follow(tokens)
        for _ in range(4):
            choices = [t for t in matcher.mask().nonzero().flatten().tolist() if t != 2]
            if not choices:
                break
            tokens = [*tokens, random.choice(choices)]
            matcher.follow(tokens)
        fresh = Matcher(structure, tokenizer, ROWS, {2})
        fresh.follow(tokens)
        assert fresh.mask().equal(matcher.mask())
        assert fresh.complete == matcher.complete


def test_two_texts_of_one_structure_do_not_touch_each_other():
    tokenizer = tokenizer_of("bytes")
    structure = Structure.regex("ab|cd")
    one, other = (Matcher(structure, tokenizer, ROWS, ()) for _ in range(2))
    one.follow(tokenizer.encode("a", add_special_tokens=False))
    other.follow(tokenizer.encode("c", add_special_tokens=False))
    assert one.mask().nonzero().flatten().tolist() == tokenizer.encode("b", add_special_tokens=False)
    assert other.mask().nonzero().flatten().tolist() == tokenizer.encode("d", add_special_tokens=False)


def test_end_tokens_are_those_of_the_text_and_not_the_tokenizers():
    tokenizer = tokenizer_of("bytes")
    ordinary = tokenizer.encode("a", add_special_tokens=False)[0]
    matcher = Matcher(Structure.regex("a*b?"), tokenizer, ROWS, {ordinary, 258})
    allowed = set(matcher.mask().nonzero().flatten().tolist())
    assert {ordinary, 258} <= allowed and 257 not in allowed
    none = Matcher(Structure.regex("a*"), tokenizer, ROWS, ())
    assert none.mask().nonzero().flatten().tolist() == [ordinary] and not none.complete


def test_special_tokens_and_rows_without_tokens_are_never_text():
    tokenizer = sentencepiece("llama")
    matcher = Matcher(Structure.regex(r"(.|\n)*"), tokenizer, ROWS, {2})
    allowed = set(matcher.mask().nonzero().flatten().tolist())
    special = tokenizer.backend.token_to_id("[CALL]")
    assert not allowed & {0, 1, special, *range(tokenizer.vocab_size, ROWS)}
    assert {2, tokenizer.backend.token_to_id("<tool>")} <= allowed


def test_a_grammar_may_name_a_special_token():
    tokenizer = sentencepiece("gemma")
    source = 'start: call "a"'
    structure = Structure("grammar", source, (("call", "[CALL]"),))
    matcher = Matcher(structure, tokenizer, ROWS, {2})
    special = tokenizer.backend.token_to_id("[CALL]")
    assert matcher.mask().nonzero().flatten().tolist() == [special]
    matcher.follow([special])
    assert tokenizer.backend.token_to_id("a") in matcher.mask().nonzero().flatten().tolist()
    plain = Matcher(structure, tokenizer_of("bytes"), ROWS, {2})  # which has no such token: its text
    assert plain.mask().nonzero().flatten().tolist() == tokenizer_of("bytes").encode("[", add_special_tokens=False)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Structure.regex("(a"), "unclosed group"),
        (lambda: Structure.regex(""), "not empty"),
        (lambda: Structure.regex("\ud800"), "surrogate"),
        (lambda: Structure.regex(7), "not empty"),
        (lambda: Structure.grammar("start: foo"), "unknown name"),
        (lambda: Structure.grammar("begin: /a/"), "start"),
        (lambda: Structure.json_schema("{"), "not JSON"),
        (lambda: Structure.json_schema("[]"), "expected an object"),
        (lambda: Structure.json_schema({"type": "flower"}), "flower"),
        (lambda: Structure.json_schema({"type": {1, 2}}), "not JSON"),
        (lambda: Structure.json_schema({"minimum": float("nan")}), "not JSON"),
        (lambda: Structure.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "json schema"),
        (lambda: Structure.json_schema({"not": {"type": "object"}}), "not"),
        (lambda: Structure("poem", "a"), "poem"),
    ],
)
def test_what_is_no_structure_is_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_structures_are_values():
    assert Structure.json_object() == Structure.json_schema('{"type": "object"}')
    assert len({Structure.regex("a"), Structure.regex("a"), Structure.grammar('start: "a"')}) == 2
