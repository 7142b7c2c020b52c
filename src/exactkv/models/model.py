"""A loaded model: what users call. It checks input, opens a step on the cache, walks the decoder, commits."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactkv.cache import Cache, CacheSpec, CheckpointPolicy, check_lengths, make_storage, uncached_step
from exactkv.errors import InputError
from exactkv.models.decode import DecodePath
from exactkv.models.decoder import Decoder, check_logits
from exactkv.models.spec import DecoderSpec, RopeSpec
from exactkv.ops import TORCH, Ops
from exactkv.ops.packed import Packed

if TYPE_CHECKING:
    from exactkv.models.tokenizer import Tokenizer


class Model:
    """A decoder with its weights, and a tokenizer if it has one.

    ``spec``: the decoder as data. ``tokenizer``: None for a model loaded without one. ``generation_config``:
    the model's own defaults for generation, such as "eos_token_id". ``decode_path``: the captured steps by which it
    decodes on CUDA, or why there are none; None goes the plain way always.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer | None = None,
        generation_config: Mapping[str, Any] | None = None,
        ops: Ops = TORCH,
        name: str = "",
    ):
        self.spec, self.tokenizer, self.name = spec, tokenizer, name
        self.generation_config = dict(generation_config or {})
        self.decoder = Decoder(spec, weights, ops)
        self.decode_path: DecodePath | None = DecodePath(self.decoder)
        self._cache_specs: dict[tuple[RopeSpec, ...], CacheSpec] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(w.nbytes for w in self.decoder.weights.values())

    @property
    def quantization(self) -> str | None:
        """How weights are packed, such as "int4 in groups of 32"; None where none are. (What the head and others have
        beside it: docs/quantization.md.)"""
        packed = [w for w in self.decoder.weights.values() if isinstance(w, Packed)]
        if not packed:
            return None
        counts = Counter((w.bits, w.group) for w in packed)
        bits, group = max(counts, key=lambda form: (counts[form], -form[0], form[1]))
        return f"int{bits} in groups of {group}"

    @cached_property
    def fingerprint(self) -> str:
        """Names these weights: a hash of the spec and of every tensor's name, shape, dtype, sums of its bytes, and
        some of them."""
        digest = hashlib.sha256(repr(self.spec).encode())
        for name, weight in sorted(self.decoder.weights.items()):
            digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
            if isinstance(weight, Packed):
                digest.update(f"packed {weight.bits} {weight.group}".encode())
            for part in (weight.numbers, weight.scales) if isinstance(weight, Packed) else (weight,):
                digest.update(_sums_and_samples(part).numpy().tobytes())
        return digest.hexdigest()

    def _cache_spec(self, max_length: int) -> CacheSpec:
        """What a cache for rows of at most ``max_length`` tokens holds. Its identity names these weights, and the
        variants of those ropes that depend on the length."""
        settled = tuple(rope.settled(max_length) for rope in self.decoder.ropes)
        if settled not in self._cache_specs:
            variant = hashlib.sha256(repr(settled).encode()).hexdigest()
            identity = self.fingerprint if settled == self.decoder.ropes else f"{self.fingerprint} {variant}"
            made = self._cache_specs[settled] = self.spec.cache_spec(identity)
            config = hashlib.sha256(repr(self.spec).encode()).hexdigest()
            made.described = {"name": self.name, "family": self.spec.family, "config": config[:16]}
        return self._cache_specs[settled]

    def new_cache(
        self,
        batch_size: int = 1,
        storage: str = "dense",
        slack: int = 0,
        max_length: int | None = None,
        step: int = 256,
        checkpoints: CheckpointPolicy | None = None,
    ) -> Cache:
        """An empty cache of ``batch_size`` rows.

        ``storage``: how keys and values are kept: "dense", in the model's dtype; "int8" or "int4", quantized in groups
        of 32 numbers, or of so many as "int4:64" says. Recurrent states are dense always.
        ``slack``: rows that windowed and chunked layers keep beyond what they need, and states that recurrent layers
        keep of earlier positions, so that slack + 1 tokens can be rewound. ``max_length``: the most tokens a row may
        have (default: the model's maximum); given, memory for them is reserved at once. Rope that depends on the
        length (long rope, dynamic NTK) follows it, so that a row's keys are all of one kind. ``step``: rows by which
        memory grows at least. ``checkpoints``: when they are filed by themselves, and how many are kept (default:
        only where `Cache.checkpoint` is called).
        Raises InputError where an argument does not fit.
        """
        poison = os.environ.get("EXACTKV_POISON", "0") not in ("", "0")
        kept = make_storage(storage, self.dtype, self.device, poison)
        spec = self._cache_spec(self._within_limit(max_length))
        return Cache(spec, batch_size, kept, slack, step, max_length, checkpoints)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor | Sequence[Sequence[int]],
        cache: Cache | None = None,
        lengths: Sequence[int] | None = None,
        logits: str = "all",
        max_length: int | None = None,
        storage: str | None = None,
    ) -> Tensor | None:
        """One forward pass: full without a cache; with one, ``tokens`` are fed after what it holds.

        ``tokens`` [B, T] integers; ``lengths``: how many of each row's are valid, the rest is padding on the
        right (default: all). Returns logits: "all" [B, T, V], "last" [B, V] (of each row's valid positions), or
        None for "none"; what stands at padded positions is NaN. ``max_length``, ``storage``: without a cache, as
        for `new_cache`, so that keys and values are read as such a cache keeps them; with one, that cache's.
        Raises InputError where tokens, lengths or cache do not fit; the cache is then as it was. So it is
        after any other exception: it is committed when all layers are done.
        """
        ids = as_tokens(tokens)
        batch, width = ids.shape
        if cache is not None:
            self._check_cache(cache, batch, max_length, storage)
        limit = self._within_limit(max_length)
        counts = check_lengths(lengths, batch, width)
        ids = self._check_ids(ids, counts)
        check_logits(logits)
        if not any(counts):
            return self._no_logits(batch, width, logits)
        if cache is None:
            if max(counts, default=0) > limit:
                whose = "this model takes" if max_length is None else "max_length is"
                raise InputError(f"{max(counts)} tokens were given; {whose} at most {limit} a row")
            spec = self._cache_spec(limit)
            kept = make_storage("dense" if storage is None else storage, self.dtype, self.device, False)
            step = uncached_step(spec, kept, width, counts)
            return self.decoder(ids.to(self.device), step, spec, logits, limit)
        fed = [row[:n] for row, n in zip(ids.tolist(), counts, strict=True)]
        step = cache.begin(width, counts, fed)
        limit = self._within_limit(cache.max_length)
        out: Tensor | None
        if width == 1 and logits != "none" and self.decode_path is not None and self.decode_path.accepts(step):
            given = [row[0] if row else 0 for row in fed]
            out = self.decode_path.run(step, given, cache.spec, limit).clone()
            out = out if logits == "last" else out[:, None]
        else:
            out = self.decoder(ids.to(self.device), step, cache.spec, logits, limit)
        cache.commit(step)
        return out

    def _no_logits(self, batch: int, width: int, logits: str) -> Tensor | None:
        """What a call without valid tokens returns."""
        shape = {"all": (batch, width, self.spec.vocab_size), "last": (batch, self.spec.vocab_size), "none": None}[
            logits
        ]
        return None if shape is None else torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def _within_limit(self, max_length: int | None) -> int:
        """``max_length``, by default the model's. Raises InputError where it is none that the model may have."""
        most = self.spec.max_length
        if max_length is None:
            return most
        if not isinstance(max_length, int) or isinstance(max_length, bool) or not 1 <= max_length <= most:
            raise InputError(f"max_length is {max_length!r}; expected an integer from 1 to {most}: the model's limit")
        return max_length

    def _check_cache(self, cache: Cache, batch: int, max_length: int | None = None, storage: str | None = None) -> None:
        if not isinstance(cache, Cache):
            raise InputError(f"cache is a {type(cache).__name__}; expected one made by model.new_cache()")
        for what, mine, its in (
            ("dtype", self.dtype, cache.storage.dtype),
            ("device", self.device, cache.storage.device),
        ):
            if mine != its:
                raise InputError(f"the cache's {what} is {its}, the model's is {mine}; make one with model.new_cache()")
        if max_length not in (None, cache.max_length):
            raise InputError(f"max_length is {max_length!r}, the cache's is {cache.max_length}; leave it None")
        if storage is not None and make_storage(storage, self.dtype, self.device, False).name != cache.storage.name:
            raise InputError(f"storage is {storage!r}, the cache's is {cache.storage.name!r}; leave it None")
        spec = self._cache_spec(min(cache.max_length or self.spec.max_length, self.spec.max_length))
        if cache.spec is not spec and cache.spec.identity != spec.identity:
            raise InputError("the cache is another model's; make one with model.new_cache()")
        if cache.batch_size != batch:
            raise InputError(f"tokens have {batch} rows, the cache has {cache.batch_size}; expected the same number")

    def _check_ids(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """``ids`` with padding replaced by 0. Ids are checked where they come from the host."""
        if min(counts, default=0) < ids.shape[1]:
            valid = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(counts, device=ids.device)[:, None]
            ids = ids.masked_fill(~valid, 0)
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(x) for x in torch.aminmax(ids))
            if low < 0 or high >= self.spec.vocab_size:
                wrong = low if low < 0 else high
                raise InputError(f"token id {wrong} is outside the vocabulary: 0 to {self.spec.vocab_size - 1}")
        return ids

    def __repr__(self) -> str:
        count = sum(w.numel() for w in self.decoder.weights.values())
        return (
            f"Model({self.name or self.spec.family}: {self.spec.family}, {count / 1e6:.0f}M parameters, "
            f"{self.quantization + ', ' if self.quantization else ''}{str(self.dtype).removeprefix('torch.')} on "
            f"{self.device})"
        )


def _sums_and_samples(weight: Tensor) -> Tensor:
    """The bytes of ``weight`` as 64-bit integers, summed modulo 2**64 in 64 stretches, with what is left over; then
    some of those integers. As fast as memory is read; a single change changes the sums, another order the samples."""
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data[: data.numel() // 512 * 512].view(torch.int64)
    sums = whole.reshape(64, -1).sum(dim=-1)
    places = torch.linspace(0, max(0, whole.numel() - 1), min(64, whole.numel()), dtype=torch.float64).long()
    return torch.cat([sums, data[whole.numel() * 8 :].long(), whole[places.to(whole.device)]]).cpu()


def as_tokens(tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """``tokens`` as int64 [B, T]. Raises InputError where they are not integers or not in two dimensions."""
    if not isinstance(tokens, Tensor):
        try:
            given = torch.tensor(tokens)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(f"tokens cannot be read as integers [B, T]: {error}") from error
        tokens = given.to(torch.int64) if given.numel() == 0 else given
    if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise InputError(f"tokens are {tokens.dtype}; expected integers")
    if tokens.layout != torch.strided or tokens.device.type == "meta":
        raise InputError(f"tokens are a {tokens.layout} tensor on {tokens.device}; expected a dense one with values")
    if tokens.dim() != 2:
        raise InputError(f"tokens have the shape {list(tokens.shape)}; expected [B, T]: a batch of rows of ids")
    return tokens.to(torch.int64)
