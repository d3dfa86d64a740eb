"""Load tests of a server, with our engine without HTTP and llama.cpp's server beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from verax.bench.harness import Benchmark
from verax.bench.serve.case import run_case
from verax.bench.serve.http import Target, fetch
from verax.bench.serve.llama_cpp import find_llama_server, llama_cpp_command, llama_server_version
from verax.bench.serve.load import Load
from verax.bench.serve.models import served_model
from verax.bench.serve.monitor import Monitor
from verax.bench.serve.process import raise_open_files, started
from verax.bench.serve.sides import AsyncSide, EngineOptions, OfflineSide, ServerSide, Side
from verax.bench.serve.traffic import Traffic
from verax.bench.text.run import GGUF_TYPES
from verax.errors import InvalidParameterError, VeraxError

__all__ = ["BASELINES", "bench_serve"]

BASELINES = ("offline", "async", "llama.cpp")
"""Sides besides the server: `LLM.generate`, `AsyncLLM`, and llama.cpp's server with the same weights."""

OURS = "verax serve"
ENGINE = "AsyncLLM"

RUNS_OF_A_CASE = 1000
"""Difference of the run numbers of two cases. No two runs have the same prompts, which a server may have kept."""


def bench_serve(
    loads: Sequence[Load],
    make_traffic: Callable[[int], Traffic],
    *,
    url: str | None = None,
    api_key: str | None = None,
    vocab_size: int | None = None,
    engine: EngineOptions | None = None,
    shapes: str | None = None,
    runs: int = 3,
    warmup: int = 1,
    against: Sequence[str] = (),
    goodput: Mapping[str, float] | None = None,
    checks: int = 8,
    llama_server: str | None = None,
) -> dict[str, Any]:
    """Load a server and, interleaved, other sides with the same requests; a report as JSON holds it.

    Beside llama.cpp, all sides run the same GGUF file.

    Args:
        loads: a case each.
        make_traffic: the requests, of a vocabulary size.
        url: base URL of a server that speaks OpenAI's API; `verax serve` is started for the benchmark if None.
        api_key: of that server.
        vocab_size: of its model, whose tokens the prompts are drawn from; of the model of `engine` if None.
        engine: model and options of the server that is started, and of the sides without one.
        shapes: of random weights in place of a model, a name out of `SHAPES` of the text benchmark.
        runs: counted rounds of each case. With `warmup` rounds before them.
        against: names out of `BASELINES`.
        goodput: `goodput_limits`.
        checks: answers of each case that are compared with those of the server without load.
        llama_server: program of llama.cpp's server; looked for if None.

    Raises:
        InvalidParameterError: for options that do not go together.
        MissingDependencyError: without llama.cpp's server, if it is to run.
        VeraxError: if a server does not start or does not answer.
    """
    asked = engine = engine or EngineOptions()
    if unknown := [name for name in against if name not in BASELINES]:
        raise InvalidParameterError(f"against: expected {', '.join(BASELINES)}, got {unknown[0]!r}")
    if url is not None and against and engine.model is None:
        raise InvalidParameterError("model: with a url, the other sides need the model of that server")
    if url is not None and vocab_size is None and engine.model is None:
        raise InvalidParameterError("vocab_size: with a url, give its model's vocabulary size, or the model itself")
    program = find_llama_server(llama_server) if "llama.cpp" in against else ""
    raise_open_files()
    benchmark = Benchmark("serve")
    with served_model(engine.model, shapes, engine.dtype) as served, asyncio.Runner() as runner:
        traffic = make_traffic(vocab_size or served.vocab_size)
        engine = replace(engine, model=served.argument, max_model_len=engine.max_model_len or traffic.longest)
        stack = contextlib.AsyncExitStack()
        try:
            sides: dict[str, Side] = {}
            gguf = None
            if "llama.cpp" in against:
                gguf = GGUF_TYPES[engine.quantization or engine.dtype]
                path = served.gguf(gguf)
                engine = replace(engine, model=str(path), quantization=None)  # all sides read the same file
                most = max(load.concurrency or engine.max_num_seqs for load in loads)
                command = llama_cpp_command(program, path, slots=most, length=traffic.longest)
                sides["llama.cpp server"] = runner.run(_server(stack, command, traffic))
            if "offline" in against:
                sides["offline"] = OfflineSide(engine, traffic)
            if "async" in against:
                sides[ENGINE] = runner.run(_async_side(stack, engine, traffic))
            if url is None:
                name, ours = OURS, runner.run(_server(stack, engine.command, traffic))
            else:
                name, ours = "server", runner.run(_given(Target.of(url, api_key=api_key), traffic))
            sides[name] = ours
            cases = [
                run_case(
                    runner,
                    load,
                    sides,
                    name,
                    engine=ENGINE if ENGINE in sides else None,
                    first=number * RUNS_OF_A_CASE,
                    runs=runs,
                    warmup=warmup,
                    goodput=goodput,
                    checks=checks,
                )
                for number, load in enumerate(loads)
            ]
            watched = ours.monitor.report()
        finally:
            runner.run(stack.aclose())
        settings = {
            "model": served.name if url is None else ours.monitor.target.model,
            "url": url,
            "shapes": shapes,
            "against": list(against),
            "dtype": asked.dtype,
            "quantization": asked.quantization,
            "gguf": gguf,
            "kv_cache_dtype": engine.kv_cache_dtype,
            "max_num_seqs": engine.max_num_seqs,
            "traffic": {name: getattr(traffic, name) for name in traffic.__dataclass_fields__},
            "loads": [load.name for load in loads],
            "num_requests": [load.num_requests for load in loads],
            "duration": [load.duration for load in loads],
            "goodput_ms": dict(goodput or {}),
            "runs": runs,
            "warmup": warmup,
        }
        versions = {"llama_server": llama_server_version(program)} if program else None
        return benchmark.result(settings, versions, cases=cases, server=watched)


async def _server(
    stack: contextlib.AsyncExitStack, command: Callable[[int], Sequence[str]], traffic: Traffic
) -> ServerSide:
    server = await stack.enter_async_context(started(command))
    return await _watched(Monitor(await _named(server.target), server), traffic)


async def _given(target: Target, traffic: Traffic) -> ServerSide:
    return await _watched(Monitor(await _named(target)), traffic)


async def _watched(monitor: Monitor, traffic: Traffic) -> ServerSide:
    await monitor.look()  # the totals before any load
    return ServerSide(monitor, traffic)


async def _named(target: Target) -> Target:
    """The target with the first model that the server lists."""
    try:
        listed = msgspec.json.decode(await fetch(target, f"{target.path}/models"))
        return replace(target, model=listed["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise VeraxError(f"url: {target.path}/models of the server lists no model") from error


async def _async_side(stack: contextlib.AsyncExitStack, engine: EngineOptions, traffic: Traffic) -> AsyncSide:
    from verax.text.engine.async_llm import AsyncLLM

    llm = AsyncLLM(engine.model, **engine.keywords())
    stack.push_async_callback(llm.shutdown)
    return AsyncSide(llm, traffic)
