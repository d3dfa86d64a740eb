"""`verax plan`: memory and least times of a model on a device that need not be there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["plan"]

_TEXT, _VIDEO, _DEVICE, _COMPILE = "Language models and encoders", "Video", "Device", "Compilation"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder (config.json is enough), GGUF file, hub id, text-builtin, encoder-builtin, video-builtin, "
            "or shapes by name: qwen3, qwen3-8b, hybrid, moe, minilm, modernbert, t2v-1.3b, i2v-14b and others.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            help="v4, v5e, v5p, v6e, a100, h100, h200, b200, l4, l40s, rtx4090, rtx5090; cpu for this machine.",
            rich_help_panel=_DEVICE,
        ),
    ],
    devices: Annotated[
        int | None,
        typer.Option(
            help="Divide a language model over so many (tensor parallelism), or a clip (see verax video --devices).",
            min=1,
            rich_help_panel=_DEVICE,
            show_default="1",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GB of a device, if it is another.", rich_help_panel=_DEVICE, show_default="the table's"),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="GB/s of a device's memory.", rich_help_panel=_DEVICE, show_default="the table's"),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(help="TFLOP/s of dense bfloat16 products.", rich_help_panel=_DEVICE, show_default="the table's"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16 or float32.", show_default="bfloat16; of encoders float32"),
    ] = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="auto, bfloat16, float32, int8 or fp8.", rich_help_panel=_TEXT, show_default="auto"),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Sequences of a step, or sentences.", min=1, rich_help_panel=_TEXT, show_default="8"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each sequence or sentence.", min=1, rich_help_panel=_TEXT, show_default="4096 or 128"
        ),
    ] = None,
    frames: Annotated[
        int | None, typer.Option(help="4n + 1.", min=1, rich_help_panel=_VIDEO, show_default="checkpoint's")
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Pixels.", min=1, rich_help_panel=_VIDEO, show_default="checkpoint's")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Pixels.", min=1, rich_help_panel=_VIDEO, show_default="checkpoint's")
    ] = None,
    inference_steps: Annotated[
        int | None,
        typer.Option(help="Steps of the solver.", min=1, rich_help_panel=_VIDEO, show_default="checkpoint's"),
    ] = None,
    guidance_parallel: Annotated[
        bool,
        typer.Option(
            "--guidance-parallel", help="Prompt and negative prompt on two groups of devices.", rich_help_panel=_VIDEO
        ),
    ] = False,
    sequence_parallel: Annotated[
        int | None,
        typer.Option(
            help="Devices of a group, which divide the tokens.", min=1, rich_help_panel=_VIDEO, show_default="1"
        ),
    ] = None,
    shard_weights: Annotated[
        bool,
        typer.Option(
            "--shard-weights", help="Divide the transformer's weights over the devices.", rich_help_panel=_VIDEO
        ),
    ] = False,
    compile_programs: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the model's programs for the device, in minutes: a TPU (extra plan-tpu), or an a100, h100, "
            "h200, b200, l4, rtx4090 or rtx5090 (extra plan-cuda).",
            rich_help_panel=_COMPILE,
        ),
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option(help="Compile so many layers only.", min=1, rich_help_panel=_COMPILE, show_default="all"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write plan.html, with two pictures, and plan.json here.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Memory and least times of a model on a device. Neither the device nor the weights need be there.

    The exit status is 0 if it fits, 1 if it does not, and 2 for wrong usage. Times are bounds, not predictions.

    Examples:

        verax plan qwen3-8b --device h100 --max-num-seqs 64 --context 4096

        verax plan Qwen3-8B/ --device v5e --devices 8

        verax plan model.gguf --device rtx4090

        verax plan t2v-14b --device h200 --frames 81 --height 720 --width 1280

        verax plan i2v-14b --device h100 --devices 8 --shard-weights --frames 81 --height 720 --width 1280

        verax plan qwen3 --device v5e --compile --depth 2
    """
    if compile_programs:  # the plugins of other devices serve as compilers; JAX must not look for the devices
        os.environ["JAX_PLATFORMS"] = "cpu"
    from verax.errors import InvalidParameterError, VeraxError
    from verax.plan.devices import find_device
    from verax.plan.report import show, write
    from verax.plan.run import plan as make_plan

    def scaled(value: float | None, unit: float) -> float | None:
        return None if value is None else value * unit

    try:
        result = make_plan(
            model,
            find_device(
                device, memory=scaled(memory, 1e9), bandwidth=scaled(bandwidth, 1e9), flops=scaled(flops, 1e12)
            ),
            compiled=compile_programs,
            depth=depth,
            devices=devices,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=max_num_seqs,
            context=context,
            frames=frames,
            height=height,
            width=width,
            inference_steps=inference_steps,
            guidance_parallel=guidance_parallel or None,
            sequence_parallel=sequence_parallel,
            shard_weights=shard_weights or None,
        )
        paths = [] if output is None else write(result, output)
    except InvalidParameterError as error:
        name, colon, rest = str(error).partition(":")
        raise typer.BadParameter(f"--{name.replace('_', '-')}{colon}{rest}") from error
    except VeraxError as error:  # status 1 says that a model does not fit, and nothing else
        raise typer.BadParameter(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        from rich.console import Console

        show(result, Console())
    for path in paths:
        typer.echo(f"written: {path}", err=True)
    if not result["fits"]:
        raise typer.Exit(1)
