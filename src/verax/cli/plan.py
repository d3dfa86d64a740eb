"""`verax plan`: memory and least times of a model on a device that need not be attached."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verax.cli import options
from verax.cli.options import Flags
from verax.cli.video import PipelineOptions
from verax.options import option
from verax.text.engine.engine_config import EngineConfig
from verax.video.options import VideoRequest

_TEXT = {"max_model_len": "4096", "max_num_seqs": "8", "max_num_batched_tokens": "the engine's"}
_TEXT |= {"kv_cache_dtype": "auto", "tensor_parallel_size": "1", "speculative_config": "no drafts"}
_CLIP = ("resolution", "height", "width", "num_frames", "num_inference_steps", "half_size_steps")
_MESH = ("devices", "guidance_parallel", "sequence_parallel", "shard_weights")


@dataclass(frozen=True)
class PlanOptions:
    """Numbers of a device that replace the numbers of its sheet, quantisation of any model, a batch of sentences."""

    memory: float | None = option(None, "GB of a device, if it is another.", low=0, panel="Device", shown="the table's")
    bandwidth: float | None = option(None, "GB/s of a device's memory.", low=0, panel="Device", shown="the table's")
    flops: float | None = option(
        None, "TFLOP/s of dense bfloat16 products.", low=0, panel="Device", shown="the table's"
    )
    quantization: str | None = option(
        None,
        "int8, w8a8, int4 (language models) or fp8 (clips): quantised while loading; dequantize: floats instead.",
        flags=("--quantization", "-q"),
        shown="the checkpoint's",
    )
    batch_size: int | None = option(None, "Sentences of a call.", low=1, panel="Sentence encoders", shown="8")
    max_length: int | None = option(None, "Tokens of each sentence.", low=1, panel="Sentence encoders", shown="128")


_SETTINGS = Annotated[
    list[dict[str, Any]],
    Flags(
        options.ModelOptions,
        without=("revision", "quantization"),
        defaults={"dtype": None},
        shown={"dtype": "bfloat16; of encoders float32"},
    ),
    Flags(PlanOptions),
    Flags(EngineConfig, only=tuple(_TEXT), defaults=dict.fromkeys(_TEXT), shown=_TEXT, panel="Language models"),
    Flags(VideoRequest, only=_CLIP, defaults={"half_size_steps": None}, panel="Clips"),
    Flags(PipelineOptions, only=_MESH, defaults={"sequence_parallel": None}, shown={"devices": "1"}, panel="Clips"),
]


@options.with_flags
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder (config.json is enough), GGUF file, hub id, text-builtin, encoder-builtin, video-builtin, "
            "or shapes by name: qwen3, qwen3-8b, hybrid, moe, minilm, modernbert, t2v-1.3b, vace-14b and others.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            help="v4, v5e, v5p, v6e, a100, h100, h200, b200, l4, l40s, rtx4090, rtx5090; cpu for this machine.",
            rich_help_panel="Device",
        ),
    ],
    *,
    settings: _SETTINGS,
    as_json: options.Json = False,
) -> None:
    """Memory and least times of a model on a device. Neither the device nor the weights need be there.

    The exit status is 0 if it fits, 1 if it does not, and 2 for wrong usage. Times are bounds, not predictions.

    \b
    Examples:
        verax plan qwen3-8b --device h100 --max-num-seqs 64 --max-model-len 4096
        verax plan Qwen3-8B/ --device v5e --tensor-parallel-size 8
        verax plan model.gguf --device rtx4090
        verax plan i2v-14b --device h100 --devices 8 --shard-weights --num-frames 81 --resolution 720P
    """
    from verax.errors import InvalidParameterError, VeraxError
    from verax.plan import plan as make_plan
    from verax.plan.devices import find_device

    given = {
        name: value for table in settings for name, value in table.items() if value is not None and value is not False
    }
    units = {"memory": 1e9, "bandwidth": 1e9, "flops": 1e12}
    sheet = {name: given.pop(name) * unit for name, unit in units.items() if name in given}
    try:
        result = make_plan(model, find_device(device, **sheet), **given)
    except InvalidParameterError as error:
        name, colon, rest = str(error).partition(":")
        raise typer.BadParameter(f"--{name.replace('_', '-')}{colon}{rest}") from error
    except (VeraxError, OSError) as error:  # status 1 says that a model does not fit, and nothing else
        raise typer.BadParameter(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _show(result)
    if not result["fits"]:
        raise typer.Exit(1)


def _show(plan: Mapping[str, Any]) -> None:
    """Print a plan's tables and verdict."""
    from verax.video.memory import format_bytes

    console = Console()
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
    from verax.video.memory import format_bytes

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
