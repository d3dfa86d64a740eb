"""Load tests of a server, next to our engine without HTTP and llama.cpp's server with the same requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import tokenizers

from verax import builtin, checkpoint, progress
from verax.bench.harness import Benchmark, Side, case_result, check_names, checkpoint_folder, time_sides
from verax.bench.results import rounds, slug, table
from verax.bench.serve.client import Client, raise_open_files, started
from verax.bench.serve.load import (
    LATENCIES,
    Answer,
    Ask,
    Load,
    Request,
    Run,
    Traffic,
    run_load,
    summarise,
)
from verax.errors import InvalidParameterError
from verax.models import causal_lm
from verax.shapes import SHAPES

if TYPE_CHECKING:
    from verax.text.engine.async_llm import AsyncLLM

__all__ = ["BASELINES", "EngineOptions", "bench_serve", "check_answers", "served_model"]

BASELINES = ("offline", "async", "llama.cpp")
"""Sides besides the server: `LLM.generate`, `AsyncLLM`, and llama.cpp's server with the same weights."""

OURS = "verax serve"

RUNS_OF_A_CASE = 1000
"""Difference of the run numbers of two cases. No two runs have the same prompts, which a server may have kept."""


@dataclass(frozen=True)
class EngineOptions:
    """Options that our engine has on every side: of `verax serve`, and of `LLM` and `AsyncLLM`."""

    model: str | None = None
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None

    def command(self, port: int) -> list[str]:
        """Command line of `verax serve`."""
        words = [sys.executable, "-m", "verax", "serve", *([self.model] if self.model else [])]
        for name, value in self.keywords().items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return [*words, "--host", "127.0.0.1", "--port", str(port)]

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`, but for the model."""
        return {name: value for name, value in asdict(self).items() if name != "model" and value is not None}


def bench_serve(
    loads: Sequence[Load],
    make_traffic: Callable[[int], Traffic],
    *,
    url: str | None = None,
    api_key: str | None = None,
    vocab_size: int | None = None,
    engine: EngineOptions | None = None,
    shapes: str | None = None,
    runs: int = 3,
    warmup: int = 1,
    against: Sequence[str] = (),
    goodput: Mapping[str, float] | None = None,
    checks: int = 8,
    llama_server: str | None = None,
) -> dict[str, Any]:
    """Load a server and, interleaved, other sides with the same requests. With llama.cpp, all run the same GGUF file.

    The arguments are the options of `verax bench serve`. Each of `loads` is a case; `make_traffic` makes the requests,
    of a vocabulary size; `engine` has the options of the server that is started, and of the sides without one.

    Raises:
        InvalidParameterError: for options that do not go together.
        MissingDependencyError: without llama.cpp's server, if it is to run.
        VeraxError: if a server does not start or does not answer.
    """
    asked = engine = engine or EngineOptions()
    check_names("against", against, BASELINES)
    if url is not None and against and engine.model is None:
        raise InvalidParameterError("model: with a url, the other sides need the model of that server")
    if url is not None and vocab_size is None and engine.model is None:
        raise InvalidParameterError("vocab_size: with a url, give its model's vocabulary size, or the model itself")
    gguf, versions, command = None, {}, None
    if "llama.cpp" in against:
        from verax.bench.serve.llama_cpp import llama_cpp_server

        command = llama_cpp_server(llama_server)
        versions["llama_server"] = command.version
    raise_open_files()
    benchmark = Benchmark("serve")
    stack = contextlib.AsyncExitStack()
    with served_model(engine.model, shapes, engine.dtype) as (model, argument, path), asyncio.Runner() as runner:
        size = vocab_size or causal_lm(checkpoint.Checkpoint.open(path).config)[1].vocab_size
        traffic = make_traffic(size)
        engine = replace(engine, model=argument, max_model_len=engine.max_model_len or traffic.longest)
        try:
            sides: dict[str, _LoadSide] = {}
            if command is not None:
                slots = max(load.concurrency or engine.max_num_seqs for load in loads)
                gguf = command.write(path, engine.quantization or engine.dtype, stack)
                engine = replace(engine, model=str(command.path), quantization=None)  # all sides read the same file
                arguments = command.arguments(slots=slots, length=traffic.longest)
                sides["llama.cpp server"] = runner.run(_start(stack, arguments, traffic))
            if "offline" in against:
                sides["offline"] = _OfflineSide(engine, traffic)
            if "async" in against:
                sides["AsyncLLM"] = runner.run(_start_async(stack, engine, traffic))
            if url is None:
                name, ours = OURS, runner.run(_start(stack, engine.command, traffic))
            else:
                name, ours = "server", runner.run(_connect(stack, Client(url, api_key=api_key), traffic))
            sides[name] = ours
            cases = [
                _run_case(runner, load, sides, name, number, runs, warmup, goodput, checks)
                for number, load in enumerate(loads)
            ]
        finally:
            runner.run(stack.aclose())
    settings = {
        "model": model if url is None else ours.client.model,
        "url": url,
        "shapes": shapes,
        "against": list(against),
        "dtype": asked.dtype,
        "quantization": asked.quantization,
        "gguf": gguf,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_num_seqs": engine.max_num_seqs,
        "traffic": asdict(traffic),
        "loads": [load.name for load in loads],
        "num_requests": [load.num_requests for load in loads],
        "duration": [load.duration for load in loads],
        "goodput_ms": dict(goodput or {}),
        "runs": runs,
        "warmup": warmup,
    }
    _ = benchmark.limits  # what the page and `verax bench docs` show of the machine
    return benchmark.result(settings=settings, versions=versions, **_page(settings, cases), cases=cases)


@contextlib.contextmanager
def served_model(model: str | None, shapes: str | None, dtype: str) -> Iterator[tuple[str, str | None, Path]]:
    """Checkpoint of a load test: its name, the model as `verax serve` takes it (None: the built-in one), its path.

    Args:
        model: a checkpoint; the built-in one if None.
        shapes: of random weights in its place, a name out of `SHAPES`; they get a made-up tokenizer.
        dtype: of the weights in the engine.

    Raises:
        InvalidParameterError: for unknown shapes, or shapes together with a model.
    """
    if shapes is not None and (model is not None or shapes not in SHAPES):
        raise InvalidParameterError(f"shapes: expected one of {', '.join(SHAPES)} and no model, got {shapes!r}")
    if shapes is not None:
        words, config = SHAPES[shapes]
        with checkpoint_folder(None, dtype, config) as path:
            _write_tokenizer(path, config["vocab_size"])
            yield f"random weights, {words}", str(path), path
    elif model is not None:
        yield model, model, Path(checkpoint.resolve(model))
    else:
        yield "the built-in model", None, builtin.text_model()


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


class _LoadSide(Protocol):
    """A side that answers the requests of a load."""

    async def run(self, load: Load, number: int) -> Run:
        """Put a load on it: the run's number decides on its prompts."""
        ...


class _ServerSide:
    """A server over HTTP."""

    def __init__(self, client: Client, traffic: Traffic):
        self.client, self._traffic = client, traffic

    async def run(self, load: Load, number: int) -> Run:
        """Put a load on the server."""
        return await run_load(self.client.complete, load, self._traffic.requests(number), number=number)


async def _start(
    stack: contextlib.AsyncExitStack, command: Callable[[int], Sequence[str]], traffic: Traffic
) -> _ServerSide:
    server = await stack.enter_async_context(started(command))
    return await _connect(stack, Client(f"{server.url}/v1"), traffic)


async def _connect(stack: contextlib.AsyncExitStack, client: Client, traffic: Traffic) -> _ServerSide:
    stack.push_async_callback(client.close)
    await client.find_model()
    return _ServerSide(client, traffic)


class _OfflineSide:
    """`LLM.generate` of the same prompts, as many at once as the load has in flight."""

    def __init__(self, engine: EngineOptions, traffic: Traffic):
        from verax.text.engine.llm import LLM

        self._llm, self._traffic = LLM(engine.model, **engine.keywords()), traffic

    async def run(self, load: Load, number: int) -> Run:
        """Generate all answers of a closed loop.

        Raises:
            InvalidParameterError: for a load without a concurrency or a number of requests.
        """
        if load.concurrency is None or load.num_requests is None:
            raise InvalidParameterError(
                "against: offline has no arrivals and no clock; give concurrency and num_requests"
            )
        begin = time.perf_counter()
        requests = list(itertools.islice(self._traffic.requests(number), load.num_requests))
        answers: list[Answer] = []
        for first in range(0, len(requests), load.concurrency):
            batch = requests[first : first + load.concurrency]
            sent = time.perf_counter()
            outputs = self._llm.generate(
                [list(request.prompt) for request in batch], [_params(request) for request in batch], use_tqdm=False
            )
            ended = time.perf_counter()
            for request, output in zip(batch, outputs, strict=True):
                sample = output.outputs[0]
                answers.append(
                    Answer(
                        request,
                        sent,
                        ended,
                        text=sample.text,
                        prompt_tokens=len(request.prompt),
                        completion_tokens=len(sample.token_ids),
                    )
                )
        return Run(tuple(answers), time.perf_counter() - begin)


class _AsyncSide:
    """`AsyncLLM` in this process: what the engine gives to a server, without HTTP."""

    def __init__(self, llm: AsyncLLM, traffic: Traffic):
        self._llm, self._traffic = llm, traffic

    async def run(self, load: Load, number: int) -> Run:
        """Put a load on the engine."""
        return await run_load(self._ask, load, self._traffic.requests(number), number=number)

    async def _ask(self, request: Request) -> Answer:
        answer = Answer(request, time.perf_counter(), prompt_tokens=len(request.prompt))
        async with contextlib.aclosing(self._llm.generate(list(request.prompt), _params(request))) as outputs:
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


async def _start_async(stack: contextlib.AsyncExitStack, engine: EngineOptions, traffic: Traffic) -> _AsyncSide:
    from verax.text.engine.async_llm import AsyncLLM

    llm = AsyncLLM(engine.model, **engine.keywords())
    stack.push_async_callback(llm.shutdown)
    return _AsyncSide(llm, traffic)


def _params(request: Request) -> Any:
    from verax.text.engine.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)


def _run_case(
    runner: asyncio.Runner,
    load: Load,
    sides: Mapping[str, _LoadSide],
    chosen: str,
    number: int,
    runs: int,
    warmup: int,
    goodput: Mapping[str, float] | None,
    checks: int,
) -> dict[str, Any]:
    """Run a load on all sides in turn, then check answers of the server `chosen`; one of the result's cases."""
    taken: dict[str, list[Run]] = {name: [] for name in sides}

    def run(name: str) -> None:
        taken[name].append(runner.run(sides[name].run(load, number * RUNS_OF_A_CASE + len(taken[name]))))

    with progress.bar(load.name) as report:
        calls = {name: Side(partial(run, name)) for name in sides}
        samples = time_sides(calls, runs=runs, warmup=warmup, report=report)
    counted = {name: all_runs[-len(samples[name].seconds) :] for name, all_runs in taken.items()}
    case = case_result(load.name, chosen, samples, 1.0)
    rates = {}
    for name, side_runs in counted.items():
        side = case["sides"][name]
        side |= summarise(side_runs, goodput)
        side["rate"] = side["output_tokens_per_s"]
        rates[name] = np.array([_rate(run) for run in side_runs])
    # Ratios of output tokens per second: a round of a duration takes every side the same time.
    ratios = {name: rates[chosen] / rate for name, rate in rates.items() if name != chosen and rate.all()}
    case["ratios"] = {name: float(np.median(ratio)) for name, ratio in ratios.items()}
    case["ratio_p10_p90"] = {name: np.percentile(ratio, (10, 90)).tolist() for name, ratio in ratios.items()}
    server = cast(_ServerSide, sides[chosen])
    case["check"] = runner.run(check_answers(server.client.complete, taken[chosen][-1].answers, number=checks))
    return case


def _rate(run: Run) -> float:
    return sum(answer.completion_tokens for answer in run.answers if answer.completed) / run.seconds


async def check_answers(ask: Ask, answers: Sequence[Answer], *, number: int) -> dict[str, int]:
    """Ask some requests again, one by one, and count the answers that are the loaded server's.

    Decoding is greedy, so both answers are the same text, unless the numbers of another batch round differently where
    two tokens were almost equally likely.

    Args:
        ask: sends a request to the server, which has no other load now.
        answers: of the load.
        number: requests to ask again, evenly spread over the load.
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


def _page(settings: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name, title, intro, tables and notes of a result."""
    precision = settings["quantization"] or settings["dtype"]
    model = str(settings["model"])
    words = [model.rstrip("/").rpartition("/")[2].removeprefix("the "), settings["gguf"] or precision]
    words += ["llama.cpp"] if settings["gguf"] else []
    if settings["gguf"]:
        precision = f"a GGUF file of {settings['gguf']}, which all sides read"
    return {
        "name": slug(*words, *settings["loads"]),
        "title": f"Serve: {model}",
        "intro": f"{precision}, at most {settings['max_num_seqs']} sequences in a step; "
        f"{_requests(settings['traffic'])}; {rounds(settings)}. The client runs on the same machine. "
        "Latencies are mean, p50 / p90 / p99 of complete answers, without slow readers.",
        "tables": [_table(case, settings["goodput_ms"]) for case in cases],
        "notes": [note for case in cases for note in _case_notes(case)],
    }


def _requests(traffic: Mapping[str, Any]) -> str:
    """Lengths of the requests in words, and the clients that behave badly."""
    words = f"prompts of {traffic['input_tokens']} tokens"
    if traffic["prefix_tokens"]:
        words += f" after one of {traffic['num_prefixes']} prefixes of {traffic['prefix_tokens']}"
    words += f", answers of {traffic['output_tokens']}"
    if traffic["range_ratio"]:
        words += f", lengths up to {100 * traffic['range_ratio']:.0f}% shorter or longer"
    for share, what in (("slow_readers", "read slowly"), ("disconnect", "disconnect")):
        if traffic[share]:
            words += f"; {100 * traffic[share]:.0f}% of the clients {what}"
    return words


def _table(case: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, Any]:
    def latency(key: str) -> Callable[[Any], str]:
        def cell(row: Any) -> str:
            found = row[1]["latency_ms"][key]
            return "-" if found is None else "{mean:.1f}, {p50:.1f} / {p90:.1f} / {p99:.1f}".format(**found)

        return cell

    columns: dict[str, Callable[[Any], object]] = {
        "side": lambda row: row[0],
        "requests": lambda row: row[1]["completed"],
        "req/s": lambda row: f"{row[1]['requests_per_s']:.2f}",
        "output tokens/s": lambda row: f"{row[1]['output_tokens_per_s']:.1f}",
        **{f"{'E2E' if key == 'e2el' else key.upper()} ms": latency(key) for key in LATENCIES},
    }
    if limits:
        words = ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items())
        columns[f"goodput ({words}) req/s"] = lambda row: f"{row[1]['goodput_requests_per_s']:.2f}"
    return table(case["sides"].items(), columns, title=case["case"])


def _case_notes(case: Mapping[str, Any]) -> list[str]:
    begin, notes = f"- {case['case']}:", []
    for name, ratio in case["ratios"].items():
        low, high = case["ratio_p10_p90"][name]
        notes.append(
            f"{begin} {case['chosen']} / {name}, output tokens per second: {ratio:.2f}x (P10-P90 of rounds "
            f"{low:.2f}-{high:.2f})."
        )
    for name, side in case["sides"].items():
        left = [f"{side['disconnected']} clients disconnected"] if side["disconnected"] else []
        failures = [f"{count} x {kind}" for kind, count in side["errors"].items()]
        notes += [f"{begin} {name}: {'; '.join(left + failures)}."] if left or failures else []
    check = case["check"]
    return [
        *notes,
        f"{begin} of {check['checked']} answers asked for again without load, {check['identical']} were identical, "
        f"{check['failed']} failed; {check['lost']} streams were lost.",
    ]
