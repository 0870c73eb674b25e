"""llama.cpp's RPC servers as devices: models that are larger than one computer.

llama-cpp-python's library is built without its RPC backend: one small library, compiled by ``rpc_build`` and loaded at
run time. The protocol has no protection of any kind: who reaches a server can read and write the memory of its process,
and who sits between reads all. So loopback and tunnels (``ssh -L``) only.

It is that of llama.cpp's ggml-rpc.cpp, version 7: a request is a byte (what), its length (8 bytes, little-endian) and
itself; an answer its length and itself.
"""

from __future__ import annotations

import ctypes
import ipaddress
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from localspec.backends.llama.ggml import Ggml, GgmlDevice, digest
from localspec.errors import EngineError, EngineUnavailable, UsageError
from localspec.system.files import home

PROTOCOL = 7  # version of the protocol that is spoken here; servers of another one are refused

MAX_SERVERS = 16  # that llama.cpp takes

_HELLO, _GET_TENSOR, _DEVICE_COUNT = 14, 8, 15
_CAPABILITIES = 24  # bytes in which both sides say what other transports they have; zeros are none

_ANSWERS = {0: 16, 1: 8, 2: 8, 3: 8, 7: 1, 9: 1, 11: 16, 13: 8, _HELLO: 4 + _CAPABILITIES, _DEVICE_COUNT: 4}
"""Request -> length of its answer [bytes]; others have none, but for ``_GET_TENSOR``, which says it itself."""

_PIECE = 1 << 20
_CONNECT_S = 5.0
_NEAR_MS = 1.0
"""A server at this machine's own address that answers faster is on this machine: on loopback that takes 0.1 ms, and
what is at the other end of a tunnel takes longer, but for the fastest of local networks."""
_SILENT_S = 20  # after so many seconds without a sign of life the other machine counts as gone

_ADDRESS = re.compile(r"[A-Za-z0-9_.-]{1,253}:\d{1,5}")


def checked_address(text: str, allow_insecure: bool) -> str:
    """``HOST:PORT``, on loopback unless any is allowed; UsageError for another."""
    host, _, port = text.rpartition(":")
    if not _ADDRESS.fullmatch(text) or not 0 < int(port) < 65536:
        raise UsageError(f"--rpc takes HOST:PORT, such as 127.0.0.1:50052, not {text[:80]!r}")
    if not allow_insecure and not is_loopback(host):
        raise UsageError(
            f"--rpc {text}: the RPC protocol is unencrypted and unauthenticated, so only loopback is accepted: "
            f"use a tunnel (ssh -N -L {port}:127.0.0.1:{port} {host}) and --rpc 127.0.0.1:{port}; --allow-insecure-rpc "
            "accepts any address, and lets anyone on the network path read the conversation and alter the answers"
        )
    return text


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, going by its name alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a server."""

    round_trip_ms: float  # the shortest time of a request and its answer
    own_address: bool = False  # whether it is reached at an address of this machine, where a tunnel can begin too

    @property
    def is_near(self) -> bool:
        """Whether it computes on this machine, as far as can be seen from here."""
        return self.own_address and self.round_trip_ms < _NEAR_MS


def ask(address: str) -> ServerFacts:
    """Ask the server at ``HOST:PORT``: it serves one client at a time, so not while a model is loaded on it.
    EngineError where none answers as it should."""
    try:
        with _connected(address, _CONNECT_S) as server:
            here, there = server.getsockname()[0], server.getpeername()[0]
            own_address = here == there or is_loopback(there)
            hello = _request(server, _HELLO, bytes(_CAPABILITIES))
            if hello[0] != PROTOCOL:
                version = ".".join(map(str, hello[:3]))
                raise EngineError(
                    f"the RPC server {address} speaks version {version} of the protocol, and {PROTOCOL} is needed: use "
                    "the same llama.cpp on both sides"
                )
            times = []
            for _ in range(5):
                start = time.perf_counter()
                _request(server, _DEVICE_COUNT, b"")
                times.append(1e3 * (time.perf_counter() - start))
            return ServerFacts(min(times), own_address)
    except TimeoutError:
        raise EngineError(f"the RPC server {address} is busy with another client, or is not an RPC server") from None
    except (OSError, ValueError, struct.error) as error:
        why = getattr(error, "strerror", None) or error
        raise EngineError(
            f"no RPC server answers at {address} ({why}); docs/devices.md says how to start one"
        ) from None


# -- between llama.cpp's client and a server ---------------------------------------------------------------------------
#
# The client ends its process (GGML_ABORT in ggml-rpc.cpp) as soon as a server does not answer. So it is connected to a
# socket of our own, which passes everything on, knows which requests are answered and how long the answers are, and
# gives zeros in the place of those that do not come any more. What was computed with them is thrown away:
# ``Link.lost`` says so after every pass.


class Link:
    """A socket on loopback behind which the server at ``address`` is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lost: str | None = None  # why the server is gone; None while it answers, and once connected anew
        self.is_near = False  # see ``ServerFacts``
        self.n_requests = 0  # sent, of those that are answered
        self._lock, self._n_clients = threading.Lock(), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"  # where the client connects to
        threading.Thread(target=self._accept, name=f"rpc {address}", daemon=True).start()

    @property
    def connected(self) -> bool:
        """Whether the client is connected."""
        return self._n_clients > 0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name=f"rpc {self.address}", daemon=True).start()

    def _lose(self, error: object) -> None:
        if self.lost is None:
            why = getattr(error, "strerror", None) or error or "it closed the connection"
            self.lost = f"the RPC server {self.address} is gone ({why})"

    def _serve(self, client: socket.socket) -> None:
        """Pass on what one connection of the client sends."""
        with self._lock:
            self.lost, self._n_clients = None, self._n_clients + 1
        expected: SimpleQueue[int | None] = SimpleQueue()
        try:
            server = _connected(self.address, _CONNECT_S)
            server.settimeout(None)
            _notice_silence(server)
        except OSError as error:
            server = socket.socket()  # connected to nothing
            self._lose(error)
        with client, server:
            try:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._answer, args=(client, server, expected), daemon=True).start()
                with suppress(OSError, EOFError):  # the client is gone: it freed all that it had
                    while True:
                        self._pass_on(client, server, expected)
            finally:
                with self._lock:
                    self._n_clients -= 1
                expected.put(None)
                for each in (server, client):
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, client: socket.socket, server: socket.socket, expected: SimpleQueue[int | None]) -> None:
        """One request."""
        data = _exactly(client, 9)
        what, left = struct.unpack("<BQ", data)
        end = b""
        while left:
            piece = client.recv(min(left, _PIECE))
            if not piece:
                raise EOFError
            left -= len(piece)
            end = (end + piece[-8:])[-8:]
            self._send(server, data + (bytes(len(piece)) if what == _HELLO else piece))  # no transport but this one
            data = b""
        self._send(server, data)
        length = int.from_bytes(end, "little") if what == _GET_TENSOR else _ANSWERS.get(what)
        if length is not None:
            self.n_requests += 1
            expected.put(length)

    def _send(self, server: socket.socket, data: bytes) -> None:
        if self.lost is None:
            try:
                server.sendall(data)
            except OSError as error:
                self._lose(error)

    def _receive(self, server: socket.socket, n: int) -> bytes:
        """At most n bytes; none once the server is gone."""
        piece = b""
        if self.lost is None:
            try:
                piece = server.recv(min(n, _PIECE))
                if not piece:
                    self._lose(None)
            except OSError as error:
                self._lose(error)
        return piece

    def _answer(self, client: socket.socket, server: socket.socket, expected: SimpleQueue[int | None]) -> None:
        """Answers in the order in which they are awaited: the server's, or zeros."""
        while (length := expected.get()) is not None:
            with suppress(OSError):  # the client does not wait any more
                left = 8 + length
                while left and (piece := self._receive(server, left)):
                    client.sendall(piece)
                    left -= len(piece)
                if left:
                    whole = struct.pack("<Q", length) if left == 8 + length else b""
                    client.sendall(whole + bytes(left - len(whole)))


def _connected(address: str, timeout: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _notice_silence(connection: socket.socket) -> None:
    """Have the system find out that the other machine is gone, also while nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)


def _exactly(connection: socket.socket, n: int) -> bytes:
    data = bytearray()
    while len(data) < n:
        piece = connection.recv(n - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _request(server: socket.socket, what: int, request: bytes) -> bytes:
    server.sendall(struct.pack("<BQ", what, len(request)) + request)
    try:
        (size,) = struct.unpack("<Q", _exactly(server, 8))
        if size != _ANSWERS[what]:
            raise ValueError("it is not an RPC server, or its version differs")
        return _exactly(server, size)
    except EOFError:
        raise ValueError("it is not an RPC server, or its version differs") from None


# -- the RPC backend ---------------------------------------------------------------------------------------------------

BUILD_COMMAND = "python -m localspec.backends.rpc_build"


def library_path() -> Path:
    """Where the library for the installed llama-cpp-python is, or would be; ImportError without one."""
    import llama_cpp

    build = digest(Path(llama_cpp.llama_cpp._lib._name).parent)
    return home() / "build" / f"ggml-rpc-{llama_cpp.__version__}-{build}" / "libggml-rpc.so"


class Rpc:
    """The RPC backend of llama-cpp-python's library; EngineUnavailable where there is none, and none was built."""

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

    def connect(self, address: str) -> tuple[Link, list[GgmlDevice]]:
        """A server's devices, and what links them.

        Raises:
            EngineError: it does not answer as it should.
        """
        known = self._servers.get(address)
        if known is not None and known[0].connected and known[0].lost is None:
            return known
        facts = ask(address)
        if known is None:
            link = Link(address)
            registry = self._add(link.endpoint.encode())
            if not registry or link.lost is not None:
                raise EngineUnavailable(link.lost or f"the RPC server {address} has no devices")
            devices = [self.ggml.describe(self._device(registry, i)) for i in range(self._count(registry))]
            known = self._servers[address] = link, devices
        known[0].is_near = facts.is_near
        return known

    def serve(self, endpoint: str, n_threads: int, devices: list[int]) -> None:
        """Be a server, until the process ends."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = [ctypes.c_char_p, ctypes.c_char_p, size, size, ctypes.POINTER(pointer)]
        start = self._function("ggml_backend_rpc_start_server", arguments, None)
        start(endpoint.encode(), None, n_threads, len(devices), (pointer * len(devices))(*devices))


@cache
def rpc() -> Rpc:
    """The RPC backend, loaded once per process."""
    return Rpc()
