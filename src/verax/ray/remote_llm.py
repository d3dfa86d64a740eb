"""`RemoteLLM`: the engines of replicas as one, whose answers survive the replica that began them; its HTTP server; and
`running_replicas`, which has replicas for as long as a command runs.

A draw depends on the request's seed and the place in the answer only. What a replica has sent of an answer is therefore
enough for another one to continue it, as if nothing had happened: the engine counts the tokens for its penalties, finds
its place in a grammar, and holds back the same beginnings of stop strings (`continue_from` of `AsyncLLM.generate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
import uuid
from collections import OrderedDict, abc
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from verax import builtin, checkpoint
from verax.batch.requests import Answer, RequestLine
from verax.errors import EngineDeadError, QueueFullError, VeraxError
from verax.models import CausalLMConfig, causal_lm
from verax.ray.cluster import keep_off_the_network, start_ray
from verax.ray.replica import Part, bind_replicas
from verax.serve.app import create_app
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.text.engine.engine_thread import Observer
from verax.text.engine.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput, joined
from verax.text.engine.request import Message, Prompt, RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.lora import LoRARequest
from verax.text.tokens.tokenizer import Tokenizer


class AnswerSoFar:
    """Answers to one request as they grow.

    `n`: number of the answers. `given`: tokens of each that the caller began with; None for none.
    """

    def __init__(self, n: int, given: Sequence[Sequence[int]] | None = None):
        self._given = [tuple(tokens) for tokens in given or [()] * n]
        self._outputs = [CompletionOutput(index, "", (), None, []) for index in range(n)]
        """Parts of each answer that the caller has so far."""
        self._before = [0.0] * n
        """Log-probability of the tokens of each that earlier replicas have sent, in nats."""
        self._metrics = RequestMetrics(time.perf_counter())
        self._request = RequestOutput(f"request-{uuid.uuid4().hex}", None, (), None, [], False, 0)
        """Output without samples: what is known of the prompt."""

    @property
    def token_ids(self) -> list[list[int]] | None:
        """Tokens of each answer, for the next replica; None before the first of them."""
        tokens = [[*given, *output.token_ids] for given, output in zip(self._given, self._outputs, strict=True)]
        return tokens if any(tokens) else None

    def begin(self) -> None:
        """Note that the next parts come from another replica."""
        self._before = [output.cumulative_logprob or 0.0 for output in self._outputs]

    def add(self, part: RequestOutput) -> RequestOutput | None:
        """Output of what is new in a part; None if nothing is.

        A replica that continues an answer which is complete sends its end again; that part is left out.
        """
        now, known, ours, theirs = time.perf_counter(), self._request, self._metrics, part.metrics
        if part.prompt_token_ids:
            num_cached = known.num_cached_tokens if known.prompt_token_ids else part.num_cached_tokens
            self._request = replace(
                known,
                prompt_token_ids=part.prompt_token_ids,
                prompt_logprobs=part.prompt_logprobs,
                num_cached_tokens=num_cached,
            )
        scheduled, first_token = ours.first_scheduled_time, ours.first_token_time
        if scheduled is None and theirs is not None and theirs.first_scheduled_time is not None:
            # The clocks of two machines have nothing in common but their pace.
            scheduled = ours.arrival_time + theirs.first_scheduled_time - theirs.arrival_time
        fresh = [self._add(new) for new in part.outputs if not self._outputs[new.index].finished]
        if first_token is None and any(new.token_ids for new in fresh):
            first_token = now
        self._metrics = RequestMetrics(
            ours.arrival_time,
            first_token,
            now if part.finished else None,
            first_scheduled_time=scheduled,
            num_draft_tokens=0 if theirs is None else theirs.num_draft_tokens,
            num_accepted_tokens=0 if theirs is None else theirs.num_accepted_tokens,
        )
        return self._output(fresh, part.finished) if fresh or part.finished else None

    def whole(self) -> RequestOutput:
        """The whole output, after the last part."""
        return self._output(list(self._outputs), True)

    def _add(self, new: CompletionOutput) -> CompletionOutput:
        if new.cumulative_logprob is not None:
            new = replace(new, cumulative_logprob=self._before[new.index] + new.cumulative_logprob)
        self._outputs[new.index] = joined(self._outputs[new.index], new)
        return new

    def _output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        return replace(self._request, outputs=outputs, finished=finished, metrics=self._metrics)


MOST_MOVES = 3
"""Replicas in a row that may die of a request, or before they add to its answer. Then it is the request that fails."""

PAUSE = 0.1
"""Seconds before a request moves, in which Ray Serve learns that its replica is dead."""

CURRENT = 10.0
"""Seconds for which the share of its cache that a replica has sent counts as current."""

MOST_REPLICAS = 256
"""Replicas whose figures are kept by name."""

LOST = (ray.exceptions.RayError, EngineDeadError)
"""Errors of a replica that has died, or is dying. An error of the request arrives as a value."""


class RemoteLLM:
    """Text engines of replicas, as the `AsyncLLM` that a server has, with the members that it calls.

    It holds the tokenizer, and no weights.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        sizes: tuple[int, int],
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        max_queued_requests: int = 1024,
    ):
        opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model, revision=revision)
        self.tokenizer: Tokenizer | None = Tokenizer.from_checkpoint(opened)
        self.model_config: CausalLMConfig = causal_lm(opened.config)[1]
        self.max_model_len, self.max_num_seqs = sizes
        """Longest sequence that the engines serve, in tokens, and most sequences in one step of an engine."""
        self.max_queued_requests = max_queued_requests
        self.error: BaseException | None = None
        self.num_moved = 0
        """Requests that continued at another replica."""
        self._recommended = SamplingParams.from_generation_config(opened.generation_config)
        self.chat_sampling = SamplingParams.for_chat(opened.generation_config)
        """Temperature and top_p of conversations, if the checkpoint recommends no sampling; else nothing."""
        # By value: over the replica's own connection, in place of two messages through Ray for each part.
        self._handle = handle.options(stream=True, _by_reference=False)
        self._observers: list[Observer] = []
        self._replicas: OrderedDict[str, tuple[float, EngineStats]] = OrderedDict()
        """Last report of each replica, and its time; the replica that was silent longest is the first."""
        self._past: list[EngineStats] = []
        """Totals of replicas that are not kept by name any more, as one record; none at first."""
        self._closing = False
        self._running = 0
        self._waiting = 0
        self._pool = ThreadPoolExecutor(2, "verax-tokenizer")

    @property
    def is_running(self) -> bool:
        """True if requests are taken."""
        return not self._closing

    def stats(self) -> EngineStats:
        """Requests that are here, the fullest cache, and the totals of all replicas so far, as they have sent them."""
        now = time.monotonic()
        totals = EngineStats.sum([*self._past, *(stats for _, stats in self._replicas.values())])
        usages = [stats.kv_cache_usage for at, stats in self._replicas.values() if now - at < CURRENT]
        return replace(
            totals,
            num_requests_running=self._running,
            num_requests_waiting=self._waiting,
            kv_cache_usage=max(usages, default=0.0),
        )

    def replica_stats(self) -> list[EngineStats]:
        """Figures of all replicas as one engine: a request is counted here, whichever replica it runs on."""
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
        continues_prompt: bool | None = None,
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
            continues_prompt=continues_prompt,
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
        call = functools.partial(self.tokenizer.apply_chat_template, messages, tools=tools, **template_options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, tokenised in a thread."""
        assert self.tokenizer is not None
        call = functools.partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
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
        moves, waits = 0, True
        self._waiting += 1
        try:
            while True:
                answer.begin()
                try:
                    async for part in self._parts(inputs, answer):
                        if waits:
                            waits = False
                            self._waiting, self._running = self._waiting - 1, self._running + 1
                        moves = 0
                        if (output := answer.add(part)) is not None:
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
        finally:
            if waits:
                self._waiting -= 1
            else:
                self._running -= 1

    async def _parts(self, inputs: RequestInput, answer: AnswerSoFar) -> AsyncGenerator[RequestOutput, None]:
        """Parts of a request from one replica, after the answer so far."""
        response: Any = self._handle.generate.remote(replace(inputs, output_token_ids=answer.token_ids))
        try:
            async for part in response:
                if isinstance(part, VeraxError):
                    raise part
                self._note(part)
                yield part.output
                if part.output.finished:
                    return
            raise EngineDeadError("the replica ended an answer without its last part")
        except BackPressureError as error:
            raise QueueFullError(f"max_queued_requests: {error}") from error
        finally:
            response.cancel()

    def _note(self, part: Part) -> None:
        """Keep what a replica has sent of itself. Names of replicas change with each restart, so only some are kept."""
        self._replicas[part.replica] = time.monotonic(), part.stats
        self._replicas.move_to_end(part.replica)
        while len(self._replicas) > MOST_REPLICAS:
            _, (_, stats) = self._replicas.popitem(last=False)
            self._past = [EngineStats.sum([*self._past, stats])]


@serve.ingress()
class Ingress:
    """HTTP server of replicas. Ray Serve's proxy has the socket.

    `settings`: of the server; the defaults, less the page, if None.
    """

    async def __init__(
        self,
        handle: DeploymentHandle,
        model: str | None,
        revision: str | None,
        names: tuple[str, ...],
        max_queued_requests: int,
        settings: ServerSettings | None,
    ):
        keep_off_the_network()
        sizes = await handle.sizes.remote()
        llm: Any = RemoteLLM(handle, sizes, model, revision=revision, max_queued_requests=max_queued_requests)
        settings = replace(
            settings or ServerSettings(disable_page=True), host="0.0.0.0"
        )  # any: it is called by names that it does not know itself
        self._server = Server(llm=llm, served_names=names, root=model, settings=settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._server)

    def check_health(self) -> None:
        """Fail if the server takes no requests. Ray Serve calls it every few seconds."""
        if not self._server.engine.is_running:
            raise RuntimeError("the server is at its end")


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
