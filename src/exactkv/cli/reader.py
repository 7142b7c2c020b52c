"""What is typed, or comes from a pipe: one entry at a time, of one line or several."""

from __future__ import annotations

import contextlib
import sys

from exactkv.errors import InputError

PROMPT, MORE = "> ", "… "
BLOCK = '"""'


class Reader:
    """Entries from standard input. In a terminal there is a prompt, and line editing where readline is there."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (input() then edits lines, with a history)

    def read(self) -> str | None:
        """The next entry, None at the end. A line that ends with a backslash goes on in the next line; one that begins
        with three quotation marks up to those at the end of a line."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.startswith(BLOCK):
            return self._block(line[len(BLOCK) :])
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(MORE)
        return "\n".join([*lines, *([] if line is None else [line])])

    def _block(self, line: str | None) -> str:
        lines = []
        while line is not None and not line.rstrip().endswith(BLOCK):
            lines.append(line)
            line = self._line(MORE)
        if line is not None and (last := line.rstrip().removesuffix(BLOCK)):
            lines.append(last)
        return "\n".join(lines[1:] if lines and not lines[0] else lines)

    def _line(self, prompt: str) -> str | None:
        if self.interactive:
            if not sys.stdout.isatty():
                print(prompt, end="", file=sys.stderr, flush=True)
                prompt = ""
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
        given = sys.stdin.buffer.readline()
        if not given:
            return None
        try:
            return given.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"a line on standard input is not valid UTF-8: {error.reason}") from None
