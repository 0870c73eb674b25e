"""How a pair is loaded: one set of options from the command line to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from localspec.backends import check_name
from localspec.backends.placement import Placement, check_engine
from localspec.errors import UsageError
from localspec.values import KV_CACHE_TYPES, MAX_COUNT, MAX_THREADS, checked_whole, is_whole, shown

PREFIX_CACHE_BYTES = 512 << 20
"""Memory that put-aside conversations may take: 18,000 tokens of Qwen2.5-1.5B at f16 (28 KiB each)."""

MAX_PARALLEL = 64
"""Most answers at a time: llama.cpp's engines take no more sequences."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Those arguments of ``LLM`` that say how to load, checked; they are explained there.

    Raises:
        UsageError: a value makes no sense.
    """

    backend: str = "auto"
    draft_backend: str | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    kv_cache_type: str = "f16"
    light_draft: bool = True
    remember: bool = True
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES
    idle: bool = True
    placement: Placement = field(default_factory=Placement)
    parallel: int | str = 1

    def __post_init__(self) -> None:
        check_name(self.backend)
        check_name("auto" if self.draft_backend is None else self.draft_backend)
        if not isinstance(self.placement, Placement):
            raise UsageError(f"placement must be a Placement, not {shown(self.placement)}")
        if self.backend != "auto":
            check_engine(self.placement, self.backend)
        if not isinstance(self.kv_cache_type, str) or self.kv_cache_type not in KV_CACHE_TYPES:
            raise UsageError(f"the KV cache type must be {', '.join(KV_CACHE_TYPES)}, not {shown(self.kv_cache_type)}")
        for name, least, most in (
            ("n_ctx", 1, MAX_COUNT),
            ("n_threads", 1, MAX_THREADS),
            ("n_gpu_layers", -1, MAX_COUNT),
            ("prefix_cache_bytes", 0, None),
        ):
            value = getattr(self, name)
            if value is not None or name == "prefix_cache_bytes":
                object.__setattr__(self, name, checked_whole(name, value, least, most))
        object.__setattr__(self, "parallel", checked_parallel(self.parallel))

    @property
    def engine(self) -> dict[str, Any]:
        """What an engine's ``load`` takes of it, for any model."""
        return {"n_threads": self.n_threads, "n_gpu_layers": self.n_gpu_layers, "kv_type": self.kv_cache_type}

    @property
    def target(self) -> dict[str, Any]:
        """What it takes for the target: it alone is placed."""
        return self.engine | ({"placement": self.placement} if self.placement else {})

    def as_arguments(self) -> dict[str, Any]:
        """The arguments of ``LLM`` that say the same."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def checked_parallel(value: Any) -> int | str:
    """How many answers at a time: ``auto``, or a number, as a text too.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(value, str):
        if value == "auto":
            return value
        value = int(value) if value.isdecimal() and len(value) < 10 else value
    if not is_whole(value) or not 1 <= value <= MAX_PARALLEL:
        raise UsageError(f"parallel must be auto or a whole number in 1..{MAX_PARALLEL}, not {shown(value)}")
    return int(value)
