"""MLX as it is installed here, and mlx-lm's model classes without the rest of mlx-lm."""

from __future__ import annotations

import os
import platform
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib import metadata
from importlib.util import find_spec, module_from_spec
from typing import Any, TypeVar

from localspec.errors import Closed, EngineUnavailable
from localspec.system.process import at_end, in_child

NAME = "mlx"


class MLXLibrary:
    """MLX as it is installed here."""

    def __init__(self) -> None:
        if not (sys.platform == "linux" or (sys.platform == "darwin" and platform.machine() == "arm64")):
            raise EngineUnavailable("MLX runs on Apple silicon, and on Linux for tests")
        if sys.platform != "darwin":
            # The CPU build compiles fused kernels with a C++ compiler that need not be there, and gains little.
            os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
        try:
            versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm", "tokenizers")}
            import mlx.core as mx
        except metadata.PackageNotFoundError as error:
            raise EngineUnavailable(
                f"{error.name} is not installed; install it with: pip install 'localspec[mlx]'"
            ) from None
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineUnavailable(
                f"MLX cannot load its library ({error}); install it with: pip install 'localspec[mlx]'"
            ) from None
        _defer_mlx_lm()
        self.version = f"{versions['mlx']} (mlx-lm {versions['mlx-lm']})"  # mlx-lm's model classes are used
        self.gpu = bool(mx.metal.is_available())
        self.built_for = ["Metal"] if self.gpu else ["CPU: slow, for tests only"]


@cache
def binding() -> MLXLibrary:
    """MLX, imported once per process; EngineUnavailable where it cannot be used here."""
    return MLXLibrary()


def _defer_mlx_lm() -> None:
    """Make ``import mlx_lm.models.…`` skip the package's own imports until another of its names is looked at.

    They bring in transformers, which takes seconds; the model classes and caches need none of that.
    """
    if "mlx_lm" in sys.modules:
        return
    spec = find_spec("mlx_lm")
    loader = spec.loader if spec is not None else None
    if spec is None or loader is None:  # its record is there, but not the package
        raise EngineUnavailable("mlx-lm is not installed; install it with: pip install 'localspec[mlx]'")
    package = module_from_spec(spec)

    def load_then_get(name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            # The import system asks for names that a module may lack; those are no reason to import anything.
            raise AttributeError(f"module 'mlx_lm' has no attribute {name!r}")
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = load_then_get
    sys.modules["mlx_lm"] = package


T = TypeVar("T")

_PATIENCE_S = 30.0  # how long the end of the program waits for a pass to end


class OwnerThread:
    """The one thread that computes with MLX, for all models of the process: it runs functions one after the other.

    MLX's streams belong to threads: what one has begun another cannot always finish. The streams must also be gone
    before the process is, or MLX aborts it; so the thread ends just before the program, and clears up.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._handing_in = threading.Lock()
        self._ended = ""
        # A daemon, or the interpreter would wait for it before it runs what is registered to end it.
        self._thread = threading.Thread(target=self._work, name="localspec-mlx", daemon=True)
        self._thread.start()
        at_end("engines", self.end)
        in_child(self, OwnerThread._renounce)

    def run(self, function: Callable[[], T]) -> T:
        """The function's result, or its exception. Ctrl-C reaches the caller at once; the function still ends. Closed
        where the program is ending, or is a child forked after MLX was used."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()
        with self._handing_in:
            if self._ended:
                raise Closed(self._ended)
            self._waiting.put((function, future))
        return future.result()

    def end(self) -> None:
        """Finish what was handed in, and free MLX's streams; nothing runs afterwards."""
        with self._handing_in:
            if not self._ended:
                self._ended = "MLX cannot be used any more: the program is ending"
                self._waiting.put(None)
        self._thread.join(_PATIENCE_S)

    def _renounce(self) -> None:
        """In a forked child: the thread, and what MLX itself runs, are the parent's."""
        self._handing_in = threading.Lock()
        self._ended = (
            "MLX was used before this process was forked, and cannot be used in the child; start a new process instead"
        )

    def _work(self) -> None:
        import mlx.core as mx

        while (item := self._waiting.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del item, function, future  # or the arrays of the last pass live until the next
        mx.clear_streams()


@cache
def owner() -> OwnerThread:
    return OwnerThread()
