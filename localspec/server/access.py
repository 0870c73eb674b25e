"""What a client may see: the one place that decides it, for every address and every field of an answer.

``guard`` finds what kind of client sent a request. ``RULES`` names the kinds that each address answers; an address
without a rule refuses all. A ``Client`` says which drafters may draft for it and which figures it gets: a draft token
shows the text that it was copied from, because rejected ones are shown, and an accepted one confirms it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count

from starlette.requests import HTTPConnection
from starlette.routing import compile_path

from localspec.engine.request import Reply
from localspec.server.fields import ApiError
from localspec.spec_decode.drafters.names import CHATS, CORPUS, is_corpus, source_of

SCOPE_KEY = "localspec.client"
"""Where the guard leaves the client in a request's scope."""


class Kind(Enum):
    """Where a request comes from, as far as can be told."""

    LOCAL = "this computer"
    """A program on this computer, or the server's own page in its browser; the server listens on loopback only."""
    REMOTE = "another computer"
    """A client with the key of a server that other computers reach; also what comes through a proxy."""
    SITE = "a site"
    """A page of an origin that ``--allow-origin`` lets in."""
    KEYLESS = "a client without the key"


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks.

    Attributes:
        kind: where the request comes from.
        origin: of a site.
    """

    kind: Kind = Kind.LOCAL
    origin: str = ""

    @property
    def owner(self) -> str:
        """The name under which it leaves things here: answers that are kept, slots and windows of ``/infill``."""
        return f"{self.kind.value} {self.origin}"

    @property
    def reads_texts(self) -> bool:
        """Whether it may read texts of this computer: conversations, chats, the files of a corpus, and what drafters
        learned from the answers to others."""
        return self.kind is Kind.LOCAL

    @property
    def sees_others(self) -> bool:
        """Whether it may see figures about the requests of others. How much of a prompt was cached is one of them:
        from it a client could find out, token by token, what others have said."""
        return self.kind in (Kind.LOCAL, Kind.REMOTE)

    def may_read(self, owner: str) -> bool:
        """Whether it may read what a client, itself or another, left here."""
        return owner == self.owner or self.reads_texts

    def drafters(self, loaded: Sequence[str]) -> dict[str, str]:
        """The drafters that may draft for it: public name -> the name that it was loaded by."""
        return {
            public: name for public, name in public_names(loaded).items() if self.reads_texts or not copies_texts(name)
        }

    def shown(self, reply: Reply, drafters: Mapping[str, str]) -> Reply:
        """A reply without what is not for it; ``drafters``: what ``drafters()`` says."""
        stats = reply.stats if self.sees_others else replace(reply.stats, cached_tokens=0)
        return replace(reply, stats=stats, draft=[each for each, name in drafters.items() if name in reply.draft])

    def check(self, path: str) -> None:
        """Refuse an address that does not answer it.

        Raises:
            ApiError: 403, or 404 where there is no such address.
        """
        kinds = _kinds(path)
        if kinds is None:
            raise ApiError(404, "no such address here", code="not_found")
        if self.kind not in kinds:
            message = "this is given out on this computer only, by a server that listens there alone"
            code = "not_loopback"
            if self.kind is Kind.SITE:
                message = "pages of other sites may not use this, not even those that --allow-origin lets in"
                code = "origin_not_allowed"
            raise ApiError(403, message, kind="permission_error", code=code)


_ALL = frozenset(Kind)
_ADMITTED = frozenset((Kind.LOCAL, Kind.REMOTE, Kind.SITE))
_SEES_OTHERS = frozenset(kind for kind in Kind if Client(kind).sees_others)
_READS_TEXTS = frozenset(kind for kind in Kind if Client(kind).reads_texts)

RULES: Mapping[str, Collection[Kind]] = {
    "/": _ALL,  # the page, which asks for the key
    "/page/{path:path}": _ALL,
    "/health": _ALL,
    "/v1/chat/completions": _ADMITTED,
    "/v1/completions": _ADMITTED,
    "/v1/responses": _ADMITTED,
    "/v1/responses/{id}": _ADMITTED,  # those of its own
    "/v1/messages": _ADMITTED,
    "/v1/messages/count_tokens": _ADMITTED,
    "/v1/embeddings": _ADMITTED,
    "/v1/models": _ADMITTED,
    "/v1/models/{model:path}": _ADMITTED,
    "/infill": _ADMITTED,
    "/api/chat": _ADMITTED,
    "/api/generate": _ADMITTED,
    "/api/embed": _ADMITTED,
    "/api/embeddings": _ADMITTED,
    "/api/tags": _ADMITTED,
    "/api/show": _ADMITTED,
    "/api/ps": _ADMITTED,
    "/api/version": _ADMITTED,
    "/v1/localspec/stats": _ADMITTED,  # without figures about others, for those who may not see them
    "/metrics": _SEES_OTHERS,
    "/v1/localspec/conversations": _READS_TEXTS,
    "/v1/localspec/conversations/{id}": _READS_TEXTS,
}
"""Address -> who it answers. Those of the embedding server are among them."""

_PATTERNS = [(compile_path(path)[0], kinds) for path, kinds in RULES.items()]


def is_open(path: str) -> bool:
    """Whether an address needs no API key."""
    return Kind.KEYLESS in (_kinds(path) or ())


def _kinds(path: str) -> Collection[Kind] | None:
    return next((kinds for pattern, kinds in _PATTERNS if pattern.match(path)), None)


def copies_texts(name: str) -> bool:
    """Whether a drafter copies texts that only this computer may read: files and chats."""
    return is_corpus(name)


def client_of(http: HTTPConnection) -> Client:
    """Who sent a request, as the guard found."""
    client: Client = http.scope[SCOPE_KEY]
    return client


def public_name(name: str) -> str:
    """A model's name without the folders that it lies in."""
    return re.split(r"[\\/]", name)[-1]


def public_names(loaded: Sequence[str]) -> dict[str, str]:
    """Public names of the drafters -> the names that they were loaded by. A public name has no part of a path: corpora
    are ``corpus``, ``corpus2``, as in rounds and statistics."""
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
