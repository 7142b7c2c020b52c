"""The texts of one HTTP request while they are under way, and what has come of them. Belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from exactkv.generation.loop import Stats
from exactkv.generation.text import Piece, Text
from exactkv.serve.errors import Refusal


@dataclass(frozen=True)
class News:
    """What has come of the text at place ``index``: a piece, or an error. ``cached``: tokens of its prompt that were
    not computed again. ``stats``: with the last."""

    index: int
    piece: Piece | None = None
    cached: int = 0
    stats: Stats | None = None
    error: Refusal | None = None
    ended: bool = False


class Call:
    """One or more texts that belong together. ``on_end``: called once, when nothing more will come of any.

    Whoever reads slowly lets pieces pile up here, at most as many as the texts have tokens; the engine goes on.
    """

    def __init__(self, texts: Sequence[Text], salt: str, on_end: Callable[[Call], None] = lambda call: None):
        self.texts, self.salt, self._on_end = list(texts), salt, on_end
        self.stats: list[Stats | None] = [None] * len(self.texts)
        self._open = set(range(len(self.texts)))
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news: asyncio.Queue[News] = asyncio.Queue()

    @property
    def open(self) -> int:
        """How many of its texts have not ended."""
        return len(self._open)

    async def accepted(self) -> None:
        """Wait until the engine has taken it. Raises Refusal where it has not."""
        await self._accepted

    async def news(self) -> AsyncIterator[News]:
        """All that comes of its texts. Raises Refusal at an error, which ends it."""
        ended = 0
        while ended < len(self.texts):
            news = await self._news.get()
            if news.error is not None:
                raise news.error
            ended += news.ended
            yield news

    def accept(self) -> None:
        """The engine has taken it."""
        if not self._accepted.done():
            self._accepted.set_result(None)

    def take(self, news: News) -> None:
        """The engine has said something."""
        if news.error is not None and not self._accepted.done():
            self._accepted.set_exception(news.error)
            self._accepted.exception()  # seen, also where nobody waits any more
        self._news.put_nowait(news)
        self.stats[news.index] = news.stats or self.stats[news.index]
        if (news.ended or news.error is not None) and news.index in self._open:
            self._open.discard(news.index)
            if not self._open:
                self._on_end(self)
