"""`verax convert` and `verax quantize`: write a checkpoint in another layout, with an adapter merged, or quantised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.cli.files import check_folder

if TYPE_CHECKING:
    from verax.checkpoint import Checkpoint


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A SkyReels-V2 or Wan folder of either layout; with --lora a language model's folder or hub id.",
            show_default=False,
        ),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    to: Annotated[
        str | None, typer.Option(help="Layout of a video model to write: original or diffusers.", show_default=False)
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(help="Folder of a LoRA adapter (PEFT) to merge into a language model.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype to write: bfloat16 or float32. A video model's VAE keeps its own.", show_default="the source's"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the target if it exists.")] = False,
) -> None:
    """Write a video model in another layout, or merge a LoRA adapter.

    Weights are written as safetensors. A video model's weights keep their bits. An adapter's changes are added to the
    weights in float32, which are then rounded once to the dtype that is written; quantised weights become bfloat16.

    In the original layout, .pth files become safetensors files of the same name (Wan2.1_VAE.safetensors,
    models_t5_umt5-xxl-enc-bf16.safetensors, ...), with their settings next to them. verax opens either layout.

    \b
    Examples:
        verax convert SkyReels-V2-I2V-1.3B-540P SkyReels-V2-I2V-1.3B-540P-Diffusers --to diffusers
        verax convert SkyReels-V2-DF-14B-540P-Diffusers DF-14B --to original --dtype bfloat16
        verax convert Qwen/Qwen3-0.6B merged --lora adapters/sql
    """
    from verax import progress
    from verax.checkpoint.video import convert as video_convert
    from verax.checkpoint.video.folder import VideoFolder
    from verax.errors import InvalidParameterError

    if dtype not in (None, "bfloat16", "float32"):
        raise InvalidParameterError(f"dtype: expected bfloat16 or float32, got {dtype!r}")
    if lora is not None:
        if to is not None:
            raise InvalidParameterError("to: an adapter is merged in the base's own layout; leave --to out")
        _merge(source, target, lora, dtype, force=force)
        return
    if to is None:
        raise InvalidParameterError(
            "to, lora: give one: --to original or --to diffusers writes a video model in that layout, --lora merges an "
            "adapter into a language model"
        )
    if to not in ("original", "diffusers"):
        raise InvalidParameterError(f"to: expected original or diffusers, got {to!r}")
    with progress.bar("converting", count=False) as report:
        folder = video_convert.convert(VideoFolder(Path(source)), target, to, dtype=dtype, force=force, progress=report)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    typer.echo(
        f"{folder}: {written / 1e6:.1f} MB in the layout of {'diffusers' if to == 'diffusers' else 'the original'}"
    )


def _merge(source: str, target: Path, lora: str, dtype: str | None, *, force: bool) -> None:
    """Write a language model with an adapter merged."""
    from verax import checkpoint, progress
    from verax.checkpoint.lora import Adapter, merge
    from verax.models import causal_lm

    opened, adapter = checkpoint.Checkpoint.open(source), Adapter.open(lora)
    _check_target(target, opened, force=force)
    family = causal_lm(opened.config)[0]
    with progress.bar("merging", count=False) as report:
        folder = merge(
            opened,
            adapter,
            target,
            aliases=family.key_aliases,
            tied=getattr(family, "tied_weights", {}),
            dtype=dtype,
            progress=report,
        )
    written = checkpoint.Checkpoint.open(folder).nbytes
    typer.echo(f"{folder}: {written / 1e6:.1f} MB, {len(adapter.pairs)} weights changed by {adapter.folder}")


def _check_target(target: Path, source: Checkpoint, *, force: bool) -> None:
    """Check that a language model may be written to a folder: never over its source, and over another with --force."""
    from verax.errors import CheckpointError

    check_folder(target)
    if target.exists() and target.samefile(source.folder):
        raise typer.BadParameter(f"{target}: that is the checkpoint itself; name another folder")
    if target.exists() and not force:
        raise CheckpointError(f"{target}: it exists already; name another folder, or --force to replace its weights")


def quantize(
    output: Annotated[Path, typer.Argument(help="Folder for the quantised checkpoint.", show_default=False)],
    model: options.Model = None,
    bits: Annotated[int, typer.Option(help="8 or 4.")] = 4,
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale: 32, 64 or 128.", show_default="a whole row at 8 bits, 32 at 4"),
    ] = None,
    round_inputs: Annotated[
        bool, typer.Option("--round-inputs", help="Inputs of 8 bits too (W8A8). The output head stays in floats.")
    ] = False,
    dtype: options.Dtype = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace the weights of the folder if it exists.")] = False,
) -> None:
    """Quantise a language model, and write it as a checkpoint.

    Its linear layers are rounded to nearest, with symmetric scales. The layout is compressed-tensors' (pack-quantized,
    or int-quantized with rounded inputs): verax loads it at once, and so do vLLM and transformers
    (which takes random experts for quantised ones of gpt-oss and Gemma 4).

    \b
    Examples:
        verax quantize small --bits 8
        verax quantize Qwen3-0.6B-int4 --model Qwen/Qwen3-0.6B --bits 4 --group-size 64
        verax quantize Qwen3-0.6B-w8a8 --model Qwen/Qwen3-0.6B --bits 8 --round-inputs
    """
    from verax import builtin, checkpoint, progress
    from verax.checkpoint.checkpoint import config_of_floats
    from verax.errors import CheckpointError, InvalidParameterError
    from verax.loading import load_causal_lm
    from verax.models import check_dtype, language_config
    from verax.ops.quantized import BITS, GROUP_SIZES

    check_dtype(dtype)
    if bits not in BITS:
        raise InvalidParameterError(f"bits: expected {' or '.join(map(str, BITS))}, got {bits}")
    if group_size not in (None, *GROUP_SIZES):
        raise InvalidParameterError(f"group_size: expected {', '.join(map(str, GROUP_SIZES))}, got {group_size}")
    if round_inputs and (bits != 8 or group_size is not None):
        raise InvalidParameterError("round_inputs: it needs --bits 8 and a scale for a whole row (no --group-size)")
    opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model)
    if opened.metadata:
        raise CheckpointError(f"{opened.folder}: a GGUF file cannot be written back; quantise the model's folder")
    _check_target(output, opened, force=force)
    if group_size is None and bits == 4:
        group_size = 32
    with progress.bar("quantising", count=False) as report:
        precision = "w8a8" if round_inputs else (bits, group_size)
        quantized: Any = load_causal_lm(
            opened, dtype=dtype, quantization=precision, quantize_head=not round_inputs, progress=report
        )
    config = config_of_floats(language_config(opened.config), dtype)
    if not round_inputs:
        config["tie_word_embeddings"] = False
    folder = checkpoint.save(
        quantized,
        output,
        config=config,
        generation_config=opened.generation_config or None,
        tokenizer_from=opened.folder,
    )
    written = checkpoint.Checkpoint.open(folder).nbytes
    typer.echo(f"{folder}: {written / 1e6:.1f} MB, before {opened.nbytes / 1e6:.1f} MB")
