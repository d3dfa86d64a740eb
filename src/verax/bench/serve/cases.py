"""Load tests of a server, next to our engine without HTTP and llama.cpp's server with the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from verax import builtin, checkpoint
from verax.bench.harness import Benchmark, case_result, checkpoint_folder, time_sides
from verax.bench.results import rounds, sides_table, slug
from verax.bench.serve import load as load_test
from verax.bench.serve.load import Answer, Ask, Client, Load, Request, Run, Server, draw_requests, run_load, started
from verax.bench.settings import ServeSettings, TrafficSettings
from verax.bench.text.gguf_export import gguf_file
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.machine import num_cores
from verax.models import causal_lm
from verax.shapes import SHAPES
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

Side = Callable[..., Coroutine[Any, Any, Run]]
"""Side of a load test, called with a load, its requests and the number of the run."""

STARTS = "Servers start with empty caches. Their memory is the peak at the end of a load."
"""Note of a page that shows both."""

RUNS_OF_A_CASE = 1000
"""Difference of the run numbers of two cases. No two runs have the same prompts, which a server may have kept."""


def bench_serve(settings: ServeSettings) -> dict[str, Any]:
    """Load a server and, interleaved, other sides with the same requests. With llama.cpp, all read one GGUF file."""
    url, against, loads = settings.url, settings.against, load_test.make_loads(settings)
    program = find_llama_server(settings.llama_server) if "llama.cpp" in against else ""
    precision = settings.quantization or settings.dtype
    # A server that was there before may have kept the prompts of an earlier benchmark in its prefix cache.
    seed = 0 if url is None else secrets.randbits(32)
    _raise_open_files()
    benchmark, gguf, cases = Benchmark("serve"), None, []
    stack, chosen = contextlib.AsyncExitStack(), "verax serve" if url is None else "server"
    with served_model(settings.model, settings.shapes) as (model, path), asyncio.Runner() as runner:
        opened, argument = checkpoint.Checkpoint.open(path), str(path)
        traffic = replace(settings, vocab_size=settings.vocab_size or causal_lm(opened.config)[1].vocab_size)
        max_num_seqs = min(max(load.concurrency or 64 for load in loads), 256)
        engine: dict[str, Any] = {"dtype": settings.dtype, "quantization": settings.quantization}
        engine |= {"max_num_seqs": max_num_seqs, "max_model_len": traffic.longest}

        async def connect(client: Client) -> Client:
            stack.push_async_callback(client.close)
            await client.find_model()
            return client

        async def start(name: str, command: Callable[[int], Sequence[str]]) -> Client:
            servers[name] = await stack.enter_async_context(started(command, empty_caches=settings.starts))
            return await connect(Client(f"{servers[name].url}/v1"))

        async def start_engine() -> AsyncLLM:
            llm = AsyncLLM(argument, **engine)
            stack.push_async_callback(llm.shutdown)
            return llm

        try:
            sides: dict[str, Side] = {}
            servers: dict[str, Server] = {}
            if program:
                gguf, file = gguf_file(opened, precision, stack, vocabulary=path / "tokenizer.json")
                argument, engine["quantization"] = str(file), None  # all sides read the same file
                slots = max(load.concurrency or max_num_seqs for load in loads)
                command = partial(llama_server_command, program, file, slots, traffic.longest)
                client = runner.run(start("llama.cpp server", command))
                sides["llama.cpp server"] = partial(run_load, client.complete)
            if "offline" in against:
                sides["offline"] = partial(run_offline, LLM(argument, **engine))
            if "async" in against:
                sides["AsyncLLM"] = partial(run_load, partial(ask_engine, runner.run(start_engine())))
            own = Client(url, api_key=settings.api_key) if url is not None else None
            client = runner.run(connect(own) if own else start(chosen, partial(serve_command, argument, engine)))
            sides[chosen] = partial(run_load, client.complete)
            run = lambda side, load, number: runner.run(
                sides[side](load, draw_requests(traffic, number, seed=seed), number=number)
            )
            for number, load in enumerate(loads):
                case, answers = _run_case(run, load, list(sides), chosen, number, settings)
                case["check"] = runner.run(check_answers(client.complete, answers, number=settings.checks))
                for name, server in servers.items() if settings.starts else ():
                    case["sides"][name] |= server.measured()
                cases.append(case)
        finally:
            runner.run(stack.aclose())
    same = ("url", "shapes", "against", "dtype", "quantization", "runs", "warmup")
    asked = {
        **{name: getattr(settings, name) for name in same},
        "model": model if url is None else client.model,
        "gguf": gguf,
        "max_num_seqs": max_num_seqs,
        "traffic": {field.name: getattr(traffic, field.name) for field in fields(TrafficSettings)},
        "loads": [load.name for load in loads],
        "num_requests": [load.num_requests for load in loads],
        "duration": [load.duration for load in loads],
    }
    versions = {"llama_server": llama_server_version(program)} if program else {}
    name = str(asked["model"])
    words = (gguf, "llama.cpp") if gguf else (precision,)
    return benchmark.result(
        slug(name.rstrip("/").rpartition("/")[2].removeprefix("the "), *words, *asked["loads"]),
        title=f"Serve: {name}",
        intro=f"{f'a GGUF file of {gguf}, which all sides read' if gguf else precision}, at most {max_num_seqs} "
        f"sequences in a step; {_requests(traffic)}; {rounds(asked)}. The client runs on the same machine. "
        "Latencies are mean, p50 / p90 / p99 of complete answers, without slow readers. Ratios are of output tokens "
        "per second.",
        settings=asked,
        versions=versions,
        tables=[sides_table(cases, "output tokens/s", note=STARTS if settings.starts and servers else "")],
        notes=[
            "- {case}: of {checked} answers asked for again without load, {identical} were identical, {failed} failed; "
            "{lost} streams were lost.".format(**case, **case["check"])
            for case in cases
        ],
        cases=cases,
    )


def _raise_open_files() -> None:
    """Raise this process's limit of open files, which its children inherit, as far as the system lets it."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def served_model(model: str | None, shapes: str | None) -> Iterator[tuple[str, Path]]:
    """Checkpoint of a load test: its name and its path.

    Args:
        model: a checkpoint; the built-in one if None.
        shapes: of random weights in its place, a name out of `SHAPES`; they get a made-up tokenizer.
    """
    if shapes is not None:
        words, config = SHAPES[shapes]
        with checkpoint_folder(None, config) as path:
            _write_tokenizer(path, config["vocab_size"])
            yield f"random weights, {words}", path
    elif model is not None:
        yield model, checkpoint.resolve(model)
    else:
        yield "the built-in model", builtin.text_model()


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a `tokenizer.json` of `vocab_size` tokens: all bytes, then words, so that any id has a text."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for number in range(len(vocabulary), vocab_size):
        vocabulary["Ġw" if len(vocabulary) == 256 else f"Ġw{number}"] = number
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ġ", "w")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def serve_command(model: str | None, options: Mapping[str, Any], port: int) -> list[str]:
    """Command line of `verax serve`, with options of `LLM`."""
    words = [sys.executable, "-m", "verax", "serve", *([model] if model else [])]
    for name, value in options.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return [*words, "--host", "127.0.0.1", "--port", str(port)]


async def run_offline(llm: LLM, load: Load, requests: Iterator[Request], *, number: int = 0) -> Run:
    """Generate all answers of a closed loop by `LLM.generate`, as many at once as the load has in flight."""
    if load.concurrency is None or load.num_requests is None:
        raise InvalidParameterError("against: offline has no arrivals and no clock; give concurrency and num_requests")
    begin, answers = time.perf_counter(), []
    for _ in range(0, load.num_requests, load.concurrency):
        batch = list(itertools.islice(requests, min(load.concurrency, load.num_requests - len(answers))))
        sent = time.perf_counter()
        prompts = [list(request.prompt) for request in batch]
        outputs = llm.generate(prompts, [_params(request) for request in batch], use_tqdm=False)
        ended = time.perf_counter()
        for request, output in zip(batch, outputs, strict=True):
            (sample,) = output.outputs
            count = len(sample.token_ids)
            answers.append(Answer(request, sent, ended, text=sample.text, completion_tokens=count))
    return Run(tuple(answers), time.perf_counter() - begin)


async def ask_engine(llm: AsyncLLM, request: Request) -> Answer:
    """Answer of `AsyncLLM` in this process: what the engine gives to a server, without HTTP."""
    answer = Answer(request, time.perf_counter())
    async with contextlib.aclosing(llm.generate(list(request.prompt), _params(request))) as outputs:
        async for output in outputs:
            if request.leave_after is not None and len(answer.events) >= request.leave_after:
                answer.left = True
                break
            # A part without text, such as half a character, is not an event over HTTP either.
            if any(sample.text or sample.finish_reason for sample in output.outputs):
                answer.events.append(time.perf_counter())
            for sample in output.outputs:
                answer.text += sample.text
                answer.completion_tokens += len(sample.token_ids)
    answer.ended = time.perf_counter()
    return answer


def _params(request: Request) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)


def _run_case(
    run: Callable[[str, Load, int], Run],
    load: Load,
    sides: Sequence[str],
    chosen: str,
    number: int,
    settings: ServeSettings,
) -> tuple[dict[str, Any], Sequence[Answer]]:
    """Run a load on all sides in turn; one of the result's cases, and the answers of `chosen` in the counted runs."""
    taken: dict[str, list[Run]] = {name: [] for name in sides}

    def call(name: str) -> None:
        taken[name].append(run(name, load, number * RUNS_OF_A_CASE + len(taken[name])))

    calls = {name: partial(call, name) for name in sides}
    samples = time_sides(calls, runs=settings.runs, warmup=settings.warmup, title=load.name)
    case, rates = case_result(load.name, chosen, samples, 1.0), {}
    for name, runs in taken.items():
        counted, side = runs[-len(samples[name].seconds) :], case["sides"][name]
        side |= load_test.summarise(counted)
        side["rate"] = side["output_tokens_per_s"]
        side["rates"] = [load_test.summarise([run])["output_tokens_per_s"] for run in counted]
        rates[name] = np.array(side["rates"])
    # Ratios of output tokens per second: a round of a duration takes every side the same time.
    ratios = {name: rates[chosen] / rate for name, rate in rates.items() if name != chosen and rate.all()}
    case["ratios"] = {name: float(np.median(ratio)) for name, ratio in ratios.items()}
    case["ratio_p10_p90"] = {name: np.percentile(ratio, (10, 90)).tolist() for name, ratio in ratios.items()}
    return case, [answer for run in taken[chosen][-settings.runs :] for answer in run.answers]


async def check_answers(ask: Ask, answers: Sequence[Answer], *, number: int) -> dict[str, int]:
    """Ask `number` of the requests again, one by one, and count the answers that are the loaded server's.

    Decoding is greedy, so both answers are the same text, unless the numbers of another batch round differently where
    two tokens were almost equally likely.
    """
    whole = [answer for answer in answers if answer.completed]
    chosen = [whole[i * len(whole) // number] for i in range(number)] if len(whole) > number else whole
    again = [await ask(replace(answer.request, slow=False, leave_after=None)) for answer in chosen]
    return {
        "checked": len(chosen),
        "identical": sum(own.text == answer.text for answer, own in zip(chosen, again, strict=True) if own.completed),
        "failed": sum(not own.completed for own in again),
        "lost": sum((answer.error or "").startswith(("lost", "mixed")) for answer in answers),
    }


def _requests(traffic: TrafficSettings) -> str:
    """Lengths of the requests in words, and the clients that behave badly."""
    words = f"prompts of {traffic.input_tokens} tokens"
    if traffic.prefix_tokens:
        words += f" after one of {traffic.num_prefixes} prefixes of {traffic.prefix_tokens}"
    words += f", answers of {traffic.output_tokens}"
    for share, what in ((traffic.slow_readers, "read slowly"), (traffic.disconnect, "disconnect")):
        words += f"; {100 * share:.0f}% of the clients {what}" if share else ""
    return words


BUILT = Path("build/llama.cpp/bin/llama-server")
"""Path of the program that `make llama-server` builds, from the repository's root."""


def find_llama_server(given: str | None = None) -> str:
    """Path of the given program, or of llama.cpp's server on PATH, or of the one that make built."""
    named = [given] if given else [BUILT.name, str(BUILT.absolute())]
    program = next(filter(None, map(shutil.which, named)), None)
    if program is None:
        raise MissingDependencyError(
            f"against: llama.cpp needs its server, and no program {named[0]!r} was found; build it with make "
            "llama-server, or give its path with --llama-server or VERAX_LLAMA_SERVER"
        )
    return program


def llama_server_version(program: str) -> str:
    """Version that the program prints, with its commit."""
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"version: (.+)", printed.stdout + printed.stderr)
    return version[1] if version else "unknown"


def llama_server_command(program: str, file: Path, slots: int, length: int, port: int) -> list[str]:
    """Command line of the program: all cores, flash attention, and a slot of `length` tokens for each request."""
    threads = str(num_cores())
    words = [program, "--model", str(file), "--parallel", str(slots), "--ctx-size", str(slots * length)]
    words += ["--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--cache-ram", "0"]
    words += ["--n-gpu-layers", "0", "--host", "127.0.0.1", "--port", str(port)]
    return [*words, "--cont-batching", "--cache-prompt", "--metrics", "--no-webui"]
