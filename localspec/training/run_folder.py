"""A run on disk: what it is to make, how far it is, its examples and checkpoint; all that it takes to go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError, UsageError
from localspec.system.files import private_folder, write_atomically
from localspec.system.home import home
from localspec.training.recipe import Recipe

_FORMAT = 1
_STATE, _TOKEN_MAP = "run.json", "token_map.npy"


class RunError(LocalspecError):
    """A run cannot go on."""


@dataclass(slots=True)
class Run:
    """How far a run is.

    Attributes:
        target: fingerprint of the target's file.
        recipe: what is made.
        minutes: that were asked for, all sittings together.
        data_seconds, training_seconds: of work so far.
        finished: whether the minutes are over and the head was measured.
        begins_with: the file name of the head that training begins with; "none" is a linear one.
        begins_with_sha256: the first digits of that file's digest; "" where there is none.
        prompts, texts, chats: what of the user's own is used, as paths.
    """

    target: str
    recipe: Recipe
    minutes: float = 0.0
    data_seconds: float = 0.0
    training_seconds: float = 0.0
    finished: bool = False
    begins_with: str = "none"
    begins_with_sha256: str = ""
    prompts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chats: bool = False


class RunFolder:
    """The folder of the run of one kind of head for one target.

    Args:
        target: the target's file.
        fingerprint: of it.
        kind: of the head.
    """

    def __init__(self, target: Path, fingerprint: str, kind: str) -> None:
        self.path = home() / "distill" / f"{target.stem[:60]}-{fingerprint[:8]}-{kind}"
        self.fingerprint = fingerprint
        self.shards = self.path / "shards"
        self.checkpoint = self.path / "checkpoint.npz"
        self.head = self.path / "head.gguf"
        self.earlier = self.path / "earlier.gguf"
        """The head that training begins with, a copy; not there where it begins with a linear one."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block no other process works here.

        Raises:
            RunError: one does.
        """
        from filelock import FileLock, Timeout

        private_folder(self.path)
        try:
            with FileLock(self.path.with_name(f"{self.path.name}.lock"), timeout=0):
                yield
        except Timeout:
            raise RunError("another localspec distill trains this head now") from None

    def read(self) -> Run | None:
        """The run that was begun here; None where there is none.

        Raises:
            RunError: it cannot be read.
        """
        try:
            text = (self.path / _STATE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            facts: dict[str, Any] = json.loads(text)
            if facts.pop("format") != _FORMAT:
                raise ValueError("it is of another version")
            recipe = Recipe(**facts.pop("recipe"))
            return Run(recipe=recipe, **facts)
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise RunError(f"{self.path / _STATE} is damaged ({error}); --force begins anew") from None

    def write(self, run: Run) -> None:
        """Keep how far it is.

        Raises:
            OSError: the disk refuses.
        """
        with write_atomically(self.path / _STATE, private=True) as file:
            file.write(json.dumps({"format": _FORMAT} | asdict(run), indent=1).encode())

    def token_map(self) -> npt.NDArray[np.int32] | None:
        """The vocabulary that was chosen; None before that."""
        try:
            found = np.load(self.path / _TOKEN_MAP, allow_pickle=False)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / _TOKEN_MAP} is damaged ({error}); --force begins anew") from None
        return np.asarray(found, dtype=np.int32)

    def keep_token_map(self, ids: npt.NDArray[np.int32]) -> None:
        """Keep the vocabulary."""
        with write_atomically(self.path / _TOKEN_MAP, private=True) as file:
            np.save(file, ids)

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.path, ignore_errors=True)
        private_folder(self.path)
