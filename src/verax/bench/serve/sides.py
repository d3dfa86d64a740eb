"""Sides of a load test: a server over HTTP, and our engine in this process without one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Load, Run, run_load
from verax.bench.serve.monitor import Monitor
from verax.bench.serve.traffic import Request, Traffic
from verax.errors import InvalidParameterError

if TYPE_CHECKING:
    from verax.text.engine.async_llm import AsyncLLM

__all__ = ["AsyncSide", "EngineOptions", "OfflineSide", "ServerSide", "Side"]


@dataclass(frozen=True)
class EngineOptions:
    """Options that our engine has on every side: of `verax serve`, and of `LLM` and `AsyncLLM`."""

    model: str | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None

    def command(self, port: int) -> list[str]:
        """Command line of `verax serve`. Its log says when each request ended."""
        words = [sys.executable, "-m", "verax", "serve", *([self.model] if self.model else [])]
        for name, value in self.keywords().items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return [*words, "--log-format", "json", "--host", "127.0.0.1", "--port", str(port)]

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`, but for the model."""
        names = ("dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "max_model_len")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Side(Protocol):
    """Something that answers the requests of a load."""

    async def run(self, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        """Put a load on it: the run's number decides on its prompts. `on_answer` is called after each answer."""
        ...


class ServerSide:
    """A server over HTTP, watched while it is loaded."""

    def __init__(self, monitor: Monitor, traffic: Traffic):
        self.monitor, self._traffic = monitor, traffic
        self.client_cpu_s = 0.0
        """Processor seconds of this process while the server was loaded."""

    async def run(self, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        """Put a load on the server."""
        watching = asyncio.create_task(self.monitor.watch())
        begin = time.process_time()
        try:
            requests = self._traffic.requests(number)
            return await run_load(self.monitor.ask, load, requests, number=number, on_answer=on_answer)
        finally:
            self.client_cpu_s += time.process_time() - begin
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


class OfflineSide:
    """`LLM.generate` of the same prompts, as many at once as the load has in flight."""

    def __init__(self, engine: EngineOptions, traffic: Traffic):
        from verax.text.engine.llm import LLM

        self._traffic = traffic
        self._llm = LLM(engine.model, **engine.keywords())

    async def run(self, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        """Generate all answers of a closed loop.

        Raises:
            InvalidParameterError: for a load without a concurrency or a number of requests.
        """
        if load.concurrency is None or load.num_requests is None:
            raise InvalidParameterError(
                "against: offline has no arrivals and no clock; give concurrency and num_requests"
            )
        begin = time.perf_counter()
        requests = list(itertools.islice(self._traffic.requests(number), load.num_requests))
        answers: list[Answer] = []
        for first in range(0, len(requests), load.concurrency):
            for answer in self._generate(requests[first : first + load.concurrency]):
                answers.append(answer)
                if on_answer is not None:
                    on_answer()
        return Run(tuple(answers), time.perf_counter() - begin)

    def _generate(self, requests: list[Request]) -> list[Answer]:
        sent = time.perf_counter()
        outputs = self._llm.generate(
            [list(request.prompt) for request in requests], [_params(request) for request in requests], use_tqdm=False
        )
        ended = time.perf_counter()
        answers = []
        for request, output in zip(requests, outputs, strict=True):
            answer = Answer(request, sent, ended, text=output.outputs[0].text)
            answer.prompt_tokens, answer.completion_tokens = len(request.prompt), len(output.outputs[0].token_ids)
            answers.append(answer)
        return answers


class AsyncSide:
    """`AsyncLLM` in this process: what the engine gives to a server, without HTTP."""

    def __init__(self, llm: AsyncLLM, traffic: Traffic):
        self._llm, self._traffic = llm, traffic

    async def run(self, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        """Put a load on the engine."""
        requests = self._traffic.requests(number)
        return await run_load(self._ask, load, requests, number=number, on_answer=on_answer)

    async def _ask(self, request: Request) -> Answer:
        answer = Answer(request, time.perf_counter(), prompt_tokens=len(request.prompt))
        pieces = []
        async with contextlib.aclosing(self._llm.generate(list(request.prompt), _params(request))) as outputs:
            async for output in outputs:
                if request.leave_after is not None and len(answer.events) >= request.leave_after:
                    answer.left = True
                    break
                # A part without text, such as half a character, is no event over HTTP either.
                if any(sample.text or sample.finish_reason for sample in output.outputs):
                    answer.events.append(time.perf_counter())
                for sample in output.outputs:
                    pieces.append(sample.text)
                    answer.completion_tokens += len(sample.token_ids)
        answer.text = "".join(pieces)
        answer.ended = time.perf_counter()
        return answer


def _params(request: Request) -> Any:
    from verax.text.engine.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
