"""A second process: it builds the same target anew, loads a saved cache, feeds tokens, returns the logits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exactkv.errors import ExactKVError
from exactkv.verify.target import Array, NotSupported, Target


class Elsewhere:
    """The second process, started at once, ready when it is first asked."""

    def __init__(self, target: Target):
        self._scratch = tempfile.TemporaryDirectory(prefix="exactkv-elsewhere-")
        recipe = json.dumps(target.recipe())
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "exactkv.verify.worker", recipe],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def feed(self, path: Path, tokens: Sequence[int]) -> Array:
        """Logits [n, V] of ``tokens`` fed to the cache saved at ``path``. Raises NotSupported or ElsewhereError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        out = Path(self._scratch.name) / "logits.npy"
        try:
            self._process.stdin.write(json.dumps({"path": str(path), "tokens": list(tokens), "out": str(out)}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ElsewhereError("the second process ended")
        told = json.loads(answer)
        if told["error"]:
            raise (NotSupported if told["supported"] is False else ElsewhereError)(told["error"])
        logits: Array = np.load(out)
        return logits

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._scratch.cleanup()


class ElsewhereError(ExactKVError):
    """Loading or feeding failed in the second process."""


def main(recipe: str) -> None:
    from exactkv.verify.targets import from_recipe

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whatever libraries print is not an answer
    target = from_recipe(json.loads(recipe))
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer = {"error": "", "supported": True}
        try:
            np.save(asked["out"], target.feed(target.load(Path(asked["path"])), asked["tokens"]))
        except NotSupported as error:
            answer = {"error": str(error), "supported": False}
        except Exception as error:  # told to the first process
            answer = {"error": f"{type(error).__name__}: {error}"[:300], "supported": True}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
