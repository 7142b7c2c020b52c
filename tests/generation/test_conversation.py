"""Turns of a conversation: hot equals cold, and what was fed is what the decoder ran."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from exactkv.cache import Cache, CheckpointPolicy, ChunkedAttention, FullAttention, SlidingWindow
from exactkv.cache.store import PromptStore
from exactkv.errors import InputError, LoadError
from exactkv.generation import stream
from exactkv.generation.conversation import Conversation, Reply
from exactkv.generation.reuse import common_prefix, next_stop, reuse
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.recurrent.spec import Mamba2Spec
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from tests.generation.tiny_text import TEMPLATE, VOCAB, byte_tokenizer

MAMBA2 = Mamba2Spec(num_heads=4, head_dim=6, num_groups=2, state_size=5, conv_width=4, norm_eps=1e-6)
FULL = FullAttention()
KINDS: dict[str, tuple[Any, ...]] = {
    "full": (FULL, FULL),
    "sliding": (SlidingWindow(window=16), FULL),
    "chunked": (ChunkedAttention(chunk_size=16), FULL),
    "mamba2": (MAMBA2, MAMBA2),
    "hybrid": (MAMBA2, SlidingWindow(window=16), FULL),
}
DROPPING = (  # thinking is left out of all answers but one that ends the messages
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Counting(Model):
    """Counts the tokens that the decoder runs."""

    ran = 0

    def __call__(self, tokens: Any, **options: Any) -> torch.Tensor | None:
        self.ran += sum(len(row) for row in tokens)
        return super().__call__(tokens, **options)


def chat_model(kind: str, template: str | None = TEMPLATE, max_length: int = 4096) -> Counting:
    layers = []
    for mixer in KINDS[kind]:
        if isinstance(mixer, Mamba2Spec):
            layers.append(LayerSpec(None, None, recurrent=mixer))
        else:
            attention = AttentionSpec(mixer, 2, 1, 8, 8**-0.5, RopeSpec(8, 10_000.0))
            layers.append(LayerSpec(attention, MlpSpec(32, "silu")))
    spec = DecoderSpec("tiny", VOCAB, 16, tuple(layers), 1e-6, max_length, tied_head=False)
    return Counting(spec, random_weights(spec, 1, torch.float64), byte_tokenizer(template), name="tiny")


def answered(model: Counting, reply: Reply) -> tuple[int, int]:
    """Take all of a reply, compare it with a cold one; returns (prompt tokens, tokens fed)."""
    before = model.ran
    list(reply)
    hot, stats = reply.generation, reply.stats
    assert model.ran - before == stats.fed_tokens + max(0, stats.generated_tokens - 1)
    assert stats.prompt_tokens == stats.cached_tokens + stats.fed_tokens == len(hot.prompt)
    cold = stream(model, hot.prompt, max_tokens=hot.max_tokens)
    list(cold)
    assert hot.tokens == cold.tokens
    more = [[*hot.tokens[-1:], 1]]  # going on from both
    first, second = (model(more, cache=g.cache.select([0]), logits="last") for g in (hot, cold))
    assert first is not None and second is not None
    assert float((first - second).abs().max()) < 5e-6 * float(second.abs().max())
    hot.cache.check_integrity()
    return stats.prompt_tokens, stats.fed_tokens


def ascii_reply(conversation: Conversation, text: str) -> None:
    """Random bytes are no text; what the model is taken to have said goes through text and back."""
    conversation.messages[-1]["content"] = text


TURNS = ["The first question of all.", "And one more, which is longer than a window of sixteen.", "A third."]


@pytest.mark.parametrize("kind", KINDS)
def test_every_turn_is_as_if_it_were_cold(kind: str) -> None:
    model = chat_model(kind)
    talk = Conversation(model, "Be brief, and say it in words that a tokenizer of bytes can count.", max_tokens=12)
    for text in TURNS:
        answered(model, talk.reply(text))
    answered(model, talk.regenerate())
    answered(model, talk.edit(5, "Another third."))
    answered(model, talk.edit(3, "Another second."))
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.undo() == "Another second."
    answered(model, talk.reply(TURNS[1]))
    talk.system = None
    answered(model, talk.reply("No system now."))


def test_full_layers_feed_only_what_is_new() -> None:
    model = chat_model("full")
    talk = Conversation(model, max_tokens=5)
    prompt, fed = answered(model, talk.reply(TURNS[0]))
    assert prompt == fed
    assert answered(model, talk.regenerate())[1] == 1
    _, fed = answered(model, talk.edit(-2, TURNS[0] + " More"))
    assert fed == len(" More\nassistant:")


@pytest.mark.parametrize("kind", KINDS)
def test_append_same_and_regenerate_feed_only_what_is_new(kind: str) -> None:
    model = chat_model(kind)
    talk = Conversation(model, "s" * 600, max_tokens=1)
    answered(model, talk.reply(TURNS[0]))
    assert answered(model, talk.regenerate())[1] == 1
    prompt, fed = answered(model, talk.edit(-2, "Another."))
    assert fed <= len("user:Another.\nassistant:") and fed < 0.05 * prompt
    talk.undo()
    assert answered(model, talk.reply("Another."))[1] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_thinking_that_the_template_drops(kind: str) -> None:
    model = chat_model(kind, DROPPING)
    talk = Conversation(model, "Think.", max_tokens=12)
    before = 0
    for text in TURNS:
        prompt, fed = answered(model, talk.reply(text))
        ascii_reply(talk, "<think>well, well, well</think>The answer.")
        assert prompt - fed >= before - 1  # nothing is lost of what came before the thinking
        before = prompt
    assert "think>" not in model.tokenizer.decode(talk.cache.tokens(0))  # type: ignore[union-attr]


OPENING = DROPPING.replace("assistant:{% endif %}", "assistant:<think>\n{% endif %}")
ALWAYS_DROPPING = OPENING.replace("{% if m.role == 'assistant' and not loop.last %}", "{% if m.role == 'assistant' %}")
MOVING = (  # the system message stands in the last question, and half a conversation is refused
    "{% if messages|length == 1 and messages[0].role == 'system' %}{{ raise_exception('no question') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[' }}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content + ']' }}"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [OPENING, ALWAYS_DROPPING, MOVING], ids=["some", "all", "moving"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_prompt_that_opens_thinking(kind: str, template: str) -> None:
    """The prompt's end is nothing that the next turn has; the question's end is."""
    model = chat_model(kind, template)
    talk = Conversation(model, "Think.", max_tokens=4)
    for text in ("q" * 300, "And?", "Q" * 200):
        answered(model, talk.reply(text))
        ascii_reply(talk, "well, well</think>The answer.")
    talk.edit(-2, "Last?").close()
    prompt, fed = answered(model, talk.edit(-2, "Why?"))
    assert fed < 120 and fed < prompt / 3  # not what any of the long questions has
    ascii_reply(talk, "well</think>So.")
    prompt, fed = answered(model, talk.reply("And now?"))
    assert fed < 60 < 300 < prompt


@pytest.mark.parametrize("pieces_taken", [0, 1, 4])
def test_a_reply_that_is_stopped_leaves_a_conversation(pieces_taken: int) -> None:
    model = chat_model("sliding")
    talk = Conversation(model, max_tokens=20)
    reply = talk.reply("Say something.")
    said = "".join(next(reply).text for _ in range(pieces_taken))
    reply.close()
    assert talk.messages == [
        {"role": "user", "content": "Say something."}, {"role": "assistant", "content": said},
    ]  # fmt: skip
    answered(model, talk.reply("Go on."))
    talk.undo()
    assert talk.undo() == "Say something." and talk.messages == []


def test_ctrl_c_in_the_middle_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chat_model("hybrid")
    talk = Conversation(model, max_tokens=20)
    reply = talk.reply("Say something.")
    next(reply)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder.layers[1], "mlp", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(reply)
    answered(model, talk.reply("Go on."))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    talk = Conversation(chat_model("full", max_length=100), max_tokens=3)
    for call, said in (
        (talk.regenerate, "no question yet"), (talk.undo, "no question yet"),
        (lambda: talk.edit(0, "x"), "message 0 is none of yours"), (lambda: talk.reply("x" * 200), "at most 100 fit"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            call()
        assert talk.messages == []
    with pytest.raises(InputError, match="no chat template"):
        Conversation(chat_model("full", None))


def test_prefixes_and_stops() -> None:
    assert [common_prefix(a, b) for a, b in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]))] == [0, 2, 1]
    model = chat_model("sliding")
    cache = model.new_cache(checkpoints=CheckpointPolicy(every=7))
    stops = []
    while cache.lengths[0] < 20:
        stops.append(next_stop(cache, 20, 5, [3, 25, 13, 0]))
        model([[1] * (stops[-1] - cache.lengths[0])], cache=cache)
    assert stops == [3, 7, 12, 13, 14, 19, 20] and cache.checkpoints(0) == [7, 14]
    model = chat_model("full")
    cache = model.new_cache()
    model([[1, 2, 3]], cache=cache)
    assert [reuse(cache.select([0]), t) for t in ([1, 2, 3], [1, 2, 3, 4], [2], [1, 2])] == [2, 3, 0, 1]


def test_saved_and_loaded(tmp_path: Any) -> None:
    model = chat_model("hybrid")
    talk = Conversation(model, "s", max_tokens=9)
    answered(model, talk.reply(TURNS[0]))
    for _ in range(2):
        talk.save(tmp_path / "talk")
    assert len(list((tmp_path / "talk").iterdir())) == 2
    again = Conversation.load(tmp_path / "talk", model)
    assert (again.messages, again.refused, again.max_tokens) == (talk.messages, None, 9)
    assert answered(model, again.regenerate())[1] <= 2
    other = Conversation.load(tmp_path / "talk", chat_model("full"))
    assert other.messages == talk.messages and other.refused and other.cache.lengths == [0]


def test_checkpoints_are_asked_for_where_messages_part_and_before_the_prompts_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, int]] = []

    def checkpoint(cache: Cache, rows: Any = None, label: str = "") -> list[int]:
        taken.append((label, cache.lengths[0]))
        return cache.lengths

    monkeypatch.setattr(Cache, "checkpoint", checkpoint, raising=False)
    for kind, wanted in (("full", False), ("sliding", True), ("mamba2", True)):
        taken.clear()
        talk = Conversation(chat_model(kind), "Be brief.", max_tokens=2)
        list(talk.reply("One."))
        ascii_reply(talk, "Yes.")
        list(talk.reply("Two."))
        texts = ["system:Be brief.\n", "user:One.\n", "assistant:", "Yes.\n", "user:Two.\n", "assistant:"]
        at = [sum(map(len, texts[: i + 1])) for i in range(len(texts))]
        header = len("user:") - 1  # where another question would part, less one token
        first = [("message", at[0] + header), ("prompt", at[2] - 1)]
        second = [("message", at[3] + header), ("prompt", at[5] - 1)]
        assert taken[:2] == (first if wanted else []) and taken[-2:] == (second if wanted else [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_serves_the_next_conversation(kind: str, tmp_path: Any) -> None:
    """After a restart as in the same process; another system message shares nothing; a stopped answer is kept too."""
    model = chat_model(kind)
    system = "A long system message, the same in each conversation. " * 6
    with PromptStore(0, tmp_path / "store") as store:
        talk = Conversation(model, system, max_tokens=8, store=store)
        answered(model, talk.reply(TURNS[0]))
        reply = talk.regenerate()
        next(reply)
        reply.close()
    with PromptStore(0, tmp_path / "store") as store:
        talk = Conversation(model, system, max_tokens=8, store=store)
        prompt, fed = answered(model, talk.reply(TURNS[0]))
        assert fed == 1
        other = Conversation(model, system, max_tokens=8, store=store)
        prompt, fed = answered(model, other.reply("A question of another kind"))
        assert fed <= prompt - len(system)
        cold = Conversation(model, "B" + system, max_tokens=8, store=store)
        prompt, fed = answered(model, cold.reply(TURNS[0]))
        assert prompt - fed <= len("system:")


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 1e400}, {"max_tokens": -3}, {"messages": [{"role": "wizard", "content": "x"}]},
     {"sampling": {"temperatur": 1}}, {"messages": 3}, {"regenerated": -1}, {"regenerated": "x"}],
    ids=lambda change: str(change)[:30],
)  # fmt: skip
def test_a_damaged_conversation_is_refused(change: dict[str, Any], tmp_path: Any) -> None:
    model = chat_model("full")
    Conversation(model, "s").save(tmp_path / "talk")
    file = tmp_path / "talk" / "conversation.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(LoadError, match="no conversation as exactkv saves it"):
        Conversation.load(tmp_path / "talk", model)


def test_a_cache_of_two_rows_is_left_aside(tmp_path: Any) -> None:
    model = chat_model("full")
    talk = Conversation(model, "s")
    talk.cache = model.new_cache(2)
    talk.save(tmp_path / "talk")
    assert "holds 2 rows" in str(Conversation.load(tmp_path / "talk", model).refused)
