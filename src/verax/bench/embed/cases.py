"""Sentences to vectors: our encoder, and transformers, OpenVINO and onnxruntime on the same weights."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from verax import builtin, checkpoint, models
from verax.bench.embed import engines
from verax.bench.harness import Benchmark, case_result, checkpoint_folder, time_sides, timed
from verax.bench.processes import STARTS, WorkerProcess
from verax.bench.results import rounds, sides_table, slug
from verax.bench.settings import EmbedSettings
from verax.compare.outputs import compare_vectors
from verax.embed.encoder import Encoder
from verax.files import model_name, write_json
from verax.loading import model_shapes
from verax.plan.model import multiplied
from verax.shapes import MINILM_L6, MODERNBERT_BASE, QWEN3_0_6B
from verax.text.tokens.tokenizer import Tokenizer

SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "minilm": ("all-MiniLM-L6-v2", MINILM_L6, "mean"),
    "modernbert": ("gte-modernbert-base", MODERNBERT_BASE, "cls"),
    "qwen3": ("Qwen3-Embedding-0.6B", QWEN3_0_6B, "lasttoken"),
}
"""Shapes of random weights by name: the model that has them, its config.json, and its pooling."""

MOST_JOINED = 6
"""A text is up to this number of sentences: lengths differ as they do in practice."""

PHRASES = (
    ("Anna", "Our neighbour", "The engineer from Delhi", "A retired teacher", "Felix", "The youngest of the sisters"),
    ("sold", "repaired", "found", "was looking for", "has finally returned", "could not afford", "drew", "ordered"),
    ("a bicycle", "seventy-five umbrellas", "the old violin", "two maps of the harbour", "a box of chocolates"),
    ("on Monday", "in the autumn of 2022", "for 750 dollars", "as a farewell present", "before the meeting", "again"),
    ("near the station", "at the market in Delhi", "without telling anybody", "because it rained", "by mistake"),
)
"""Parts of the sentences, one of each in a sentence: 7,200 sentences of 6 to 17 words."""


ACCURACY = (
    "Vectors are compared with verax's in float32: the largest difference of a number and distance of a sentence, the "
    "share of sentences whose nearest other one is the same, and Spearman's correlation of all pairs' cosines."
)


def bench_embed(settings: EmbedSettings) -> dict[str, Any]:
    """Encode texts with our encoder and, interleaved, with others."""
    texts, benchmark = _texts(settings.sentences), Benchmark("embed")
    dtype, quantization = settings.dtype, settings.quantization
    latency, batch_size = settings.latency, settings.batch_size
    chosen = settings.shapes or "minilm"
    with _folder(settings.model, chosen) as folder, contextlib.ExitStack() as stack:
        encoder = Encoder(folder, dtype=dtype, quantization=quantization)
        shapes = model_shapes(*models.encoder(checkpoint.Checkpoint.open(folder).config), dtype=np.float32)
        weights = multiplied(shapes)[0]
        lengths = encoder.token_counts(texts)
        others = _other_sides(settings, folder, encoder, texts, stack)
        encode = partial(encoder.encode, batch_size=batch_size, show_progress=False)
        ours = partial(_one_by_one, encode, texts) if latency else partial(encode, texts)
        vectors, first_s = timed(ours)
        exact = dtype == "float32" and quantization is None
        reference = vectors if exact else Encoder(folder).encode(texts, show_progress=False)
        compared = {name: side.vectors for name, side in others.items()}
        if others or not exact:
            compared["verax"] = vectors
        compiled = encoder.num_compiled()
        sides = {name: side.call for name, side in others.items()} | {"verax": ours}
        samples = time_sides(sides, runs=settings.runs, warmup=settings.warmup, trace=settings.trace)
        compiled = encoder.num_compiled() - compiled
    size = 1 if quantization else 2 if dtype == "bfloat16" else 4
    num_calls = len(texts) if latency else -(-len(texts) // batch_size)
    moved, flops = num_calls * size * weights, 2 * weights * sum(lengths)
    work = benchmark.against_limit(samples["verax"].median, bytes_moved=moved, flops=flops, dtype=dtype)
    case, shapes = case_result("", "verax", samples, len(texts)), None if settings.model else chosen
    case["sides"]["verax"] |= work
    model = model_name(settings.model) if settings.model else f"random weights, {SHAPES[chosen][0]} shapes"
    sizes = {"tokens": sum(lengths), "shortest": min(lengths), "longest": max(lengths)}
    asked, precision = asdict(settings) | {"model": model, "shapes": shapes} | sizes, str(quantization or dtype)
    for name, side in others.items():
        case["sides"][name] |= side.start
    for name, theirs in compared.items():
        case["sides"][name] |= compare_vectors(reference, theirs).to_dict()
    notes = [f"- {name}: {side.setting}" for name, side in others.items() if side.setting]
    if latency:
        means = (f"{name} {1e3 / side['rate']:.2f} ms" for name, side in case["sides"].items())
        notes.append(f"A sentence: {', '.join(means)}.")
    note = (
        f"{ACCURACY} {STARTS} verax compiles in its first call." if "verax" in others else ACCURACY if compared else ""
    )
    return benchmark.result(
        slug(shapes if shapes not in (None, "minilm") else "", precision, "latency" if latency else ""),
        title=f"Embeddings: {model}, {precision}",
        intro=f"{len(texts)} sentences of {min(lengths)} to {max(lengths)} tokens ({sum(lengths)} in all), "
        f"{'each in a call of its own' if latency else f'{batch_size} at once'}; "
        f"{rounds(asked)}, tokenizer included. The first run, which compiled, took {first_s:.1f} s; "
        f"{compiled} programs compiled afterwards. The limit is for the weights and their products"
        + (f", at {dtype}'s rate, which products of 8-bit integers exceed." if quantization else "."),
        settings=asked,
        versions={name: version for side in others.values() for name, version in side.versions.items()},
        tables=[sides_table([case], "sentences/s", note=note)],
        notes=notes,
        cases=[case],
        compiled_during_runs=compiled,
        work=work,
    )


class _Side(NamedTuple):
    """Side in a process of its own: its call, its vectors, the numbers of its first start, and what ran."""

    call: Callable[[], object]
    vectors: np.ndarray
    start: dict[str, float]
    versions: dict[str, Any]
    setting: str


def _other_sides(
    settings: EmbedSettings, folder: Path, encoder: Encoder, texts: list[str], stack: contextlib.ExitStack
) -> dict[str, _Side]:
    """Sides of `settings.against`, and `verax` for its first start; its process has ended.

    Raises:
        MissingDependencyError: if a package is not installed.
        VeraxError: if a side fails; the message ends with its output.
    """
    padding = checkpoint.Checkpoint.open(folder).config.get("pad_token_id")
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verax-bench-")))
    tokenizer, path, sides = scratch / "tokenizer.json", scratch / "vectors.npy", dict[str, _Side]()
    read = Tokenizer.from_folder(folder, encodes=True)
    tokenizer.write_text(read.to_json(max_length=encoder.max_length), encoding="utf-8")
    work = {"folder": str(folder), "tokenizer": str(tokenizer), "padding": padding or 0, "texts": texts}
    work |= {"pooling": encoder.settings.pooling, "batch_size": settings.batch_size, "latency": settings.latency}
    for name in [*settings.against, *(["verax"] if settings.against and settings.starts else [])]:
        library, _, quantization = name.partition("-")
        # onnxruntime's kernels of a CPU have bfloat16 on ARM only.
        dtype = "float32" if library == "onnxruntime" else settings.dtype
        side = name if library in ("transformers", "verax") else f"{library} {quantization or dtype}"
        work |= {"dtype": dtype, "quantization": settings.quantization if library == "verax" else quantization or None}
        remedy = f"pip install 'verax[{'parity' if library == 'transformers' else library}]'"
        with contextlib.ExitStack() as own:
            options = {"remedy": remedy, "empty_caches": True}
            process = own.enter_context(WorkerProcess(name, sys.executable, engines, library, **options))
            versions, answer = process.load(**work), process.ask(path=str(path))
            start = {"start_s": process.start_s, "first_s": answer["seconds"], "peak_bytes": answer["peak_bytes"]}
            call, start = partial(process.ask, path=None), start if settings.starts else {}
            sides[side] = _Side(call, np.load(path), start, versions, answer["result"])
            if library != "verax":
                stack.enter_context(own.pop_all())
    return sides


def _one_by_one(encode: Callable[[list[str]], np.ndarray], texts: list[str]) -> np.ndarray:
    return np.concatenate([encode([text]) for text in texts])


def _texts(count: int) -> list[str]:
    rng = Random(0)
    sentence = lambda: " ".join(rng.choice(phrases) for phrases in PHRASES) + "."
    return [" ".join(sentence() for _ in range(rng.randint(1, MOST_JOINED))) for _ in range(count)]


@contextlib.contextmanager
def _folder(model: str | None, shapes: str) -> Iterator[Path]:
    """Folder of a checkpoint; of random weights with the built-in tokenizer, gone afterwards, if there is none."""
    _, config, pooling = SHAPES[shapes]
    options = {"dtype": np.float32, "tokenizer_from": builtin.encoder()}
    with checkpoint_folder(model, config, models.encoder, **options) as folder:
        if model is None:
            (folder / "1_Pooling").mkdir()
            write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
        yield folder
