"""What the commands print for programs."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any, indent: int | None = None) -> None:
    """One JSON value on standard output, strict (no NaN), whole in any locale: characters that its encoding lacks
    are escaped."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, allow_nan=False, indent=indent), flush=True)
