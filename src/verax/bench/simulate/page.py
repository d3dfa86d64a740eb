"""Tables of simulated fleets for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["show"]


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a simulation: a row for each fleet."""
    settings = result["settings"]
    table = Table(title=f"{settings['model']} on {settings['device']}, {settings['load']}", title_justify="left")
    names = ["replicas", "devices", "tokens/s", "TTFT ms p50 / p99", "TPOT ms p50 / p99", "E2E s p50 / p99", "busy"]
    names += ["device s / M tokens"]
    names += ["good/s"] * ("goodput_requests_per_s" in result["fleets"][0])
    for name in names:
        table.add_column(name, justify="right")
    for fleet in result["fleets"]:
        latency = fleet["latency_ms"]
        cost = fleet["device_seconds_per_million_tokens"]
        cells = [
            f"{fleet['replicas']:,}",
            f"{fleet['devices']:,}",
            f"{fleet['output_tokens_per_s']:,.0f}",
            _pair(latency["ttft"]),
            _pair(latency["tpot"]),
            _pair(latency["e2el"], 1e-3),
            f"{fleet['busy']:.0%}",
            "-" if cost is None else f"{cost:,.0f}",
        ]
        if "goodput_requests_per_s" in fleet:
            cells.append(f"{fleet['goodput_requests_per_s']:,.1f}")
        table.add_row(*cells)
    console.print(table)
    for fleet in result["fleets"]:
        if notes := _notes(fleet):
            console.print(f"{fleet['replicas']:,} replicas: {', '.join(notes)}.")
    console.print(settings["times"])


def _pair(spread: Mapping[str, float] | None, unit: float = 1.0) -> str:
    return "-" if spread is None else f"{unit * spread['p50']:,.2f} / {unit * spread['p99']:,.2f}"


def _notes(fleet: Mapping[str, Any]) -> list[str]:
    notes = []
    if fleet["simulated"] < fleet["replicas"]:
        notes.append(f"{fleet['simulated']} of them simulated under their share of the load")
    if fleet["prefix_hits"]:
        notes.append(f"{fleet['prefix_hits']:.0%} of the prompts' tokens were in a cache")
    if fleet["preemptions"]:
        notes.append(f"{fleet['preemptions']:,} preemptions")
    if fleet["failures"]:
        notes.append(f"{fleet['failures']:,} failures")
    return notes
