"""The socket between llama.cpp's RPC client and a server, against a server of our own."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from localspec import Placement
from localspec.backends.llama.rpc import PROTOCOL, Link, ServerFacts, ask, checked_address
from localspec.errors import EngineError, UsageError


class Server:
    """Speaks the protocol: one device, and tensors full of the byte 7.

    Args:
        version: of the protocol.
        dies_at: the number of the request at which it closes the connection, in the middle of its answer.
        waits: seconds before each answer.
    """

    def __init__(self, version: int = PROTOCOL, dies_at: int = -1, waits: float = 0.0) -> None:
        self.version, self.dies_at, self.waits = version, dies_at, waits
        self.seen: list[tuple[int, bytes]] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client, suppress(OSError, ConnectionError, struct.error):
                self.serve(client)

    def serve(self, client: socket.socket) -> None:
        stream = client.makefile("rwb")
        while head := stream.read(9):
            what, size = struct.unpack("<BQ", head)
            body = stream.read(size)
            self.seen.append((what, body))
            answer = {
                14: bytes([self.version, 0, 0, 0]) + bytes(24),
                15: struct.pack("<I", 1),
                11: struct.pack("<QQ", 5 << 30, 8 << 30),
            }.get(what)
            if what == 8:
                answer = b"\7" * int.from_bytes(body[-8:], "little")
            if answer is not None:
                time.sleep(self.waits)
                message = struct.pack("<Q", len(answer)) + answer
                if len(self.seen) == self.dies_at:
                    stream.write(message[:10])
                    stream.flush()
                    return
                stream.write(message)
                stream.flush()


def request(client: socket.socket, what: int, body: bytes) -> None:
    client.sendall(struct.pack("<BQ", what, len(body)) + body)


def answer(client: socket.socket) -> bytes:
    with client.makefile("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        return stream.read(size)


def connected(link: Link) -> socket.socket:
    host, port = link.endpoint.split(":")
    return socket.create_connection((host, int(port)), 10)


@contextmanager
def linked(server: Server) -> Iterator[tuple[Link, socket.socket]]:
    link = Link(server.address)
    with connected(link) as client:
        yield link, client


def test_a_tunnel_to_another_machine_takes_longer_than_this_one() -> None:
    """Both are at an address of this machine's own: what is near is told by the time an answer takes."""
    facts = ask(Server().address)
    assert facts.round_trip_ms > 0
    assert facts.own_address
    for ms, own, near in ((0.1, True, True), (0.1, False, False), (5.0, True, False)):
        assert ServerFacts(ms, own).is_near == near
    assert not ask(Server(waits=0.002).address).is_near


def test_other_versions_and_other_servers_are_refused() -> None:
    with pytest.raises(EngineError, match=r"speaks version 6\.0\.0 of the protocol, and 7 is needed"):
        ask(Server(version=6).address)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"no RPC server answers at {address}"):
        ask(address)
    with pytest.raises(EngineError, match="no RPC server"):
        ask(Server(dies_at=1).address)


def test_requests_and_answers_pass_as_they_are() -> None:
    server = Server()
    tensor = bytes(range(256)) * 8192  # 2 MiB: more than one piece
    with linked(server) as (link, client):
        request(client, 14, b"x" * 24)
        assert answer(client)[0] == PROTOCOL
        request(client, 6, tensor)  # has no answer
        request(client, 8, bytes(300) + struct.pack("<Q", 3 << 20))
        assert answer(client) == b"\7" * (3 << 20)
        assert link.lost is None
        assert link.n_requests == 2
    assert server.seen[0] == (14, bytes(24))  # no transport but this one is offered
    assert server.seen[1] == (6, tensor)


def test_zeros_stand_for_the_answers_of_a_server_that_is_gone() -> None:
    with linked(Server(dies_at=2)) as (link, client):
        request(client, 15, b"")
        assert answer(client) == struct.pack("<I", 1)
        request(client, 8, bytes(300) + struct.pack("<Q", 5000))  # it dies after two bytes of this
        assert answer(client) == b"\7\7" + bytes(4998)
        assert link.address in link.lost
        request(client, 6, bytes(4 << 20))
        request(client, 8, bytes(300) + struct.pack("<Q", 100))
        assert answer(client) == bytes(100)
        request(client, 11, bytes(4))
        assert answer(client) == bytes(16)


def test_a_server_that_was_never_there_loses_no_process_either() -> None:
    server = Server()
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()
    with linked(server) as (link, client):
        request(client, 15, b"")
        assert answer(client) == bytes(4)
        assert link.lost is not None


def test_another_connection_finds_the_server_again() -> None:
    server = Server(dies_at=1)
    link = Link(server.address)
    for expected in (bytes(4), struct.pack("<I", 1)):
        with connected(link) as client:
            request(client, 15, b"")
            found = answer(client)
        assert found[2:] == expected[2:]
    assert link.lost is None


def test_addresses_of_other_machines_only_for_who_says_so() -> None:
    for address in ("127.0.0.1:50052", "localhost:1", "127.9.9.9:65535"):
        assert checked_address(address, False) == address
    for address in ("192.168.1.7:50052", "server:50052", "localhost.example.com:1", "0.0.0.0:1"):
        with pytest.raises(UsageError, match=r"unencrypted and unauthenticated.*ssh -N -L.*--allow-insecure-rpc"):
            Placement(rpc=(address,))
        assert Placement(rpc=(address,), allow_insecure_rpc=True).rpc == (address,)
