"""`verax plan`: memory and least times of a model on a device that need not be attached."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from verax.cli import options

__all__ = ["plan"]

_TEXT, _ENCODER, _VIDEO, _DEVICE = "Language models", "Sentence encoders", "Clips", "Device"
_SHEET, _CHECKPOINT = "the table's", "checkpoint's"


def _option(help_text: str, panel: str, default: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=default, **more)


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
    memory: Annotated[float | None, _option("GB of a device, if it is another.", _DEVICE, _SHEET)] = None,
    bandwidth: Annotated[float | None, _option("GB/s of a device's memory.", _DEVICE, _SHEET)] = None,
    flops: Annotated[float | None, _option("TFLOP/s of dense bfloat16 products.", _DEVICE, _SHEET)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32.", show_default="bfloat16; of encoders float32")
    ] = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: Annotated[str | None, _option("auto, bfloat16, float32, int8 or fp8.", _TEXT, "auto")] = None,
    max_model_len: Annotated[int | None, _option("Tokens of each sequence.", _TEXT, "4096")] = None,
    max_num_seqs: Annotated[int | None, _option("Sequences of a step.", _TEXT, "8")] = None,
    max_num_batched_tokens: Annotated[int | None, _option("Token budget of a step.", _TEXT, "the engine's")] = None,
    tensor_parallel_size: Annotated[int | None, _option("Devices that share the model.", _TEXT, "1")] = None,
    batch_size: Annotated[int | None, _option("Sentences of a call.", _ENCODER, "8")] = None,
    max_length: Annotated[int | None, _option("Tokens of each sentence.", _ENCODER, "128")] = None,
    resolution: Annotated[str | None, _option("540P or 720P.", _VIDEO, _CHECKPOINT)] = None,
    height: Annotated[int | None, _option("Pixels.", _VIDEO, _CHECKPOINT)] = None,
    width: Annotated[int | None, _option("Pixels.", _VIDEO, _CHECKPOINT)] = None,
    num_frames: Annotated[int | None, _option("4n + 1.", _VIDEO, _CHECKPOINT)] = None,
    num_inference_steps: Annotated[
        int | None,
        _option("Steps of the solver.", _VIDEO, _CHECKPOINT, "--inference-steps", "--num-inference-steps"),
    ] = None,
    devices: Annotated[
        int | None,
        _option("Devices for guidance and sequence parallelism, as many of them as divide the clip.", _VIDEO, "1"),
    ] = None,
    guidance_parallel: Annotated[
        bool | None,
        _option("Prompt and negative prompt on two groups of devices.", _VIDEO, "off", "--guidance-parallel"),
    ] = None,
    sequence_parallel: Annotated[int | None, _option("Devices of a group, which divide tokens.", _VIDEO, "1")] = None,
    shard_weights: Annotated[
        bool | None, _option("Divide the transformer's weights over the devices.", _VIDEO, "off", "--shard-weights")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Memory and least times of a model on a device. Neither the device nor the weights need be there.

    The exit status is 0 if it fits, 1 if it does not, and 2 for wrong usage. Times are bounds, not predictions.

    Examples:

        verax plan qwen3-8b --device h100 --max-num-seqs 64 --max-model-len 4096

        verax plan Qwen3-8B/ --device v5e --tensor-parallel-size 8

        verax plan model.gguf --device rtx4090

        verax plan i2v-14b --device h100 --devices 8 --shard-weights --num-frames 81 --resolution 720P
    """
    from verax.errors import InvalidParameterError, VeraxError
    from verax.plan.devices import find_device
    from verax.plan.run import plan as make_plan
    from verax.plan.run import show

    numbers = {"memory": (memory, 1e9), "bandwidth": (bandwidth, 1e9), "flops": (flops, 1e12)}
    sheet = {name: value * unit for name, (value, unit) in numbers.items() if value is not None}
    try:
        result = make_plan(
            model,
            find_device(device, **sheet),
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            batch_size=batch_size,
            max_length=max_length,
            resolution=resolution,
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=num_inference_steps,
            devices=devices,
            guidance_parallel=guidance_parallel,
            sequence_parallel=sequence_parallel,
            shard_weights=shard_weights,
        )
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
    if not result["fits"]:
        raise typer.Exit(1)
