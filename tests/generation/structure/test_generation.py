"""Texts that must follow a structure: alone, in batches, with drafts, settings, limits."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactkv.errors import InputError
from exactkv.generation import Engine, Sampling, Structure, generate, generate_each, make_text, stream
from tests.generation.structure.vocabularies import sentencepiece
from tests.generation.tiny_text import BOS, END, EOS, byte_tokenizer, text_model

MODEL = text_model(tokenizer=byte_tokenizer())
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
                   "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3}},
    "required": ["name", "n", "tags"], "additionalProperties": False,
}  # fmt: skip
STRUCTURES = [
    Structure.json_schema(SCHEMA), Structure.regex(r"[a-c]{3,9}(-[0-9]{2}){1,3}"), None,
    Structure.grammar('start: item ("," item)* "."\nitem: /[xyz]{1,3}/'),
    Structure.json_schema({"enum": ["é", "日本", "🎉🎊"]}),
]  # fmt: skip


def follows(structure: Structure | None, text: str) -> bool:
    if structure is None:
        return True
    at = STRUCTURES.index(structure)
    if at == 0:
        value = json.loads(text)
        assert list(value) == ["name", "n", "tags"]
        return len(value["name"]) <= 6 and 0 <= value["n"] <= 99 and set(value["tags"]) <= {"x", "yy"}
    if at == 4:
        return json.loads(text) in ["é", "日本", "🎉🎊"]
    pattern = {1: r"[a-c]{3,9}(-[0-9]{2}){1,3}", 3: r"[xyz]{1,3}(,[xyz]{1,3})*\."}[at]
    return re.fullmatch(pattern, text) is not None


@settings(max_examples=4)
@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from([None, "lookup"]))
def test_a_row_among_others_says_what_it_says_alone_and_follows_its_structure(seed, temperature, draft):
    sampling = Sampling(temperature=temperature, seed=seed)
    prompts = ["abab abab abab", "x", '{"name": "x", "n": 1', "one,one,one", "é"]
    alone = [
        "".join(p.text for p in stream(MODEL, prompt, 70, sampling, structure=structure))
        for prompt, structure in zip(prompts, STRUCTURES, strict=True)
    ]
    results = generate(MODEL, prompts, max_tokens=70, sampling=sampling, structure=STRUCTURES, draft=draft, max_rows=3)
    assert [r.text for r in results] == alone
    for structure, result in zip(STRUCTURES, results, strict=True):
        if structure is not None and result.finish_reason == "stop":
            assert follows(structure, result.text), result.text
    assert [r.finish_reason for r in results][1] == "stop"  # a finite language ends always


class Wrong:
    """Guesses the true continuation, with every third token replaced by what a seed says."""

    def __init__(self, true: list[int], prompt: int, seed: int):
        self.true, self.prompt, self.seed = true, prompt, seed

    def propose(self, tokens, most):
        at = len(tokens) - self.prompt
        guess = self.true[at : at + most]
        return [(t * 7 + self.seed) % 259 if (at + i + self.seed) % 3 == 0 else t for i, t in enumerate(guess)]


@settings(max_examples=6)
@given(st.integers(0, 50), st.sampled_from([0.0, 1.0]), st.sampled_from([s for s in STRUCTURES if s]))
def test_drafts_change_nothing(seed, temperature, structure):
    sampling = Sampling(temperature=temperature, seed=seed, repetition_penalty=1.2, dry_multiplier=0.5)
    plain = stream(MODEL, "draft", 80, sampling, structure=structure, logprobs=2)
    list(plain)
    drafted = stream(
        MODEL, "draft", 80, sampling, structure=structure, logprobs=2,
        draft=Wrong(plain.tokens, len(plain.prompt), seed), draft_tokens=5,
    )  # fmt: skip
    list(drafted)
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert drafted.finish_reason == plain.finish_reason and drafted.cache.lengths == plain.cache.lengths
    assert [x.token for x in drafted.logprobs] == plain.tokens
    assert plain.stats.generated_tokens < 12 or drafted.stats.accepted_tokens


def test_a_guess_beyond_the_end_is_not_looked_at():
    structure = Structure.regex("(ab){6}")
    plain = stream(MODEL, "x", 50, structure=structure, stop_token_ids=())
    list(plain)
    true = [*plain.tokens, *plain.tokens]
    for seed in (1, 2):
        draft = Wrong(true, len(plain.prompt), seed)
        drafted = stream(MODEL, "x", 50, structure=structure, stop_token_ids=(), draft=draft)
        list(drafted)
        assert drafted.text == plain.text == "ab" * 6 and drafted.finish_reason == "stop"


def test_the_text_ends_where_nothing_can_follow_and_not_before():
    done = stream(MODEL, "a", 50, structure=Structure.regex("yes|yesterday"), stop_token_ids=())
    list(done)
    assert (done.text, done.finish_reason, done.matched) == ("yesterday", "stop", None)  # no end token may end it
    (result,) = generate(MODEL, ["a"], structure=Structure.regex("(yes|no){2}"), stop_token_ids=[EOS, END])
    assert re.fullmatch("(yes|no){2}", result.text) and result.finish_reason == "stop"


def test_an_end_token_ends_it_only_where_the_structure_may_end():
    pull = Sampling(logit_bias={END: 100.0})
    done = stream(MODEL, "a", 50, pull, structure=Structure.regex("[ab]{4}[ab]*"))
    list(done)
    assert len(done.text) == 4 and done.matched == END
    assert done.tokens[-1] == END


def test_max_tokens_cuts_it_and_says_so():
    done = stream(MODEL, "a", 5, structure=Structure.regex("[ab]{10}"))
    list(done)
    assert done.finish_reason == "length" and re.fullmatch("[ab]{5}", done.text)
    whole = stream(MODEL, "a", 5, structure=Structure.regex("[ab]{5}"))
    list(whole)
    assert whole.finish_reason == "stop"  # complete, and max_tokens too


def test_other_settings_go_on_within_what_is_allowed():
    letters = {c: byte_tokenizer().encode(c, add_special_tokens=False)[0] for c in "abc"}
    sampling = Sampling(banned_tokens=[letters["a"]], logit_bias={letters["c"]: 50.0}, temperature=0.7, top_k=1)
    done = stream(MODEL, "a", 20, sampling, structure=Structure.regex("[abd]{3}c[abc]{3}"), logprobs=1)
    list(done)
    assert re.fullmatch("[bd]{3}cccc", done.text)
    own = [x for x in done.logprobs if x.token == letters["c"]]
    assert own[0].logprob < -0.1 and own[0].sampled_logprob == 0  # the model's own are of its logits as they came


def test_where_nothing_is_left_only_that_row_fails():
    letters = byte_tokenizer().encode("ab", add_special_tokens=False)
    engine = Engine(MODEL, draft_tokens=4)
    bad = engine.add(make_text(MODEL, "x", 30, Sampling(banned_tokens=letters), structure=Structure.regex("x[ab]")))
    good = engine.add(make_text(MODEL, "x", 30, structure=Structure.regex("x[ab]{5}")))
    list(engine.run())
    assert "a structure" in str(bad.error) and bad.text.shown == "x"
    assert good.error is None and re.fullmatch("x[ab]{5}", good.text.shown)
    with pytest.raises(InputError, match="a structure"):
        list(stream(MODEL, "x", 30, Sampling(banned_tokens=letters), structure=Structure.regex("x[ab]")))


def test_a_structure_too_costly_to_follow_fails_its_row_and_says_why():
    engine = Engine(MODEL)
    rules = "\n".join(f'r{i}: /a*b{{{i}}}/ "c"' for i in range(2100))
    heavy = Structure.grammar(f"start: {' | '.join(f'r{i}' for i in range(2100))}\n{rules}")
    bad = engine.add(make_text(MODEL, "x", 30, structure=heavy))
    good = engine.add(make_text(MODEL, "x", 30, structure=Structure.regex("x[ab]{5}")))
    list(engine.run())
    assert good.error is None and re.fullmatch("x[ab]{5}", good.text.shown)
    assert re.search("cannot follow its structure.*max is 2000", str(bad.error)) and len(str(bad.error)) < 300


def test_a_paused_row_goes_on_where_it_was():
    """A budget of bytes for less than all rows makes some give theirs back."""
    prompts, structure = ["ab" * 20, "cd" * 20, "ef" * 20], Structure.regex("([a-f]{2} ){40}")
    alone = [generate(MODEL, [p], max_tokens=200, structure=structure)[0].text for p in prompts]
    cache = MODEL.new_cache(0)
    engine = Engine(MODEL, max_bytes=int(2.2 * cache.most_nbytes(160)))
    requests = [engine.add(make_text(MODEL, p, 200, structure=structure)) for p in prompts]
    list(engine.run())
    assert engine.preemptions and [r.text.shown for r in requests] == alone


def test_the_first_space_that_a_decoder_drops_is_not_part_of_the_text():
    for decoder in ("llama", "gemma"):
        model = text_model(tokenizer=sentencepiece(decoder))
        assert model.spec.vocab_size < model.tokenizer.vocab_size  # fewer rows than tokens: those are never asked for
        for seed in range(6):
            sampling = Sampling(temperature=3.0, seed=seed)
            done = stream(model, [1, 5], 20, sampling, structure=Structure.regex("a (a|b)"), stop_token_ids=[2])
            list(done)
            assert re.fullmatch("a (a|b)", done.text)


def test_special_tokens_are_shown_where_asked_for():
    text = stream(MODEL, "x", 3, Sampling(allowed_tokens=[BOS]), show_special_tokens=True)
    list(text)
    assert text.text == "<bos>" * 3
    (hidden,) = generate(MODEL, ["x"], max_tokens=3, sampling=Sampling(allowed_tokens=[BOS]))
    assert hidden.text == ""
    (shown,) = generate(MODEL, ["x"], max_tokens=3, sampling=Sampling(allowed_tokens=[END]), show_special_tokens=True)
    assert (shown.text, shown.matched) == ("", END)


def test_what_does_not_fit_is_refused_before_anything_is_done():
    with pytest.raises(InputError, match="expected one such as Structure"):
        stream(MODEL, "x", structure={"type": "object"})
    with pytest.raises(InputError, match="no tokenizer"):
        stream(text_model(), [1], structure=Structure.json_object())
    with pytest.raises(InputError, match="2 structures were given for 1"):
        generate(MODEL, ["x"], structure=[None, None])
    late = list(generate_each(MODEL, ["x", "y"], max_tokens=2, structure=[None]))
    assert [r.error is None for r in sorted(late, key=lambda r: r.index)] == [True, False]
    with pytest.raises(InputError, match="show_special_tokens"):
        stream(MODEL, "x", show_special_tokens="yes")
