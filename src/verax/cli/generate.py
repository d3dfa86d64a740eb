"""`verax generate`: complete prompts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.cli.files import checked, read_lines
from verax.cli.options import Flags

if TYPE_CHECKING:
    from verax.text.engine.llm import LLM
    from verax.text.engine.sampling_params import SamplingParams, StructuredOutputs
    from verax.text.features.lora import LoRARequest

MOST_AT_ONCE = 64
"""Largest number of sequences in one step: steps are compiled for sizes up to this. Few commands have more prompts."""

_FORM = "Form of the answer"


@options.with_flags
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to complete; standard input if left out.")] = None,
    model: options.Model = None,
    lora: options.Lora = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A file with one prompt a line; - for stdin.")
    ] = None,
    *,
    sampling: Annotated[dict[str, Any], options.sampling_flags("n", "logprobs", max_tokens=256)],
    json_schema: Annotated[
        str | None,
        typer.Option(help="Answer in JSON of this schema: a file, or the schema itself.", rich_help_panel=_FORM),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Answer what this regular expression matches.", rich_help_panel=_FORM)
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer one of these texts; can be repeated.", rich_help_panel=_FORM)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Answer by the grammar in this file (Lark or GBNF).", rich_help_panel=_FORM)
    ] = None,
    loading: Annotated[dict[str, Any], Flags(options.ModelOptions)],
    engine: Annotated[dict[str, Any], options.engine_flags("structured_outputs", *options.LORA)],
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init", help="Token ids instead of texts, in and out, for checkpoints without a tokenizer."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Complete prompts. One answer is shown while it is generated; several prompts are completed together.

    \b
    Examples:
        verax generate "Once upon a time"
        verax generate --json --temperature 0 --max-tokens 4 "12 + 30 =" "7 + 8 ="
        verax generate --model Qwen/Qwen3-0.6B --file prompts.txt --max-tokens 100
        cat prompts.txt | verax generate --json > answers.jsonl
        verax generate --skip-tokenizer-init "19 20 305 223"
        verax generate --choice yes --choice no "Is a fox an animal?"
        verax generate --model Qwen/Qwen3-0.6B --lora adapters/sql "List all users"
    """
    if sampling["logprobs"] is not None and not as_json:
        raise typer.BadParameter("--logprobs: only --json shows them")
    texts = _prompts(prompts, file)
    inputs = [_token_ids(text) for text in texts] if skip_tokenizer_init else texts
    form = _form(json_schema, regex, choice, grammar)
    from verax.text.engine.llm import LLM

    if engine["programs"] is None:
        engine["max_num_seqs"] = engine["max_num_seqs"] or min(len(texts) * sampling["n"], MOST_AT_ONCE)
    llm = LLM(
        model,
        skip_tokenizer_init=skip_tokenizer_init,
        structured_outputs=form is not None,
        **loading,
        **engine,
        **options.lora_options(lora),
    )
    if engine["node_rank"] > 0:
        return llm.follow()
    adapter = options.lora_request(lora)
    params = llm.default_sampling_params(structured_outputs=form, **options.given(**sampling))
    begin, failed = time.perf_counter(), False
    if len(texts) == 1 and params.n == 1 and not (as_json or skip_tokenizer_init):
        count = _show_one(llm, texts[0], params, adapter)
    else:
        outputs = llm.generate(inputs, params, lora_request=adapter)
        count = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        failed = any(output.error is not None for output in outputs)
        for output in outputs:
            if output.error is not None:
                sys.stderr.write(f"error: {output.error}\n")
            if as_json:
                sys.stdout.write(json.dumps(output.to_dict(), ensure_ascii=False) + "\n")
            else:
                for sample in output.outputs:
                    line = (
                        " ".join(map(str, sample.token_ids)) if skip_tokenizer_init else f"{output.prompt}{sample.text}"
                    )
                    sys.stdout.write(f"{line}\n")
    seconds = time.perf_counter() - begin
    drafts = "" if llm.spec_decode is None else f", {llm.spec_decode}"
    sys.stderr.write(f"{count} tokens in {seconds:.2f} s, {count / seconds:.0f} tokens/s{drafts}\n")
    if failed:
        raise typer.Exit(1)


def _show_one(llm: LLM, prompt: str, params: SamplingParams, adapter: LoRARequest | None) -> int:
    """Write a text while it is generated, and return its number of tokens."""
    pieces = llm.stream(prompt, params, adapter)  # first of all: it refuses what cannot be served
    sys.stdout.write(prompt)
    sys.stdout.flush()
    while True:
        try:
            sys.stdout.write(next(pieces))
            sys.stdout.flush()
        except StopIteration as end:
            sys.stdout.write("\n")
            return len(end.value.outputs[0].token_ids)


def _prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file:
        raise typer.BadParameter("give prompts or --file, not both")
    if prompts:
        return checked(prompts)
    return read_lines(file)


def _form(
    json_schema: str | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> StructuredOutputs | None:
    """Form of the answer; None if it is free."""
    from verax.text.engine.sampling_params import StructuredOutputs

    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        json_schema = _read("--json-schema", Path(json_schema))
    text = None if grammar is None else _read("--grammar", grammar)
    form = options.given(json=json_schema, regex=regex, choice=choice or None, grammar=text)
    return StructuredOutputs(**form) if form else None


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{option}: cannot read {path}: {error}") from error


def _token_ids(text: str) -> list[int]:
    """Token ids of a prompt such as `19 20 305` or `19,20,305`."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(
            f"--skip-tokenizer-init: expected token ids such as '19 20 305', got {text!r}"
        ) from None
