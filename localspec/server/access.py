"""What a client may see, of every address and every field of an answer.

``guard`` finds what kind of client sent a request. An ``Address`` names the kinds that it answers. A ``Client`` says
which drafters may draft for it and which figures it gets: a draft token shows the text that it was copied from, because
rejected ones are shown, and an accepted one confirms it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from localspec.engine.request import Reply
from localspec.spec_decode.drafters.names import CHATS, CORPUS, is_corpus, source_of

SCOPE_KEY = "localspec.client"  # where the guard leaves the client in a request's scope


class Kind(Enum):
    """Where a request comes from."""

    LOCAL = "this computer"
    """A program here, or the server's own page; the server listens on loopback only."""
    REMOTE = "another computer"
    """A client of a server that other computers reach, or through a proxy."""
    SITE = "a site"
    """A page of an origin of ``--allow-origin``."""
    KEYLESS = "a client without the key"


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks; ``origin``: of a site."""

    kind: Kind = Kind.LOCAL
    origin: str = ""

    @property
    def owner(self) -> str:
        """The owner of what it leaves here: answers that are kept, slots and windows of ``/infill``."""
        return f"{self.kind.value} {self.origin}"

    @property
    def reads_texts(self) -> bool:
        """Whether it may read texts of this computer: conversations, chats, a corpus, and what drafters learned from
        other answers."""
        return self.kind is Kind.LOCAL

    @property
    def sees_others(self) -> bool:
        """Whether it may see figures about the requests of others, such as how much of a prompt was cached: from that
        a client could find out, token by token, what others have said."""
        return self.kind in (Kind.LOCAL, Kind.REMOTE)

    def may_read(self, owner: str) -> bool:
        return owner == self.owner or self.reads_texts

    def drafters(self, loaded: Sequence[str]) -> dict[str, str]:
        """The drafters that may draft for it: public name -> loaded name."""
        names = public_names(loaded)
        return {public: name for public, name in names.items() if self.reads_texts or not is_corpus(name)}

    def shown(self, reply: Reply, drafters: Mapping[str, str]) -> Reply:
        """A reply without what the client may not see; ``drafters`` as ``drafters()`` returns them."""
        stats = reply.stats if self.sees_others else replace(reply.stats, cached_tokens=0)
        return replace(reply, stats=stats, draft=[each for each, name in drafters.items() if name in reply.draft])


ALL = frozenset(Kind)
ADMITTED = frozenset((Kind.LOCAL, Kind.REMOTE, Kind.SITE))
SEES_OTHERS = frozenset(kind for kind in Kind if Client(kind).sees_others)
READS_TEXTS = frozenset(kind for kind in Kind if Client(kind).reads_texts)


@dataclass(frozen=True, slots=True)
class Address:
    """What answers at an address, and whom."""

    path: str  # as Starlette's routes have it
    endpoint: Callable[[Request], Awaitable[Response]]
    kinds: Collection[Kind] = ADMITTED  # of client, that are answered
    methods: tuple[str, ...] = ("GET",)


def client_of(http: HTTPConnection) -> Client:
    client: Client = http.scope[SCOPE_KEY]
    return client


def public_name(name: str) -> str:
    return re.split(r"[\\/]", name)[-1]


def public_names(loaded: Sequence[str]) -> dict[str, str]:
    """Public name -> loaded name of each drafter. A public name has no part of a path: corpora are ``corpus``,
    ``corpus2``, as in rounds and statistics."""
    found: dict[str, str] = {}
    n_corpora = 0
    for name in loaded:
        public = public_name(name)
        if is_corpus(name):
            public = name if name == f"{CORPUS}:{CHATS}" else source_of(CORPUS, n_corpora)
            n_corpora += 1
        again = (f"{public}-{n}" for n in count(2))
        found[public if public not in found else next(each for each in again if each not in found)] = name
    return found
