"""The world of graph_spike.py: kernels, rows, tables, a small model, and the captured step."""

import math
import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported
try:
    import triton
    import triton.language as tl
except ImportError:
    print("graph_spike: skipped, Triton is not installed")
    sys.exit(2)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 256, 8, 2, 64, 97
CHUNK = 16
SEGMENTS = 4  # entries a slot: up to three shared segments, then the run
MAX_LENGTH = 512
ROW_BYTES = HEAD_DIM * 4
BOUND = 1e-5  # of max|logit|, float32 against float64


# ---------------------------------------------------------------- kernels


@triton.jit
def write_row(positions, spans, addresses, keys, values, SEGMENTS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write the new key and value of one slot and head into its run. An idle slot (-1) writes nothing."""
    slot, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + slot)
    run = slot * SEGMENTS + SEGMENTS - 1
    column = tl.arange(0, HEAD_DIM)
    offset = (head * tl.load(spans + run * 3 + 2) + position * HEAD_DIM) * 4
    source = (slot * tl.num_programs(1) + head) * HEAD_DIM + column
    active = (column >= 0) & (position >= 0)
    key_at = tl.multiple_of((tl.load(addresses + run * 2) + offset).to(tl.pointer_type(tl.float32)), 16)
    value_at = tl.multiple_of((tl.load(addresses + run * 2 + 1) + offset).to(tl.pointer_type(tl.float32)), 16)
    tl.store(key_at + column, tl.load(keys + source), mask=active)
    tl.store(value_at + column, tl.load(values + source), mask=active)


@triton.jit
def attend(
    positions, spans, addresses, queries, out, scale,
    CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one slot and key head over blocks of keys at absolute positions, wherever their rows lie.

    A visible position that no segment holds reads as NaN. An idle slot gives zeros and reads no rows.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + slot).to(tl.int32)
    first_visible = 0
    if CHUNK > 0:
        first_visible = tl.maximum(position, 0) // CHUNK * CHUNK
    column, member = tl.arange(0, HEAD_DIM), tl.arange(0, GROUP)
    place = ((slot * tl.num_programs(1) + head) * GROUP + member)[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(queries + place) * scale  # [GROUP, D]
    entry = slot * SEGMENTS + tl.arange(0, SEGMENTS)  # the slot's part of the tables, read once
    first, end = tl.load(spans + entry * 3), tl.load(spans + entry * 3 + 1)
    end = tl.where(tl.arange(0, SEGMENTS) == SEGMENTS - 1, position + 1, end)  # the row just written ends the run
    head_at = tl.load(spans + entry * 3 + 2) * head * 4
    key_zero, value_zero = (
        tl.load(addresses + entry * 2) + head_at,
        tl.load(addresses + entry * 2 + 1) + head_at,
    )
    best = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for block in range(first_visible // BLOCK * BLOCK, position + 1, BLOCK):
        at = block + tl.arange(0, BLOCK)
        visible = (at >= first_visible) & (at <= position)
        here = visible[:, None] & (at[:, None] >= first[None, :]) & (at[:, None] < end[None, :])
        key_at = tl.sum(tl.where(here, key_zero[None, :] + at[:, None] * (HEAD_DIM * 4), 0), axis=1)
        value_at = tl.sum(tl.where(here, value_zero[None, :] + at[:, None] * (HEAD_DIM * 4), 0), axis=1)
        held = (key_at != 0)[:, None]
        key_rows = tl.multiple_of(key_at.to(tl.pointer_type(tl.float32)), 16)[:, None] + column[None, :]
        value_rows = tl.multiple_of(value_at.to(tl.pointer_type(tl.float32)), 16)[:, None] + column[None, :]
        key = tl.where(visible[:, None], tl.load(key_rows, mask=held, other=float("nan")), 0.0)  # [BLOCK, D]
        value = tl.where(visible[:, None], tl.load(value_rows, mask=held, other=float("nan")), 0.0)
        score = tl.sum(query[:, None, :] * key[None, :, :], axis=2)  # [GROUP, BLOCK]
        score = tl.where(visible[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - new_best[:, None])
        kept = tl.exp(best - new_best)
        total = total * kept + tl.sum(weight, axis=1)
        mixed = mixed * kept[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], axis=1)
        best = new_best
    tl.store(out + place, mixed / tl.where(total > 0, total, 1.0)[:, None])


# ---------------------------------------------------------------- rows: the layout under test


@dataclass(frozen=True)
class Layout:
    """How rows are kept. Logits must not depend on it."""

    full_step: int = 8
    bounded_capacity: int = CHUNK + CHUNK // 4
    share: bool = True  # a fork shares the frozen run; otherwise it copies it


@dataclass
class Memory:
    """Buffers start and end full of NaN. Every second retired set is freed at once, the others are kept."""

    device: str
    kept: list[torch.Tensor] = field(default_factory=list)
    shared: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    retired: int = 0

    def new(self, count: int, capacity: int) -> list[torch.Tensor]:
        shape = (KV_HEADS, capacity, HEAD_DIM)
        return [torch.full(shape, math.nan, device=self.device) for _ in range(count)]

    def retire(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            buffer.fill_(math.nan)
        self.retired += 1
        if self.retired % 2:
            self.kept.extend(buffers)

    def intact(self) -> bool:
        """No kept buffer was written after it was retired, and no shared one after it was frozen."""
        poisoned = all(bool(buffer.isnan().all()) for buffer in self.kept)
        return poisoned and all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in self.shared)


@dataclass
class Run:
    """What one row of the batch holds for one group of layers: position p at index p - origin."""

    chunk: int  # 0: full attention
    buffers: list[torch.Tensor]  # key, value, key, value, ... each [H_kv, capacity, D]
    capacity: int
    origin: int
    start: int  # live rows are [start, end); the end of a private run is the row's length
    end: int = -1  # set when frozen into a shared segment

    def first_visible(self, position: int) -> int:
        return position // self.chunk * self.chunk if self.chunk else 0

    def addresses(self) -> np.ndarray:
        """Where position 0 would lie, for each key and value buffer: [layers of the group, 2]."""
        pointers = np.array([buffer.data_ptr() for buffer in self.buffers], dtype=np.int64)
        return (pointers - self.origin * ROW_BYTES).reshape(-1, 2)


class Row:
    """One row of the batch: its length, its shared segments and its runs, one a group of layers."""

    def __init__(self, memory: Memory, layout: Layout, groups: dict[int, list[int]], length: int = 0):
        self.memory, self.layout, self.groups, self.length = memory, layout, groups, length
        self.segments: dict[int, list[Run]] = {chunk: [] for chunk in groups}
        self.runs = {chunk: self._empty_run(chunk) for chunk in groups}
        self.fed: list[tuple[int, int]] = []  # the forward pass and slot that each position was fed in
        self.growths = self.moves = 0

    def _empty_run(self, chunk: int) -> Run:
        capacity = self.layout.bounded_capacity if chunk else self.layout.full_step
        buffers = self.memory.new(2 * len(self.groups[chunk]), capacity)
        return Run(chunk, buffers, capacity, origin=self.length, start=self.length)

    def prepare(self) -> bool:
        """Make room for the next position, once for all layers of a group. True if a table entry changed."""
        changed = False
        for chunk, run in self.runs.items():
            first_visible = run.first_visible(self.length)
            run.start = max(run.start, first_visible)
            if self.segments[chunk] and self.segments[chunk][0].end <= first_visible:
                self.segments[chunk] = [part for part in self.segments[chunk] if part.end > first_visible]
                changed = True
            if self.length - run.origin == run.capacity:
                self._make_room(run)
                changed = True
        return changed

    def _make_room(self, run: Run) -> None:
        first = run.start if run.chunk else run.origin
        capacity = run.capacity if run.chunk else run.capacity + self.layout.full_step
        fresh = self.memory.new(len(run.buffers), capacity)
        for new, old in zip(fresh, run.buffers, strict=True):
            new[:, : self.length - first] = old[:, first - run.origin : self.length - run.origin]
        self.memory.retire(run.buffers)
        run.buffers, run.capacity, run.origin = fresh, capacity, first
        self.moves += bool(run.chunk)
        self.growths += not run.chunk

    def poison(self) -> None:
        for run in self.runs.values():
            for buffer in run.buffers:
                buffer[:, : run.start - run.origin] = math.nan
                buffer[:, self.length - run.origin :] = math.nan

    def fork(self) -> "Row":
        """A row with the same content: the run frozen and shared, or copied, as the layout says."""
        self.poison()
        child = Row(self.memory, self.layout, self.groups, self.length)
        child.fed = list(self.fed)
        for chunk, run in self.runs.items():
            if not self.layout.share:
                child.runs[chunk] = replace(run, buffers=[buffer.clone() for buffer in run.buffers])
                continue
            if run.start < self.length:
                self.segments[chunk].append(replace(run, end=self.length))
                self.memory.shared.extend((buffer, buffer.clone()) for buffer in run.buffers)
                self.runs[chunk] = self._empty_run(chunk)
            child.segments[chunk] = list(self.segments[chunk])
        return child

    def leave(self) -> None:
        for run in self.runs.values():
            self.memory.retire(run.buffers)
        self.runs, self.segments = {}, {}


class Tables:
    """What kernels know of the rows: one int64 tensor. A step without an event rewrites its head only.

    positions [B]: the position of the new token, -1 where the slot is idle
    spans     [groups, B, SEGMENTS, (first position, end position, head stride in elements)]
    addresses [layers, B, SEGMENTS, (key, value)]: where position 0 would lie, in bytes
    """

    def __init__(self, groups: dict[int, list[int]], slots: int, device: str, segments: int = SEGMENTS):
        layers = sum(len(members) for members in groups.values())
        self.groups, self.cuda, self.waits = groups, device == "cuda", 0
        shapes = [(slots,), (len(groups), slots, segments, 3), (layers, slots, segments, 2)]
        sizes = [math.prod(shape) + math.prod(shape) % 2 for shape in shapes]  # each section on 16 bytes
        self.hot, self.size = sizes[0], sum(sizes)
        self.mirror = torch.zeros(self.size, dtype=torch.int64)
        self.staging = [torch.zeros(self.size, dtype=torch.int64, pin_memory=self.cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)] if self.cuda else []
        self.on_device = torch.zeros(self.size, dtype=torch.int64, device=device)
        starts = [0, sizes[0], sizes[0] + sizes[1]]

        def sections(flat: Any) -> list[Any]:
            parts = zip(starts, shapes, strict=True)
            return [flat[start : start + math.prod(shape)].reshape(shape) for start, shape in parts]

        self.positions, self.spans, self.addresses = sections(self.on_device)
        self.host_positions, self.host_spans, self.host_addresses = sections(self.mirror.numpy())
        self.host_positions[:] = -1
        self.turn, self.dirty = 0, True

    def write(self, slot: int, row: Row) -> None:
        self.clear(slot)
        for group, (chunk, layers) in enumerate(self.groups.items()):
            shared = row.segments[chunk]
            if len(shared) >= SEGMENTS:
                raise ValueError(f"{len(shared)} shared segments, the table holds {SEGMENTS - 1}")
            for place, part in [*enumerate(shared), (SEGMENTS - 1, row.runs[chunk])]:
                first = part.start if part.end >= 0 else part.origin
                self.host_spans[group, slot, place] = first, part.end, part.capacity * HEAD_DIM
                self.host_addresses[layers, slot, place] = part.addresses()

    def clear(self, slot: int) -> None:
        self.host_positions[slot] = -1
        self.host_spans[:, slot] = 0
        self.host_addresses[:, slot] = 0
        self.dirty = True

    def publish(self) -> None:
        """Copy to the device, in stream order. A staging buffer is reused once its own last copy was read."""
        self.turn = 1 - self.turn
        count = self.size if self.dirty else self.hot
        if self.cuda and not self.copied[self.turn].query():
            self.waits += 1
            self.copied[self.turn].synchronize()
        staged = self.staging[self.turn][:count]
        staged.copy_(self.mirror[:count])
        self.on_device[:count].copy_(staged, non_blocking=True)
        if self.cuda:
            self.copied[self.turn].record()
        self.dirty = False


# ---------------------------------------------------------------- the model and its step


class Model:
    """Random weights: attention layers (chunk 0: full, no rope; else chunked, with rope), no MLP."""

    def __init__(self, chunks: tuple[int, ...], device: str, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) / math.sqrt(rows)).to(device)

        width = HEADS * HEAD_DIM
        self.chunks = chunks
        self.embedding = weight(VOCABULARY, HIDDEN) * math.sqrt(VOCABULARY)
        self.project = [weight(HIDDEN, width + 2 * KV_HEADS * HEAD_DIM) for _ in chunks]
        self.merge = [weight(width, HIDDEN) * 2 for _ in chunks]
        self.head = weight(HIDDEN, VOCABULARY)
        frequency = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
        angle = torch.arange(MAX_LENGTH)[:, None] * frequency
        self.cos, self.sin = angle.cos().float().to(device), angle.sin().float().to(device)
        self.groups: dict[int, list[int]] = {}  # the layers of each pattern
        for layer, chunk in enumerate(chunks):
            self.groups.setdefault(chunk, []).append(layer)

    def reference(self, tokens: torch.Tensor) -> torch.Tensor:
        """One full forward pass in float64 with a dense mask. tokens [T] -> logits [T, V], on the CPU."""
        at = torch.arange(len(tokens))
        x = self.embedding.cpu().double()[tokens]
        for chunk, project, merge in zip(self.chunks, self.project, self.merge, strict=True):
            q, k, v = split_heads(normalise(x) @ project.cpu().double())
            if chunk:
                cos, sin = self.cos.cpu().double()[at], self.sin.cpu().double()[at]
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
            first_visible = at // chunk * chunk if chunk else at * 0
            visible = (at[None, :] <= at[:, None]) & (at[None, :] >= first_visible[:, None])
            score = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
            mixed = torch.einsum("hqk,khd->qhd", score.masked_fill(~visible, -math.inf).softmax(-1), v)
            x = x + mixed.flatten(1) @ merge.cpu().double()
        return normalise(x) @ self.head.cpu().double()


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def split_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, (H + 2 H_kv) * D] -> [N, H, D], [N, H_kv, D], [N, H_kv, D]."""
    q, k, v = x.view(x.shape[0], -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return q, k, v


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rope, in halves. x [N, H, D], cos and sin [N, D / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class World:
    """Slots, their rows and one step over them, eager or captured. Nothing here reads the device."""

    def __init__(self, model: Model, slots: int, device: str, layout: Layout, captured: bool):
        self.model, self.slots, self.device = model, slots, device
        self.layout, self.captured = layout, captured
        self.memory = Memory(device)
        self.tables = Tables(model.groups, slots, device)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.logits = torch.zeros(slots, VOCABULARY, device=device)
        self.rows: dict[int, Row] = {}
        self.all_rows: list[Row] = []
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []  # a forward pass: tokens in, logits out
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captures = 0

    def capture(self) -> None:
        """Capture the step with every slot idle: it writes no row whatever is held."""
        self.tables.host_positions[:] = -1
        self.tables.publish()
        self.forward()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward()
        self.captures += 1

    def replay(self) -> None:
        assert self.graph is not None
        self.graph.replay()

    def forward(self) -> None:
        """tokens in, logits and the next tokens out, all on the device."""
        model, tables, grid = self.model, self.tables, (self.slots, KV_HEADS)
        at = tables.positions.clamp(min=0)
        x = model.embedding[self.tokens]
        for layer, chunk in enumerate(model.chunks):
            spans = tables.spans[list(model.groups).index(chunk)]
            x = x + self._attention(layer, chunk, spans, x, at, grid) @ model.merge[layer]
        torch.mm(normalise(x), model.head, out=self.logits)
        self.tokens.copy_(torch.where(tables.positions >= 0, self.logits.argmax(-1), self.tokens))

    def _attention(self, layer, chunk, spans, x, at, grid) -> torch.Tensor:
        model, positions, addresses = self.model, self.tables.positions, self.tables.addresses[layer]
        q, k, v = split_heads(normalise(x) @ model.project[layer])
        if chunk:
            q, k = rotate(q, model.cos[at], model.sin[at]), rotate(k, model.cos[at], model.sin[at])
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.full_like(q, math.nan)
        write_row[grid](positions, spans, addresses, k, v, SEGMENTS, HEAD_DIM)
        attend[grid](
            positions, spans, addresses, q, out, 1 / math.sqrt(HEAD_DIM),
            CHUNK=chunk, SEGMENTS=SEGMENTS, GROUP=HEADS // KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK=16,
        )  # fmt: skip
        return out.flatten(1)

    def join(self, slot: int, row: Row, prompt: torch.Tensor) -> Row:
        """Feed the prompt eagerly, token by token, the other slots idle meanwhile; the row then decodes."""
        self.tables.write(slot, row)
        for token in prompt:
            self.tokens[slot].copy_(token)
            self.step({slot: row})
        self.rows[slot] = row
        self.all_rows.append(row)
        return row

    def leave(self, slot: int) -> None:
        self.rows.pop(slot).leave()
        self.tables.clear(slot)

    def new_row(self) -> Row:
        return Row(self.memory, self.layout, self.model.groups)

    def prepare(self, active: dict[int, Row]) -> None:
        """All the host does before a step: room in the runs, table entries, the copy to the device."""
        self.tables.host_positions[:] = -1
        for slot, row in active.items():
            if row.prepare():
                self.tables.write(slot, row)
            self.tables.host_positions[slot] = row.length
        self.tables.publish()

    def step(self, active: dict[int, Row], replay: bool = False) -> None:
        self.prepare(active)
        for row in active.values():
            row.poison()
        tokens = self.tokens.clone()
        if replay and self.captured:
            self.replay()
        else:
            self.forward()
        for slot, row in active.items():  # commit
            row.fed.append((len(self.history), slot))
            row.length += 1
        self.history.append((tokens, self.logits.clone()))
