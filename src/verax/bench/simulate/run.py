"""Throughput, latencies and device time of fleets that need not be there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verax import progress
from verax.bench.serve.load import Load, Run
from verax.bench.serve.summary import summarise
from verax.bench.serve.traffic import Traffic, arrival_times
from verax.bench.simulate.engines import Engines, planned_engines
from verax.bench.simulate.fleet import Failures, simulate
from verax.bench.simulate.overheads import Overheads
from verax.bench.simulate.replica import Replica
from verax.errors import InvalidParameterError
from verax.machine import num_cores
from verax.plan.devices import find_device
from verax.plan.model import describe
from verax.plan.text import text_plan

__all__ = ["MOST_SIMULATED", "simulate_fleets", "simulate_model"]

MOST_SIMULATED = 16
"""Replicas of a fleet that are simulated at most. A larger one is so many times this share of it."""

REQUESTS_OF_A_REPLICA = 200
"""Requests for each simulated replica, if no number is given."""


def simulate_fleets(
    engines: Engines,
    traffic: Traffic,
    sizes: Sequence[int],
    *,
    request_rate: float | None = None,
    concurrency: int | None = None,
    burstiness: float = 1.0,
    num_requests: int | None = None,
    router: str = "least-loaded",
    failures: Failures | None = None,
    goodput: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Put one load on fleets of several sizes; a report of each as JSON holds it.

    Of a fleet with more than `MOST_SIMULATED` replicas a share is simulated under its share of the load, and rates are
    scaled: replicas meet in the router only.

    Args:
        engines: the replicas.
        traffic: lengths and prefixes of the requests.
        sizes: numbers of replicas.
        request_rate: requests per second on the whole fleet, at random times; None for a closed loop.
        concurrency: requests in flight on the whole fleet, in a closed loop.
        burstiness: of the arrivals, see `arrival_times`.
        num_requests: requests that are simulated of each fleet.
        router: one of `ROUTERS`.
        failures: of the replicas; None for none.
        goodput: `goodput_limits`.

    Raises:
        InvalidParameterError: for options out of range, or requests that no replica can serve.
    """
    if (request_rate is None) == (concurrency is None):
        raise InvalidParameterError("concurrency: expected either a concurrency or a request rate")
    if traffic.longest > engines.config.max_model_len:
        raise InvalidParameterError(
            f"context: the longest request has {traffic.longest} tokens, and the engine's sequences "
            f"{engines.config.max_model_len}"
        )
    if not sizes or min(sizes) < 1:
        raise InvalidParameterError(f"replicas: expected numbers of at least 1, got {', '.join(map(str, sizes))}")
    fleets = []
    for size in sizes:
        simulated = min(size, MOST_SIMULATED)
        share = simulated / size
        requests = num_requests or REQUESTS_OF_A_REPLICA * simulated
        load = _load(request_rate, concurrency, share, burstiness=burstiness, num_requests=requests, seed=traffic.seed)
        replicas = engines.new(simulated)
        with progress.bar(f"{size} replica{'s' * (size > 1)}") as report:
            answered = iter(range(1, requests + 1))
            run, failed = simulate(
                replicas,
                load,
                traffic.requests(),
                router=router,
                failures=failures,
                on_answer=lambda answered=answered, report=report, most=requests: report(next(answered), most),
            )
        fleets.append(_report(run, replicas, size, share, engines.devices, failed, goodput))
    return fleets


def _load(
    rate: float | None, concurrency: int | None, share: float, *, burstiness: float, num_requests: int, seed: int
) -> Load:
    """The share of the load that the simulated replicas get."""
    if concurrency is not None:
        if concurrency < 1:
            raise InvalidParameterError(f"concurrency: expected at least 1, got {concurrency}")
        streams = max(1, math.floor(concurrency * share))
        return Load(f"{concurrency} streams", concurrency=streams, num_requests=num_requests)
    assert rate is not None

    def arrivals(run: int) -> Iterator[float]:
        return arrival_times(rate * share, burstiness=burstiness, seed=seed + run)

    arrivals(0)  # a wrong rate is an error now
    return Load(f"{rate:g} requests per second", arrivals=arrivals, num_requests=num_requests)


def _report(
    run: Run,
    replicas: Sequence[Replica],
    size: int,
    share: float,
    devices: int,
    failed: int,
    goodput: Mapping[str, float] | None,
) -> dict[str, Any]:
    for replica in replicas:
        replica.collect()
    report = summarise([run], goodput)
    for name in ("requests_per_s", "output_tokens_per_s", "goodput_requests_per_s"):
        if name in report:
            report[name] /= share
    queries = sum(replica.cache_queries for replica in replicas)
    rate = report["output_tokens_per_s"]
    return {
        "replicas": size,
        "simulated": len(replicas),
        "devices": size * devices,
        "seconds": run.seconds,
        **report,
        "busy": sum(replica.busy for replica in replicas) / (len(replicas) * run.seconds),
        "device_seconds_per_million_tokens": 1e6 * size * devices / rate if rate else None,
        "preemptions": sum(replica.preemptions for replica in replicas),
        "prefix_hits": sum(replica.cache_hits for replica in replicas) / queries if queries else 0.0,
        "failures": failed,
    }


def simulate_model(
    model: str,
    device: str,
    make_traffic: Callable[[int], Traffic],
    sizes: Sequence[int],
    *,
    replica: Mapping[str, Any],
    efficiency: float = 1.0,
    overheads: Overheads | None = None,
    **load: Any,
) -> dict[str, Any]:
    """Simulate fleets of a language model on a kind of device; a report as JSON holds it.

    Args:
        model: see `plan.model.describe`.
        device: see `plan.devices.find_device`.
        make_traffic: the requests, of a vocabulary size.
        sizes: numbers of replicas.
        replica: options of `plan.text.text_plan`. The context is that of the longest request if it is None.
        efficiency: as in `LeastTimes`.
        overheads: of the host, whose contention follows from the device; none if None.
        load: options of `simulate_fleets`.

    Raises:
        CheckpointError, UnsupportedModelError: for a model that is not there, or that verax does not have.
        InvalidParameterError: for a model that is no language model, or an option out of range.
    """
    found = describe(model, quantization=replica.get("quantization"))
    if found.kind != "text":
        raise InvalidParameterError(f"model: expected a language model, {found.name} is of kind {found.kind}")
    longest = make_traffic(1 << 30).longest
    kind = find_device(device)
    plan = text_plan(found, kind, **{**replica, "context": replica.get("context") or longest})
    overheads = replace(overheads or Overheads(), contention=1 / num_cores() if kind.platform == "cpu" else 0.0)
    engines = planned_engines(plan, efficiency=efficiency, overheads=overheads)
    traffic = make_traffic(engines.vocab_size)
    fleets = simulate_fleets(engines, traffic, sizes, **load)
    rate, streams = load.get("request_rate"), load.get("concurrency")
    reached = "reach it" if efficiency == 1 else f"reach {efficiency:.0%} of it"
    failures = load.get("failures")
    return {
        "settings": {
            "model": found.name,
            "device": f"{plan.devices} x {kind.name}" if plan.devices > 1 else kind.name,
            "load": f"{streams} streams" if rate is None else f"{rate:g} requests per second",
            "times": f"Steps are bounded by the device's sheet and {reached}; nothing was measured.",
            **replica,
            "context": plan.context,
            "efficiency": efficiency,
            "overhead_s": overheads.per_step,
            "overhead_per_token_s": overheads.per_token,
            "overhead_per_request_s": overheads.per_request,
            "contention": overheads.contention,
            "router": load.get("router", "least-loaded"),
            "mtbf_s": failures and failures.mean_time,
            "restart_s": failures and failures.restart,
            "traffic": {name: getattr(traffic, name) for name in traffic.__dataclass_fields__},
        },
        "fleets": fleets,
    }
