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
from starlette.routing import compile_path

from localspec.engine.request import Reply
from localspec.server.http import ApiError
from localspec.spec_decode.drafters.names import CHATS, CORPUS, is_corpus, source_of

SCOPE_KEY = "localspec.client"
"""Where the guard leaves the client in a request's scope."""


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
        return {
            public: name for public, name in public_names(loaded).items() if self.reads_texts or not copies_texts(name)
        }

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
    """What answers at an address, and whom.

    Attributes:
        path: as Starlette's routes have it.
        endpoint: an async function of the request.
        kinds: the kinds of client that are answered.
        methods: of HTTP.
    """

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    kinds: Collection[Kind] = ADMITTED
    methods: tuple[str, ...] = ("GET",)


class Rules:
    """Which kinds of client each address answers; one that is not among them refuses all.

    Args:
        kinds: path, as Starlette's routes have it -> kinds.
    """

    def __init__(self, kinds: Mapping[str, Collection[Kind]]) -> None:
        self._patterns = [(compile_path(path)[0], allowed) for path, allowed in kinds.items()]

    def is_open(self, path: str) -> bool:
        """Whether an address needs no API key."""
        return Kind.KEYLESS in (self._kinds(path) or ())

    def check(self, client: Client, path: str) -> None:
        """Refuse an address that does not answer a client.

        Raises:
            ApiError: 403, or 404 where there is no such address.
        """
        kinds = self._kinds(path)
        if kinds is None:
            raise ApiError(404, "no such address here", code="not_found")
        if client.kind not in kinds:
            message = "this is given out on this computer only, by a server that listens there alone"
            code = "not_loopback"
            if client.kind is Kind.SITE:
                message = "pages of other sites may not use this, not even those of --allow-origin"
                code = "origin_not_allowed"
            raise ApiError(403, message, kind="permission_error", code=code)

    def _kinds(self, path: str) -> Collection[Kind] | None:
        return next((kinds for pattern, kinds in self._patterns if pattern.match(path)), None)


def copies_texts(name: str) -> bool:
    """Whether a drafter copies texts that only this computer may read: files and chats."""
    return is_corpus(name)


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
