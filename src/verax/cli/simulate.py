"""`verax simulate`: throughput and latencies of replicas on devices that need not be there."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from verax.cli import load, options

__all__ = ["simulate"]

_REPLICA, _FLEET = "Replicas", "Fleet"


def simulate(
    model: Annotated[
        str,
        typer.Argument(help="A language model, as verax plan takes it: no weights are needed.", show_default=False),
    ],
    device: Annotated[
        str,
        typer.Option(help="As verax plan takes it: h100, v5e and others.", rich_help_panel=_REPLICA),
    ],
    devices: Annotated[
        int, typer.Option(help="Devices of a replica (tensor parallelism).", min=1, rich_help_panel=_REPLICA)
    ] = 1,
    efficiency: Annotated[
        float,
        typer.Option(help="Least time of a step over its real time, such as 0.6.", rich_help_panel=_REPLICA),
    ] = 1.0,
    overhead_ms: Annotated[
        float,
        typer.Option(
            help="Milliseconds of a step for which the device waits for the host.", min=0, rich_help_panel=_REPLICA
        ),
    ] = 0.0,
    overhead_per_token_us: Annotated[
        float,
        typer.Option(
            help="Microseconds of the host for each token: detokenisation and its event.",
            min=0,
            rich_help_panel=_REPLICA,
        ),
    ] = 0.0,
    overhead_per_request_ms: Annotated[
        float,
        typer.Option(
            help="Milliseconds of the host for each request: HTTP and tokenisation.", min=0, rich_help_panel=_REPLICA
        ),
    ] = 0.0,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences in one step.", min=1, rich_help_panel=_REPLICA)
    ] = 64,
    context: Annotated[
        int | None,
        typer.Option(
            help="Longest sequence in tokens.", min=2, rich_help_panel=_REPLICA, show_default="the longest request"
        ),
    ] = None,
    replicas: Annotated[
        str, typer.Option(help="Numbers of replicas, a fleet each, such as 1,8,64.", rich_help_panel=_FLEET)
    ] = "1",
    router: Annotated[
        str,
        typer.Option(
            help="least-loaded, or prefix: where the beginning of the prompt was read.", rich_help_panel=_FLEET
        ),
    ] = "least-loaded",
    mtbf: Annotated[
        float | None,
        typer.Option(help="Hours between two failures of a replica, in the mean.", rich_help_panel=_FLEET),
    ] = None,
    restart: Annotated[
        float, typer.Option(help="Seconds until a failed replica serves again.", rich_help_panel=_FLEET)
    ] = 60.0,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second on the whole fleet.", rich_help_panel=load.LOAD),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Closed loop: requests in flight on the whole fleet.", min=1, rich_help_panel=load.LOAD),
    ] = None,
    burstiness: load.Burstiness = 1.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests that are simulated.",
            min=1,
            show_default="200 a simulated replica",
            rich_help_panel=load.LOAD,
        ),
    ] = None,
    goodput: load.Goodput = None,
    input_tokens: load.InputTokens = 512,
    output_tokens: load.OutputTokens = 128,
    range_ratio: load.RangeRatio = 0.0,
    prefix_tokens: load.PrefixTokens = 0,
    num_prefixes: load.NumPrefixes = 1,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths, arrivals and failures.", min=0)] = 0,
    as_json: options.Json = False,
) -> None:
    """Throughput and latencies of replicas that serve requests, on devices that need not be there.

    The engine's own scheduler and cache run, on a clock instead of a device. A step takes its least time on the device
    over the efficiency, so that without one all numbers are bounds. `verax bench serve --against simulated` measures
    the overheads of a server, and prints these options.

    Examples:

        verax simulate qwen3-8b --device h100 --request-rate 20 --replicas 1,2,4

        verax simulate qwen3-8b --device v5e --devices 8 --concurrency 256 --efficiency 0.6 --overhead-per-token-us 40

        verax simulate qwen3 --device l4 --request-rate 500 --replicas 100 --mtbf 24 --restart 120 --num-requests 20000
    """
    from verax.bench.serve.summary import goodput_limits
    from verax.bench.serve.traffic import Traffic
    from verax.bench.simulate.fleet import Failures
    from verax.bench.simulate.overheads import Overheads
    from verax.bench.simulate.page import show
    from verax.bench.simulate.run import simulate_model
    from verax.errors import InvalidParameterError, VeraxError

    try:
        sizes = [int(number) for number in replicas.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--replicas: expected whole numbers such as 1,8, got {replicas!r}") from error

    def traffic(vocab_size: int) -> Traffic:
        return Traffic(
            vocab_size,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            range_ratio=range_ratio,
            prefix_tokens=prefix_tokens,
            num_prefixes=num_prefixes,
            seed=seed,
        )

    try:
        result = simulate_model(
            model,
            device,
            traffic,
            sizes,
            efficiency=efficiency,
            overheads=Overheads(1e-3 * overhead_ms, 1e-6 * overhead_per_token_us, 1e-3 * overhead_per_request_ms),
            replica={
                "devices": devices,
                "dtype": dtype,
                "quantization": quantization,
                "kv_cache_dtype": kv_cache_dtype,
                "max_num_seqs": max_num_seqs,
                "context": context,
            },
            num_requests=num_requests,
            router=router,
            failures=None if mtbf is None else Failures(3600 * mtbf, restart, seed),
            goodput=goodput_limits(goodput) if goodput else None,
            request_rate=request_rate,
            concurrency=concurrency,
            burstiness=burstiness,
        )
    except InvalidParameterError as error:
        name, colon, rest = str(error).partition(":")
        raise typer.BadParameter(f"--{name.replace('_', '-')}{colon}{rest}") from error
    except VeraxError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    from rich.console import Console

    show(result, Console())
