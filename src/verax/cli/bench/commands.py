"""`verax bench`: measurements that anyone can repeat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verax.cli import options
from verax.cli.bench import accelerator, compare, docs, reports, serve
from verax.cli.bench.output import Output, show
from verax.cli.files import read_lines

if TYPE_CHECKING:
    from verax.bench.text.workload import Workload

__all__ = ["app"]

app = typer.Typer(help="Measure speed and memory, beside other libraries.", no_args_is_help=True)


app.command("accelerator")(accelerator.accelerator)
app.command("compare")(compare.compare)
app.command("docs")(docs.docs)
app.command("reports")(reports.reports)
app.command("serve")(serve.serve)


@app.callback()
def _group() -> None:
    """Measure speed and memory, beside other libraries."""


@app.command("text")
def text(
    model: options.Model = None,
    workload: Annotated[
        str,
        typer.Option(
            help="short-prompts (100 new tokens each), nano-vllm (its bench.py), prompt (reading one) or repeat (going "
            "on with a text that repeats itself)."
        ),
    ] = "short-prompts",
    requests: Annotated[
        int | None,
        typer.Option("--requests", "--prompts", help="Prompts; 4, nano-vllm's 256 or prompt's 1 if left out."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="short-prompts, repeat: new tokens of each prompt.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(help="prompt: tokens of each.", min=1)] = 512,
    scale: Annotated[float, typer.Option(help="nano-vllm: factor on its lengths, to fit a small machine.")] = 1.0,
    temperature: Annotated[
        float | None, typer.Option(help="0.7 for short-prompts, 0.6 for nano-vllm, 0 for others, if left out.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="Rounds before them.", min=0)] = 1,
    against: Annotated[
        str | None,
        typer.Option(
            help="transformers, llama.cpp, verax (our side unquantised) or some with commas: run them too, interleaved."
        ),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    speculative_config: options.SpeculativeConfig = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one step.")] = None,
    decode_breakdown: Annotated[
        bool, typer.Option("--decode-breakdown", help="Measure the parts of a decode step too.")
    ] = False,
    shapes: Annotated[
        str,
        typer.Option(
            help="Without --model: qwen3 (0.6B), qwen3-8b, hybrid (4 layers of Qwen3.5-0.8B), moe (4 of 30B-A3B)."
        ),
    ] = "qwen3",
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Tokens per second of text generation; Qwen3-0.6B's shapes with random weights if there is no --model.

    Examples:

        verax bench text --against transformers --decode-breakdown

        verax bench text --against llama.cpp,verax --quantization int8 --temperature 0

        verax bench text --against llama.cpp --prompts 1

        verax bench text --workload nano-vllm --requests 8 --scale 0.1

        verax bench text --workload prompt --against transformers

        verax bench text --workload repeat --speculative-config '{"method": "ngram", "num_speculative_tokens": 7}'

        verax bench text --shapes hybrid --against transformers

        verax bench text --shapes moe --against transformers --prompts 1
    """
    from verax.bench.text.run import bench_text
    from verax.bench.text.workload import WORKLOADS, nano_vllm, prompt, repeat, short_prompts

    if workload not in WORKLOADS:
        raise typer.BadParameter(f"--workload: expected {', '.join(WORKLOADS)}, got {workload!r}")
    if requests is not None and requests < 1:
        raise typer.BadParameter("--requests: at least 1")
    if scale <= 0:
        raise typer.BadParameter("--scale: more than 0")
    given = options.given(temperature=temperature, requests=requests)

    def make(vocab_size: int) -> Workload:
        if workload == "short-prompts":
            return short_prompts(vocab_size, max_tokens=max_tokens, **given)
        if workload == "prompt":
            return prompt(vocab_size, tokens=prompt_tokens, **given)
        if workload == "repeat":
            return repeat(vocab_size, max_tokens=max_tokens, trained=model is not None, **given)
        return nano_vllm(vocab_size, scale=scale, **given)

    result = bench_text(
        model,
        make,
        runs=runs,
        warmup=warmup,
        against=tuple(name.strip() for name in against.split(",")) if against else (),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        decode_breakdown=decode_breakdown,
        shapes=shapes,
        speculative_config=speculative_config,
    )
    show(result, output, as_json)


@app.command("ops")
def operations(
    size_in: Annotated[int, typer.Option(help="Inputs of the linear operation.", min=1)] = 4096,
    size_out: Annotated[int, typer.Option(help="Outputs of the linear operation.", min=1)] = 11008,
    rows: Annotated[str, typer.Option(help="Rows of the input, one case each.")] = "1,2,4,8,16,32,128",
    weights: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, int8, int8-32, int8-128, int4-32, int4-128, int4-128-zeros, float8-128, or a GGUF "
            "type Q4_K; all if left out."
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(help="linear, grouped, attention or conv; all if left out.")] = None,
    runs: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="Rounds before them.", min=0)] = 2,
    against: Annotated[str | None, typer.Option(help="torch: time its operations too, interleaved.")] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Each implementation of an operation by itself, beside torch and the machine's measured limits.

    Examples:

        verax bench ops --against torch

        verax bench ops --only linear --size-in 1024 --size-out 3072 --rows 1,4 --weights bfloat16,int8
    """
    from verax.bench.ops.linear import WEIGHTS
    from verax.bench.ops.run import OPERATIONS, bench_ops

    try:
        counts = [int(count) for count in rows.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"--rows: expected numbers from 1 such as 1,4,16, got {rows!r}")
    result = bench_ops(
        size_in=size_in,
        size_out=size_out,
        rows=counts,
        weights=weights.split(",") if weights else list(WEIGHTS),
        operations=only.split(",") if only else OPERATIONS,
        against=tuple(against.split(",")) if against else (),
        runs=runs,
        warmup=warmup,
    )
    show(result, output, as_json)


@app.command("quality")
def quality(
    model: options.Model = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text to measure on, instead of the built-in model's own kind.")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Precisions by name, separated by semicolons; all if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text, at most.", min=2)] = 16384,
    additions: Annotated[
        int | None, typer.Option(help="Held-out sums; all of the built-in model, 200 of others, if left out.", min=0)
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="llama.cpp: its perplexity on the same tokens too, of a GGUF file.")
    ] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Cost of quantised weights and an int8 cache: perplexity, sums, and the logits' distance from float32.

    Examples:

        verax bench quality

        verax bench quality --model Qwen/Qwen3-0.6B --text book.txt --variants "bfloat16; int8; int4-32"

        verax bench quality --model gemma-3-270m-q4_k_m.gguf --text book.txt --additions 0 --against llama.cpp
    """
    from verax.bench.text.quality import bench_quality, read_text

    result = bench_quality(
        model,
        text=None if text is None else read_text(text),
        variants=[name.strip() for name in variants.split(";")] if variants else None,
        tokens=tokens,
        additions=additions,
        against=[against] if against else (),
    )
    show(result, output, as_json)


@app.command("embed")
def embeddings(
    model: options.Model = None,
    sentences: Annotated[int, typer.Option(help="How many.", min=1)] = 512,
    batch_size: Annotated[int, typer.Option(help="Most sentences in one call.", min=1)] = 32,
    runs: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="Rounds before them.", min=0)] = 1,
    against: Annotated[
        str | None,
        typer.Option(
            help="transformers, openvino, openvino-int8, onnxruntime, onnxruntime-int8 or some with commas: run them "
            "too, interleaved."
        ),
    ] = None,
    dtype: options.Dtype = "float32",
    quantization: options.EncoderQuantization = None,
    shapes: Annotated[str, typer.Option(help="Shapes of random weights: minilm, modernbert or qwen3.")] = "minilm",
    latency: Annotated[bool, typer.Option("--latency", help="Each sentence in a call of its own.")] = False,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Sentences per second of an encoder; all-MiniLM-L6-v2's shapes with random weights if there is no --model.

    Examples:

        verax bench embed --against transformers

        verax bench embed --model BAAI/bge-small-en-v1.5 --dtype bfloat16

        verax bench embed --shapes modernbert --sentences 128 --against transformers

        verax bench embed --against openvino,onnxruntime --latency --sentences 64

        verax bench embed --against openvino-int8,onnxruntime-int8 --quantization int8
    """
    from verax.bench.embed.run import bench_embed

    result = bench_embed(
        model,
        sentences=sentences,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        against=tuple(against.split(",")) if against else (),
        dtype=dtype,
        quantization=quantization,
        shapes=shapes,
        latency=latency,
    )
    show(result, output, as_json)


@app.command("delta")
def delta(
    only: Annotated[
        str | None, typer.Option(help="rule, layer, gated, gradient, decode, encoder; all of them if left out.")
    ] = None,
    configurations: Annotated[
        str | None, typer.Option("--configs", help="Small, Medium, Large; all of them if left out.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="torch, cython, torch.compile, transformers, fla; what there is of them if left out."),
    ] = None,
    runs: Annotated[int | None, typer.Option(help="Counted rounds; 10, or 3 if quick.", min=1)] = None,
    warmup: Annotated[int, typer.Option(help="Rounds before them.", min=0)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest configuration, without torch.compile.")] = False,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """The delta rules beside PyTorch, equal work on the same device.

    Runs on JAX's default device; JAX_PLATFORMS=cpu takes the CPU of a machine with a GPU. A plot is written beside the
    other files of --output.

    Examples:

        verax bench delta --quick

        verax bench delta --only gated,decode --against transformers --output benchmarks/results
    """
    from verax._optional import load_pyplot
    from verax.bench.delta.page import plot
    from verax.bench.delta.run import bench_delta
    from verax.bench.delta.sizes import CONFIGURATIONS, SECTIONS

    if output is not None:
        load_pyplot()  # before the work, not after it
    result = bench_delta(
        sections=only.split(",") if only else SECTIONS,
        configurations=configurations.split(",") if configurations else list(CONFIGURATIONS)[: 1 if quick else None],
        against=against.split(",") if against else None,
        without=("torch.compile",) if quick else (),
        runs=runs or (3 if quick else 10),
        warmup=warmup,
    )
    path = show(result, output, as_json)
    if path is not None:
        plot(result, path.with_suffix(".png"))


@app.command("video")
def video(
    size: Annotated[str, typer.Option(help="1.3b or 14b: image to video. 5b: text and image. tiny.")] = "1.3b",
    stage: Annotated[
        str, typer.Option(help="transformer, vae, text, several with commas, or all.")
    ] = "transformer,vae",
    frames: Annotated[str, typer.Option(help="Frames of the clip, 4n + 1; a case each.")] = "9",
    height: Annotated[int, typer.Option(help="Pixels, divisible by 16.")] = 272,
    width: Annotated[int, typer.Option(help="Pixels, divisible by 16.")] = 480,
    attention: Annotated[str, typer.Option(help="Implementation that the transformer is timed with.")] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(help="Implementations whose memory is planned, which needs no run: auto,chunked,standard,flash."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of transformer and text encoder; all.", min=1)] = None,
    runs: Annotated[int, typer.Option(help="Counted rounds; 0 for memory only.", min=0)] = 3,
    warmup: Annotated[int, typer.Option(help="Rounds before them.", min=0)] = 1,
    against: Annotated[
        str | None,
        typer.Option(help="diffusers, torch.compile, openvino or some with commas: run them too, interleaved."),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Stages of SkyReels-V2's pipeline with random weights in its real sizes, beside diffusers with the same.

    Examples:

        verax bench video --against diffusers

        verax bench video --stage transformer --against diffusers,torch.compile,openvino

        verax bench video --runs 0 --memory auto,chunked,standard --frames 57 --height 544 --width 960
    """
    from verax.bench.video.cases import STAGES
    from verax.bench.video.run import bench_video

    counts = frames.split(",")
    if not all(count.isdigit() for count in counts):
        raise typer.BadParameter(f"--frames: expected numbers such as 9,17,57, got {frames!r}")
    if runs == 0 and not memory:
        raise typer.BadParameter("--runs 0: nothing would be measured; with --memory it is memory only")
    result = bench_video(
        size=size,
        stages=STAGES if stage == "all" else stage.split(","),
        frames=[int(count) for count in counts],
        height=height,
        width=width,
        dtype=dtype,
        attention=attention,
        memory=memory.split(",") if memory else (),
        layers=layers,
        runs=runs,
        warmup=warmup,
        against=against.split(",") if against else (),
    )
    show(result, output, as_json)


@app.command("teacache")
def teacache(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A folder of SkyReels-V2 or Wan2.1, or its hub id.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt on each line; the built-in model has some of its own.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="A picture: the first frame of all clips.")] = None,
    thresholds: Annotated[str, typer.Option(help="Of --cache-threshold.")] = "0.05,0.1,0.2,0.3",
    num_frames: Annotated[int | None, typer.Option(help="4n + 1.", show_default="checkpoint's")] = None,
    height: Annotated[int | None, typer.Option(help="Of a frame, in pixels.", show_default="checkpoint's")] = None,
    width: Annotated[int | None, typer.Option(help="Of a frame, in pixels.", show_default="checkpoint's")] = None,
    inference_steps: Annotated[int | None, typer.Option(help="Of the solver.", show_default="checkpoint's")] = None,
    seed: Annotated[int, typer.Option(help="Of the first clip; the next ones have the next.")] = 0,
    dtype: options.Dtype = "bfloat16",
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Cost of TeaCache in quality, and the time that it saves: clips with it beside the same clips without.

    Examples:

        verax bench teacache

        verax bench teacache --model SkyReels-V2-DF-1.3B-540P --prompts prompts.txt --thresholds 0.1,0.2
    """
    from verax.bench.video.teacache import bench_teacache

    try:
        values = [float(value) for value in thresholds.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--thresholds: expected numbers such as 0.1,0.2, got {thresholds!r}") from error
    result = bench_teacache(
        model,
        prompts=read_lines(prompts) if prompts else (),
        thresholds=values,
        dtype=dtype,
        image=image,
        num_frames=num_frames,
        height=height,
        width=width,
        num_inference_steps=inference_steps,
        seed=seed,
    )
    show(result, output, as_json)
