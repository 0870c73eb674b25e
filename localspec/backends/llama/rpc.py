"""llama.cpp's RPC servers as devices: models that are larger than one computer.

llama-cpp-python's library is built without them; what is missing is one small library, compiled by ``rpc_build`` and
loaded at run time. The protocol has no protection of any kind: who reaches a server can read and write the memory of
its process, and who sits between reads all. Loopback and tunnels (``ssh -L``) only.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from localspec.backends.llama.ggml import Ggml, GgmlDevice, digest
from localspec.backends.llama.rpc_link import Link, ServerFacts, ask
from localspec.errors import EngineUnavailable
from localspec.system.files import home

BUILD_COMMAND = "python -m localspec.backends.rpc_build"


def library_path() -> Path:
    """Where the library for the installed llama-cpp-python is, or would be.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """
    import llama_cpp

    build = digest(Path(llama_cpp.llama_cpp._lib._name).parent)
    return home() / "build" / f"ggml-rpc-{llama_cpp.__version__}-{build}" / "libggml-rpc.so"


class Rpc:
    """The RPC backend of llama-cpp-python's library.

    Raises:
        EngineUnavailable: there is none, and none was built.
    """

    def __init__(self) -> None:
        self.ggml = ggml = Ggml()
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        registry = ggml.bind("ggml_backend_reg_by_name", [text], pointer)(b"RPC")
        if not registry:
            path = library_path()
            if not path.is_file():
                raise EngineUnavailable(
                    "--rpc needs llama.cpp's RPC backend, which llama-cpp-python is built without; compile it once "
                    f"(10 s, with a C++ compiler): {BUILD_COMMAND}"
                )
            registry = ggml.bind("ggml_backend_load", [text], pointer)(bytes(path))
            if not registry:
                raise EngineUnavailable(f"{path} does not load; delete it and compile it again: {BUILD_COMMAND}")
        self._registry = registry
        self._add = self._function("ggml_backend_rpc_add_server", [text], pointer)
        self._count = ggml.bind("ggml_backend_reg_dev_count", [pointer], ctypes.c_size_t)
        self._device = ggml.bind("ggml_backend_reg_dev_get", [pointer, ctypes.c_size_t], pointer)
        self._servers: dict[str, tuple[Link, list[GgmlDevice]]] = {}

    def _function(self, name: str, arguments: list[Any], result: Any) -> Any:
        address = self.ggml.reg_get_proc_address(self._registry, name.encode())
        if not address:
            raise EngineUnavailable(f"the RPC backend has no {name}")
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def connect(self, address: str) -> tuple[Link, list[GgmlDevice], ServerFacts | None]:
        """A server's devices, and what links them; its facts unless a model is loaded on it already.

        Raises:
            EngineError: it does not answer as it should.
        """
        known = self._servers.get(address)
        if known is not None and known[0].connected and known[0].lost is None:
            return *known, None
        facts = ask(address)
        if known is None:
            link = Link(address)
            registry = self._add(link.endpoint.encode())
            if not registry or link.lost is not None:
                raise EngineUnavailable(link.lost or f"the RPC server {address} has no devices")
            devices = [self.ggml.describe(self._device(registry, i)) for i in range(self._count(registry))]
            known = self._servers[address] = link, devices
        known[0].is_near = facts.is_near
        return *known, facts

    def serve(self, endpoint: str, n_threads: int, devices: list[int]) -> None:
        """Be a server, until the process ends."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = [ctypes.c_char_p, ctypes.c_char_p, size, size, ctypes.POINTER(pointer)]
        start = self._function("ggml_backend_rpc_start_server", arguments, None)
        start(endpoint.encode(), None, n_threads, len(devices), (pointer * len(devices))(*devices))


@cache
def rpc() -> Rpc:
    """The RPC backend, loaded once per process; see ``Rpc``."""
    return Rpc()
