"""The engines: which exist, which are usable here, and which one to load a file with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localspec.backends import trust
from localspec.backends.base import Capabilities, Context, Forward, Model, Progress
from localspec.backends.placement import Placement, check_engine
from localspec.backends.registry import backend_names, check_name, engine_module, unavailable_reason
from localspec.errors import EngineError, EngineUnavailable, LocalspecError, UnsupportedModel
from localspec.model_files.gguf import GGUFFile

__all__ = [
    "Capabilities",
    "Context",
    "Forward",
    "Model",
    "backend_names",
    "candidates",
    "check_name",
    "load",
    "unavailable_reason",
]

Order = Callable[[list[str], bool], list[str]]
"""Takes usable engines in the usual order and whether one of them would use a GPU; returns them in the order to try."""


def candidates(n_gpu_layers: int | None = None) -> list[str]:
    """Usable engines for real models, the fastest for where the model will run first.

    A GPU goes before the CPU, unless ``n_gpu_layers`` is 0. On a Mac both llama.cpp and MLX can have it: llama.cpp
    first, which reads every architecture and computes with the file's own bits.

    Raises:
        EngineUnavailable: there is none.
    """
    reasons = {name: unavailable_reason(name) for name in ("ik-llama", "llama-cpp")}
    usable = [name for name, reason in reasons.items() if reason is None]
    on_gpu = [name for name in ("llama-cpp", "mlx") if n_gpu_layers != 0 and _has_gpu(name)]
    if not usable and not on_gpu:
        raise EngineUnavailable("no engine can be used here: " + "; ".join(str(reason) for reason in reasons.values()))
    if n_gpu_layers and not on_gpu:
        there = "llama-cpp" in usable
        how = "; docs/engines.md has the command for each kind" if there else ": pip install 'localspec[llama-cpp]'"
        raise EngineUnavailable(f"--gpu-layers needs llama-cpp-python built for your GPU{how}")
    return on_gpu if n_gpu_layers else [*on_gpu, *(name for name in usable if name not in on_gpu)]


def _has_gpu(name: str) -> bool:
    """On Linux MLX is there for tests, and used only when named."""
    if (name == "mlx" and sys.platform != "darwin") or unavailable_reason(name) is not None:
        return False
    return bool(getattr(engine_module(name).binding(), "gpu", False))


def load(
    path: Path,
    backend: str = "auto",
    *,
    n_threads: int | None = None,
    n_gpu_layers: int | None = None,
    kv_type: str = "f16",
    placement: Placement | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda line: None,
    check: bool = True,
    put_off: bool = False,
    order: Order | None = None,
    layers: Callable[[str], int | None] = lambda name: None,
) -> Model:
    """Load a file with an engine that computes it rightly.

    Args:
        path, n_threads, n_gpu_layers, kv_type, placement, progress: see ``registry``.
        backend: an engine's name, or ``auto``: the first usable one that passes the check in ``trust``.
        say: takes what is being done, in a line.
        warn: takes remarks that a user should keep, such as why an engine was passed over.
        check: whether the engine has to be right about the file; only a draft model may do without.
        put_off: leave the comparison with another engine to idle time; see ``trust.load_checked``.
        order: the order in which ``auto`` tries several engines; None is that of ``candidates``.
        layers: how many layers an engine puts on a GPU where ``n_gpu_layers`` is None; None leaves that to the engine.

    Raises:
        EngineMismatch: every usable engine computes this file wrongly.
        LocalspecError: as ``registry`` says.
    """
    check_name(backend)
    with GGUFFile(path) as gguf:
        gguf.check_generates_text()  # the engines take heads too
    names = [backend]
    if placement and backend != "auto":
        check_engine(placement, backend)
    if backend == "auto":
        names = candidates(None if placement and placement.rpc else n_gpu_layers)
        if placement:
            names = placement.in_order(names)
        elif order is not None and len(names) > 1:
            names = order(names, n_gpu_layers != 0 and any(map(_has_gpu, names)))
    failures: list[LocalspecError] = []
    cancelled = False

    def watched(fraction: float) -> bool:
        nonlocal cancelled
        cancelled = cancelled or (progress is not None and not progress(fraction))
        return not cancelled

    options: dict[str, Any] = {"n_threads": n_threads, "n_gpu_layers": n_gpu_layers, "kv_type": kv_type}
    options |= {"progress": watched} | ({"placement": placement} if placement else {})
    for name in names:
        if n_gpu_layers is None:
            options["n_gpu_layers"] = layers(name)
        try:
            if not check:
                model: Model = engine_module(name).load(path, **options)
                return model
            return trust.load_checked(name, path, options, say, put_off=put_off)
        except (EngineError, UnsupportedModel) as error:
            if cancelled:  # no engine's fault, and no reason to try another
                raise
            failures.append(error)
            if name != names[-1]:
                warn(f"{error}; trying {names[names.index(name) + 1]}")
    reasons = list(dict.fromkeys(map(str, failures)))
    if len(reasons) == 1:
        raise failures[0]
    raise type(failures[0])(f"no engine here can run {path.name}: {'; '.join(reasons)}")
