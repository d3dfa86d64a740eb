"""Page of `verax bench serve`: rates and latencies of all sides, failures, checks, and the server's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verax.bench.lines import rounds

__all__ = ["KIND", "render", "slug"]

KIND = "serve"

COLUMNS = (("TTFT ms", "ttft"), ("TPOT ms", "tpot"), ("ITL ms", "itl"), ("E2E ms", "e2el"))
"""Headings and names of the latencies."""

MEMORY_COLUMNS = 13
"""Columns of the memory's table at most: a line of a terminal."""

ABORT_TIMES = {"p50_s": "p50", "p99_s": "p99", "most_s": "at most"}
"""Keys and names of the times that aborts took."""


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines: settings, a table for each load, and what was seen of the server."""
    settings, traffic = result["settings"], result["settings"]["traffic"]
    lines = [
        f"# Serve: {settings['model']}",
        "",
        f"{_precision(settings)}, at most {settings['max_num_seqs']} sequences in a step; "
        f"{_requests(traffic)}; {rounds(result)}. The client runs on the same machine. "
        "Latencies are mean, p50 / p90 / p99 of complete answers, without slow readers.",
    ]
    for case in result["cases"]:
        lines += _case(case, settings["goodput_ms"])
    return [*lines, *_server(result["server"])]


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: the model and its precision, and the loads."""
    settings = result["settings"]
    model = str(settings["model"]).rstrip("/").rpartition("/")[2].removeprefix("the ")
    precision = [settings["gguf"].lower(), "beside", "llama.cpp"] if settings["gguf"] else [_precision(settings)]
    return [model.lower(), *precision, *(load.lower() for load in settings["loads"])]


def _precision(settings: Mapping[str, Any]) -> str:
    if settings["gguf"]:
        return f"a GGUF file of {settings['gguf']}, which all sides read"
    return settings["quantization"] or settings["dtype"]


def _requests(traffic: Mapping[str, Any]) -> str:
    """Lengths of the requests in words, and the clients that behave badly."""
    words = f"prompts of {traffic['input_tokens']} tokens"
    if traffic["prefix_tokens"]:
        words += f" behind one of {traffic['num_prefixes']} prefixes of {traffic['prefix_tokens']}"
    words += f", answers of {traffic['output_tokens']}"
    if traffic["range_ratio"]:
        words += f", lengths up to {100 * traffic['range_ratio']:.0f}% shorter or longer"
    for share, what in (("slow_readers", "read slowly"), ("disconnect", "disconnect")):
        if traffic[share]:
            words += f"; {100 * traffic[share]:.0f}% of the clients {what}"
    return words


def _case(case: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    good = [f"goodput ({', '.join(f'{name} {limit:g} ms' for name, limit in limits.items())}) req/s"] if limits else []
    head = ["side", "requests", "req/s", "output tokens/s", *(title for title, _ in COLUMNS), *good]
    lines = ["", f"## {case['name']}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, side in case["sides"].items():
        cells = [name, f"{side['completed']}", f"{side['requests_per_s']:.2f}", f"{side['output_tokens_per_s']:.1f}"]
        cells += [_latency(side["latency_ms"][key]) for _, key in COLUMNS]
        cells += [f"{side['goodput_requests_per_s']:.2f}"] if limits else []
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(_ratio(name, ratio, case["ratio_p10_p90"][name]) for name, ratio in case["ratios"].items())]
    lines += _added(case.get("added_ttft_ms"))
    for name, side in case["sides"].items():
        share = side["disconnected"] / max(1, side["requests"])
        left = [f"{side['disconnected']} clients disconnected ({100 * share:.1f}%)"] if side["disconnected"] else []
        failures = [f"{count} x {kind}" for kind, count in side["errors"].items()]
        lines += [f"- {name}: {'; '.join(left + failures)}."] if left or failures else []
    check = case["check"]
    return [
        *lines,
        f"- Of {check['checked']} answers asked for again without load, {check['identical']} were identical, "
        f"{check['diverged']} parted from them at some token, {check['mixed']} did not follow from their prompts, "
        f"{check['failed']} failed; {check['distinct']} of the texts are distinct. {check['lost']} streams were lost, "
        f"{check['repeated_ids']} ids occurred twice.",
        f"- The client took {case['client_cores']:.2f} cores.",
    ]


def _latency(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['mean']:.1f}, {spread['p50']:.1f} / {spread['p90']:.1f} / {spread['p99']:.1f}"


def _ratio(name: str, ratio: float, spread: Sequence[float]) -> str:
    return f"- {name}, output tokens per second: {ratio:.2f}x (P10-P90 of rounds {spread[0]:.2f}-{spread[1]:.2f})."


def _added(added: Mapping[str, Any] | None) -> list[str]:
    """Line on the time to first token over HTTP, less that of the engine without a server."""
    if added is None:
        return []
    low, high = min(added["rounds_p50"]), max(added["rounds_p50"])
    return [
        f"- Time to first token: added by the server: {added['p50']:.1f} ms p50 ({low:.1f} to {high:.1f} ms by round), "
        f"{added['mean']:.1f} ms mean, {added['p90']:.1f} ms p90, {added['p99']:.1f} ms p99; "
        f"{added['requests']} requests, each beside the same one to AsyncLLM."
    ]


def _server(server: Mapping[str, Any]) -> list[str]:
    """Lines on the server: memory over time, and requests of clients that disconnected."""
    return [*_memory(server["memory"]), *_aborts(server["abandoned"]), *_orphans(server)]


def _memory(memory: Mapping[str, Any] | None) -> list[str]:
    if memory is None:
        return []
    points = memory["over_time"]
    shown = [points[round(i * (len(points) - 1) / (MEMORY_COLUMNS - 1))] for i in range(MEMORY_COLUMNS)]
    shown = [point for i, point in enumerate(shown) if point not in shown[:i]]
    grown = 1e3 * (memory["end_gb"] - memory["warm_gb"])
    return [
        "",
        f"Memory of the server: {memory['start_gb']:.3f} GB at the start, {memory['warm_gb']:.3f} GB after a "
        f"quarter of the time, {memory['end_gb']:.3f} GB at the end ({grown:+.0f} MB since that quarter), "
        f"{memory['peak_gb']:.3f} GB at most.",
        "",
        f"| time, s | {' | '.join(f'{when:.0f}' for when, _ in shown)} |",
        f"|{'---|' * (len(shown) + 1)}",
        f"| memory, GB | {' | '.join(f'{value:.3f}' for _, value in shown)} |",
    ]


def _aborts(abandoned: Mapping[str, Any] | None) -> list[str]:
    """Lines on the aborts as the server's log and counters have them."""
    if abandoned is None:
        return []
    lines = []
    if "clients" in abandoned:
        text = (
            f"- {abandoned['clients']} clients disconnected. The server's log has the end of {abandoned['logged']} of "
            f"their requests; {abandoned['late']} ended later than a second after the disconnection, or never"
        )
        if "p50_s" in abandoned:
            times = (f"{1e3 * abandoned[key]:.0f} ms {name}" for key, name in ABORT_TIMES.items())
            text += f" ({', '.join(times)})"
        lines.append(f"{text}.")
        if abandoned["unread"]:
            lines.append(
                f"- {abandoned['unread']} of them left before the server had read their request. They count from "
                f"then on; the last was dropped {1e3 * abandoned['unread_most_s']:.0f} ms after the disconnection."
            )
    if "engine_aborts" in abandoned:
        lines.append(
            f"- The engine counted {abandoned['engine_aborts']} aborts. {abandoned['ran_to_their_end']} abandoned "
            "requests ran to their end."
        )
    return ["", "Abandoned requests:", "", *lines]


def _orphans(server: Mapping[str, Any]) -> list[str]:
    if server["most_orphans"] is None:
        return []
    drain = server["drain_s"]
    end = "Requests were left at the end." if drain is None else f"None was left {drain:.2f} s after the last answer."
    return [
        "",
        f"Requests in the engine that no client had waited for within the last second: {server['most_orphans']} at "
        f"most, in {server['looks']} looks at its gauges. {end}",
    ]
