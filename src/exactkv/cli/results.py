"""OUT of `exactkv generate --file`: results that are there already, and those that are added."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO, cast

from exactkv.cli.lines import BEGINNING, Id, read_result
from exactkv.errors import InputError


class Results:
    """A file of results, open for more; '-' is standard output.

    ``finished``: the ids that it holds a result of. Errors of an earlier run are dropped when it is `prepare`d, as
    their lines are tried again, and so is a last line that was cut off. A pipe or device is only written to.
    Raises InputError where a line is no result, or where another process is writing to it.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.finished: set[Id] = set()
        self._errors, self._end, self._newline = 0, 0, True
        standard = str(path) == "-"
        self._created = not standard and not path.exists()
        self._regular = not standard and (self._created or path.is_file())
        mode = "ab" if self._created else "r+b" if self._regular else "wb"
        try:
            self._file = cast(BinaryIO, sys.stdout.buffer if standard else open(path, mode))  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}; give another --out") from None
        if self._regular:
            self._lock(self._file)
            self._read()

    def prepare(self) -> None:
        """Leave nothing but finished results, each with its end of line."""
        if not self._regular:
            return
        if self._errors:
            self._drop_errors()
        else:
            self._file.truncate(self._end)
            self._file.seek(self._end)
        if not self._newline:
            self._file.write(b"\n")
        self._file.flush()

    def add(self, line: bytes) -> None:
        """Append a line; it is with the system when this returns."""
        self._file.write(line)
        self._file.flush()

    def close(self, unused: bool = False) -> None:
        """``unused``: a file that was made for nothing is removed."""
        if self._file is not sys.stdout.buffer:
            self._file.close()
        if unused and self._created and self._regular:
            self.path.unlink(missing_ok=True)

    def _lock(self, file: BinaryIO) -> None:
        with contextlib.suppress(ImportError):  # there is none on Windows
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another process is writing to {self.path}; wait for it, or give another --out"
                ) from None
            except OSError:
                return  # a file system without locks
            if file is self._file and not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                raise InputError(f"another process has just rewritten {self.path}; wait for it, or give another --out")

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                found = read_result(raw)
                whole = raw.endswith(b"\n")
                if found is None and not whole and raw.startswith(BEGINNING[: len(raw)]):
                    return  # cut off
                if found is None and raw.strip():
                    raise InputError(
                        f"line {number} of {self.path} is no result of exactkv generate --file; give another --out"
                    )
                self._newline, self._end = whole, self._end + len(raw)
                if found is not None and found[1]:
                    self._errors += 1
                elif found is not None:
                    self.finished.add(found[0])

    def _drop_errors(self) -> None:
        """Write what stays beside the file, then put it in the file's place."""
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
        beside = Path(name)
        try:
            self._write_finished(handle)
            shutil.copymode(self.path, beside)
            kept = open(beside, "ab")  # noqa: SIM115
            self._lock(kept)
            os.replace(beside, self.path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = kept

    def _write_finished(self, handle: int) -> None:
        """To the file descriptor ``handle``, which is closed."""
        with os.fdopen(handle, "wb") as new, self.path.open("rb") as old:
            left = self._end
            for raw in old:
                left -= len(raw)
                if left < 0:
                    break
                found = read_result(raw)
                if found is not None and not found[1]:
                    new.write(raw)
                    self._newline = raw.endswith(b"\n")
            new.flush()
            os.fsync(new.fileno())
