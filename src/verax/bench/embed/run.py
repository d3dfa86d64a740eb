"""Sentences to vectors: our encoder, and transformers, OpenVINO and onnxruntime beside it on the same weights."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flax import nnx

from recipes.encoder.paraphrases import pairs
from verax import builtin, checkpoint, models, progress
from verax.bench.embed.exported import Encode, ExportedSide, cosine_distance, one_by_one
from verax.bench.embed.transformers import TransformersSide
from verax.bench.harness import Benchmark, product_weights
from verax.bench.results import model_name
from verax.bench.timing import interleave
from verax.checkpoint.load import random_weights
from verax.compare.outputs import compare_vectors
from verax.embed.encoder import Encoder
from verax.embed.settings import EncoderSettings
from verax.errors import InvalidParameterError
from verax.files import write_json
from verax.shapes import MINILM_L6, MODERNBERT_BASE, QWEN3_0_6B

__all__ = ["BASELINES", "SHAPES", "bench_embed"]

SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "minilm": ("all-MiniLM-L6-v2", MINILM_L6, "mean"),
    "modernbert": ("gte-modernbert-base", MODERNBERT_BASE, "cls"),
    "qwen3": ("Qwen3-Embedding-0.6B", QWEN3_0_6B, "lasttoken"),
}
"""Shapes of random weights by name: the model that has them, its config.json, and its pooling."""

BASELINES = ("transformers", "openvino", "openvino-int8", "onnxruntime", "onnxruntime-int8")
"""Sides beside ours: in the dtype of ours, unless a precision is part of the name."""

MOST_JOINED = 6
"""A text is one to so many generated sentences: lengths differ as they do in practice."""


def bench_embed(
    model: str | None,
    *,
    sentences: int,
    batch_size: int,
    runs: int,
    warmup: int,
    against: tuple[str, ...] = (),
    dtype: str = "float32",
    quantization: str | None = None,
    shapes: str = "minilm",
    latency: bool = False,
) -> dict[str, Any]:
    """Encode texts with our encoder and, interleaved, with others; a report as JSON holds it.

    Args:
        model: a checkpoint; random weights if None.
        sentences: how many texts.
        batch_size: most texts in a call, of all sides.
        runs: counted rounds. With `warmup` rounds before them.
        against: names out of `BASELINES`.
        dtype: of all sides whose name has no precision.
        quantization: of our side, as `Encoder` takes it.
        shapes: of random weights, a name out of `SHAPES`.
        latency: encode each text by a call of its own, instead of all texts by one call.
    """
    if shapes not in SHAPES:
        raise InvalidParameterError(f"shapes: expected {' or '.join(SHAPES)}, got {shapes!r}")
    unknown = [name for name in against if name not in BASELINES]
    if unknown:
        raise InvalidParameterError(f"against: expected {' or '.join(BASELINES)}, got {unknown[0]!r}")
    texts, benchmark = _texts(sentences), Benchmark("embed")
    with _folder(model, shapes) as folder:
        encoder = Encoder(folder, dtype=dtype, quantization=quantization)
        weights = product_weights(checkpoint.Checkpoint.open(folder), tables="embed")
        lengths = encoder.token_counts(texts)
        encoders: dict[str, Encode] = {}
        versions: dict[str, Any] = {}
        chosen: dict[str, Any] = {}
        for name in against:
            if name == "transformers":
                theirs = TransformersSide(folder, dtype, encoder.settings)
                encoders[name] = partial(theirs.encode, batch_size=batch_size)
            else:
                theirs = _exported_side(name, folder, dtype, encoder.settings, texts, batch_size, latency)
                chosen[theirs.name] = theirs.choose(texts, latency=latency)
                encoders[theirs.name] = theirs.encode
            versions |= theirs.versions()
        encoders["verax"] = partial(encoder.encode, batch_size=batch_size, show_progress=False)
        sides = {name: partial(one_by_one, e, texts) if latency else partial(e, texts) for name, e in encoders.items()}
        begin = time.perf_counter()
        ours = sides["verax"]()
        first_s = time.perf_counter() - begin
        accuracy: dict[str, dict[str, float | None]] = {}
        exact = dtype == "float32" and quantization is None
        if against or not exact:
            reference = ours if exact else Encoder(folder).encode(texts, show_progress=False)
            for name, run in sides.items():
                vectors = run()
                largest = float(np.abs(vectors - reference).max())
                distance = cosine_distance(vectors, reference)
                alike = compare_vectors(reference, vectors)
                accuracy[name] = {
                    "largest_difference": largest,
                    "cosine_distance": distance,
                    "same_nearest": alike.same_nearest,
                    "rank_correlation": alike.rank_correlation,
                }
        compiled = encoder.num_compiled()
        with progress.bar("measuring") as report:
            samples = interleave(sides, runs=runs, warmup=warmup, report=report)
    size = 1 if quantization else 2 if dtype == "bfloat16" else 4
    return benchmark.result(
        {
            "model": model_name(model) if model else f"random weights, {SHAPES[shapes][0]} shapes",
            "shapes": None if model else shapes,
            "dtype": dtype,
            "quantization": quantization,
            "sentences": len(texts),
            "tokens": sum(lengths),
            "shortest": min(lengths),
            "longest": max(lengths),
            "batch_size": batch_size,
            "latency": latency,
            "runs": runs,
            "warmup": warmup,
        },
        versions,
        first_s=first_s,
        compiled_during_runs=encoder.num_compiled() - compiled,
        sides={name: side.to_dict(len(texts)) for name, side in samples.items()},
        ratios={f"verax / {name}": samples["verax"].ratio_to(samples[name]) for name in sides if name != "verax"},
        work=benchmark.against_limit(
            samples["verax"].median,
            bytes_moved=(len(texts) if latency else -(-len(texts) // batch_size)) * size * weights,
            flops=2 * weights * sum(lengths),
            dtype=dtype,
        ),
        chosen=chosen,
        accuracy=accuracy,
    )


def _exported_side(
    name: str,
    folder: Path,
    dtype: str,
    settings: EncoderSettings,
    texts: list[str],
    batch_size: int,
    latency: bool,
) -> ExportedSide:
    """Side by its name out of `BASELINES`; its library is imported here."""
    library, _, precision = name.partition("-")
    if library == "openvino":
        from verax.bench.embed.openvino import openvino_side as make
    else:
        from verax.bench.embed.onnxruntime import onnxruntime_side as make
    return make(folder, precision or dtype, settings, texts, batch_size, latency=latency)


def _texts(count: int) -> list[str]:
    rng = Random(0)
    sentences = (pair.first for _, pair in pairs("bench"))
    return [" ".join(islice(sentences, rng.randint(1, MOST_JOINED))) for _ in range(count)]


@contextlib.contextmanager
def _folder(model: str | None, shapes: str) -> Iterator[Path]:
    """The checkpoint's folder; random weights with the built-in tokenizer, gone afterwards, if there is none."""
    if model is not None:
        yield checkpoint.resolve(model)
        return
    _, sizes, pooling = SHAPES[shapes]
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        architecture, config = models.encoder(sizes)
        weights = random_weights(nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(0))))
        folder = checkpoint.save(weights, name, config=sizes, tokenizer_from=builtin.encoder())
        (folder / "1_Pooling").mkdir()
        write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})
        yield folder
