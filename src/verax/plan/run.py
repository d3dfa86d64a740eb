"""A plan of any model (language model, sentence encoder or video model), and its tables in the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from verax.errors import InvalidParameterError
from verax.plan.devices import Device
from verax.plan.model import describe
from verax.plan.text import plan_embed, plan_text
from verax.plan.video import plan_video
from verax.video.memory import format_bytes

_ENGINES = {"text": plan_text, "embedding": plan_embed, "video": plan_video}

_OPTIONS = {
    "text": (
        *("dtype", "quantization", "kv_cache_dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens"),
        *("tensor_parallel_size", "speculative_config"),
    ),
    "embedding": ("dtype", "batch_size", "max_length"),
    "video": (
        *("dtype", "quantization", "resolution", "height", "width", "num_frames", "num_inference_steps"),
        *("half_size_steps", "devices", "guidance_parallel", "sequence_parallel", "shard_weights"),
    ),
}
"""Options of each kind of model, by the names of `verax serve`, `verax embed` and `verax video`."""


def plan(model: str, device: Device, **options: Any) -> dict[str, Any]:
    """Plan of a model on a device, as JSON holds it.

    `model`: see `plan.model.describe`. `options`: options of the model's engine, see `text_plan`, `plan_embed` and
    `read_clip`. None counts as not given.

    Raises:
        CheckpointError, UnsupportedModelError: for a model that is not there, or that verax does not have.
        InvalidParameterError: for an option that this kind of model does not have, or a value out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    described = describe(model, quantization=given.get("quantization"))
    taken = _OPTIONS[described.kind]
    if unknown := [name for name in given if name not in taken]:
        raise InvalidParameterError(
            f"{unknown[0]}: the plan of a model of kind {described.kind} has no such option; it has {', '.join(taken)}"
        )
    parts = _ENGINES[described.kind](described, device, **given)
    return {"kind": described.kind, "model": described.name, "device": dataclasses.asdict(device), **parts}


def show(plan: Mapping[str, Any], console: Console) -> None:
    """Print a plan's tables and verdict."""
    device, count = plan["device"], plan["devices"]
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plan["settings"].items() if value)
    rates = ", ".join(f"{dtype} {rate / 1e12:,.1f}" for dtype, rate in device["flops"].items())
    console.print(f"[bold]{plan['model']} on {f'{count} x ' if count > 1 else ''}{device['name']}[/]", highlight=False)
    facts = f"{format_bytes(device['memory'])}, {device['bandwidth'] / 1e9:,.0f} GB/s, TFLOP/s: {rates}"
    console.print(settings, f"{device['name']}: {facts} ({device['source']})", sep="\n", highlight=False, end="\n\n")
    sizes = [(row, *map(format_bytes, (row["nbytes"], row["per_device"]))) for row in plan["weights"]]
    rows = [(row["part"], row["precision"], f"{row['weights']:,}", *both) for row, *both in sizes]
    _print(console, ("weights", "precision", "number", "bytes", "per device"), rows)
    memory = {**plan["memory"], "all": sum(plan["memory"].values())}
    rows = [(name, format_bytes(size), f"{size / device['memory']:.1%}") for name, size in memory.items()]
    _print(console, ("memory of a device", "bytes", "share"), rows)
    if "stages" in plan:
        names = ("weights", "others", "work", "together")
        rows = [(row["stage"], *(format_bytes(row[name]) for name in names)) for row in plan["stages"]]
        _print(console, ("stage", "weights", "other models", "work, at least", "together"), rows)
    rows = [
        (
            *(row["name"], str(row["times"]), f"{row['flops'] / 1e12:,.3g}", f"{row['bytes_per_device'] / 1e9:,.3f}"),
            *(_seconds(row["at_least_s"]), row["limit"]),
        )
        for row in plan["programs"]
    ]
    _print(console, ("program", "calls", "TFLOP", "GB per device", "at least", "limited by"), rows)
    bound = (
        "Times are bounds, not predictions: a program takes at least this long at the full rates of the device's sheet."
    )
    for line in (*_sentences(plan), f"{bound} Measured ones are longer."):
        console.print(line, highlight=False, soft_wrap=True)
    console.print("[bold green]fits[/]" if plan["fits"] else "[bold red]does not fit[/]", highlight=False)


def _print(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, "")


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def _sentences(plan: Mapping[str, Any]) -> list[str]:
    """Results of a plan in sentences."""
    lines = [f"At most {value:,.1f} {name}." for name, value in plan.get("at_most", {}).items()]
    least = {name.removeprefix("seconds "): value for name, value in plan.get("at_least", {}).items()}
    lines += [f"At least {_seconds(value)} {name}." for name, value in least.items()]
    if plan["kind"] != "text":
        return [
            *lines,
            "Of the buffers between operations only some are counted; verax video --plan counts all.",
        ]
    batch, context, fewest = (plan[name] for name in ("largest_batch", "largest_context", "fewest_devices"))
    seqs, tokens = (plan["settings"][name] for name in ("max_num_seqs", "max_model_len"))
    room, needed = map(format_bytes, (plan["cache_room"], plan["memory"]["cache"]))
    return [
        *lines,
        f"The engine has {room} for its cache next to the weights. {seqs} sequences of {tokens} tokens need {needed}.",
        f"Largest batch of {tokens} tokens each: {batch or 'not even one'}.",
        f"Largest context of {seqs} sequences: {context or 'none'}.",
        f"Fewest devices that it fits on: {fewest or 'no number that divides it'}.",
    ]
