"""`verax rerank`: put documents in the order in which they answer a query."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options
from verax.cli.lines import checked, read_lines

__all__ = ["rerank"]


def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are to answer.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A checkpoint folder or hub id of a reranker.")],
    documents: Annotated[
        Path | None,
        typer.Option("--documents", "-d", help="A file with one document a line; standard input if left out."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", help="Only so many of the best documents.", min=1)
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="What a document has to do, for Qwen3-Reranker.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Most documents in one call of the device; as many as fit if absent.", min=1)
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens that are read of query and document.")] = None,
    dtype: options.Dtype = "float32",
    quantization: options.EncoderQuantization = None,
    as_json: options.Json = False,
) -> None:
    """Put documents in the order in which they answer a query. --json gives the documents' numbers, from 0, and scores.

    Examples:

        verax rerank "Who sleeps?" --model cross-encoder/ms-marco-MiniLM-L6-v2 --documents sentences.txt

        verax rerank "Who sleeps?" --model Qwen/Qwen3-Reranker-0.6B --dtype bfloat16 -d sentences.txt --top-k 3 --json
    """
    checked([query], "query")
    texts = read_lines(documents, "document")
    from verax.embed.reranker import Reranker

    reranker = Reranker(model, dtype=dtype, quantization=quantization, max_length=max_length)
    begin = time.perf_counter()
    ranked = reranker.rank(query, texts, top_k, instruction=instruction, batch_size=batch_size)
    seconds = time.perf_counter() - begin
    if as_json:
        found = [{"index": one.index, "score": one.score, "text": one.text} for one in ranked]
        sys.stdout.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("index", "score", "document")
        for one in ranked:
            table.add_row(str(one.index), f"{one.score:.4f}", Text(one.text))
        Console().print(table)
    cut = f", {reranker.truncated} cut to {reranker.max_length} tokens" if reranker.truncated else ""
    sys.stderr.write(f"{len(texts)} documents in {seconds:.2f} s, {len(texts) / seconds:,.0f} a second{cut}\n")
