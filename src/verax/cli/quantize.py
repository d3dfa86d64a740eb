"""`verax quantize`: quantise a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verax.cli import options

__all__ = ["quantize"]


def quantize(
    output: Annotated[Path, typer.Argument(help="Folder for the quantised checkpoint.", show_default=False)],
    model: options.Model = None,
    bits: Annotated[int, typer.Option(help="8 or 4.")] = 4,
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale: 32, 64 or 128.", show_default="a whole row at 8 bits, 32 at 4"),
    ] = None,
    dtype: options.Dtype = "bfloat16",
) -> None:
    """Quantise the linear layers of a language model, symmetric, rounded to nearest, and write it as a checkpoint.

    The layout is compressed-tensors' (pack-quantized): verax loads it at once, and so do vLLM and transformers.

    Examples:

        verax quantize small --bits 8

        verax quantize Qwen3-0.6B-int4 --model Qwen/Qwen3-0.6B --bits 4 --group-size 64
    """
    from verax import builtin, checkpoint, progress
    from verax.errors import CheckpointError
    from verax.loading import load_causal_lm
    from verax.models import check_dtype

    check_dtype(dtype)
    opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model)
    if opened.metadata:
        raise CheckpointError(f"{opened.folder}: a GGUF file cannot be written back; quantise the model's folder")
    if output.exists() and output.samefile(opened.folder):
        raise typer.BadParameter(f"{output}: that is the checkpoint itself; name another folder")
    if group_size is None and bits == 4:
        group_size = 32
    with progress.bar("quantising", count=False) as report:
        quantized: Any = load_causal_lm(opened, dtype=dtype, quantization=(bits, group_size), progress=report)
    config = {**opened.config, "tie_word_embeddings": False, "torch_dtype": dtype}
    folder = checkpoint.save(
        quantized,
        output,
        config=config,
        generation_config=opened.generation_config or None,
        tokenizer_from=opened.folder,
    )
    written = checkpoint.Checkpoint.open(folder).nbytes
    typer.echo(f"{folder}: {written / 1e6:.1f} MB, before {opened.nbytes / 1e6:.1f} MB")
