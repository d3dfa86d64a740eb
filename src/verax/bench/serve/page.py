"""Page of `verax bench serve`: rates and latencies of all sides, failures, checks, and the server's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.bench.lines import rounds

__all__ = ["KIND", "render", "slug"]

KIND = "serve"

COLUMNS = (("TTFT ms", "ttft"), ("TPOT ms", "tpot"), ("ITL ms", "itl"), ("E2E ms", "e2el"))
"""Headings and names of the latencies."""


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines: settings, a table for each load, and what was seen of the server."""
    settings, traffic = result["settings"], result["settings"]["traffic"]
    lines = [
        f"# Serve: {settings['model']}",
        "",
        f"{settings['quantization'] or settings['dtype']}, at most {settings['max_num_seqs']} sequences in a step; "
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
    return [model.lower(), settings["quantization"] or settings["dtype"], *(load.lower() for load in settings["loads"])]


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
    lines += ["", *(f"- {name}: {ratio:.2f}x" for name, ratio in case["ratios"].items())]
    for name, side in case["sides"].items():
        left = [f"{side['disconnected']} clients disconnected"] if side["disconnected"] else []
        failures = [f"{count} x {kind}" for kind, count in side["errors"].items()]
        lines += [f"- {name}: {'; '.join(left + failures)}."] if left or failures else []
    check = case["check"]
    return [
        *lines,
        f"- Of {check['checked']} answers asked for again without load, {check['identical']} were identical, "
        f"{check['diverged']} parted at some token, {check['mixed']} were another request's, {check['failed']} "
        f"failed; {check['distinct']} of the texts are distinct. {check['lost']} streams were lost, "
        f"{check['repeated_ids']} ids occurred twice.",
        f"- The client took {case['client_cores']:.2f} cores.",
    ]


def _latency(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    return f"{spread['mean']:.1f}, {spread['p50']:.1f} / {spread['p90']:.1f} / {spread['p99']:.1f}"


def _server(server: Mapping[str, Any]) -> list[str]:
    memory, lines = server["memory"], []
    if memory is not None:
        lines.append(
            f"Memory of the server: {memory['start_gb']:.3f} GB at the start, {memory['warm_gb']:.3f} GB after a "
            f"quarter of the time, {memory['end_gb']:.3f} GB at the end, {memory['peak_gb']:.3f} GB at most."
        )
    if server["most_orphans"] is not None:
        drain = server["drain_s"]
        lines.append(
            f"Abandoned requests that ran on for more than a second: {server['most_orphans']}. "
            + (
                "Requests were left at the end."
                if drain is None
                else f"None was left {drain:.2f} s after the last answer."
            )
        )
    return ["", " ".join(lines)] if lines else []
