"""`verax bench` of each subject: text, quality, embed, video, teacache, ops, delta."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options
from verax.cli.bench import files, serve
from verax.cli.bench.files import Output, Runs, Warmup, names, numbers, show
from verax.cli.files import read_lines

__all__ = ["app"]

app = typer.Typer(help="Measure speed and memory, compared with other libraries.", no_args_is_help=True)
for command in (files.accelerator, files.compare, files.docs, files.reports, serve.serve):
    app.command()(command)


@app.command()
def text(
    model: options.Model = None,
    workload: Annotated[
        str,
        typer.Option(
            help="short-prompts (100 new tokens each), nano-vllm (its bench.py), prompt (reading one) or repeat "
            "(continuing a text that repeats itself)."
        ),
    ] = "short-prompts",
    requests: Annotated[
        int | None,
        typer.Option("--requests", "--prompts", help="Prompts; 4, nano-vllm's 256 or prompt's 1 if left out.", min=1),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="short-prompts, repeat: new tokens of each prompt.")] = 100,
    prompt_tokens: Annotated[int, typer.Option(help="prompt: tokens of each.", min=1)] = 512,
    scale: Annotated[float, typer.Option(help="nano-vllm: factor on its lengths, to fit a small machine.")] = 1.0,
    temperature: Annotated[
        float | None, typer.Option(help="0.7 for short-prompts, 0.6 for nano-vllm, 0 for others, if left out.")
    ] = None,
    runs: Runs = 10,
    warmup: Warmup = 1,
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

        verax bench text --workload nano-vllm --requests 8 --scale 0.1

        verax bench text --workload repeat --speculative-config '{"method": "ngram", "num_speculative_tokens": 7}'

        verax bench text --shapes moe --against transformers --prompts 1
    """
    from verax.bench.text.cases import bench_text
    from verax.bench.text.workload import WORKLOADS

    if workload not in WORKLOADS:
        raise typer.BadParameter(f"--workload: expected {', '.join(WORKLOADS)}, got {workload!r}")
    if scale <= 0:
        raise typer.BadParameter("--scale: more than 0")
    sizes = {
        "short-prompts": {"max_tokens": max_tokens},
        "nano-vllm": {"scale": scale},
        "prompt": {"tokens": prompt_tokens},
        "repeat": {"max_tokens": max_tokens, "trained": model is not None},
    }[workload] | options.given(temperature=temperature, requests=requests)
    result = bench_text(
        model,
        lambda vocab_size: WORKLOADS[workload](vocab_size, **sizes),
        runs=runs,
        warmup=warmup,
        against=names(against),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        decode_breakdown=decode_breakdown,
        shapes=shapes,
        speculative_config=speculative_config,
    )
    show(result, output, as_json)


@app.command()
def quality(
    model: options.Model = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text to measure on, instead of the built-in model's own kind.")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Precisions by name, separated by semicolons; all if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text, at most.", min=2)] = 16384,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Cost of quantised weights and an int8 cache: perplexity, and the logits' distance from float32.

    Examples:

        verax bench quality

        verax bench quality --model Qwen/Qwen3-0.6B --text book.txt --variants "bfloat16; int8; int4-32"

        verax bench quality --model gemma-3-270m-q4_k_m.gguf --text book.txt
    """
    from verax.bench.text.quality import bench_quality, read_text

    result = bench_quality(
        model,
        text=None if text is None else read_text(text),
        variants=[name.strip() for name in variants.split(";")] if variants else None,
        tokens=tokens,
    )
    show(result, output, as_json)


@app.command()
def embed(
    model: options.Model = None,
    sentences: Annotated[int, typer.Option(help="Number of texts.", min=1)] = 512,
    batch_size: Annotated[int, typer.Option(help="Most sentences in one call.", min=1)] = 32,
    runs: Runs = 10,
    warmup: Warmup = 1,
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

        verax bench embed --against openvino,onnxruntime --latency --sentences 64

        verax bench embed --against openvino-int8,onnxruntime-int8 --quantization int8
    """
    from verax.bench.embed.cases import bench_embed

    result = bench_embed(
        model,
        sentences=sentences,
        batch_size=batch_size,
        runs=runs,
        warmup=warmup,
        against=names(against),
        dtype=dtype,
        quantization=quantization,
        shapes=shapes,
        latency=latency,
    )
    show(result, output, as_json)


@app.command()
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
        typer.Option(help="Implementations whose memory is planned, which runs nothing: auto,chunked,standard,flash."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of transformer and text encoder; all.", min=1)] = None,
    runs: Annotated[int, typer.Option(help="Counted rounds; 0 for memory only.", min=0)] = 3,
    warmup: Warmup = 1,
    against: Annotated[
        str | None,
        typer.Option(help="diffusers, torch.compile, openvino or some with commas: run them too, interleaved."),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Stages of SkyReels-V2's pipeline with random weights in its real sizes, compared with diffusers.

    Examples:

        verax bench video --against diffusers

        verax bench video --stage transformer --against diffusers,torch.compile,openvino

        verax bench video --runs 0 --memory auto,chunked,standard --frames 57 --height 544 --width 960
    """
    from verax.bench.video.cases import bench_video
    from verax.bench.video.work import STAGES

    if runs == 0 and not memory:
        raise typer.BadParameter("--runs 0: nothing would be measured; with --memory it is memory only")
    result = bench_video(
        size=size,
        stages=STAGES if stage == "all" else names(stage),
        frames=numbers("--frames", frames, int),
        height=height,
        width=width,
        dtype=dtype,
        attention=attention,
        memory=names(memory),
        layers=layers,
        runs=runs,
        warmup=warmup,
        against=names(against),
    )
    show(result, output, as_json)


@app.command()
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
    """Cost of TeaCache in quality, and the time that it saves: clips with it and the same clips without.

    Examples:

        verax bench teacache

        verax bench teacache --model SkyReels-V2-DF-1.3B-540P --prompts prompts.txt --thresholds 0.1,0.2
    """
    from verax.bench.video.teacache import bench_teacache

    result = bench_teacache(
        model,
        prompts=read_lines(prompts) if prompts else (),
        thresholds=numbers("--thresholds", thresholds, float),
        dtype=dtype,
        image=image,
        num_frames=num_frames,
        height=height,
        width=width,
        num_inference_steps=inference_steps,
        seed=seed,
    )
    show(result, output, as_json)


@app.command()
def ops(
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
    only: Annotated[str | None, typer.Option(help="linear, grouped, attention, conv; paged, kernels.")] = None,
    runs: Runs = 10,
    warmup: Warmup = 2,
    against: Annotated[str | None, typer.Option(help="torch: time its operations too, interleaved.")] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Each implementation of an operation by itself, compared with torch and the machine's measured limits.

    Examples:

        verax bench ops --against torch

        verax bench ops --only linear --size-in 1024 --size-out 3072 --rows 1,4 --weights bfloat16,int8
    """
    from verax.bench.ops import OPERATIONS, bench_ops

    counts = numbers("--rows", rows, int)
    if min(counts) < 1:
        raise typer.BadParameter(f"--rows: expected numbers from 1, got {rows!r}")
    result = bench_ops(
        size_in=size_in,
        size_out=size_out,
        rows=counts,
        weights=names(weights) or None,
        operations=names(only) or OPERATIONS,
        against=names(against),
        runs=runs,
        warmup=warmup,
    )
    show(result, output, as_json)


@app.command()
def delta(
    only: Annotated[
        str | None, typer.Option(help="rule, layer, gated, gradient, decode, encoder; all of them if left out.")
    ] = None,
    configurations: Annotated[
        str | None, typer.Option("--configs", help="Small, Medium, Large; all of them if left out.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="torch, cython, torch.compile, transformers, fla; the installed ones if left out."),
    ] = None,
    runs: Annotated[int | None, typer.Option(help="Counted rounds; 10, or 3 if quick.", min=1)] = None,
    warmup: Warmup = 1,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest configuration, without torch.compile.")] = False,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """The delta rules compared with PyTorch, equal work on the same device.

    Runs on JAX's default device; JAX_PLATFORMS=cpu takes the CPU of a machine with a GPU. A plot is written next to the
    other files of --output.

    Examples:

        verax bench delta --quick

        verax bench delta --only gated,decode --against transformers --output results
    """
    from verax._optional import load_pyplot
    from verax.bench.delta.cases import CONFIGURATIONS, SECTIONS, bench_delta
    from verax.bench.results import plot

    if output is not None:
        load_pyplot("bench")  # an error before the work, not after it
    result = bench_delta(
        sections=names(only) or tuple(SECTIONS),
        configurations=names(configurations) or list(CONFIGURATIONS)[: 1 if quick else None],
        against=names(against) or None,
        without=("torch.compile",) if quick else (),
        runs=runs or (3 if quick else 10),
        warmup=warmup,
    )
    path = show(result, output, as_json)
    if path is not None:
        plot(result, path.with_name(f"delta-{result['name']}.png"))
