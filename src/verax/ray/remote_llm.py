"""`RemoteLLM`: the engines of replicas as one, whose answers survive the replica that began them.

A draw depends on the request's seed and the place in the answer only. What a replica has sent of an answer is therefore
enough for another one to go on, as if nothing had happened: the engine counts the tokens for its penalties, finds its
place in a grammar, and holds back the same beginnings of stop strings (`continue_from` of `AsyncLLM.generate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import abc
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray.exceptions
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from verax import builtin, checkpoint
from verax.errors import EngineDeadError, QueueFullError, VeraxError
from verax.models import CausalLMConfig, causal_lm
from verax.ray.answer import AnswerSoFar
from verax.ray.replica import Description, Part
from verax.text.engine.engine_thread import Observer
from verax.text.engine.outputs import EngineStats, RequestOutput
from verax.text.engine.request import Message, Prompt, RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.lora import LoRARequest
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["RemoteLLM"]

MOST_MOVES = 3
"""Replicas in a row that may die of a request, or before they add to its answer. Then it is the request that fails."""

PAUSE = 0.1
"""Seconds before a request moves, in which Ray Serve learns that its replica is dead."""

CURRENT = 10.0
"""Seconds for which the share of its cache that a replica has sent counts as that of now."""

LOST = (ray.exceptions.RayError, EngineDeadError)
"""Errors of a replica that has died, or is dying. An error of the request arrives as a value."""


class RemoteLLM:
    """Text engines of replicas, as the one engine that a server has. It holds the tokenizer, and no weights.

    Args:
        handle: of a deployment of `Replica`.
        description: sizes of its engines.
        model: the replicas' checkpoint; the built-in one if None.
        revision: branch, tag or commit of a hub id.
        max_queued_requests: most requests that wait for a replica.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        description: Description,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        max_queued_requests: int = 1024,
    ):
        opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model, revision=revision)
        self.tokenizer: Tokenizer | None = Tokenizer.from_checkpoint(opened)
        self.model_config: CausalLMConfig = causal_lm(opened.config)[1]
        self.max_queued_requests = max_queued_requests
        self.error: BaseException | None = None
        self.num_moved = 0
        """Requests that went on at another replica."""
        self._recommended = SamplingParams.from_generation_config(opened.generation_config)
        # By value: over the replica's own connection, in place of two messages through Ray for each part.
        self._handle = handle.options(stream=True, _by_reference=False)
        self._description = description
        self._observers: list[Observer] = []
        self._replicas: dict[str, tuple[float, EngineStats]] = {}
        self._closing = False
        self._running = 0
        self._waiting = 0
        self._pool = ThreadPoolExecutor(2, "verax-tokenizer")

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the engines serve, in tokens."""
        return self._description.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step of an engine."""
        return self._description.max_num_seqs

    @property
    def is_running(self) -> bool:
        """True if requests are taken."""
        return not self._closing

    def stats(self) -> EngineStats:
        """Requests that are here, the fullest cache, and the totals of all replicas so far, as they have sent them."""
        now = time.monotonic()
        each = [stats for _, stats in self._replicas.values()]
        usages = [stats.kv_cache_usage for at, stats in self._replicas.values() if now - at < CURRENT]
        return EngineStats(
            num_requests_running=self._running,
            num_requests_waiting=self._waiting,
            kv_cache_usage=max(usages, default=0.0),
            prefix_cache_queries=sum(stats.prefix_cache_queries for stats in each),
            prefix_cache_hits=sum(stats.prefix_cache_hits for stats in each),
            num_preemptions=sum(stats.num_preemptions for stats in each),
            prompt_tokens=sum(stats.prompt_tokens for stats in each),
            generation_tokens=sum(stats.generation_tokens for stats in each),
        )

    def replica_stats(self) -> list[EngineStats]:
        """The same, as those of one engine: a request is counted here, whichever replica it runs on."""
        return [self.stats()]

    def add_observer(self, observer: Observer) -> None:
        """Call a function with 0 and the whole `RequestOutput` of each request that ended, unless it failed."""
        self._observers.append(observer)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters that the checkpoint recommends, with some of them replaced."""
        return replace(self._recommended, **overrides)

    def generate(
        self,
        prompt: Prompt | abc.Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        continue_from: abc.Sequence[abc.Sequence[int]] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers as they grow, as `AsyncLLM.generate` gives them, from whichever replica lives.

        Raises:
            QueueFullError: from the generator, if as many requests wait as may.
            EngineDeadError: if the server is at its end; from the generator, if the request has lost several replicas.
            VeraxError: from the generator, as `AsyncLLM`.
        """
        if self._closing:
            raise EngineDeadError("the engine was shut down")
        params = sampling_params or self.default_sampling_params()
        if params.seed is None:  # another replica has to draw alike
            params = replace(params, seed=secrets.randbits(63))
        inputs = RequestInput(
            prompt,
            params,
            add_special_tokens=add_special_tokens,
            output_token_ids=continue_from,
            lora_request=lora_request,
        )
        return self._generate(inputs, AnswerSoFar(params.n, continue_from))

    async def render(
        self,
        messages: abc.Sequence[Message],
        *,
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> str:
        """The prompt of a conversation, by the checkpoint's chat template. It is rendered in a thread."""
        assert self.tokenizer is not None
        call = partial(self.tokenizer.apply_chat_template, messages, tools=tools, **template_options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, tokenised in a thread."""
        assert self.tokenizer is not None
        call = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def shutdown(self, timeout: float = 0) -> None:
        """Take no new requests. The replicas are Ray Serve's to end."""
        self._closing = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _generate(self, inputs: RequestInput, answer: AnswerSoFar) -> AsyncGenerator[RequestOutput, None]:
        if self._waiting >= self.max_queued_requests > 0:
            raise QueueFullError(
                f"max_queued_requests: {self._waiting} requests wait, which is the most; try again later"
            )
        with self._counted() as begun:
            moves = 0
            while True:
                answer.begin()
                try:
                    async for part in self._parts(inputs, answer):
                        begun()
                        moves = 0
                        output = answer.add(part)
                        if output is not None:
                            yield output
                    break
                except LOST as error:
                    if moves == MOST_MOVES or self._closing:
                        raise EngineDeadError(f"{moves + 1} replicas were lost in a row: {error}") from error
                    moves += 1
                    self.num_moved += 1
                    await asyncio.sleep(PAUSE)
            for observer in self._observers:
                observer(0, answer.whole())

    async def _parts(self, inputs: RequestInput, answer: AnswerSoFar) -> AsyncGenerator[Part, None]:
        """Parts of a request from one replica, behind the answer so far.

        Raises:
            RayError: if the replica is lost.
            VeraxError: if the request fails.
        """
        response: Any = self._handle.generate.remote(replace(inputs, output_token_ids=answer.token_ids))
        try:
            async for part in response:
                if isinstance(part, VeraxError):
                    raise part
                self._replicas[part.replica] = time.monotonic(), part.stats
                yield part
                if part.finished:
                    return
            raise EngineDeadError("the replica ended an answer without its last part")
        except BackPressureError as error:
            raise QueueFullError(f"max_queued_requests: {error}") from error
        finally:
            response.cancel()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Callable[[], None]]:
        """Context of a request, which waits until the function that it gives is called, and then runs."""
        waits = True
        self._waiting += 1

        def begin() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._waiting -= 1
                self._running += 1

        try:
            yield begin
        finally:
            if waits:
                self._waiting -= 1
            else:
                self._running -= 1
