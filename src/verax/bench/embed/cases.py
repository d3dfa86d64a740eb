"""Sentences to vectors: our encoder, and transformers, OpenVINO and onnxruntime on the same weights."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flax import nnx

from verax import builtin, checkpoint, models
from verax.bench.embed.baselines import (
    Encode,
    cosine_distance,
    fastest_way,
    one_by_one,
    onnxruntime_side,
    openvino_side,
    transformers_encode,
)
from verax.bench.harness import Benchmark, Side, case_result, product_weights, time_sides
from verax.bench.results import outliers, rounds, side_table, slug, table
from verax.bench.settings import EmbedSettings
from verax.checkpoint.load import random_weights
from verax.compare.outputs import compare_vectors
from verax.embed.encoder import Encoder
from verax.files import model_name, write_json
from verax.shapes import MINILM_L6, MODERNBERT_BASE, QWEN3_0_6B

__all__ = ["SHAPES", "bench_embed"]

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


def bench_embed(settings: EmbedSettings) -> dict[str, Any]:
    """Encode texts with our encoder and, interleaved, with others.

    Raises:
        MissingDependencyError: if a baseline is not installed.
    """
    texts, benchmark = _texts(settings.sentences), Benchmark("embed")
    dtype, quantization = settings.dtype, settings.quantization
    latency, batch_size = settings.latency, settings.batch_size
    with _folder(settings.model, settings.shapes) as folder:
        encoder = Encoder(folder, dtype=dtype, quantization=quantization)
        weights = product_weights(checkpoint.Checkpoint.open(folder), tables="embed")
        lengths = encoder.token_counts(texts)
        encoders: dict[str, Encode] = {}
        versions: dict[str, Any] = {}
        chosen: dict[str, Any] = {}
        for name in settings.against:
            library, _, precision = name.partition("-")
            if library == "transformers":
                encoders[name], library_versions = transformers_encode(folder, dtype, encoder.settings, batch_size)
                versions |= library_versions
                continue
            export = openvino_side if library == "openvino" else onnxruntime_side
            exported = export(folder, precision or dtype, encoder.settings, texts, batch_size, latency=latency)
            encoders[exported.name], chosen[exported.name] = fastest_way(exported, texts, latency=latency)
            versions |= exported.versions
        encoders["verax"] = partial(encoder.encode, batch_size=batch_size, show_progress=False)
        calls = {name: partial(one_by_one, e, texts) if latency else partial(e, texts) for name, e in encoders.items()}
        begin = time.perf_counter()
        ours = calls["verax"]()
        first_s = time.perf_counter() - begin
        accuracy: dict[str, dict[str, float | None]] = {}
        exact = dtype == "float32" and quantization is None
        if settings.against or not exact:
            reference = ours if exact else Encoder(folder).encode(texts, show_progress=False)
            for name, call in calls.items():
                vectors = call()
                alike = compare_vectors(reference, vectors)
                accuracy[name] = {
                    "largest_difference": float(np.abs(vectors - reference).max()),
                    "cosine_distance": cosine_distance(vectors, reference),
                    "same_nearest": alike.same_nearest,
                    "rank_correlation": alike.rank_correlation,
                }
        compiled = encoder.num_compiled()
        sides = {name: Side(call) for name, call in calls.items()}
        samples = time_sides(sides, runs=settings.runs, warmup=settings.warmup)
    size = 1 if quantization else 2 if dtype == "bfloat16" else 4
    num_calls = len(texts) if latency else -(-len(texts) // batch_size)
    moved, flops = num_calls * size * weights, 2 * weights * sum(lengths)
    measured = {
        "first_s": first_s,
        "compiled_during_runs": encoder.num_compiled() - compiled,
        "cases": [case_result("", "verax", samples, len(texts))],
        "work": benchmark.against_limit(samples["verax"].median, bytes_moved=moved, flops=flops, dtype=dtype),
        "chosen": chosen,
        "accuracy": accuracy,
    }
    model, words = settings.model, f"random weights, {SHAPES[settings.shapes][0]} shapes"
    asked = asdict(settings) | {
        "model": model_name(model) if model else words,
        "shapes": None if model else settings.shapes,
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
    }
    return benchmark.result(settings=asked, versions=versions, **_page(asked, measured), **measured)


def _texts(count: int) -> list[str]:
    rng = Random(0)
    sentence = lambda: " ".join(rng.choice(phrases) for phrases in PHRASES) + "."
    return [" ".join(sentence() for _ in range(rng.randint(1, MOST_JOINED))) for _ in range(count)]


@contextlib.contextmanager
def _folder(model: str | None, shapes: str) -> Iterator[Path]:
    """Folder of a checkpoint; of random weights with the built-in tokenizer, gone afterwards, if there is none."""
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


def _page(settings: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Name, title, intro, tables and notes of a result."""
    precision, latency = settings["quantization"] or settings["dtype"], settings["latency"]
    case, shapes, work = measured["cases"][0], settings["shapes"], measured["work"]
    tables = [side_table(case, "sentences/s", digits=3, rate_digits=0)]
    if measured["accuracy"]:

        def cell(key: str, form: str) -> Any:
            return lambda row: "-" if row[1][key] is None else format(row[1][key], form)

        columns = {
            "side": lambda row: row[0],
            "difference of a number": cell("largest_difference", ".1e"),
            "1 - cosine": cell("cosine_distance", ".1e"),
            "same nearest": cell("same_nearest", ".1%"),
            "rank correlation": cell("rank_correlation", ".5f"),
        }
        note = (
            "Vectors compared with verax's in float32: the largest distance of any sentence; the share of "
            "sentences whose nearest other one is the same, and Spearman's correlation of all pairs' cosines."
        )
        tables.append(table(measured["accuracy"].items(), columns, note=note))
    notes = [
        *outliers(case["sides"]),
        f"verax read {work['bytes_moved'] / 1e9:.1f} GB of weights and did {work['flops'] / 1e12:.3g} TFLOP of "
        f"products with them (attention left out): {work['gflop_per_s']:.0f} GFLOP/s, "
        f"{100 * work['fraction_of_limit']:.0f}% of the measured limit.",
    ]
    if latency:
        means = (f"{name} {1e3 / side['rate']:.2f} ms" for name, side in case["sides"].items())
        notes.append(f"A sentence: {', '.join(means)}.")
    for name, side in measured["chosen"].items():
        rates = (f"{rate:.0f} with {way}" for way, rate in side["trials"].items())
        tried = f"; sentences/s in a trial: {', '.join(rates)}" if side["trials"] else ""
        wrong = "".join(f"; left out as wrong by {distance:.2g}: {way}" for way, distance in side["wrong"].items())
        notes.append(f"- {name}, the fastest way that was tried: {side['way']}{tried}{wrong}")
    return {
        "name": slug(shapes if shapes not in (None, "minilm") else "", str(precision), "latency" if latency else ""),
        "title": f"Embeddings: {settings['model']}, {precision}",
        "intro": f"{settings['sentences']} sentences of {settings['shortest']} to {settings['longest']} tokens "
        f"({settings['tokens']} in all), "
        f"{'each in a call of its own' if latency else str(settings['batch_size']) + ' at once'}; "
        f"{rounds(settings)}, tokenizer included. The first run, which compiled, took {measured['first_s']:.1f} s; "
        f"{measured['compiled_during_runs']} programs compiled afterwards.",
        "tables": tables,
        "notes": notes,
    }
