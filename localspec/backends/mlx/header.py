"""The settings of one architecture in a GGUF header, read so that none is overlooked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from localspec.errors import UnsupportedModel
from localspec.model_files.gguf_file import GGUFFile

_WITHOUT_EFFECT = {
    "vocab_size",
    "context_length",
    "embedding_length_out",
    "feed_forward_length",
    "tensor_data_layout",
    "use_parallel_residual",
    "attention.causal",
    "attention.max_alibi_bias",
    "attention.layer_norm_epsilon",
    "attention.group_norm_epsilon",
    "rope.scaling.finetuned",
    "classifier.output_labels",
}
"""Settings that say what follows anyway from others, or that llama.cpp does not look at for these architectures."""


class Header:
    """``<architecture>.<key>`` settings, which remembers the keys that were read.

    A setting that was not read may change what the model computes, so ``refuse_unread`` is called last.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name = file.path.name
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        self._read.add(key)
        return self.file.field(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; a list with one number for each layer must repeat a single one."""
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise UnsupportedModel(f"{self.name}: {self._full(key)} is {value!r}, not a whole number")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        value = self._uniform(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise UnsupportedModel(f"{self.name}: {self._full(key)} is {value!r}, not a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        self._read.add(key)
        return str(self.file.field(key, default))

    def flag(self, key: str, default: bool) -> bool:
        self._read.add(key)
        return bool(self.file.field(key, default))

    def list_or_integer(self, key: str, default: int) -> int | list[int]:
        self._read.add(key)
        value = self.file.field(key, default)
        return [int(item) for item in value] if isinstance(value, np.ndarray) else int(value)

    def expect(self, key: str, *accepted: float) -> None:
        """Refuse a setting whose value would need code that is not there."""
        self._read.add(key)
        value = self.file.field(key)
        if value is not None and not any(np.isclose(value, one) for one in accepted):
            raise UnsupportedModel(
                f"{self.name}: {self._full(key)} = {value} is not handled by the mlx backend; use --backend llama-cpp"
            )

    def ignore(self, keys: Iterable[str]) -> None:
        self._read.update(keys)

    def refuse_unread(self) -> None:
        """Raise for a setting that was not read.

        Raises:
            UnsupportedModel: it names the settings.
        """
        prefix = self.file.architecture + "."
        found = {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}
        unread = sorted(found - self._read - _WITHOUT_EFFECT)
        if unread:
            raise UnsupportedModel(
                f"{self.name}: the mlx backend does not know the {self.file.architecture} "
                f"setting{'s' * (len(unread) > 1)} {', '.join(unread)}; use --backend llama-cpp"
            )

    def _uniform(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.file.field(key, default)
        if value is None:
            raise UnsupportedModel(f"{self.name} lacks the setting {self._full(key)}")
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise UnsupportedModel(
                    f"{self.name}: {self._full(key)} differs between layers, which the mlx backend cannot compute; "
                    "use --backend llama-cpp"
                )
            value = value[0]
        return value

    def _full(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"
