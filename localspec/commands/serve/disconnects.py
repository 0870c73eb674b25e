"""Work for a client, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from localspec.commands.serve.errors import stopping

Result = TypeVar("Result")


async def while_connected(receive: Receive, ending: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work; a client that leaves, or a server that ends, cancels it.

    Args:
        receive: the request's; its body has been read.
        ending: set when the server goes down.
        work: what to do.

    Raises:
        ClientDisconnect: the client is gone.
        ApiError: the server goes down.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    ended = asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait((task, gone, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if ended.done():
            raise stopping()
        raise ClientDisconnect
    finally:
        for each in (task, gone, ended):
            each.cancel()
        # The engine is free when this returns: what the work cleans up is part of it.
        await asyncio.gather(task, gone, ended, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
