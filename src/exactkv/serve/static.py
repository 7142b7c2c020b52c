"""The files of the page, with the headers that hold it to this server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import Response
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


class Page(StaticFiles):
    """Serves the page's files; `/` is its `index.html`."""

    def __init__(self) -> None:
        super().__init__(directory=PAGE, html=True)

    def file_response(self, full_path: Any, *args: Any, **options: Any) -> Response:
        response = super().file_response(full_path, *args, **options)
        response.headers.update(HEADERS)
        if "content-type" in response.headers:  # there is none where nothing has changed
            response.headers["content-type"] = f"{TYPES[Path(full_path).suffix]}; charset=utf-8"
        return response
