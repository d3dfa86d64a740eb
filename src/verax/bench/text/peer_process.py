"""Process of a peer of `verax bench text`, run by a Python of the peer's own that need not have verax.

It reads a JSON object a line from standard input and answers each with one on standard output. The first has the name
of an engine and the arguments of its function in `ENGINES`; its answer has the package's version. Each further one has
the arguments of a `Run`; its answer has the new tokens of each prompt and the process's peak memory in bytes. An answer
with `error` says what failed, one with `missing` which package is not installed.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., list[list[int]]]
"""Function from `prompts`, `max_tokens` of each, and `temperature` to the new tokens."""


def llm_class(package: Any, folder: str, precision: str, sequences: int, length: int) -> Run:
    """Engine of vLLM, or of verax, whose classes have the same names."""
    sizes = {"max_num_seqs": sequences, "max_model_len": length}
    llm = package.LLM(folder, dtype=precision, skip_tokenizer_init=True, enable_prefix_caching=False, **sizes)

    def run(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        params = [package.SamplingParams(temperature=temperature, max_tokens=m, ignore_eos=True) for m in max_tokens]
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    return run


def continuous_batching(package: Any, folder: str, precision: str, sequences: int, length: int) -> Run:
    """Engine of OpenVINO GenAI; optimum-intel exports the checkpoint, in a process of its own."""
    openvino, numpy = importlib.import_module("openvino"), importlib.import_module("numpy")
    kind = {"float32": "fp32", "bfloat16": "fp16"}.get(precision, precision)
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--weight-format", kind]
    command += ["--group-size", "32", "--ratio", "1.0"] if kind == "int4" else []
    scheduler, floats = package.SchedulerConfig(), "f32" if precision == "float32" else "bf16"
    scheduler.enable_prefix_caching, scheduler.max_num_seqs, scheduler.cache_size = False, sequences, 1
    hints = {"INFERENCE_PRECISION_HINT": floats, "KV_CACHE_PRECISION": floats}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as exported:
        task = ["--task", "text-generation-with-past", "--model", folder, exported]
        subprocess.run([*command, *task], check=True, stdout=sys.stderr)
        pipeline = package.ContinuousBatchingPipeline(exported, scheduler, "CPU", hints)

    def run(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        # Their defaults draw from the 50 likeliest tokens, which is other work than ours.
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        configs = [package.GenerationConfig(max_new_tokens=m, ignore_eos=True, **drawn) for m in max_tokens]
        ids = [openvino.Tensor(numpy.array([prompt], numpy.int64)) for prompt in prompts]
        return [[int(token) for token in one.m_generation_ids[0]] for one in pipeline.generate(ids, configs)]

    return run


ENGINES: dict[str, Callable[..., Run]] = {
    "verax": llm_class,
    "vllm": llm_class,
    "openvino_genai": continuous_batching,
}
"""Function by module: from the module, a checkpoint folder, a precision and the sizes of its engine to its runs."""


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    run: Run | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if run is None:
                name = request.pop("engine")
                package = importlib.import_module(name)
                run = ENGINES[name](package, **request)
                answer = {"version": package.__version__}
            else:
                answer = {"tokens": run(**request)}
                # Not getrusage's: it counts what the process that started this one had held.
                status = Path("/proc/self/status")
                lines = status.read_text().splitlines() if status.exists() else []
                answer["peak_bytes"] = sum(1024 * int(one.split()[1]) for one in lines if one.startswith("VmHWM"))
        except ModuleNotFoundError as error:
            answer = {"missing": error.name}
        except Exception as error:  # the reader of the answer raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
