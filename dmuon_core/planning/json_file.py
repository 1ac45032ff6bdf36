"""JSON as people write it by hand: what Python's reader would pass over in silence is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The content of a file in UTF-8. Local.

    Raises:
        ValueError: a file that cannot be read or is no JSON; a name that an object has twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{path}: '{name}' occurs twice")
            found[name] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"cannot read {path} as JSON: {error}") from error
