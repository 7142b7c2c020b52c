"""Mixed load: streams and whole replies, clients that leave, bad requests. Each reply is what it is alone, and nothing
is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from exactkv.cache.store import PromptStore
from exactkv.generation import Sampling, generate
from exactkv.models.model import Model
from exactkv.serve import ServeOptions
from tests.serve.conftest import NAME, Running, until

PATH = "/v1/completions"


def asked(number: int) -> dict[str, Any]:
    """One of the requests of which the load is made."""
    prompt = ("shared by many " * 4)[: 8 * (number % 7)] + f"and then {number % 11}"
    return {"model": NAME, "prompt": prompt, "max_tokens": 3 + number % 29, "seed": number,
            "temperature": (number % 4) / 3}  # fmt: skip


def expected(model: Model, count: int) -> list[str]:
    bodies = [asked(i) for i in range(count)]
    return [
        generate(model, [b["prompt"]], max_tokens=b["max_tokens"],
                 sampling=Sampling(temperature=b["temperature"], seed=b["seed"]))[0].text
        for b in bodies
    ]  # fmt: skip


async def client(url: str, texts: list[str], seed: int, until_: float, seen: Counter[str]) -> None:
    """Asks one thing after another, until a moment of the loop's clock."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while loop.time() < until_:
            number, what = chance.randrange(len(texts)), chance.choice(("whole", "stream", "leave", "bad"))
            body = {**asked(number), "stream": what in ("stream", "leave")}
            if what == "bad":
                response = await http.post(PATH, json={**body, chance.choice(list(body)): [None]})
                assert response.status_code in (400, 404), response.text
            elif what == "whole":
                response = await http.post(PATH, json=body)
                if response.status_code == 429:
                    what = "full"
                    await asyncio.sleep(0.01)
                else:
                    assert response.json()["choices"][0]["text"] == texts[number], number
            else:
                what = await streamed(http, body, texts[number], chance.randrange(9) if what == "leave" else None)
            seen[what] += 1


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], text: str, leave_after: int | None) -> str:
    said, lines = "", 0
    async with http.stream("POST", PATH, json=body) as response:
        if response.status_code == 429:
            return "full"
        async for line in response.aiter_lines():
            if leave_after is not None and lines >= leave_after:
                assert text.startswith(said)
                return "leave"
            lines += 1
            if line.startswith("data: {"):
                said += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
    assert said == text
    return "stream"


def load(server: Running, texts: list[str], clients: int, seconds: float, seed: int = 0) -> Counter[str]:
    seen: Counter[str] = Counter()

    async def run() -> None:
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(client(server.url, texts, seed + i, end, seen) for i in range(clients)))

    asyncio.run(run())
    until(server.idle)
    return seen


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_mixed_load(start: Callable[..., Running], model: Model) -> None:
    server = start(PromptStore(200_000), max_batch=4, queue=4)  # a store that must evict
    texts, seen = expected(model, 30), Counter[str]()
    for turn in range(10):  # a busy machine takes longer to see all
        seen += load(server, texts, clients=16, seconds=2, seed=100 * turn)
        if {"whole", "stream", "leave", "bad", "full"} <= seen.keys() and sum(seen.values()) > 50:
            return
    raise AssertionError(seen)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_mixed_load_for_longer(model: Model) -> None:
    """Memory is flat, and a server that ends amid the load loses nobody else's."""
    texts, sizes = expected(model, 200), []
    for turn in range(3):
        server = Running(model, ServeOptions(grace=1, max_batch=16, queue=16), PromptStore(5_000_000))
        for part in range(4):
            load(server, texts, clients=32, seconds=8, seed=100 * turn + 10 * part)
            gc.collect()
            sizes.append(resident())
        server.stop()
    assert max(sizes[4:]) < 1.05 * min(sizes[4:]), sizes
