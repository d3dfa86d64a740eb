"""Options that several commands share, and their conversion to arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from verax.text.features.lora import LoRARequest
    from verax.text.tokens.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "DataParallelSize",
    "Dtype",
    "EncoderQuantization",
    "FrequencyPenalty",
    "IgnoreEos",
    "Json",
    "KvCacheDtype",
    "Lora",
    "MasterAddr",
    "MasterPort",
    "MaxModelLen",
    "MaxTokens",
    "MinP",
    "Model",
    "Nnodes",
    "NodeRank",
    "PresencePenalty",
    "Programs",
    "Quantization",
    "RepetitionPenalty",
    "RetryErrors",
    "Seed",
    "SpeculativeConfig",
    "Stop",
    "Temperature",
    "TensorParallelSize",
    "TopK",
    "TopP",
    "given",
    "lora_options",
    "lora_request",
    "with_chat_template",
]

_SAMPLING = "Sampling"
_HOSTS = "Several hosts"

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A checkpoint folder, GGUF file or hub id; the built-in model if left out."),
]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        "-q",
        help="int8 or int4: quantise while loading. dequantize: make floats of quantised weights.",
        show_default="as the checkpoint is",
    ),
]
EncoderQuantization = Annotated[
    str | None,
    typer.Option("--quantization", "-q", help="int8: matrix products of 8-bit integers.", show_default="none"),
]
KvCacheDtype = Annotated[
    str, typer.Option(help="Dtype of the key/value cache: auto (the weights'), bfloat16, float32, int8 or fp8.")
]
TensorParallelSize = Annotated[
    int, typer.Option(help="Devices that share the model: each holds a part of its weights and cache.", min=1)
]
DataParallelSize = Annotated[
    int, typer.Option(help="Replicas of the model, each on --tensor-parallel-size devices of its own.", min=1)
]
Nnodes = Annotated[
    int, typer.Option(help="Hosts that share the model; each runs this command.", min=1, rich_help_panel=_HOSTS)
]
NodeRank = Annotated[
    int, typer.Option(help="Number of this host; host 0 takes the requests.", min=0, rich_help_panel=_HOSTS)
]
MasterAddr = Annotated[
    str, typer.Option(help="Address of host 0, HOST or HOST:PORT, where it listens.", rich_help_panel=_HOSTS)
]
MasterPort = Annotated[
    int, typer.Option(help="Port of host 0, if the address has none.", min=1, max=65535, rich_help_panel=_HOSTS)
]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        help="Draft tokens and verify several in a step: JSON such as "
        '{"method": "ngram", "num_speculative_tokens": 4}.',
        show_default="no drafts",
    ),
]
Programs = Annotated[
    Path | None,
    typer.Option(help="Folder of verax compile: load its programs, and take its sizes.", exists=True, file_okay=False),
]
Lora = Annotated[
    str | None, typer.Option("--lora", help="Folder of a LoRA adapter (PEFT) that the model goes through.")
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="A Jinja file to render conversations with.", show_default="the checkpoint's", exists=True, dir_okay=False
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest text, prompt and answer, in tokens.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
RetryErrors = Annotated[
    bool, typer.Option("--retry-errors", help="Remove the errors from the output first, and run their lines again.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING, show_default="checkpoint's"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Likeliest tokens up to this total probability.", rich_help_panel=_SAMPLING, show_default="checkpoint's"
    ),
]
TopK = Annotated[
    int | None, typer.Option(help="This many likeliest tokens.", rich_help_panel=_SAMPLING, show_default="checkpoint's")
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Least probability, relative to the best token.", rich_help_panel=_SAMPLING, show_default="checkpoint's"
    ),
]
PresencePenalty = Annotated[
    float, typer.Option(help="Penalty of tokens that occurred before.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[float, typer.Option(help="Penalty per earlier occurrence.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Divides scores of earlier tokens.", rich_help_panel=_SAMPLING, show_default="checkpoint's"),
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the answer at this text; can be repeated.", rich_help_panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end of text.", rich_help_panel=_SAMPLING)
]


def given(**options: Any) -> dict[str, Any]:
    """Options that are not None. The checkpoint's generation_config.json has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


def lora_options(lora: str | None) -> dict[str, Any]:
    """Options of an engine that takes this adapter, whatever its rank; none without an adapter."""
    from verax.checkpoint.peft import Adapter

    return {} if lora is None else {"enable_lora": True, "max_lora_rank": Adapter.open(lora).rank}


def lora_request(lora: str | None) -> LoRARequest | None:
    """Adapter of a command's requests."""
    from verax.text.features.lora import LoRARequest

    return None if lora is None else LoRARequest("lora", 1, lora)


class HasTokenizer(Protocol):
    """Engine whose tokenizer can be replaced."""

    tokenizer: Tokenizer | None


def with_chat_template(llm: HasTokenizer, file: Path | None) -> None:
    """Render conversations with the template of a file, if one is given.

    Raises:
        typer.BadParameter: if the file is not UTF-8 text.
    """
    if file is None or llm.tokenizer is None:
        return
    try:
        llm.tokenizer = llm.tokenizer.with_chat_template(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"--chat-template: {file} is not UTF-8 text") from error
