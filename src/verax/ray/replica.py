"""`Replica`: a server's models in an actor of Ray Serve, and `bind_replicas`, the application of some of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verax._optional import require_optional
from verax.batch.requests import Answer, LocalServer, RequestLine
from verax.errors import EngineDeadError, VeraxError
from verax.ray.cluster import (
    actor_environment,
    check_actors,
    end_actor,
    keep_off_the_network,
    one_compiles,
    set_threads,
)
from verax.serve.http.server import Server
from verax.text.engine.outputs import EngineStats, RequestOutput
from verax.text.engine.request import RequestInput

TARGET = 32.0
"""Requests of a replica that autoscaling aims at."""

MOST_ONGOING = 1024
"""Requests that a replica takes at once; its engine queues those beyond its slots."""

HEALTH_PERIOD, HEALTH_TIMEOUT = 2.0, 10.0
"""Seconds between two health checks of a replica, and for its answer."""

JOIN = 0.03
"""Seconds for which new tokens of an answer are joined after its first part. A message costs more than a token."""


@dataclass(frozen=True)
class Part:
    """New part of a request's answers.

    `output`: what is new, with times by the clock of the replica's machine. The prompt's tokens and their
    log-probabilities are left out between the first part and the last one.
    """

    output: RequestOutput
    replica: str
    stats: EngineStats


class Replica:
    """Models of a server in an actor. An engine that fails ends the process, so that Ray Serve starts another.

    `new_server`: loads the models. Replicas with equal arguments compile the same programs.
    """

    def __init__(self, new_server: functools.partial[Server]):
        set_threads()
        keep_off_the_network()
        with one_compiles(new_server.args, new_server.keywords):
            self._server = new_server()
        self._local = LocalServer(self._server)
        self._entered: asyncio.Future[None] | None = None
        self._stack = contextlib.AsyncExitStack()
        self._name = f"{os.uname().nodename}-{os.getpid()}"

    def sizes(self) -> tuple[int, int]:
        """Longest sequence that the engine serves, in tokens, and most sequences in one of its steps."""
        return self._server.engine.max_model_len, self._server.engine.max_num_seqs

    async def generate(self, inputs: RequestInput) -> AsyncGenerator[Part | VeraxError, None]:
        """Parts of an answer as it grows: the first at once, later ones joined; or the error that ends it.

        `inputs`: the request, with a seed and, after a move, the answers so far of another replica.
        """
        first = True
        try:
            # The clock of another machine has nothing in common with the clock of this one.
            engine: Any = self._server.engine
            stream = engine.submit(replace(inputs, arrival_time=time.perf_counter()))
            async with contextlib.aclosing(stream):
                async for output in stream:
                    if not first and not output.finished:
                        output = replace(output, prompt_token_ids=(), prompt_logprobs=None)
                    yield Part(output, self._name, self._server.engine.stats())
                    first = False
                    if not output.finished:
                        await asyncio.sleep(JOIN)
        except EngineDeadError as error:
            self.check_health()
            yield error
        except VeraxError as error:
            yield error

    async def answer(self, request: RequestLine, clips: Path | None) -> Answer:
        """Answer to a line of a batch.

        `clips`: folder for clips, on a file system that the reader of the answers shares; None for none.
        """
        if self._entered is None:
            self._entered = asyncio.ensure_future(self._stack.enter_async_context(self._local.running()))
        await asyncio.shield(self._entered)
        try:
            return await self._local.answer(request, clips)
        except EngineDeadError:
            self.check_health()
            raise

    def check_health(self) -> None:
        """End the process if the engine has failed. Ray Serve calls it every few seconds."""
        error = self._server.engine.error
        if error is not None:
            end_actor(error)


def bind_replicas(
    new_server: functools.partial[Server],
    bounds: int | tuple[int, int],
    *,
    num_cpus: float,
    num_gpus: float,
    max_queued_requests: int,
    target_ongoing_requests: float = TARGET,
) -> Any:
    """An application of Ray Serve without HTTP: replicas of a server's models, called through a handle.

    `new_server`: loads the models. It is pickled. `bounds`: number of replicas, or the least and the most.
    `max_queued_requests`: most requests that wait at one handle for a replica; -1 for any number.
    """
    least, most = check_actors("replicas", bounds, num_cpus, num_gpus)
    bounds_of_scaling = {"min_replicas": least, "max_replicas": most}
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {"autoscaling_config": {**bounds_of_scaling, "target_ongoing_requests": target_ongoing_requests}}
    application = require_optional("ray.serve").deployment(
        Replica,
        name="verax-replica",
        max_ongoing_requests=MOST_ONGOING,
        max_queued_requests=max_queued_requests,
        health_check_period_s=HEALTH_PERIOD,
        health_check_timeout_s=HEALTH_TIMEOUT,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus, "runtime_env": actor_environment()},
        **scaling,
    )
    return application.bind(new_server)
