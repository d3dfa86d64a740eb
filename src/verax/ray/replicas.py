"""`running_replicas`: replicas for as long as a command runs, and the batch that they answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from verax.batch.requests import Answer, RequestLine
from verax.errors import EngineDeadError, VeraxError
from verax.ray.app import bind_replicas
from verax.ray.cluster import start_ray
from verax.ray.remote_llm import LOST, MOST_MOVES, PAUSE, RemoteLLM
from verax.serve.http.server import Server


@contextlib.contextmanager
def running_replicas(
    new_server: functools.partial[Server], bounds: int | tuple[int, int], *, num_cpus: float, num_gpus: float
) -> Iterator[RunningReplicas]:
    """Context of replicas on the cluster, or on this machine.

    `new_server`: loads the models of each. It is pickled. `bounds`: number of replicas, or the least and the most.
    """
    started = not ray.is_initialized()
    start_ray()
    name = f"verax-{secrets.token_hex(4)}"
    try:
        application = bind_replicas(new_server, bounds, num_cpus=num_cpus, num_gpus=num_gpus, max_queued_requests=-1)
        serve.start(proxy_location="Disabled")
        try:
            try:
                handle = serve.run(application, name=name, route_prefix=None)  # waits until they are ready
            except RuntimeError as error:
                raise VeraxError(f"replicas: they did not start: {error}") from error
            sizes = handle.sizes.remote().result()
            yield RunningReplicas(handle, sizes, bounds if isinstance(bounds, int) else bounds[1])
        finally:
            serve.delete(name)
    finally:
        if started:
            ray.shutdown()


class RunningReplicas:
    """Replicas that run, as a batch calls them: the line of a replica that dies goes to another one.

    `max_num_seqs`: most sequences that can run at once, on as many replicas as there can be.
    """

    def __init__(self, handle: DeploymentHandle, sizes: tuple[int, int], most: int):
        self.max_num_seqs = most * sizes[1]
        self._handle = handle
        self._sizes = sizes

    def text_engine(self, model: str | None, **options: Any) -> RemoteLLM:
        """The replicas as the engine of an HTTP server; arguments as in `RemoteLLM`."""
        return RemoteLLM(self._handle, self._sizes, model, **options)

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Context in which requests are answered: always."""
        return contextlib.nullcontext()

    async def answer(self, request: RequestLine, clips: Path | None) -> Answer:
        """Answer to a line. Cancelling the task ends the request.

        Raises:
            EngineDeadError: if the line has lost several replicas.
        """
        for attempt in range(MOST_MOVES + 1):
            response = self._handle.answer.remote(request, clips)
            try:
                return await response
            except LOST as error:
                if attempt == MOST_MOVES:
                    raise EngineDeadError(f"{attempt + 1} replicas were lost in a row: {error}") from error
                await asyncio.sleep(PAUSE)
            finally:
                response.cancel()
        raise AssertionError("the last attempt returns or raises")
