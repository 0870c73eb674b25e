"""Small facts kept on disk between runs: verdicts, measured times, what was learned. Losing one only costs time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from localspec.system.files import write_atomically

Key = Mapping[str, str]


class JsonStore:
    """One JSON file per key, in a folder.

    The whole key is stored with the value, so that a chance agreement of file names shows nothing foreign.

    Args:
        folder: where the files lie; made when first needed.
        format: version of the values; those of another one are not seen.
    """

    def __init__(self, folder: Path, format: int) -> None:
        self.folder = folder
        self.format = format

    def get(self, key: Key) -> dict[str, Any] | None:
        """The stored value, or None where there is none or it cannot be read."""
        try:
            stored = json.loads(self._path(key).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(stored, dict) or stored.get("format") != self.format or stored.get("key") != dict(key):
            return None
        value = stored.get("value")
        return value if isinstance(value, dict) else None

    def put(self, key: Key, value: Mapping[str, Any]) -> None:
        """Store a value. A full or read-only disk only means that it will be found out again."""
        text = json.dumps({"format": self.format, "key": dict(key), "value": value})
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            # After a power failure an empty file counts as none, and waiting for the disk would delay an answer.
            with write_atomically(self._path(key), private=True, durable=False) as file:
                file.write(text.encode())

    def _path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:20]
        return self.folder / f"{digest}.json"
