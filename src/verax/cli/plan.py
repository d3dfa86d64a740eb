"""`verax plan`: memory and least times of a model on a device that need not be attached."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

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
    from verax.plan.devices import find_device
    from verax.plan.run import plan as make_plan
    from verax.plan.run import show

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
    except VeraxError as error:  # status 1 says that a model does not fit, and nothing else
        raise typer.BadParameter(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        from rich.console import Console

        show(result, Console())
    if not result["fits"]:
        raise typer.Exit(1)
