"""`verax batch`: a file of requests in OpenAI's batch format, answered in one process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from verax.batch.lines import is_parquet, lines_path
from verax.batch.results import ResultFile
from verax.cli import options
from verax.cli.files import AGAIN, PIPE, check_input, counted, line_bar, open_results
from verax.cli.options import Flags
from verax.cli.serve import Models, ModelsFlags
from verax.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from verax.batch.lines import ParquetLines
    from verax.batch.requests import AnswerLine, BatchServer
    from verax.batch.results import LineCounts
    from verax.batch.run import BatchRun

SETTINGS = ("any_model_name", "max_embedding_inputs", "embedding_batch_size", "shutdown_timeout")
"""Settings of the server that matter without HTTP."""


@options.with_flags
def batch(
    input: Annotated[Path, typer.Option("--input", "-i", help="A file of requests (JSONL or Parquet); - for stdin.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file that answers are appended to; - for standard output.")
    ],
    model: options.ModelArgument = None,
    retry_errors: options.RetryErrors = False,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            help="Most requests that are with the engine at once.", min=1, show_default="twice --max-num-seqs"
        ),
    ] = None,
    *,
    models: ModelsFlags,
    settings: Annotated[dict[str, Any], Flags(ServerSettings, only=SETTINGS)],
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Models and options are the same as for verax serve. Started again with the same files, it continues after the
    answers that are there. The exit status is 1 if an answer in the output is an error.

    \b
    Examples:
        verax batch -i requests.jsonl -o answers.jsonl
        verax batch -i requests.jsonl -o answers.jsonl Qwen/Qwen3-0.6B --any-model-name
        verax batch -i requests.jsonl -o answers.jsonl --retry-errors
        verax batch -i requests.parquet -o answers.parquet --ray --replicas 8 --num-gpus 1
    """
    served = Models(model, *models)
    from verax.batch.requests import LocalServer
    from verax.batch.run import BatchRun

    if served.node_rank > 0:
        return served.follow()
    # Requests in flight are bounded here, and a line is in memory already.
    lifted = ("max_queued_embedding_inputs", "max_body_bytes", "max_video_body_bytes")
    checked = ServerSettings(disable_page=True, **dict.fromkeys(lifted, sys.maxsize), **settings)
    unbounded = {"max_queued_requests": sys.maxsize}
    with contextlib.ExitStack() as stack:
        # Both files before minutes of loading.
        requests, size = _input(input, output)
        answers = _output(output, retry_errors=retry_errors)
        if output != PIPE:
            stack.callback(answers.file.close)
        failed_before = answers.num_failed
        if served.on_ray:
            running = stack.enter_context(served.replicas(checked, **unbounded))
            server: BatchServer = running
            max_num_seqs = running.max_num_seqs
        else:
            local = served.loader(checked, **unbounded)()
            server, max_num_seqs = LocalServer(local), local.engine.max_num_seqs
        with line_bar("batch", size) as show:
            run = BatchRun(
                server,
                requests,
                answers,
                max_in_flight=max_in_flight or 2 * max_num_seqs,
                clips=None if output == PIPE else output.with_suffix(".clips").absolute(),
                shutdown_timeout=checked.shutdown_timeout,
                report=show,
            )
            counts = run.run()
        if is_parquet(output) and run.complete:
            from verax.batch.requests import write_answers

            write_answers(lines_path(output), output)
    sys.stderr.write(f"{_summary(counts, failed_before)}\n")
    if not run.complete:
        sys.stderr.write(f"stopped before the end{'' if PIPE in (input, output) else AGAIN}\n")
    if status := _status(run, failed_before):
        raise typer.Exit(status)


def _input(path: Path, output: Path) -> tuple[BinaryIO | ParquetLines, int | None]:
    """The requests, which their reader closes, and their size in bytes, if it is known."""
    if path == PIPE:
        # Not sys.stdin, whose lock the interpreter takes at its end, while a thread may still read.
        return open(0, "rb", closefd=False), None
    check_input(path, output, "--input")
    if is_parquet(path):
        from verax.batch.requests import request_lines

        return request_lines(path), None
    return path.open("rb"), path.stat().st_size


def _output(path: Path, *, retry_errors: bool) -> ResultFile[AnswerLine]:
    from verax.batch.requests import AnswerLine

    if path != PIPE:
        return open_results(path, AnswerLine, retry_errors=retry_errors)
    if retry_errors:
        raise typer.BadParameter("--retry-errors: it needs a file of answers, not standard output")
    return ResultFile(sys.stdout.buffer, AnswerLine)


def _summary(counts: LineCounts, failed_before: int) -> str:
    kind, tokens = ("output", counts.output_tokens) if counts.output_tokens else ("prompt", counts.prompt_tokens)
    speed = tokens / counts.seconds if counts.seconds else 0.0
    return f"{counted(counts, failed_before)}; {tokens:,} {kind} tokens, {speed:,.0f} tokens/s"


def _status(run: BatchRun, failed_before: int) -> int:
    """Exit status: 128 and the signal that stopped the run; 1 if the output has errors."""
    if run.stopped_by is not None and not run.complete:
        return 128 + run.stopped_by
    return 1 if run.counts.failed or failed_before else 0
