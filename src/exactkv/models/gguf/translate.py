"""GGUF metadata -> what config.json and generation_config.json of the same model would say.

Every metadata key of the architecture is looked at: one that is translated, one that must have the only value
the architecture is defined for here, one that changes nothing, or else LoadError. Key names and meanings:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's llama_hparams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from exactkv.errors import LoadError
from exactkv.models.gguf.architectures import ARCHITECTURES, Architecture
from exactkv.models.gguf.metadata import Metadata


def architecture_of(metadata: Mapping[str, Any], path: object) -> tuple[str, Architecture]:
    """The name and description of the file's architecture. Raises LoadError naming those supported."""
    if (kind := metadata.get("general.type", "model")) != "model":
        raise LoadError(f"{path} holds a GGUF {kind!r}, expected a model. Give the file of the model itself.")
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise LoadError(
            f"{path}: GGUF architecture {name!r} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}. Load the model from its safetensors "
            "directory instead, if its family is supported there."
        )
    return name, ARCHITECTURES[name]


def translate_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    floats: Callable[[str], list[float]],
    path: object,
) -> dict[str, Any]:
    """The model's config in Hugging Face terms.

    metadata: of the file. shapes: GGUF tensor name -> shape in torch order. floats: reads a small tensor, such as the
    factors of rope. path: for error messages. Raises LoadError for missing, unknown or contradictory keys.
    """
    name, arch = architecture_of(metadata, path)
    prefix = name + "."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    meta = Metadata(values, shapes, floats)
    try:
        config = arch.config(meta)
        meta.finish()
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise LoadError(
            f"{path}: metadata of {name} have a value that makes no sense ({error}); the file is damaged."
        ) from error
    return config


def translate_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`eos_token_id` (a list: end of sequence, of turn, of message), `bos_token_id`, `pad_token_id`; fields
    the file does not name are absent.
    """
    generation: dict[str, Any] = {"eos_token_id": end_token_ids(metadata)}
    for key, kind in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token := token_id(metadata, kind)) is not None:
            generation[key] = token
    return generation


def token_id(metadata: Mapping[str, Any], kind: str) -> int | None:
    """The id of the token with a role ("bos", "eos", "eot", "eom", "padding", "unknown"). Ids outside the
    vocabulary mean none: some writers use -1 or 2**32 - 1."""
    token = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    count = len(metadata.get("tokenizer.ggml.tokens", ()))
    return token if token is not None and 0 <= token < count else None


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end a text, a turn or a message, in this order, each once."""
    ids = (token_id(metadata, kind) for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in ids if token is not None))
