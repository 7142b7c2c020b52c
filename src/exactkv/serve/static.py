"""The files of the page, with the headers that hold it to this server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a newer server's page is asked for, an unchanged one is not sent again
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
"""Not the machine's: some say that scripts are plain text, which browsers then do not run."""


def page_routes() -> list[Route]:
    """A route for each file, and `/` for `index.html`. Not a mount: that would take each path that no endpoint is at,
    and each method that an endpoint has not, for a file that is missing."""
    files = Files(directory=PAGE)
    names = {f"/{file.name}": file.name for file in sorted(PAGE.iterdir())} | {"/": "index.html"}
    return [Route(path, _endpoint(files, name)) for path, name in names.items()]


def _endpoint(files: StaticFiles, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return await files.get_response(name, request.scope)

    return send


class Files(StaticFiles):
    """With our headers and types."""

    def file_response(self, full_path: Any, *args: Any, **options: Any) -> Response:
        response = super().file_response(full_path, *args, **options)
        response.headers.update(HEADERS)
        if "content-type" in response.headers:  # there is none where nothing has changed
            response.headers["content-type"] = f"{TYPES[Path(full_path).suffix]}; charset=utf-8"
        return response
