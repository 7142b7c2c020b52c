"""Reading a Hugging Face config so that no field which changes the arithmetic is passed over in silence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.defaults import BY_MODEL_TYPE

_REQUIRED = object()

MAX_LAYERS = 10_000
"""More than any model has; a decoder is described layer by layer."""

# Fields that every Hugging Face config may carry and that do not change what a decoder computes.
HARMLESS = frozenset(
    """
    add_cross_attention architectures attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    dropout dtype embd_pdrop eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id for_llm_compressor id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    transformers.js_config typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 (a list would be a page long)
)


class Config:
    """A config whose fields are each taken once; ``finish`` refuses what nobody took.

    ``accepted``: names of fields that the caller has judged to be harmless.
    """

    def __init__(self, fields: Mapping[str, Any], family: str, accepted: Collection[str] = ()):
        self.fields, self.family = fields, family
        self.accepted = frozenset(accepted)
        self.taken: set[str] = set(accepted)
        self.defaults = BY_MODEL_TYPE.get(str(fields.get("model_type")), {})

    def take(self, name: str, default: Any = _REQUIRED, nullable: bool = False) -> Any:
        """The field's value. Where it is absent, what that means for this model type, else ``default``; the latter
        where it is null, unless null means something (``nullable``). Raises LoadError where it must be there."""
        self.taken.add(name)
        if name not in self.fields and name in self.defaults:
            return self.defaults[name]
        value = self.fields.get(name)
        if value is None and not (nullable and name in self.fields):
            if default is _REQUIRED:
                raise LoadError(f"config of a {self.family} model: the field {name!r} is missing")
            return default
        if name in ("num_hidden_layers", "n_layer"):
            self._check_count(name, value)
        return value

    def _check_count(self, name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LAYERS:
            raise LoadError(
                f"config of a {self.family} model: {name} is {value!r}, expected an integer from 1 to {MAX_LAYERS:,}; "
                "compare config.json with the original"
            )

    def expect(self, name: str, *supported: Any, default: Any = None) -> Any:
        """A field of which only some values are supported; raises LoadError on any other."""
        value = self.take(name, default)
        if value not in supported:
            raise LoadError(
                f"config of a {self.family} model: {name} = {value!r} is not supported; "
                f"supported: {', '.join(map(repr, supported))}"
            )
        return value

    def ignore(self, *names: str) -> None:
        """Fields of this family that do not change the arithmetic."""
        self.taken.update(names)

    def unknown(self) -> list[str]:
        """The fields that are neither taken, nor null, nor known to be harmless."""
        return sorted(
            name
            for name, value in self.fields.items()
            if value is not None and name not in self.taken and name not in HARMLESS and not name.startswith("_")
        )

    def finish(self) -> None:
        """Raise LoadError where a field is unknown."""
        if unknown := self.unknown():
            shown = ", ".join(f"{name} = {self.fields[name]!r}"[:80] for name in unknown)
            raise LoadError(
                f"config of a {self.family} model: unknown fields that may change the arithmetic: {shown}. "
                "If they do not, pass their names as load(..., accept_fields=[...]), or with --accept-field to "
                "generate, chat or perplexity."
            )


class LenientConfig(Config):
    """Reads another family's config to its end: a value that is not supported is noted in ``unsupported``, and the
    first that is stands in for it; a field that must be there and is not is noted in ``missing``, and a small size
    stands in for it."""

    def __init__(self, fields: Mapping[str, Any], family: str):
        super().__init__(fields, family)
        self.unsupported: dict[str, Any] = {}
        self.missing: list[str] = []

    def take(self, name: str, default: Any = _REQUIRED, nullable: bool = False) -> Any:
        if default is _REQUIRED and self.fields.get(name) is None:
            self.missing += [name] if name not in self.missing else []
            default = 8
        return super().take(name, default, nullable)

    def expect(self, name: str, *supported: Any, default: Any = None) -> Any:
        value = self.take(name, default)
        if value in supported:
            return value
        self.unsupported[name] = value
        return supported[0]
