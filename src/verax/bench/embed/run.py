"""Sentences to vectors: our encoder, and a loop over transformers as in sentence-transformers, on the same weights."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from flax import nnx

from verax import builtin, checkpoint, models, progress
from verax.bench.harness import Benchmark, product_weights
from verax.bench.text.run import QWEN3_0_6B
from verax.bench.timing import interleave
from verax.checkpoint.random_weights import random_weights
from verax.embed.encoder import Encoder
from verax.embed.settings import EncoderSettings
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.files import write_json
from verax.machine import num_cores
from verax.train.encoder.paraphrases import pairs

__all__ = ["bench_embed"]

MINILM_L6: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
"""config.json of all-MiniLM-L6-v2, as far as it decides shapes."""

MODERNBERT_BASE: dict[str, Any] = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
}
"""config.json of gte-modernbert-base, as far as it decides shapes."""

SHAPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "minilm": ("all-MiniLM-L6-v2", MINILM_L6, "mean"),
    "modernbert": ("gte-modernbert-base", MODERNBERT_BASE, "cls"),
    "qwen3": ("Qwen3-Embedding-0.6B", QWEN3_0_6B, "lasttoken"),
}
"""Shapes of random weights by name: the model that has them, its config.json, and its pooling."""

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
    shapes: str = "minilm",
) -> dict[str, Any]:
    """Encode texts with our encoder and, interleaved, with others; a report as JSON holds it.

    Args:
        model: a checkpoint; random weights if None.
        sentences: how many texts.
        batch_size: of both sides.
        runs: counted rounds. With `warmup` rounds before them.
        against: `"transformers"` for its model in batches that are sorted by length, pooled as ours.
        dtype: of both sides.
        shapes: of random weights, a name out of `SHAPES`.
    """
    if shapes not in SHAPES:
        raise InvalidParameterError(f"shapes: expected {' or '.join(SHAPES)}, got {shapes!r}")
    unknown = [name for name in against if name != "transformers"]
    if unknown:
        raise InvalidParameterError(f"against: expected transformers, got {unknown[0]!r}")
    texts, benchmark = _texts(sentences), Benchmark("embed")
    with _folder(model, shapes) as folder:
        encoder = Encoder(folder, dtype=dtype)
        weights = product_weights(checkpoint.Checkpoint.open(folder), tables="embed")
        lengths = encoder.token_counts(texts)
        sides: dict[str, Callable[[], np.ndarray]] = {}
        versions: dict[str, Any] = {}
        if "transformers" in against:
            theirs = _TransformersLoop(folder, dtype, encoder.settings)
            versions = theirs.versions()
            sides["transformers"] = lambda: theirs.encode(texts, batch_size)
        sides["verax"] = lambda: encoder.encode(texts, batch_size=batch_size, show_progress=False)
        begin = time.perf_counter()
        results = {"verax": sides["verax"]()}
        first_s = time.perf_counter() - begin
        results |= {name: run() for name, run in sides.items() if name != "verax"}
        compiled = encoder.num_compiled()
        with progress.bar("measuring") as report:
            samples = interleave(sides, runs=runs, warmup=warmup, report=report)
    others = [name for name in sides if name != "verax"]
    size = 2 if dtype == "bfloat16" else 4
    return benchmark.result(
        {
            "model": model or f"random weights, {SHAPES[shapes][0]} shapes",
            "shapes": None if model else shapes,
            "dtype": dtype,
            "sentences": len(texts),
            "tokens": sum(lengths),
            "shortest": min(lengths),
            "longest": max(lengths),
            "batch_size": batch_size,
            "runs": runs,
            "warmup": warmup,
        },
        versions,
        first_s=first_s,
        compiled_during_runs=encoder.num_compiled() - compiled,
        sides={name: side.to_dict(len(texts)) for name, side in samples.items()},
        ratios={f"verax / {name}": samples["verax"].ratio_to(samples[name]) for name in others},
        work=benchmark.against_limit(
            samples["verax"].median,
            bytes_moved=-(-len(texts) // batch_size) * size * weights,
            flops=2 * weights * sum(lengths),
            dtype=dtype,
        ),
        largest_difference=max((float(np.abs(results["verax"] - results[n]).max()) for n in others), default=0.0),
    )


class _TransformersLoop:
    """`SentenceTransformer.encode`, without that library: sorted, tokenised, padded, run, pooled, normalised."""

    def __init__(self, folder: Path, dtype: str, settings: EncoderSettings):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise MissingDependencyError(
                "comparing with transformers needs it and torch: pip install 'verax[parity]'"
            ) from error
        self._torch, self._settings = torch, settings
        self._versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(num_cores())
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
        model: Any = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model: Any = model.to(self._device).eval()

    def versions(self) -> dict[str, Any]:
        """Versions, threads and device of this side."""
        return {**self._versions, "torch_threads": self._torch.get_num_threads(), "torch_device": self._device}

    def encode(self, texts: list[str], batch_size: int) -> np.ndarray:
        """Normalised vectors, in order."""
        torch = self._torch
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = []
        with torch.inference_mode():
            for begin in range(0, len(order), batch_size):
                chosen = [texts[i] for i in order[begin : begin + batch_size]]
                inputs = self._tokenizer(
                    chosen, padding=True, truncation=True, max_length=self._settings.max_length, return_tensors="pt"
                )
                ids, mask = inputs["input_ids"].to(self._device), inputs["attention_mask"].to(self._device)
                hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
                found.append(torch.nn.functional.normalize(self._pooled(hidden, mask)).float().cpu())
        vectors = torch.cat(found).numpy()
        return vectors[np.argsort(order)]

    def _pooled(self, hidden: Any, mask: Any) -> Any:
        if self._settings.pooling == "cls":
            return hidden[:, 0]
        if self._settings.pooling == "lasttoken":
            return hidden[self._torch.arange(len(hidden)), mask.sum(1) - 1]
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


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
