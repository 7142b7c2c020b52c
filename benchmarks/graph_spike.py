"""One CUDA graph, captured once, replayed while caches grow, move, fork, leave and join.

What it shows. A row of the batch owns, for each group of layers with the same attention pattern, a few
immutable shared segments and one private run. Kernels find them through one table on the device, which the
host rewrites before every step; so a decode step of two slots, one full and one chunked layer, is captured
once (every slot idle) and replayed while full runs grow, chunked runs cross chunk boundaries and move, a row
leaves and its memory is poisoned and freed, and another joins in its slot. Every logit is compared with the
same kernels launched eagerly, with the same kernels over another layout of the same rows (both bit for bit),
and with one full forward pass in float64. Memory outside the live ranges is NaN before every step, and the
host waits for nothing but its staging buffers, so a stale pointer, a stale read or an overtaken table shows.
Then it times steps, table updates and growth (at 48 layers and 32 slots too) and the attention kernel.

    python benchmarks/graph_spike.py [--json]
    python benchmarks/graph_spike.py --interpret    without a GPU: Triton's interpreter, no capture, no timing

Exit status: 0 all equal, 1 not, 2 no CUDA device (or no Triton).
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from graph_world import (
    BOUND,
    CHUNK,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MAX_LENGTH,
    SEGMENTS,
    VOCABULARY,
    Layout,
    Model,
    Row,
    Tables,
    World,
    attend,
    triton,
)  # fmt: skip

# ---------------------------------------------------------------- the check


def play(world: World, steps: int) -> None:
    """The same story in every world: fork, ragged join, growth, moves, leave, join in the same slot."""
    prompt = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).to(world.device)
    trunk = world.join(0, world.new_row(), prompt[:10])
    branch = world.join(0, trunk.fork(), prompt[10:15])
    twig = branch.fork()  # two shared segments: [0, 10) and [10, 15)
    del world.rows[0]
    if world.captured:
        world.capture()
    busy = torch.ones(8192, 8192, device=world.device) if world.captured else None
    for step in range(steps):
        if step == 0:
            world.join(0, trunk.fork(), prompt[20:23])
        if step == 23:
            world.join(1, world.new_row(), prompt[23:30])
        if step == 60:
            world.leave(0)
        if step == 72:
            world.join(0, twig, prompt[30:32])
        if busy is not None and step % 10 == 3:
            torch.mm(busy, busy)  # holds the device back, so that the host runs ahead of it
        world.step(world.rows, replay=True)


def fed(world: World, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and logits of every position of a row, [T] and [T, V], on the CPU."""
    pairs = [(world.history[number][0][slot], world.history[number][1][slot]) for number, slot in row.fed]
    return torch.stack([pair[0] for pair in pairs]).cpu(), torch.stack([pair[1] for pair in pairs]).cpu()


def wrong_table_is_seen(world: World) -> bool:
    """The control: entries that point at poison must show in a replay of the same graph."""
    slot, row = next(iter(world.rows.items()))
    row.prepare()
    for run in row.runs.values():
        run.buffers = world.memory.new(len(run.buffers), run.capacity)
    world.tables.write(slot, row)
    world.step({slot: row}, replay=True)
    return bool(world.logits[slot].isnan().all())


def check(device: str, steps: int) -> dict[str, Any]:
    model = Model((0, CHUNK), device)
    contiguous = Layout(full_step=MAX_LENGTH, bounded_capacity=3 * CHUNK, share=False)
    worlds = {
        "eager": World(model, 2, device, Layout(), captured=False),
        "another layout": World(model, 2, device, contiguous, captured=False),
    }
    if device == "cuda":
        worlds = {"graph": World(model, 2, device, Layout(), captured=True), **worlds}
    for world in worlds.values():
        play(world, steps)
    subject = next(iter(worlds.values()))
    error, positions = 0.0, 0
    equal = dict.fromkeys([name for name, world in worlds.items() if world is not subject], True)
    for number, row in enumerate(subject.all_rows):
        tokens, logits = fed(subject, row)
        expected = model.reference(tokens)
        error = max(error, float((logits - expected).abs().max().nan_to_num(math.inf) / expected.abs().max()))
        positions += len(tokens)
        for name in equal:
            equal[name] &= torch.equal(logits, fed(worlds[name], worlds[name].all_rows[number])[1])
    intact = all(world.memory.intact() for world in worlds.values())
    result = {
        "subject": next(iter(worlds)), "steps": steps, "rows": len(subject.all_rows),
        "logits_compared": positions,
        "captures": subject.captures, "growths": sum(row.growths for row in subject.all_rows),
        "moves": sum(row.moves for row in subject.all_rows),
        "waits_for_staging": subject.tables.waits, "bit_equal": equal, "error_of_max_logit": error,
        "retired_and_shared_memory_intact": intact, "wrong_table_is_seen": wrong_table_is_seen(subject),
    }  # fmt: skip
    captured_once = subject.captures == (device == "cuda")
    good = error <= BOUND and all(equal.values()) and intact and captured_once
    return {**result, "ok": good and result["wrong_table_is_seen"]}


# ---------------------------------------------------------------- the timing


def timed(function: Callable[[], object], calls: int = 200) -> dict[str, float]:
    """Median of five: microseconds a call to issue on the host, and until the device is done."""
    samples = []
    for _ in range(6):  # the first warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        samples.append((issued - begin, time.perf_counter() - begin))
    host, wall = (statistics.median(column) / calls * 1e6 for column in zip(*samples[1:], strict=True))
    return {"host_us": round(host, 1), "wall_us": round(wall, 1)}


def time_steps(chunks: tuple[int, ...], slots: int, length: int, copy_gb_s: float) -> dict[str, Any]:
    """A step at a standing position, and what the host does before it, with every slot active."""
    world = World(Model(chunks, "cuda"), slots, "cuda", Layout(full_step=256), captured=True)
    world.rows = {slot: world.new_row() for slot in range(slots)}
    for slot, row in world.rows.items():
        world.tables.write(slot, row)
    for _ in range(length):
        world.prepare(world.rows)
        world.forward()
        for row in world.rows.values():
            row.length += 1
    world.capture()
    world.prepare(world.rows)
    tables = world.tables

    def publish_all() -> None:
        tables.dirty = True
        tables.publish()

    def full_step() -> None:
        world.prepare(world.rows)
        world.replay()

    def rewrite_one() -> None:
        tables.write(0, world.rows[0])
        tables.host_positions[0] = world.rows[0].length

    def rewrite_every_slot() -> None:
        for slot, row in world.rows.items():
            tables.write(slot, row)
            tables.host_positions[slot] = row.length

    return {
        "layers": len(chunks), "slots": slots, "length": length,
        "bytes_hot": tables.hot * 8, "bytes_all": tables.size * 8,
        "copy_all_floor_us": round(tables.size * 8 / copy_gb_s / 1e3, 1),
        "bytes_if_one_buffer_a_group": (tables.hot + len(tables.groups) * slots * SEGMENTS * 5) * 8,
        "replay": timed(world.replay), "eager": timed(world.forward, 20),
        "host_and_replay": timed(full_step), "host_without_event": timed(lambda: world.prepare(world.rows)),
        "publish_hot": timed(tables.publish), "publish_all": timed(publish_all),
        "rewrite_one_slot": timed(rewrite_one, 50), "rewrite_every_slot": timed(rewrite_every_slot, 5),
    }  # fmt: skip


def time_growth(layers: int, capacity: int) -> dict[str, Any]:
    """Growth by a quarter of one row in all layers of a group: a buffer each, or one buffer for the group."""
    shape, larger = (KV_HEADS, capacity, HEAD_DIM), (KV_HEADS, capacity + capacity // 4, HEAD_DIM)
    apart = [torch.randn(shape, device="cuda") for _ in range(2 * layers)]
    together = torch.randn((2 * layers, *shape), device="cuda")

    def grow_apart() -> list[torch.Tensor]:
        fresh = [torch.empty(larger, device="cuda") for _ in apart]
        for new, old in zip(fresh, apart, strict=True):
            new[:, :capacity] = old
        return fresh

    def grow_fused() -> list[torch.Tensor]:
        fresh = [torch.empty(larger, device="cuda") for _ in apart]
        torch._foreach_copy_([new[:, :capacity] for new in fresh], apart)
        return fresh

    def grow_together() -> torch.Tensor:
        fresh = torch.empty((2 * layers, *larger), device="cuda")
        fresh[:, :, :capacity] = together
        return fresh

    return {
        "layers": layers, "capacity": capacity, "megabytes": round(together.nbytes / 1e6, 1),
        "buffer_each": timed(grow_apart, 20), "buffer_each_foreach": timed(grow_fused, 20),
        "one_buffer": timed(grow_together, 20),
    }  # fmt: skip


def overtaken_copies(guarded: bool, copies: int = 20) -> int:
    """How many copies from pinned memory a busy device reads after the host has rewritten that memory."""
    busy = torch.ones(8192, 8192, device="cuda")
    staging = [torch.zeros(64, dtype=torch.int64, pin_memory=True) for _ in range(2 if guarded else 1)]
    events = [torch.cuda.Event() for _ in staging]
    seen = torch.zeros(copies, 64, dtype=torch.int64, device="cuda")
    for number in range(copies):
        if number % 5 == 0:
            torch.mm(busy, busy)
        turn = number % len(staging)
        if guarded:
            events[turn].synchronize()
        staging[turn].fill_(number)
        seen[number].copy_(staging[turn], non_blocking=True)
        events[turn].record()
    expected = torch.arange(copies)[:, None].expand(-1, 64)
    return int((seen.cpu() != expected).any(1).sum())


def time_attend(segments: int, block: int, slots: int = 256, length: int = 4096) -> dict[str, Any]:
    """One full layer over runs that fill the GPU, found through tables of more or fewer entries."""
    keys, values = torch.randn(2, slots, KV_HEADS, length, HEAD_DIM, device="cuda")
    tables = Tables({0: [0]}, slots, "cuda", segments)
    tables.host_positions[:] = length - 1
    tables.host_spans[0, :, -1] = 0, -1, length * HEAD_DIM
    for slot in range(slots):
        tables.host_addresses[0, slot, -1] = keys[slot].data_ptr(), values[slot].data_ptr()
    tables.publish()
    queries = torch.randn(slots, HEADS, HEAD_DIM, device="cuda")
    out = torch.full_like(queries, math.nan)

    def call() -> None:
        attend[(slots, KV_HEADS)](
            tables.positions, tables.spans[0], tables.addresses[0], queries, out, 1 / math.sqrt(HEAD_DIM),
            CHUNK=0, SEGMENTS=segments, GROUP=HEADS // KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK=block,
        )  # fmt: skip

    call()
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries[:8, :, None].double(), keys[:8].double(), values[:8].double(), enable_gqa=True
    )[:, :, 0]
    error = float((out[:8] - expected).abs().max())
    took = timed(call, 20)
    return {
        "segments": segments, "block": block, "wall_us": took["wall_us"], "max_error": error,
        "gb_s": round((keys.nbytes + values.nbytes) / took["wall_us"] / 1e3),
    }  # fmt: skip


def device_bandwidth() -> float:
    """GB/s of a large copy on the device, bytes read and written: the ceiling of attention."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return round(2 * source.nbytes / timed(lambda: target.copy_(source), 20)["wall_us"] / 1e3)


def copy_bandwidth() -> float:
    """GB/s of a large copy from pinned memory: the ceiling of a table update."""
    source = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return round(source.nbytes / timed(lambda: target.copy_(source, non_blocking=True), 5)["wall_us"] / 1e3, 1)


def measure() -> dict[str, Any]:
    llama4 = (CHUNK, CHUNK, CHUNK, 0) * 12
    copy_gb_s = copy_bandwidth()
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "copy_gb_s": copy_gb_s, "device_gb_s": device_bandwidth(),
        "attend": [time_attend(segments, block) for block in (16, 32, 64) for segments in (1, 4, 16)],
        "overtaken_copies": {"one_buffer": overtaken_copies(False), "two_and_event": overtaken_copies(True)},
        "steps": [time_steps((0, CHUNK), 2, 100, copy_gb_s), time_steps(llama4, 32, 100, copy_gb_s)],
        "growth": [time_growth(12, 1024), time_growth(36, 1024), time_growth(12, 16384)],
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    for name, value in report["check"].items():
        print(f"{name:36} {value}")
    timing = report.get("timing")
    if timing is None:
        return
    print(f"\n{timing['device']}, torch {timing['torch']}, triton {timing['triton']}")
    print(f"pinned copy, large: {timing['copy_gb_s']} GB/s")
    print(f"copy on the device, large: {timing['device_gb_s']} GB/s, read and written")
    for case in timing["attend"]:
        print("attend: " + ", ".join(f"{name} {value:.4g}" for name, value in case.items()))
    print(f"copies overtaken by the host, of 20: {timing['overtaken_copies']}")
    for case in [*timing["steps"], *timing["growth"]]:
        plain = {name: value for name, value in case.items() if not isinstance(value, dict)}
        print("\n" + ", ".join(f"{name} {value}" for name, value in plain.items()))
        print(f"  {'us a call':24} {'host':>10} {'wall':>10}")
        for name, value in case.items():
            if isinstance(value, dict):
                print(f"  {name:24} {value['host_us']:10.1f} {value['wall_us']:10.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--interpret", action="store_true", help="run the kernels on the CPU, without capture")
    parser.add_argument("--steps", type=int, default=120, help="decode steps of the check")
    options = parser.parse_args()
    if not options.interpret and not torch.cuda.is_available():
        print("graph_spike: skipped, no CUDA device (try --interpret)")
        return 2
    device = "cpu" if options.interpret else "cuda"
    report: dict[str, Any] = {"check": check(device, options.steps)}
    if device == "cuda":
        report["timing"] = measure()
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if report["check"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
