"""Engines of `verax bench text` in processes of their own (`bench.worker`), by Pythons that need not have verax.

Each function has the name of the package that it takes; then come a checkpoint, its precision and the engine's sizes.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# OpenVINO would send usage statistics, whatever DO_NOT_TRACK says. It does without this module.
sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]

Tokens = list[list[int]]
"""Tokens of several texts."""

Run = Callable[..., Tokens]
"""Function from `prompts`, `max_tokens` of each, and `temperature` to the new tokens."""

Engine = tuple[Run, dict[str, Any]]
"""An engine's runs, and the versions of its packages."""

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def verax(package: Any, model: str, dtype: str, quantization: str | None, sequences: int, length: int) -> Engine:
    """Engine of vLLM, or of verax, whose classes have the same names."""
    sizes = {"max_num_seqs": sequences, "max_model_len": length, "skip_tokenizer_init": True}
    llm = package.LLM(model, dtype=dtype, quantization=quantization, enable_prefix_caching=False, **sizes)

    def run(prompts: Tokens, max_tokens: list[int], temperature: float) -> Tokens:
        params = [package.SamplingParams(temperature=temperature, max_tokens=m, ignore_eos=True) for m in max_tokens]
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    return run, {package.__name__: package.__version__}


vllm = verax


def openvino_genai(
    package: Any, model: str, dtype: str, quantization: str | None, sequences: int, length: int
) -> Engine:
    """Engine of OpenVINO GenAI; optimum-intel exports the checkpoint, in a process of its own."""
    openvino, numpy = importlib.import_module("openvino"), importlib.import_module("numpy")
    precision = quantization or dtype
    kind = {"float32": "fp32", "bfloat16": "fp16", "w8a8": "int8"}.get(precision, precision)  # int8 rounds inputs too
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--weight-format", kind]
    command += ["--group-size", "32", "--ratio", "1.0"] if kind == "int4" else []
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    floats = "bf16" if dtype == "bfloat16" and "BF16" in able else "f32"  # without it, caches are float32 only
    scheduler = package.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.max_num_seqs, scheduler.cache_size = False, sequences, 1
    hints = {"INFERENCE_PRECISION_HINT": floats, "KV_CACHE_PRECISION": floats}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as exported:
        task = ["--task", "text-generation-with-past", "--model", model, exported]
        subprocess.run([*command, *task], check=True, stdout=sys.stderr)
        pipeline = package.ContinuousBatchingPipeline(exported, scheduler, "CPU", hints)

    def run(prompts: Tokens, max_tokens: list[int], temperature: float) -> Tokens:
        # Their defaults draw from the 50 likeliest tokens, which is other work than ours.
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        configs = [package.GenerationConfig(max_new_tokens=m, ignore_eos=True, **drawn) for m in max_tokens]
        ids = [openvino.Tensor(numpy.array([prompt], numpy.int64)) for prompt in prompts]
        return [[int(token) for token in one.m_generation_ids[0]] for one in pipeline.generate(ids, configs)]

    return run, {"openvino_genai": package.__version__}


def transformers(package: Any, model: str, dtype: str, quantization: str | None, sequences: int, length: int) -> Engine:
    """transformers on the CPU or its GPU: prompt by prompt, or in one batch until its longest answer is done."""
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = package.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()

    def generate(prompts: Tokens, count: int, temperature: float) -> Tokens:
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        # top_k and top_p off: generate's own default would keep 50 tokens, which is other work than ours.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = loaded.generate(
                tokens.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                **(sampling if temperature else {"do_sample": False}),
            )
        return out[:, width:].tolist()

    def run(prompts: Tokens, max_tokens: list[int], temperature: float, batched: bool = False) -> Tokens:
        if batched:
            answers = generate(prompts, max(max_tokens), temperature)
            return [answer[:m] for answer, m in zip(answers, max_tokens, strict=True)]
        return [generate([p], m, temperature)[0] for p, m in zip(prompts, max_tokens, strict=True)]

    versions = {"torch": torch.__version__, "transformers": package.__version__}
    return run, versions | {"torch_threads": torch.get_num_threads(), "torch_device": device}


BATCH_TOKENS = 512
"""llama.cpp's own physical batch, which a call takes while prompts are read."""


def llama_cpp(package: Any, model: str, dtype: str, quantization: str | None, sequences: int, length: int) -> Engine:
    """llama.cpp, or ik_llama.cpp, through its C interface on all cores: one call of `llama_decode` a step.

    A sequence leaves the batch when it has its tokens. All tokens can be drawn, as on our side, by an exponential race:
    the smallest E / p, where every E is exponentially distributed.
    """
    numpy, ctypes = importlib.import_module("numpy"), importlib.import_module("ctypes")
    is_ik = package.__name__ == "ik_llama_cpp"
    c = importlib.import_module("ik_llama_cpp._ctypes_api") if is_ik else package
    system_info = c._lib.llama_print_system_info if is_ik else c.llama_print_system_info
    system_info.restype = ctypes.c_char_p
    features = system_info().decode().split(":", 1)[-1].split("|")
    build = " ".join(name.split("=")[0].strip() for name in features if name.strip() and "= 0" not in name)
    c.llama_backend_init()
    loaded = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
    options, size = c.llama_context_default_params(), max(BATCH_TOKENS, sequences)
    options.n_ctx, options.n_seq_max = sequences * length, sequences
    options.n_batch = options.n_ubatch = size
    options.n_threads = options.n_threads_batch = CORES
    if is_ik:  # without VNNI, an assertion of its flash attention fails
        options.flash_attn = "VNNI" in build
    context = c.llama_init_from_model(loaded, options) if loaded else None
    if not context:
        raise ValueError(f"cannot load {model} with room for {sequences} sequences of {length} tokens")
    batch, vocab_size = c.llama_batch_init(size, 0, 1), c.llama_vocab_n_tokens(c.llama_model_get_vocab(loaded))
    rng = numpy.random.default_rng(0)

    def draw(row: int, temperature: float) -> int:
        logits = numpy.ctypeslib.as_array(c.llama_get_logits_ith(context, row), (vocab_size,))
        if temperature:
            logits = logits / temperature - numpy.log(rng.standard_exponential(vocab_size, numpy.float32))
        return int(logits.argmax())

    def run(prompts: Tokens, max_tokens: list[int], temperature: float) -> Tokens:
        if len(prompts) > sequences:
            raise ValueError(f"llama.cpp takes at most {sequences} sequences at once, not {len(prompts)}")
        if is_ik:
            c.llama_kv_cache_clear(context)
        else:
            c.llama_memory_clear(c.llama_get_memory(context), False)
        answers: Tokens = [[] for _ in prompts]
        rows = [(i, token, at, at + 1 == len(p)) for i, p in enumerate(prompts) for at, token in enumerate(p)]
        calls = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        while calls:
            rows = calls.pop(0)
            batch.n_tokens = len(rows)
            for n, (sequence, token, position, last) in enumerate(rows):
                batch.token[n], batch.pos[n], batch.logits[n] = token, position, last
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
            if code := c.llama_decode(context, batch):
                raise ValueError(f"llama_decode returned {code}")
            for n, (sequence, *_, last) in enumerate(rows):
                if last:
                    answers[sequence].append(draw(n, temperature))
            left = [i for i, answer in enumerate(answers) if len(answer) < max_tokens[i]]
            if not calls and left:
                calls = [[(i, answers[i][-1], len(prompts[i]) + len(answers[i]) - 1, True) for i in left]]
        return answers

    name = "ik_llama_cpp" if is_ik else "llama_cpp"
    return run, {f"{name}_python": package.__version__, f"{name}_threads": CORES, f"{name}_build": build}


ik_llama_cpp = llama_cpp
