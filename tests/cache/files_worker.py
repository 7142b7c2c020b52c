"""A second process: it loads saved caches, goes on with each and saves the logits. Run by `test_files`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from exactkv import load_cache
from tests.cache.test_files import MODELS, going_on


def main(directory: Path) -> None:
    for file in sorted(directory.glob("*.cache")):
        cache = load_cache(file, MODELS[file.name.split("-")[0]])
        torch.save(going_on(MODELS[file.name.split("-")[0]], cache), file.with_suffix(".logits"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
