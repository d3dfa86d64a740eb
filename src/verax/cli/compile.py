"""`verax compile`: programs of a language model, compiled before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["compile"]


def compile(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint folder, GGUF file or hub id; the built-in model if left out.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the programs.")] = Path("programs"),
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device, such as h100: an error where another is attached.", show_default="attached"),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one step.", min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.", min=1)] = None,
    kv_cache_memory: Annotated[int | None, typer.Option(help="Bytes of the cache.", min=1)] = None,
    structured_outputs: Annotated[
        bool, typer.Option("--structured-outputs", help="Programs for answers of a given form too.")
    ] = False,
) -> None:
    """Compile a language model for the attached device, into a folder that --programs of other commands takes.

    Starts with it trace, lower and compile nothing. The folder belongs to one kind of device, one version of JAX and
    verax, and one configuration; another is refused by name.

    Examples:

        verax compile -o programs --max-num-seqs 8

        verax compile Qwen/Qwen3-0.6B --device h100 -o qwen3-h100
    """
    from verax.text.engine.llm import LLM

    if device is not None:
        _check_device(device)
    llm = LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory=kv_cache_memory,
        structured_outputs=structured_outputs,
    )
    files = llm.write_programs(output)
    size = sum(path.stat().st_size for path in files) / 1e6
    typer.echo(f"{output}: {len(files)} programs, {size:.1f} MB, compiled in {llm.compile_seconds:.1f} s")


def _check_device(name: str) -> None:
    """Raise unless the attached device is of this kind."""
    from verax import ops
    from verax.errors import InvalidParameterError
    from verax.plan.devices import find_device

    target = ops.target()
    wanted = "cpu" if name == "cpu" else find_device(name).kind
    if wanted != target.device_kind:
        raise InvalidParameterError(
            f"device: programs are compiled on the device itself, which chooses tiles by trying them; {name} is "
            f"{wanted!r}, attached is {target.device_kind!r}"
        )
