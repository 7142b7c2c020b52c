"""Where a text ends and what of it is shown: stop strings by their plain definition, tokens, limits, the deadline."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.errors import InputError
from exactkv.generation import stream
from exactkv.generation.stopping import Ending, HeldText, Stopping
from tests.generation.tiny_text import END, byte_tokenizer, scripted, text_model

TOKENIZER = byte_tokenizer()


def plain_stop(text: str, strings: list[str], include: bool = False) -> tuple[str, str | None]:
    """The text that is shown, and what ended it: the string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [s for s in strings if text[:end].endswith(s)]
        if complete:
            matched = max(complete, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


@settings(max_examples=300)
@given(st.data())
def test_stop_strings_by_definition_wherever_the_text_is_cut(data: st.DataObject) -> None:
    letters = st.text("ab", max_size=12)
    text, strings = data.draw(letters), data.draw(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
    include = data.draw(st.booleans())
    held, shown = HeldText(strings, include), ""
    rest = text
    while rest and held.matched is None:
        size = data.draw(st.integers(1, 4))
        part, rest = rest[:size], rest[size:]
        shown += held.add(part)
        so_far = text[: len(text) - len(rest)]
        if held.matched is None:  # as much is shown as cannot belong to a stop string, and no more
            kept = len(so_far) - len(shown)
            assert so_far.startswith(shown)
            longest = max((n for s in strings for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
            assert kept == longest
    shown += held.release()
    assert (shown, held.matched) == plain_stop(text, strings, include)


def fed(ids: list[int], stopping: Stopping) -> tuple[Ending, str, int]:
    """Feed until it ends; the text and how many tokens it took."""
    ending, text = Ending(stopping, TOKENIZER), ""
    ending.start()
    for count, token in enumerate(ids, start=1):
        text += ending.feed(token)
        if ending.reason is not None:
            return ending, text, count
    return ending, text + ending.give_up(), len(ids)


@settings(max_examples=200)
@given(st.data())
def test_all_ends_together(data: st.DataObject) -> None:
    """Whatever comes first: tokens of bytes, so that characters and stop strings lie across them. A text cut by the
    limit or by an end token within a character shows U+FFFD, as decoding does."""
    text = data.draw(st.text("ab日é🎉", max_size=10))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if data.draw(st.booleans()):
        ids = [*ids[: data.draw(st.integers(0, len(ids)))], END, *ids]
    strings = data.draw(st.lists(st.text("ab日é", min_size=1, max_size=3), max_size=3))
    include = data.draw(st.booleans())
    limit = data.draw(st.integers(1, 20))
    ending, shown, taken = fed(ids, Stopping(limit, [END], strings, include))
    used = ids[: min(limit, len(ids))]
    ended = END in used
    used = used[: used.index(END)] if ended else used
    expected, matched = plain_stop(TOKENIZER.decode(used), strings, include)
    assert shown == expected
    if matched is not None:
        assert (ending.reason, ending.matched) == ("stop", matched)
        assert plain_stop(TOKENIZER.decode(ids[: taken - 1]).removesuffix("\ufffd"), strings)[1] is None  # not later
    elif ended:
        assert (ending.reason, ending.matched, taken) == ("stop", END, len(used) + 1)
    else:
        assert (ending.reason, ending.matched) == ("length" if limit <= len(ids) else "deadline", None)


def test_an_accepted_run_with_the_cap_and_the_end_inside() -> None:
    """[x, EOS, y, z] as a draft that was accepted at once (kinds I and S): nothing after the end counts."""
    x, y, z = TOKENIZER.encode("xyz", add_special_tokens=False)
    for limit, strings, expected in (
        (9, (), ("stop", END, 2)),
        (2, (), ("stop", END, 2)),
        (1, (), ("length", None, 1)),
        (9, (TOKENIZER.decode([x]),), ("stop", TOKENIZER.decode([x]), 1)),
        (1, (TOKENIZER.decode([x]),), ("stop", TOKENIZER.decode([x]), 1)),  # complete with the last token: a stop
    ):
        ending, _, taken = fed([x, END, y, z], Stopping(limit, [END], strings))
        assert (ending.reason, ending.matched, taken) == expected
        with pytest.raises(AssertionError, match="has ended"):
            ending.feed(y)


def test_a_stop_string_over_tokens_in_a_stream() -> None:
    said = "one two three"
    generation = stream(scripted(said, END), "x", max_tokens=100, stop=["two", "zzz"])
    pieces = list(generation)
    assert "".join(p.text for p in pieces) == generation.text == "one "
    assert (
        (generation.finish_reason, generation.matched)
        == ("stop", "two")
        == (
            pieces[-1].finish_reason,
            pieces[-1].matched,
        )
    )
    # The tokens are all that were generated: the cache holds all but the last, and going on from there is exact.
    assert TOKENIZER.decode(generation.tokens) == "one two"
    assert [t for p in pieces for t in p.tokens] == generation.tokens
    assert generation.cache.tokens(0) == [*generation.prompt, *generation.tokens[:-1]]
    included = stream(scripted(said, END), "x", max_tokens=100, stop="two", include_stop=True)
    assert "".join(p.text for p in included) == "one two"


def test_held_back_text_comes_when_it_is_no_stop() -> None:
    generation = stream(scripted("ab<en<end", END), "x", stop="<end>")
    texts = [p.text for p in generation]
    assert texts == ["a", "b", "<en", "<end"]  # the last with the end token
    assert generation.matched == END
    limited = stream(scripted("ab<en"), "x", max_tokens=5, stop="<end>")
    assert "".join(p.text for p in limited) == "ab<en" and limited.finish_reason == "length"


def test_an_end_token_with_a_text() -> None:
    token = TOKENIZER.encode("b", add_special_tokens=False)
    shown = {
        include: "".join(p.text for p in stream(scripted("abc"), "x", stop_token_ids=token, include_stop=include))
        for include in (False, True)
    }
    assert shown == {False: "a", True: "ab"}


def test_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("exactkv.generation.stopping.time.monotonic", lambda: now[0])
    model = text_model(tokenizer=TOKENIZER)
    generation = stream(model, [1, 2, 3], stop_token_ids=(), deadline=5)
    now[0] = 100.0  # the time before the first step does not count
    next(generation)
    now[0] = 104.9
    next(generation)
    now[0] = 105.0
    rest = list(generation)
    assert len(rest) == 1 and rest[0].finish_reason == generation.finish_reason == "deadline"
    assert generation.cache.tokens(0) == [1, 2, 3, *generation.tokens[:-1]]
    assert stream(model, [1], deadline=5).finish_reason is None

    class Slow(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            now[0] += 10
            return super().__call__(*args, **options)

    slow = text_model(tokenizer=TOKENIZER, make=Slow)
    early = stream(slow, list(range(200)) * 4, deadline=5)  # over within the prompt: no token at all
    pieces = list(early)
    assert [(p.text, p.tokens, p.finish_reason) for p in pieces] == [("", (), "deadline")]
    assert early.tokens == [] and early.stats.generated_tokens == 0
    assert 0 < early.cache.lengths[0] < 800
    early.cache.check_integrity()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": [""]}, r"stop is \[''\]; expected texts that are not empty"),
        ({"stop": [3]}, r"stop is \[3\]"),
        ({"stop": 3}, "stop is a int; expected a list"),
        ({"include_stop": 1}, "include_stop is 1; expected True or False"),
        ({"deadline": 0}, "deadline is 0; expected seconds, a number above 0"),
        ({"deadline": float("nan")}, "deadline is nan"),
        ({"deadline": float("inf")}, "deadline is inf"),
        ({"deadline": "5"}, "deadline is '5'"),
        ({"stop": "x"}, "stop strings need a text, and this model has no tokenizer; give stop_token_ids"),
        ({"logprobs": -1}, "logprobs is -1; expected how many top tokens to tell"),
        ({"logprobs": True}, "logprobs is True"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        stream(text_model(), [1], **options)
