"""How a server behaves: what ``localspec serve`` is given, checked before anything is loaded."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from localspec.commands.options import check_text
from localspec.errors import UsageError
from localspec.runtime.load_options import checked_parallel
from localspec.sampling.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server behaves.

    Attributes:
        host, port: where to listen; port 0 finds one.
        api_key: what ``Authorization: Bearer`` must carry; None asks for none.
        queue: most requests that wait.
        parallel: most requests that are answered at a time; ``auto``: as many as gain throughput.
        prefix_cache: megabytes for conversations other than the present one.
        time_limit: longest time from a request to the end of its answer [s].
        aliases: further names that requests may call the model by.
        origins: web origins, besides the server's own, whose pages may use it.
        hosts: names that requests may be addressed to, besides ``localhost`` and the loopback addresses.
        corpora: what requests may have copied from, as ``--draft`` calls it; the others do without.
        params: sampling parameters where a request says nothing.
        system: system prompt of chats that bring none.
        body_bytes: largest body; ``bodies_bytes``: of all that are being read at a time.
        body_seconds: longest time until a body has arrived.

    Raises:
        UsageError: a value makes no sense, or a server that other computers reach has no key.
    """

    host: str = "127.0.0.1"
    port: int = 8642
    api_key: str | None = None
    queue: int = 32
    parallel: int | str = "auto"
    prefix_cache: int = 512
    time_limit: float = 3600.0
    aliases: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    corpora: Sequence[str] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    body_bytes: int = 8 << 20
    bodies_bytes: int = 64 << 20
    body_seconds: float = 20.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parallel", checked_parallel(self.parallel))
        for text in (self.host, self.api_key, *self.aliases, *self.corpora, *self.origins, *self.hosts):
            check_text(text, "an option")
        for origin in self.origins:
            if "://" not in origin or origin.rstrip("/").count("/") != 2:
                raise UsageError(f"--allow-origin must be like http://localhost:3000, not {origin!r}")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty")
        if not self.local and self.api_key is None:
            raise UsageError(
                f"--host {self.host} can be reached from other computers: that needs --api-key KEY, "
                "or LOCALSPEC_API_KEY"
            )

    @property
    def local(self) -> bool:
        """Whether only programs on this computer can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only programs on this computer can reach the address.

    Raises:
        UsageError: no such address.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host}: there is no such address") from None
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
