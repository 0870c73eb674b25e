"""A real server on loopback with a tiny pair, which the clients of all APIs talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localspec import LLM
from tests.server.apis.packages import APIS, Api
from tests.support.serving import Server, serve


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with serve(llm, aliases=["claude-local"]) as running:
        yield running


@pytest.fixture(scope="module", params=APIS)
def api(request: pytest.FixtureRequest, server: Server) -> Iterator[Api]:
    """Each API in turn."""
    made = APIS[request.param](server.url, server.service.names[-1])
    yield made
    made.package.close()


@pytest.fixture(autouse=True)
def _everything_ends(server: Server) -> Iterator[None]:
    yield
    server.wait_idle()
