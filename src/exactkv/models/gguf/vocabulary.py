"""GGUF vocabulary metadata -> a `tokenizers` object.

Three kinds of vocabulary are read: "gpt2", byte-level BPE with merges, whose text is first split by regular expressions
that the file only names (`splittings`); "llama", SentencePiece BPE, whose file holds a score a piece and no merges; and
"gemma4", BPE with merges on text as it is, with SentencePiece's marks for spaces. The defaults of absent keys are those
of llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from exactkv.errors import LoadError
from exactkv.models.gguf.splittings import SPLITTINGS
from exactkv.models.gguf.translate import end_token_ids, token_id
from exactkv.models.tokenizer import Tokenizer, surround

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def build_tokenizer(metadata: Mapping[str, Any], path: object) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe, with special tokens and chat template.

    path: for error messages. Raises LoadError if there is no vocabulary, or one of a kind
    (`tokenizer.ggml.model`) or with a splitting (`tokenizer.ggml.pre`) or normalization that is not
    supported.
    """
    vocabulary = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, tokens = vocabulary.get("model"), vocabulary.get("tokens")
    if not tokens:
        raise LoadError(f"{path} holds no vocabulary (tokenizer.ggml.tokens); give a file that has one.")
    types = vocabulary.get("token_type") or _types_without_table(vocabulary, len(tokens))
    if len(types) != len(tokens):
        raise LoadError(f"{path} holds {len(tokens)} tokens but {len(types)} token types; the file is damaged.")
    if kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary, tokens, path)
    elif kind == "llama":
        unknown = token_id(metadata, "unknown")
        backend, add_bos = _sentencepiece(vocabulary, tokens, types, unknown, path), True
    elif kind == "gemma4":
        backend, add_bos = _with_marks(vocabulary, tokens, token_id(metadata, "unknown"), path), False
    else:
        raise LoadError(
            f"{path}: vocabulary kind tokenizer.ggml.model = {kind!r} is not supported; supported are 'gpt2' "
            "(byte-level BPE), 'llama' (SentencePiece BPE) and 'gemma4' (BPE with marks for spaces). Load the model "
            "from its original directory instead."
        )
    _add_special_tokens(backend, tokens, types)
    bos, eos = token_id(metadata, "bos"), token_id(metadata, "eos")
    first = bos if vocabulary.get("add_bos_token", add_bos) else None
    last = eos if vocabulary.get("add_eos_token", False) else None
    if first is not None or last is not None:
        surround(backend, first, last)
    return Tokenizer(
        backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_token_id=bos,
        eos_token_ids=end_token_ids(metadata),
        pad_token_id=token_id(metadata, "padding"),
        unk_token_id=token_id(metadata, "unknown"),
    )


def _byte_level(vocabulary: Mapping[str, Any], tokens: list[str], path: object) -> tuple[Backend, bool]:
    name = vocabulary.get("pre", "default")
    if name not in SPLITTINGS:
        raise LoadError(
            f"{path}: how text is split before BPE, tokenizer.ggml.pre = {name!r}, is not known; known are "
            f"{', '.join(sorted(SPLITTINGS))}. Load the model from its original directory instead."
        )
    splitting = SPLITTINGS[name]
    backend = Backend(_merging(vocabulary, tokens, path, ignore_merges=splitting.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if splitting.normalizer is not None:
        backend.normalizer = splitting.normalizer
    return backend, splitting.add_bos


def _with_marks(vocabulary: Mapping[str, Any], tokens: list[str], unknown: int | None, path: object) -> Backend:
    """Runs of line breaks stand alone; else text is not split."""
    words = {"unk_token": tokens[unknown] if unknown is not None else None, "fuse_unk": True, "byte_fallback": True}
    backend = Backend(_merging(vocabulary, tokens, path, **words))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merging(vocabulary: Mapping[str, Any], tokens: list[str], path: object, **words: Any) -> models.BPE:
    if "merges" not in vocabulary:
        raise LoadError(
            f"{path}: a {vocabulary['model']!r} vocabulary needs tokenizer.ggml.merges, which the file does not have."
        )
    # A token may itself start with a space, so the separator is looked for behind the first character.
    pairs = ((merge, merge.find(" ", 1)) for merge in vocabulary["merges"])
    merges = [(merge[:space], merge[space + 1 :]) for merge, space in pairs]
    try:
        return models.BPE(_token_ids(tokens), merges, **words)
    except Exception as error:  # tokenizers raises bare Exception
        raise LoadError(f"{path}: the merges do not fit the vocabulary ({error}); the file is damaged.") from error


def _sentencepiece(
    vocabulary: Mapping[str, Any], tokens: list[str], types: list[int], unknown: int | None, path: object
) -> Backend:
    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise LoadError(
            f"{path}: a 'llama' vocabulary needs a score a token (tokenizer.ggml.scores); the file has "
            f"{0 if scores is None else len(scores)} for {len(tokens)} tokens."
        )
    if vocabulary.get("precompiled_charsmap") or vocabulary.get("remove_extra_whitespaces"):
        raise LoadError(
            f"{path}: the vocabulary asks for text normalization (precompiled_charsmap or "
            "remove_extra_whitespaces), which is not supported for GGUF files. Load the model from "
            "its original directory instead."
        )
    ids = _token_ids(tokens)
    backend = Backend(
        models.BPE(
            ids,
            _merges_from_scores(tokens, scores, types, ids),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: list[int], ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges whichever two neighbours make the piece of the highest score. As a list of merges:
    for each piece, best first, every pair of pieces that makes it; pairs of one piece in the order of their
    own scores.
    """
    normal = (index for index, kind in enumerate(types) if kind == _NORMAL and len(tokens[index]) > 1)
    order = sorted(normal, key=lambda index: -scores[index])
    merges: list[tuple[str, str]] = []
    for piece in order:
        text = tokens[piece]
        if len(text) == 2:
            if text[0] in ids and text[1] in ids:
                merges.append((text[0], text[1]))
            continue
        pairs = [
            (left, right) for cut in range(1, len(text)) if (left := text[:cut]) in ids and (right := text[cut:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (-scores[ids[pair[0]]], -scores[ids[pair[1]]]))
        merges += pairs
    return merges


def _token_ids(tokens: list[str]) -> dict[str, int]:
    """Text -> id; of several tokens with one text the first is the one that encoding gives."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _types_without_table(vocabulary: Mapping[str, Any], count: int) -> list[int]:
    """Files without token types: the tokens with a role are control tokens."""
    types = [_NORMAL] * count
    for key, token in vocabulary.items():
        if key.endswith("_token_id") and isinstance(token, int) and 0 <= token < count:
            types[token] = _CONTROL
    return types


def _add_special_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    """Control tokens, and those users defined, are found in raw text before anything else. Only the former
    are special: left out of decoded text.
    """
    for kinds, special in (((_UNKNOWN, _CONTROL), True), ((_USER_DEFINED,), False)):
        added = [
            AddedToken(text, normalized=False, special=special)
            for text, kind in zip(tokens, types, strict=True)
            if kind in kinds and text
        ]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)
