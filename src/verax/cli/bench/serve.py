"""`verax bench serve`: load on a server."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from verax.cli import options
from verax.cli.bench.files import Output, Runs, Warmup, names, numbers, show

__all__ = ["serve"]

CONCURRENCY = "1,8,32,64"

FEWEST_REQUESTS, OPEN_LOOP_REQUESTS = 16, 100
"""Requests of a closed loop at least, and of an open one, unless a number is given. More streams send two each."""

LOAD, TRAFFIC, SERVER = "Load", "Requests", "Server"
"""Panels of the help text."""


def serve(
    url: Annotated[
        str | None,
        typer.Option(help="A running server, such as http://127.0.0.1:8000/v1.", show_default="starts verax serve"),
    ] = None,
    model: options.Model = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Random weights instead of a model: qwen3 (0.6B), qwen3-8b, hybrid or moe.", rich_help_panel=SERVER
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Closed loop: streams at once, a case each.", show_default=CONCURRENCY, rich_help_panel=LOAD),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(help="Open loop: requests per second that arrive at random, a case each.", rich_help_panel=LOAD),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Open loop: 1 is a Poisson process, less is burstier.", rich_help_panel=LOAD)
    ] = 1.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of a run.", min=1, show_default="2 a stream, 16 at least; 100", rich_help_panel=LOAD
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of a run, instead of a number of requests.", rich_help_panel=LOAD)
    ] = None,
    input_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1, rich_help_panel=TRAFFIC)] = 32,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1, rich_help_panel=TRAFFIC)] = 64,
    range_ratio: Annotated[
        float, typer.Option(help="Spread of both lengths around their mean, from 0 to 1.", rich_help_panel=TRAFFIC)
    ] = 0.0,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens of a prefix that prompts share.", min=0, rich_help_panel=TRAFFIC)
    ] = 0,
    num_prefixes: Annotated[int, typer.Option(help="Different prefixes.", min=1, rich_help_panel=TRAFFIC)] = 1,
    slow_readers: Annotated[
        float, typer.Option(help="Share of clients that read slowly.", rich_help_panel=TRAFFIC)
    ] = 0.0,
    disconnect: Annotated[
        float, typer.Option(help="Share of clients that leave in mid-answer.", rich_help_panel=TRAFFIC)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.", min=0, rich_help_panel=TRAFFIC)] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="With --url: prompts are tokens below this.", show_default="--model's", rich_help_panel=TRAFFIC
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            help="Milliseconds of a good request at most, such as ttft:200,tpot:50,e2el:5000.", rich_help_panel=LOAD
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="offline (LLM.generate), async (AsyncLLM), llama.cpp, or some with commas: run them too, interleaved."
        ),
    ] = None,
    llama_server: Annotated[
        str | None,
        typer.Option(
            help="Program of llama.cpp's server.",
            show_default="VERAX_LLAMA_SERVER, the one on PATH, or of make llama-server",
        ),
    ] = None,
    checks: Annotated[int, typer.Option(help="Answers to ask for again without load, and compare.", min=0)] = 8,
    runs: Runs = 3,
    warmup: Warmup = 1,
    api_key: Annotated[
        str | None, typer.Option(help="With --url: key of that server.", envvar="OPENAI_API_KEY")
    ] = None,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Most sequences in one step.", show_default="the most streams, 256 at most", min=1),
    ] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Load on a server that speaks OpenAI's API: throughput, latencies, goodput, and checks of the answers.

    Examples:

        verax bench serve --against offline,async --concurrency 64

        verax bench serve --url http://127.0.0.1:8000/v1 --vocab-size 32000 --request-rate 2,8 --goodput ttft:200

        verax bench serve --concurrency 1000 --duration 60 --slow-readers 0.1 --disconnect 0.2 --runs 1 --warmup 0
    """
    from verax.bench.serve.cases import EngineOptions, bench_serve
    from verax.bench.serve.load import Load, Traffic, arrival_times, goodput_limits

    if concurrency is not None and request_rate is not None:
        raise typer.BadParameter("--concurrency: a closed loop; --request-rate is an open one, give one of them")
    loads: list[Load] = []
    if request_rate is not None:
        for rate in numbers("--request-rate", request_rate, float):
            arrivals = lambda run, rate=rate: arrival_times(rate, burstiness=burstiness, seed=seed + run)
            arrivals(0)  # a wrong rate is an error before a server starts
            count = num_requests or (None if duration else OPEN_LOOP_REQUESTS)
            name = f"{rate:g} requests per second"
            loads.append(Load(name, arrivals=arrivals, num_requests=count, duration=duration))
    else:
        for streams in numbers("--concurrency", concurrency or CONCURRENCY, int):
            count = num_requests or (None if duration else max(2 * streams, FEWEST_REQUESTS))
            name = f"{streams} stream{'s' if streams > 1 else ''}"
            loads.append(Load(name, concurrency=streams, num_requests=count, duration=duration))
    traffic = partial(
        Traffic,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        range_ratio=range_ratio,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        slow_readers=slow_readers,
        disconnect=disconnect,
        seed=seed,
    )
    traffic(1 << 30)  # wrong lengths and shares are an error before a server starts
    engine = EngineOptions(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs or min(max(load.concurrency or 64 for load in loads), 256),
    )
    result = bench_serve(
        loads,
        traffic,
        url=url,
        api_key=api_key,
        vocab_size=vocab_size,
        engine=engine,
        shapes=shapes,
        runs=runs,
        warmup=warmup,
        against=names(against),
        goodput=goodput_limits(goodput) if goodput else None,
        checks=checks,
        llama_server=llama_server,
    )
    show(result, output, as_json)
