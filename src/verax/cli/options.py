"""Flags of commands, derived from tables of options, and options that several commands share.

A command takes a table's options as one dictionary: a parameter annotated `Annotated[dict[str, Any], Flags(Table)]`
becomes a flag for each option of the table in the signature that Typer reads (`with_flags`). A parameter with several
`Flags` gets a list of dictionaries.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from verax.errors import VeraxError
from verax.options import option, options_of
from verax.sampling_fields import SamplingFields
from verax.text.engine.engine_config import EngineConfig

if TYPE_CHECKING:
    from verax.text.features.lora import LoRARequest


class Command(TyperCommand):
    """Command whose help has a section for each panel of options.

    Typer's tables cut flags with an ellipsis where a terminal has 80 columns, and in a pipe. The application therefore
    has `rich_markup_mode=None`, whose help has no panels. A paragraph of a docstring that begins with `\\b` is printed
    as it is, so that a command of more than a line can be copied.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each parameter of a command, in sections."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or plain, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class VerdictCommand(Command):
    """Command whose exit status 1 is a verdict, such as of a comparison: what fails in it ends with 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (VeraxError, OSError) as error:
            raise typer.BadParameter(str(error), ctx=ctx) from error


@dataclass(frozen=True)
class Flags:
    """Options of a table that a command takes.

    `only`: names of the options; all if None. `shown`: defaults as the help text shows them, where they differ from the
    table's. `underscores`: True if flags are also spelled with underscores.
    """

    table: type
    _: KW_ONLY
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    panel: str | None = None
    underscores: bool = False

    def __post_init__(self) -> None:
        if unknown := {*(self.only or ()), *self.without, *self.defaults, *self.shown} - {*options_of(self.table)}:
            raise ValueError(f"{self.table.__name__} has no options {', '.join(sorted(unknown))}")

    @property
    def names(self) -> list[str]:
        """Names of the options."""
        chosen = options_of(self.table) if self.only is None else self.only
        return [name for name in options_of(self.table) if name in chosen and name not in self.without]

    def default(self, name: str) -> Any:
        """Default of a flag; None where the checkpoint's generation_config.json may have one."""
        declared = options_of(self.table)[name]
        default = self.defaults.get(name, None if declared.recommended else declared.default)
        return None if default == () else default

    def flag(self, name: str) -> Any:
        """Typer's option for an option of the table."""
        declared = options_of(self.table)[name]
        flags = list(declared.flags) if declared.flags and not self.prefix else []
        own = [f"--{(self.prefix + name).replace('_', '-')}"]
        negatable = declared.kind is bool and self.default(name) is not False
        if declared.kind is bool and not negatable:
            flags = flags or own  # else Typer adds a flag for False
        if self.underscores and not negatable:
            dashed = [spelled for spelled in flags or own if "-" in spelled[2:]]
            flags = (flags or own) + [f"--{spelled[2:].replace('-', '_')}" for spelled in dashed]
        number = declared.kind in (int, float)
        shown = self.shown.get(name, "checkpoint's" if declared.recommended else declared.shown)
        return typer.Option(
            *flags,
            help=declared.help,
            min=None if declared.above or not number else declared.low,
            max=declared.high if number else None,
            exists=declared.path is not None,
            file_okay=declared.path != "folder",
            dir_okay=declared.path != "file",
            envvar=declared.envvar,
            rich_help_panel=self.panel or declared.panel,
            show_default=True if shown is None else shown or False,
        )

    def parameters(self) -> list[inspect.Parameter]:
        """Parameters for Typer, one for each option."""
        parameters = []
        for name in self.names:
            declared, default = options_of(self.table)[name], self.default(name)
            kind: Any = list[str] if declared.repeated else declared.kind
            parameters.append(
                inspect.Parameter(
                    self.prefix + name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind | None if default is None else kind, self.flag(name)],
                )
            )
        return parameters

    def take(self, values: dict[str, Any]) -> dict[str, Any]:
        """Remove the options' values from a command's arguments, and return them by the names of the table."""
        taken = {name: values.pop(self.prefix + name) for name in self.names}
        repeated = [name for name in taken if options_of(self.table)[name].repeated]
        return taken | {name: tuple(taken[name] or ()) for name in repeated}


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for commands: a parameter that is annotated with `Flags` becomes the flags, and gets their values."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, list[Flags]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        tables = [one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Flags)]
        if tables:
            groups[parameter.name] = tables
            parameters += [derived for table in tables for derived in table.parameters()]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        taken = {name: [table.take(values) for table in tables] for name, tables in groups.items()}
        return command(**{name: one[0] if len(one) == 1 else one for name, one in taken.items()}, **values)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class ModelOptions:
    """Options of a language model's load, in addition to the engine's."""

    dtype: str = option("bfloat16", "bfloat16 or float32.")
    quantization: str | None = option(
        None,
        "int8, int4, or w8a8 (int8, inputs too): quantise while loading; dequantize: make floats of quantised weights.",
        flags=("--quantization", "-q"),
        shown="the checkpoint's",
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub id.")


@dataclass(frozen=True)
class EncoderOptions:
    """Options of the load of an encoder or a reranker."""

    dtype: str = option("float32", "float32 or bfloat16.")
    quantization: str | None = option(
        None, "int8: matrix products of 8-bit integers.", flags=("--quantization", "-q"), shown="none"
    )
    max_length: int | None = option(None, "Tokens that are read of a text.", low=1, shown="all that the model reads")


LORA = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")
"""Options of the engine that commands with one adapter set by themselves."""


def engine_flags(*without: str, **defaults: Any) -> Flags:
    """Flags of the engine, without some of its options and with defaults of the command's own."""
    return Flags(EngineConfig, without=without, defaults=defaults)


def sampling_flags(*more: str, **defaults: Any) -> Flags:
    """Flags of the sampling parameters that have a panel in the help text, and of some more."""
    declared = options_of(SamplingFields).values()
    names = tuple(one.name for one in declared if one.panel is not None or one.name in more)
    return Flags(SamplingFields, only=names, defaults=defaults)


Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A checkpoint folder, GGUF file or hub id; the built-in model if left out."),
]
ModelArgument = Annotated[
    str | None, typer.Argument(help="A checkpoint folder, GGUF file or hub id; the built-in model if left out.")
]
Dtype = Annotated[str, Flags(ModelOptions).flag("dtype")]

Lora = Annotated[
    str | None, typer.Option("--lora", help="Folder of a LoRA adapter (PEFT) that the model is used with.")
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="A Jinja file to render conversations with.", show_default="the checkpoint's", exists=True, dir_okay=False
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Most texts in one call of the device; as many as fit if left out.", min=1)
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
RetryErrors = Annotated[
    bool, typer.Option("--retry-errors", help="Remove the errors from the output first, and run their lines again.")
]


def given(**options: Any) -> dict[str, Any]:
    """Options that are not None. The checkpoint's generation_config.json has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def lora_options(lora: str | None) -> dict[str, Any]:
    """Options of an engine that takes this adapter, whatever its rank; none without an adapter."""
    from verax.checkpoint.lora import Adapter

    return {} if lora is None else {"enable_lora": True, "max_lora_rank": Adapter.open(lora).rank}


def lora_request(lora: str | None) -> LoRARequest | None:
    """Adapter of a command's requests."""
    from verax.text.features.lora import LoRARequest

    return None if lora is None else LoRARequest("lora", 1, lora)


def with_chat_template(llm: Any, file: Path | None) -> None:
    """Render the conversations of an engine, whose tokenizer is replaced, with a file's template, if one is given."""
    if file is None:
        return
    try:
        llm.tokenizer = llm.tokenizer.with_chat_template(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"--chat-template: {file} is not UTF-8 text") from error
