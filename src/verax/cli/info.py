"""`verax info`: the machine, the chosen implementation of each operation; or what a checkpoint or an adapter holds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options

if TYPE_CHECKING:
    from rich.table import Table


def info(
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint or adapter folder, GGUF file or hub id to describe instead of the machine."),
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure memory bandwidth and matmul rate (some seconds).")] = True,
    as_json: options.Json = False,
) -> None:
    """Describe the machine, or a checkpoint.

    The machine: versions, devices, memory, measured bandwidth and matmul rate, and the chosen implementation of each
    operation.

    With a checkpoint: its architecture, size, precision and tokenizer, without loading it. With a video model's folder:
    its kind, its defaults, and the parameters of its parts. With a LoRA adapter's folder: its base, rank and modules.

    \b
    Examples:
        verax info
        verax info --json --no-measure
        verax info Qwen3-0.6B-Q8_0.gguf
    """
    if model is not None:
        _show_model(model, as_json)
        return
    from rich.console import Console
    from rich.table import Table

    from verax import ops
    from verax._compat import enable_compilation_cache
    from verax.machine import fingerprint, measure_machine
    from verax.ops.cpu import library

    enable_compilation_cache()  # as every model does: so that the folder is known
    facts = {
        "machine": fingerprint(),
        "measured": measure_machine() if measure else None,
        "operations": ops.chosen_implementations(),
        "cpu_kernels": {"level": library.level(), "levels": library.levels(), "problem": library.problem()},
    }
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    console = Console()
    for title in ("machine", "measured"):
        if facts[title]:
            console.print(_table(title, facts[title]))
    table = Table("operation", "runs here", "other implementations", title="operations", title_justify="left")
    for name, row in facts["operations"].items():
        table.add_row(name, row["runs"], ", ".join(row["others"]))
    console.print(table)
    kernels = facts["cpu_kernels"]
    others = ", ".join(name for name in kernels["levels"] if name != kernels["level"])
    choice = f" (this machine also runs {others}; choose with VERAX_CPU_LEVEL)" if others else ""
    console.print(
        f"CPU kernels: {kernels['level']}{choice}" if kernels["level"] else kernels["problem"], soft_wrap=True
    )


def _show_model(model: str, as_json: bool) -> None:
    from rich.console import Console

    from verax.checkpoint.lora import CONFIG

    is_adapter = (Path(model).expanduser() / CONFIG).is_file()
    facts = _describe_adapter(model) if is_adapter else _describe(model)
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        Console().print(_table("adapter" if is_adapter else "checkpoint", facts))


def _describe(model: str) -> dict[str, Any]:
    """Facts about a checkpoint, from its configuration and the headers of its files."""
    from verax.checkpoint.video.folder import is_video_folder

    if is_video_folder(Path(model).expanduser()):
        from verax.video.load import describe_folder

        return describe_folder(model)
    from verax.checkpoint import Checkpoint
    from verax.models import encoder
    from verax.text.tokens.tokenizer import Tokenizer

    opened = Checkpoint.open(model)
    config = encoder(opened.config)[1]  # of a language model too
    tokenizer = Tokenizer.from_checkpoint(opened)
    names = {opened.place(name): name for name in opened.names()}.values()  # a tied head is there once
    sizes: dict[str, int] = {}
    for name in names:
        sizes[opened.kind(name)] = sizes.get(opened.kind(name), 0) + opened.size(name)
    facts = {
        "path": str(opened.folder),
        "architecture": opened.config["model_type"],
        "layers": config.num_hidden_layers + len(getattr(config, "shared_layers", ())),
        "hidden_size": getattr(config, "hidden_size", None),
        "heads": _heads(config),
        "context": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
        "parameters": sum(math.prod(opened.shape(name)) for name in names),
        "weights": [f"{kind} {size / 1e6:.1f} MB" for kind, size in sorted(sizes.items(), key=lambda item: -item[1])],
        "tokens": tokenizer.vocab_size,
        "end_of_text": [str(tokenizer.token(number)) for number in sorted(tokenizer.eos_token_ids)],
        "chat_template": tokenizer.has_chat_template,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}  # a registered model may lack some


def _heads(config: Any) -> str | None:
    """Numbers of heads, and their size where queries may have more of them than keys and values."""
    if not hasattr(config, "num_attention_heads"):
        return None
    if not hasattr(config, "num_key_value_heads"):
        return str(config.num_attention_heads)
    shared = f"{config.num_key_value_heads} of them for keys and values"
    return f"{config.num_attention_heads}, {shared}, of size {config.head_dim}"


def _describe_adapter(folder: str) -> dict[str, Any]:
    """Facts about a LoRA adapter, from its settings and the header of its file."""
    from verax.checkpoint.lora import Adapter

    adapter = Adapter.open(folder)
    pairs = adapter.pairs.values()
    return {
        "path": str(adapter.folder),
        "adapter": "LoRA",
        "base_model": adapter.base or "not named",
        "modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
        "adapted_weights": len(adapter.pairs),
        "rank": sorted({str(pair.rank) for pair in pairs}, key=int),
        "scale": sorted({f"{pair.scale:g}" for pair in pairs}),
        "parameters": adapter.num_parameters,
    }


def _table(title: str, facts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in facts.items():
        if value == {}:  # no setting of the environment
            continue
        if isinstance(value, dict):
            value = [f"{part}={one}" if isinstance(one, str) else f"{part} {one:,}" for part, one in value.items()]
        table.add_row(name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
    return table
