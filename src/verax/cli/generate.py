"""`verax generate`: complete prompts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["generate"]

MOST_AT_ONCE = 64
"""Sequences in one step: steps are compiled for sizes up to this, and a command line rarely brings more prompts."""


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to complete; standard input if left out.")] = None,
    model: options.Model = None,
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
    n: Annotated[int, typer.Option("-n", "--n", help="Continuations of each prompt.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of this many best tokens.")
    ] = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "bfloat16",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one step.")] = None,
    as_json: options.Json = False,
) -> None:
    """Complete prompts.

    Examples:

        verax generate "Once upon a time"

        verax generate --json --temperature 0 -n 1 "12 + 30 =" "7 + 8 ="

        verax generate --model Qwen/Qwen3-0.6B --file prompts.txt --max-tokens 100
    """
    texts = _prompts(prompts, file)
    from verax.text.llm import LLM

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs or min(len(texts) * n, MOST_AT_ONCE),
        seed=seed,
    )
    params = llm.default_sampling_params(
        n=n,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        **options.given(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
        ),
    )
    begin = time.perf_counter()
    if len(texts) == 1 and n == 1 and not as_json:
        count = _show_one(llm, texts[0], params)
    else:
        outputs = llm.generate(texts, params)
        count = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        for output in outputs:
            if as_json:
                sys.stdout.write(json.dumps(output.to_dict(), ensure_ascii=False) + "\n")
            else:
                for sample in output.outputs:
                    sys.stdout.write(f"{output.prompt}{sample.text}\n")
    seconds = time.perf_counter() - begin
    if sys.stderr.isatty():
        sys.stderr.write(f"{count} tokens in {seconds:.2f} s, {count / seconds:.0f} tokens/s\n")


def _show_one(llm, prompt, params) -> int:  # type: ignore[no-untyped-def]
    """Write a text as it comes; the number of tokens."""
    sys.stdout.write(prompt)
    pieces = llm.stream(prompt, params)
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
    if file is not None:
        if not file.is_file():
            raise typer.BadParameter(f"--file: no such file: {file}")
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    elif not prompts:
        if sys.stdin.isatty():
            raise typer.BadParameter('no prompt: give one as an argument, as in verax generate "Once upon a time"')
        prompts = [line for line in sys.stdin.read().splitlines() if line]
    if not prompts or not all(prompts):
        raise typer.BadParameter("no prompt: the input is empty")
    return prompts
