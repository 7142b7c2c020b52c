"""What six turns of a conversation feed and how long their first token takes: reused, recomputed, and in transformers.

    python benchmarks/prompt_cache.py [--tokens 4000] [--models smollm2 gemma3 llama4 mamba2] [--json]

A `Conversation` goes through them, so checkpoints are those that it asks for. Its words are random token ids, so that
base models and tiny random ones take part: *append* a message, the *same* prompt again, *regenerate* (after an answer),
*edit* the last message, *drop thinking* (the template opens it in the generation prompt and leaves it out of earlier
answers), and edit an *earlier* message. Each is run on the conversation's cache (hot), and on none (cold); both must
say the same tokens, and their logits must agree to 5e-6 of the largest. transformers runs the same shape with random
weights: its DynamicCache cropped to the common prefix, all recomputed where it cannot be cropped. Everything in
float32, in one run, so compare within it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer as Backend  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402

import exactkv  # noqa: E402
from exactkv.generation import Generation, stream  # noqa: E402
from exactkv.generation.conversation import Conversation, Reply  # noqa: E402
from exactkv.generation.reuse import common_prefix  # noqa: E402
from exactkv.models.tokenizer import Tokenizer  # noqa: E402

MESSAGE, THINKING, ANSWERED = 20, 60, 8
FIRST_MARK, MARKS = 3, ("user", "assistant", "end", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content.split('</think>')[-1] }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant <think> {% endif %}"
)
MODELS = ("smollm2", "gemma3", "llama4", "mamba2")
LONGEST = 1 << 16


def config_of(name: str) -> Any:
    """What transformers builds: the shape of the real model, or a tiny one."""
    if name == "smollm2":
        return transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip
    if name == "gemma3":
        return transformers.Gemma3TextConfig(
            vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
            num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=32768,
        )  # fmt: skip
    if name == "llama4":
        return transformers.Llama4TextConfig(
            vocab_size=1000, hidden_size=64, intermediate_size=64, intermediate_size_mlp=96, num_hidden_layers=8,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4, attention_chunk_size=512,
            max_position_embeddings=LONGEST, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    return transformers.Mamba2Config(
        vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_heads=8, head_dim=16, state_size=16, n_groups=2,
        expand=2, chunk_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def theirs_of(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32).eval()


def ours_of(name: str, theirs: Any) -> exactkv.Model:
    """The real model where it is one, else the tiny one that transformers made."""
    if name in ("smollm2", "gemma3"):
        return exactkv.load(name, dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return exactkv.load(directory, dtype="float32", device="cpu")


class Transformers:
    """One conversation as a user of transformers would keep it. ``dropped``: turns whose cache could not be cropped."""

    def __init__(self, model: Any):
        self.model, self.cache, self.ids = model, None, []
        self.recurrent = "mamba" in model.config.model_type

    def turn(self, prompt: list[int]) -> tuple[int, float]:
        """(tokens fed, seconds to the first token); then it says as many as ours."""
        started = time.perf_counter()
        held = min(common_prefix(self.ids, prompt), len(prompt) - 1)
        if self.cache is None or not self._cropped(held):
            self.cache, held = None, 0
        token = self._feed(prompt[held:])
        seconds = time.perf_counter() - started
        self.ids = [*prompt]
        for _ in range(ANSWERED - 1):
            self.ids.append(token)
            token = self._feed([token])
        return len(prompt) - held, seconds

    def _cropped(self, to: int) -> bool:
        if self.recurrent:
            return to == len(self.ids)
        try:
            if to < len(self.ids):
                self.cache.crop(to - len(self.ids))
        except (RuntimeError, ValueError):
            return False
        return bool(self.cache.get_seq_length() == to)

    @torch.no_grad()
    def _feed(self, tokens: list[int]) -> int:
        name = "cache_params" if self.recurrent else "past_key_values"
        found = self.model(torch.tensor([tokens]), **{name: self.cache}, use_cache=True, logits_to_keep=1)
        self.cache = found[name]
        return int(found.logits[0, -1].argmax())


def words(vocab_size: int) -> Tokenizer:
    """A tokenizer whose words are the token ids themselves, with a template that opens and drops thinking."""
    known = {str(i): i for i in range(vocab_size)}
    for i, name in enumerate(MARKS, FIRST_MARK):
        del known[str(i)]
        known[name] = i
    backend = Backend(WordLevel(known, unk_token=str(vocab_size - 1)))
    backend.pre_tokenizer = WhitespaceSplit()
    return Tokenizer(backend, chat_template=TEMPLATE)


def cold_run(model: exactkv.Model, prompt: Sequence[int]) -> Generation:
    made = stream(model, list(prompt), ANSWERED, stop_token_ids=())
    list(made)
    return made


def difference(hot: Generation, cold: Generation) -> float:
    """Of what both say next, relative to the largest logit."""
    a, b = (g.model([g.tokens[-1:]], cache=g.cache.fork(1), logits="last") for g in (hot, cold))
    assert a is not None and b is not None
    return float((a - b).abs().max() / b.abs().max())


def turns(name: str, tokens: int) -> list[dict[str, Any]]:
    theirs = theirs_of(name)
    model, other = ours_of(name, theirs), Transformers(theirs)
    model.tokenizer, model.generation_config = words(model.spec.vocab_size), {}  # no end token: all answers are as long
    generator = torch.Generator().manual_seed(0)
    first, top = FIRST_MARK + len(MARKS), min(model.spec.vocab_size, 40_000)
    spare = iter(torch.randint(first, top, (2 * tokens + 1000,), generator=generator).tolist())
    take = lambda count: " ".join(str(next(spare)) for _ in range(count))  # noqa: E731
    talk = Conversation(model, max_tokens=ANSWERED)
    talk.messages = [{"role": ("user", "assistant")[i % 2], "content": take(tokens // 8)} for i in range(8)]
    rows: list[dict[str, Any]] = []

    def turn(what: str, reply: Reply) -> None:
        print(f"{name}: {what} …", file=sys.stderr, flush=True)
        list(reply)
        hot = reply.generation
        cold = cold_run(model, hot.prompt)
        assert hot.tokens == cold.tokens, f"{what}: the hot turn says {hot.tokens}, the cold one {cold.tokens}"
        off = difference(hot, cold)
        assert off <= 5e-6, f"{what}: logits differ by {off:.1e} of the largest"
        stats = hot.stats
        assert stats.prompt_tokens == stats.cached_tokens + stats.fed_tokens
        fed, seconds = other.turn(list(hot.prompt))
        rows.append(
            {
                "turn": what, "prompt": stats.prompt_tokens, "fed": stats.fed_tokens,
                "hot_seconds": stats.first_token_seconds, "cold_seconds": cold.stats.first_token_seconds,
                "transformers_fed": fed, "transformers_seconds": seconds, "difference": off,
                "bytes": stats.cache_bytes, "checkpoint_bytes": hot.cache.checkpoint_nbytes,
            }
        )  # fmt: skip

    turn("first", talk.reply(take(MESSAGE)))
    rows.clear()
    question = take(MESSAGE)
    turn("append", talk.reply(question))
    talk.undo()
    turn("same again", talk.reply(question))
    turn("regenerate", talk.regenerate())
    turn("edit the last", talk.edit(-2, " ".join([*question.split()[: MESSAGE // 4], take(MESSAGE)])))
    talk.messages[-1]["content"] = f"{take(THINKING)} </think> {take(ANSWERED)}"
    turn("drop thinking", talk.reply(take(MESSAGE)))
    turn("edit an earlier", talk.edit(6, take(MESSAGE)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.json:
        print(json.dumps({name: turns(name, given.tokens) for name in given.models}))
        return
    print("| model | turn | prompt | fed | first token | recomputed | transformers: fed | its first token |", end="")
    print(" difference | MB held | of them checkpoints |\n" + "|---" * 11 + "|")
    for name in given.models:
        for r in turns(name, given.tokens):
            cells = [
                name, r["turn"], r["prompt"], r["fed"], f"{r['hot_seconds']:.3f} s", f"{r['cold_seconds']:.3f} s",
                r["transformers_fed"], f"{r['transformers_seconds']:.3f} s", f"{r['difference']:.1e}",
                f"{r['bytes'] / 1e6:.1f}", f"{r['checkpoint_bytes'] / 1e6:.1f}",
            ]  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
