"""A tiny model that knows text: its tokens are bytes, so that characters come in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from exactkv.cache import FullAttention, SlidingWindow
from exactkv.models.model import Model
from exactkv.models.random import random_weights
from exactkv.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from exactkv.models.tokenizer import Tokenizer

BOS, EOS, END = 256, 257, 258
VOCAB = 264  # some rows more than there are tokens, as models have them
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_backend() -> Backend:
    """256 tokens for the bytes, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<end>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return backend


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_backend(), chat_template=chat_template, bos_token_id=BOS, eos_token_ids=[EOS])


def text_spec(max_length: int = 2048) -> DecoderSpec:
    layers = tuple(
        LayerSpec(AttentionSpec(pattern, 2, 1, 8, 8**-0.5, RopeSpec(8, 10_000.0)), MlpSpec(32, "silu"))
        for pattern in (SlidingWindow(window=16), FullAttention())
    )
    return DecoderSpec("llama", VOCAB, 16, layers, 1e-6, max_length, tied_head=False)


def text_model(max_length: int = 2048, tokenizer: Tokenizer | None = None, **kind: Any) -> Model:
    spec = text_spec(max_length)
    weights = random_weights(spec, seed=1, dtype=torch.float64, gain=1.5)
    make = kind.pop("make", Model)
    return make(spec, weights, tokenizer, {"eos_token_id": [END]}, name="tiny", **kind)  # type: ignore[no-any-return]


class Scripted(Model):
    """Feeds its cache as any model does, but its logits say the ids of a script, one a call with logits."""

    script: Sequence[int] = ()
    calls: int = 0

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor | None:
        out = super().__call__(*args, **options)
        if out is None:
            return None
        said = torch.zeros_like(out)
        said[..., self.script[self.calls]] = 1
        self.calls += 1
        return said


def scripted(text: str, *ends: int, **options: Any) -> Scripted:
    """A model that says ``text`` and then the ids ``ends``."""
    tokenizer = byte_tokenizer()
    model = text_model(tokenizer=tokenizer, make=Scripted, **options)
    assert isinstance(model, Scripted)
    model.script = [*tokenizer.encode(text, add_special_tokens=False), *ends]
    return model
