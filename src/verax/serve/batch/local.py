"""`LocalServer`: the models of this process, as a batch calls them. Replicas behind a handle have the same methods."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from verax.errors import EngineDeadError
from verax.serve.app import create_app
from verax.serve.batch.client import Answer, call
from verax.serve.batch.clips import make_clip
from verax.serve.batch.lines import VIDEOS, RequestLine
from verax.serve.http.server import Server

__all__ = ["BatchServer", "LocalServer"]


class BatchServer(Protocol):
    """Models that answer the lines of a batch."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Context in which requests are answered."""
        ...

    async def answer(self, request: RequestLine, clips: Path | None) -> Answer:
        """Answer to a line, as `LocalServer` gives it."""
        ...


class LocalServer:
    """Models of this process.

    Args:
        server: the models.
    """

    def __init__(self, server: Server):
        self._server = server
        self._app = create_app(server)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Context in which requests are answered; the engine stops at its end."""
        return self._server.lifespan(self._app)

    async def answer(self, request: RequestLine, clips: Path | None) -> Answer:
        """Answer to a line. Cancelling the task ends the request.

        Args:
            request: the line.
            clips: folder for clips. None if there can be none in this batch.

        Raises:
            EngineDeadError: if the text engine has failed, whose answer this would be.
        """
        body, llm = bytes(request.body), self._server.llm
        if request.url == VIDEOS and clips is not None:
            answer = await make_clip(self._app, body, clips)
        else:
            answer = await call(self._app, "POST", request.url, body)
        if answer.status >= 500 and llm is not None and llm.error is not None:
            raise EngineDeadError(f"the engine has failed: {llm.error}") from llm.error
        return answer
