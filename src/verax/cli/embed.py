"""`verax embed`: turn sentences into vectors; `verax rerank`: order documents by how well they answer a query."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.cli.files import check_input, check_output, checked, open_results, read_lines, run_lines
from verax.cli.options import Flags

if TYPE_CHECKING:
    from verax.batch.results import LineCounts


@options.with_flags
def embed(
    sentences: Annotated[list[str] | None, typer.Argument(help="Sentences; standard input if left out.")] = None,
    model: options.Model = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A file with one sentence a line; - for stdin.")
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Lines are JSON objects: the sentence is in this field of each.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A file that ends in .npy (a row for each sentence, float32 or as --precision says) or .jsonl; JSONL "
            "to standard output if none. With --batch .jsonl or .parquet.",
        ),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            help="A file of any size: JSONL or Parquet with custom_id and text, or a text a line. Started again, it "
            "continues where it stopped."
        ),
    ] = None,
    retry_errors: options.RetryErrors = False,
    normalize: Annotated[bool, typer.Option(help="Vectors of length 1.")] = True,
    batch_size: options.BatchSize = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Prompt of the checkpoint that goes before each sentence, such as query.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text that goes before each sentence.")] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="First numbers of each vector that are kept (Matryoshka).")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="float32; int8 or uint8, in steps of the sentences' own ranges; binary or ubinary.")
    ] = "float32",
    task: Annotated[
        str | None, typer.Option(help="Task whose adapter is used, such as retrieval.query of jina-embeddings-v3.")
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Sparse vectors of a masked language model (SPLADE); also to an .npz file.")
    ] = False,
    *,
    loading: Annotated[dict[str, Any], Flags(options.EncoderOptions)],
) -> None:
    """Turn sentences into vectors, one for each line. JSONL has {"text": ..., "embedding": [...]} for each.

    With --field, each line keeps the other fields of its object, and blank lines are left out. With --sparse, the
    embedding is {"indices": [...], "values": [...]}, and an .npz file is SciPy's, a row for each.

    \b
    Examples:
        verax embed "A cat is asleep." "The cat sleeps."
        verax embed --file sentences.txt --output vectors.npy
        verax embed --batch sentences.jsonl --output vectors.parquet
        verax embed --model sentence-transformers/all-MiniLM-L6-v2 --file papers.jsonl --field title -o vectors.jsonl
        verax embed --model Qwen/Qwen3-Embedding-0.6B --prompt-name query --dimensions 256 "What is a mat?"
    """
    if prompt is not None and prompt_name is not None:
        raise typer.BadParameter("give --prompt or --prompt-name, not both")
    loading |= {"model": model, "dimensions": dimensions, "task": task}
    encoding: dict[str, Any] = dict(normalize=normalize, batch_size=batch_size, prompt_name=prompt_name, prompt=prompt)
    from verax.embed.modules import check_finite, check_precision

    check_precision(precision)
    if sparse:
        if model is None:
            raise typer.BadParameter("--sparse: it needs --model, a masked language model trained for it")
        if batch is not None or precision != "float32" or not normalize:
            raise typer.BadParameter("--sparse: it is not for --batch, --precision or --no-normalize")
        loading["output"] = "sparse"
        del encoding["normalize"]
    if batch is not None:
        if precision != "float32":
            raise typer.BadParameter("--precision: it is for sentences and --file; --batch writes float32")
        if sentences or file:
            raise typer.BadParameter("--batch: give it, or sentences, or --file, and no two of them")
        return _embed_batch(batch, field or "text", output, loading, encoding, retry_errors=retry_errors)
    if retry_errors:
        raise typer.BadParameter("--retry-errors: it is for --batch")
    write = _writer(output, (".npz" if sparse else ".npy", ".jsonl"))
    records = _records(sentences, file, field)
    texts = [record[field or "text"] for record in records]
    from verax.embed.encoder import Encoder

    encoder = Encoder(**loading)
    begin = time.perf_counter()
    if not sparse:
        encoding["precision"] = precision
    vectors = encoder.encode(texts, **encoding)
    seconds = time.perf_counter() - begin
    check_finite(vectors.sum(axis=1) if sparse else vectors)
    write(records, vectors)
    cut = _cut(encoder.truncated, encoder.max_length)
    speed = f"{len(texts) / seconds:,.0f} a second, vectors of {encoder.dimension}{cut}"
    sys.stderr.write(f"{len(texts)} sentences in {seconds:.2f} s, {speed}\n")


def _cut(truncated: int, max_length: int | None) -> str:
    """End of a report: the number of texts that were longer than the model reads; None for texts of several limits."""
    length = "" if max_length is None else f" to {max_length} tokens"
    return f", {truncated} cut{length}" if truncated else ""


def _embed_batch(
    path: Path,
    field: str,
    output: Path | None,
    loading: dict[str, Any],
    encoding: dict[str, Any],
    *,
    retry_errors: bool,
) -> None:
    """Append the vectors of a file's texts to the output, but for those that it has already."""
    from verax.batch.lines import CUSTOM_ID, InputFile, is_parquet, lines_path
    from verax.batch.work import LEAST, MOST, VectorLine, Vectors, write_vectors

    if output is None or not (output.suffix == ".jsonl" or is_parquet(output)):
        got = "none" if output is None else output
        raise typer.BadParameter(f"--output: {got}: expected a name that ends in .jsonl or .parquet with --batch")
    check_input(path, output, "--batch")
    file = InputFile(path, field, (CUSTOM_ID, field))
    results = open_results(output, VectorLine, retry_errors=retry_errors)  # before the model is loaded
    from verax.embed.encoder import Encoder

    encoder = Encoder(**loading)
    vectors = Vectors(encoder, field, **encoding)

    def summary(counts: LineCounts) -> str:
        cut = _cut(vectors.truncated, encoder.max_length)
        speed = counts.done / counts.seconds if counts.seconds else 0.0
        return f", {speed:,.0f} a second, vectors of {encoder.dimension}{cut}"

    good = run_lines("embedding", file, results, vectors, least=LEAST, most=MOST, summary=summary)
    if is_parquet(output):
        write_vectors(lines_path(output), output, encoder.dimension)
    if not good:
        raise typer.Exit(1)


def _records(sentences: list[str] | None, file: Path | None, field: str | None) -> list[dict[str, Any]]:
    """Objects of the sentences, in their order; without `field`, each has the text alone."""
    if sentences and file:
        raise typer.BadParameter("give sentences or --file, not both")
    if sentences and field:
        raise typer.BadParameter("--field: it is for lines of a file or standard input")
    # Blank lines are kept: a vector's number is its line's.
    lines = checked(sentences, "sentence") if sentences else read_lines(file, "sentence", keep_blank=True)
    if field is None:
        return [{"text": line} for line in lines]
    return [_object(line, number, field) for number, line in enumerate(lines, start=1) if line.strip()]


def _object(line: str, number: int, field: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise typer.BadParameter(f"line {number}: not valid JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        has = f"it has {', '.join(map(repr, record)) or 'none'}" if isinstance(record, dict) else "it is not an object"
        raise typer.BadParameter(f"line {number}: expected an object with a text in its field {field!r}; {has}")
    return record


def _writer(output: Path | None, suffixes: tuple[str, str]) -> Any:
    """Function that writes (records, vectors). A path that cannot be written is refused here, before the work."""
    if output is None:
        return lambda records, vectors: _write_lines(sys.stdout, records, vectors)
    if output.suffix not in suffixes:
        raise typer.BadParameter(f"--output: {output}: expected a name that ends in {' or '.join(suffixes)}")
    check_output(output)
    return lambda records, vectors: _write_file(output, records, vectors)


def _write_file(output: Path, records: Sequence[dict[str, Any]], vectors: Any) -> None:
    """Write a file atomically: write a temporary file, then rename it."""
    import numpy as np

    from verax.files import atomic_path

    with atomic_path(output) as partial:
        if output.suffix in (".npy", ".npz"):
            with partial.open("wb") as file:
                if output.suffix == ".npy":
                    np.save(file, vectors)
                else:
                    import scipy.sparse

                    scipy.sparse.save_npz(file, vectors)
        else:
            with partial.open("w", encoding="utf-8") as file:
                _write_lines(file, records, vectors)


def _write_lines(file: Any, records: Sequence[dict[str, Any]], vectors: Any) -> None:
    from verax.batch.work import numbers

    for i, record in enumerate(records):
        if hasattr(vectors, "indptr"):
            row = vectors[[i]]
            embedding: Any = {"indices": row.indices.tolist(), "values": numbers(row.data)}
        elif vectors.dtype.kind in "iu":
            embedding = vectors[i].tolist()
        else:
            embedding = numbers(vectors[i])
        file.write(json.dumps({**record, "embedding": embedding}, ensure_ascii=False) + "\n")


@options.with_flags
def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are to answer.")],
    documents: Annotated[
        list[str] | None, typer.Argument(help="Documents; lines of standard input if left out.")
    ] = None,
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="A checkpoint folder or hub id of a reranker.")],
    file: Annotated[
        Path | None, typer.Option("--documents", "-d", help="A file with one document a line; - for stdin.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", help="Only this many of the best documents.", min=1)
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="What a document has to do, for Qwen3-Reranker.")] = None,
    batch_size: options.BatchSize = None,
    loading: Annotated[dict[str, Any], Flags(options.EncoderOptions)],
    as_json: options.Json = False,
) -> None:
    """Put documents in the order in which they answer a query. --json gives the documents' numbers, from 0, and scores.

    \b
    Examples:
        verax rerank "Who sleeps?" "A cat is asleep." "The dog runs." --model BAAI/bge-reranker-v2-m3
        verax rerank "Who sleeps?" --model cross-encoder/ms-marco-MiniLM-L6-v2 --documents sentences.txt
        verax rerank "Who sleeps?" --model Qwen/Qwen3-Reranker-0.6B --dtype bfloat16 -d sentences.txt --top-k 3 --json
    """
    checked([query], "query")
    if documents and file:
        raise typer.BadParameter("give documents or --documents, not both")
    texts = checked(documents, "document") if documents else read_lines(file, "document")
    from verax.embed.modules import open_folder
    from verax.embed.reranker import Reranker
    from verax.embed.token_encoder import TokenEncoder, is_token_model

    reranker: Any
    if is_token_model(*open_folder(model, None)):
        if instruction is not None:
            raise typer.BadParameter("--instruction: a model of token vectors reads none")
        reranker, ranking = TokenEncoder(model, **loading), {}
        longest = None  # queries and documents have limits of their own
    else:
        reranker, ranking = Reranker(model, **loading), {"instruction": instruction}
        longest = reranker.max_length
    begin = time.perf_counter()
    ranked = reranker.rank(query, texts, top_k, batch_size=batch_size, **ranking)
    seconds = time.perf_counter() - begin
    if as_json:
        records = [{"index": one.index, "score": one.score, "text": one.text} for one in ranked]
        sys.stdout.write(json.dumps(records, indent=2, ensure_ascii=False) + "\n")
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("index", "score", "document")
        for one in ranked:
            table.add_row(str(one.index), f"{one.score:.4f}", Text(one.text))
        Console().print(table)
    cut = _cut(reranker.truncated, longest)
    sys.stderr.write(f"{len(texts)} documents in {seconds:.2f} s, {len(texts) / seconds:,.0f} a second{cut}\n")
