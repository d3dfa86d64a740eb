"""`verax compile`: programs of a language model, compiled before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verax.cli import options
from verax.cli.files import check_folder
from verax.cli.options import Flags
from verax.text.engine.engine_config import EngineConfig

ENGINE = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "kv_cache_dtype"),
    "structured_outputs",
)
"""Options of the engine that its programs depend on."""


@options.with_flags
def compile(
    model: options.ModelArgument = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the programs.")] = Path("programs"),
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device, such as h100: an error where another is attached.", show_default="attached"),
    ] = None,
    *,
    loading: Annotated[dict[str, Any], Flags(options.ModelOptions, without=("revision",))],
    engine: Annotated[dict[str, Any], Flags(EngineConfig, only=ENGINE)],
) -> None:
    """Compile a language model for the attached device.

    Other commands take the folder as --programs: starts with it trace, lower and compile nothing. The folder belongs to
    one kind of device, one version of JAX and verax, and one configuration; another is refused by name.

    \b
    Examples:
        verax compile -o programs --max-num-seqs 8
        verax compile Qwen/Qwen3-0.6B --device h100 -o qwen3-h100
    """
    from verax.text.engine.llm import LLM
    from verax.text.step.program import check_replaceable

    check_replaceable(output)  # before minutes of compiling
    check_folder(output)
    if device is not None:
        _check_device(device)
    llm = LLM(model, skip_tokenizer_init=True, **loading, **engine)
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
