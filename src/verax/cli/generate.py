"""`verax generate`: complete prompts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verax.cli import options
from verax.cli.lines import checked, read_lines

if TYPE_CHECKING:
    from verax.text.engine.llm import LLM
    from verax.text.engine.sampling_params import SamplingParams
    from verax.text.features.lora import LoRARequest
    from verax.text.features.structured_outputs import StructuredOutputs

__all__ = ["generate"]

MOST_AT_ONCE = 64
"""Largest number of sequences in one step: steps are compiled for sizes up to this. Few commands have more prompts."""

_FORM = "Form of the answer"


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to complete; standard input if left out.")] = None,
    model: options.Model = None,
    lora: options.Lora = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file with one prompt a line.")] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    json_schema: Annotated[
        str | None,
        typer.Option(help="Answer in JSON of this schema: a file, or the schema itself.", rich_help_panel=_FORM),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Answer what this regular expression matches.", rich_help_panel=_FORM)
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer one of these texts; to be repeated.", rich_help_panel=_FORM)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Answer by the grammar in this file (Lark or GBNF).", rich_help_panel=_FORM)
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Continuations of each prompt.", min=1)] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of this many best tokens.")
    ] = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    tensor_parallel_size: options.TensorParallelSize = 1,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    master_addr: options.MasterAddr = "127.0.0.1",
    master_port: options.MasterPort = 29501,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one step.", min=1)] = None,
    speculative_config: options.SpeculativeConfig = None,
    programs: options.Programs = None,
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init", help="Token ids instead of texts, in and out, for checkpoints without a tokenizer."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Complete prompts. One prompt is shown as it comes; several are completed together.

    Examples:

        verax generate "Once upon a time"

        verax generate --json --temperature 0 "12 + 30 =" "7 + 8 ="

        verax generate --model Qwen/Qwen3-0.6B --file prompts.txt --max-tokens 100

        cat prompts.txt | verax generate --json > answers.jsonl

        verax generate --skip-tokenizer-init "19 20 305 223"

        verax generate --choice yes --choice no "Is a fox an animal?"

        verax generate --model Qwen/Qwen3-0.6B --lora adapters/sql "List all users"
    """
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs: only --json shows them")
    texts = _prompts(prompts, file)
    inputs = [_token_ids(text) for text in texts] if skip_tokenizer_init else texts
    form = _form(json_schema, regex, choice, grammar)
    from verax.text.engine.llm import LLM

    llm = LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs or (None if programs else min(len(texts) * n, MOST_AT_ONCE)),
        programs=programs,
        seed=seed,
        skip_tokenizer_init=skip_tokenizer_init,
        structured_outputs=form is not None,
        speculative_config=speculative_config,
        **options.lora_options(lora),
    )
    if node_rank > 0:
        return llm.follow()
    adapter = options.lora_request(lora)
    params = llm.default_sampling_params(
        n=n,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        structured_outputs=form,
        **options.given(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
        ),
    )
    begin = time.perf_counter()
    if len(texts) == 1 and n == 1 and not (as_json or skip_tokenizer_init):
        count = _show_one(llm, texts[0], params, adapter)
    else:
        outputs = llm.generate(inputs, params, lora_request=adapter)
        count = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        for output in outputs:
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


def _show_one(llm: LLM, prompt: str, params: SamplingParams, adapter: LoRARequest | None) -> int:
    """Write a text as it comes, and return its number of tokens."""
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
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter('no prompt: give one as an argument, as in verax generate "Once upon a time"')
    return read_lines(file)


def _form(
    json_schema: str | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> StructuredOutputs | None:
    """Form of the answer; None if it is free."""
    from verax.text.features.structured_outputs import StructuredOutputs

    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        json_schema = _read("--json-schema", Path(json_schema))
    text = None if grammar is None else _read("--grammar", grammar)
    form = options.given(json=json_schema, regex=regex, choice=choice or None, grammar=text)
    return StructuredOutputs(**form) if form else None


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
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
