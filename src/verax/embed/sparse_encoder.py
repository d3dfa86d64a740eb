"""Sparse vectors of the vocabulary (SPLADE, Formal et al., 2021, arXiv:2107.05720 and arXiv:2109.10086).

A text's weight of a token is log(1 + relu(logit)) of a masked language model, the largest or the sum over the text's
tokens. Most weights are zero, so that an inverted index holds the vectors. Folders are read as sentence-transformers'
`SparseEncoder` reads them; a masked language model without a modules.json takes the maximum, as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, Bool, Float, Int32

from verax import models
from verax.checkpoint import Checkpoint
from verax.embed.buckets import Job, compiled, run_jobs
from verax.embed.encoder import Encoder, LoadOptions
from verax.embed.modules import list_modules
from verax.embed.settings import (
    SPARSE_MODEL,
    EncoderSettings,
    Prompts,
    read_max_length,
    read_model_file,
    read_transformer_file,
)
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Size, read_value
from verax.files import read_json
from verax.nn import Sentences
from verax.text.tokens.tokenizer import Tokenizer


class SparseEncoder(Encoder):
    """Texts to sparse vectors `[V]`, a weight for each token of the vocabulary.

    `Encoder`'s arguments load it; `pooling` is `"max"` or `"sum"`, and `dimensions` and `task` are refused.

    Examples:
        >>> encoder = Encoder("naver/splade-cocondenser-ensembledistil", output="sparse")
        >>> queries, documents = encoder.encode_query(["Who wrote Faust?"]), encoder.encode(["Goethe wrote Faust."])
        >>> scores = (queries @ documents.T).toarray()
        >>> encoder.decode(documents, top_k=5)
    """

    _vectors = "sparse vectors"
    _refused = ("dimensions", "task")

    def _load(self, folder: Path, opened: Checkpoint, options: LoadOptions) -> None:
        file = read_model_file(folder, SPARSE_MODEL)
        chosen, twice = _read_pooling(folder)
        strategy = options.pooling or chosen
        if strategy not in ("max", "sum"):
            raise InvalidParameterError(f"pooling: expected max or sum with output='sparse', got {strategy!r}")
        model_class, config = models.masked_lm(opened.config)
        self.model_config = config
        self._full_dimension = self._dimensions = config.vocab_size
        self._most = read_value(file, "max_active_dims", Size, None)
        tokens = read_transformer_file(opened.folder, "fill-mask")
        self.settings = EncoderSettings(
            strategy,
            read_max_length(opened.folder, config.max_position_embeddings, options.max_length, tokens),
            lower_case=read_value(tokens, "do_lower_case", bool, False),
            prompts=Prompts.from_file(file),
        )
        self._tokenizer = Tokenizer.from_folder(opened.folder, rows=config.vocab_size)
        if self.settings.lower_case:
            self._tokenizer.with_lower_case()
        loaded = options.load(opened, model_class, config, self.max_length)

        def encode(
            model: Any,
            tokens: Int32[Array, "1 T"],
            lengths: Int32[Array, "S"],
            normalize: Bool[Array, ""],
            skipped: Int32[Array, ""],
        ) -> Float[Array, "S V"]:
            sentences = Sentences.packed(lengths, tokens.shape[1])
            weights = jnp.log1p(jax.nn.relu(model(tokens, sentences)))
            weights = jnp.log1p(weights) if twice else weights
            if strategy == "max":
                return sentences.maximum(weights)
            return jax.ops.segment_sum(weights[0], sentences.segments[0], lengths.shape[0])

        self._program, self._weights = compiled(encode, loaded)

    def encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        sentences: str | Iterable[str],
        batch_size: int | None = None,
        show_progress: bool = True,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        max_active: int | None = None,
    ) -> scipy.sparse.csr_array:
        """Vectors of sentences, `[n, V]` float32, in their order; of one sentence, `[1, V]`.

        Args:
            batch_size, show_progress, prompt_name, prompt: as in `Encoder.encode`.
            max_active: largest weights that are kept of each vector; the checkpoint's number, or all, if None.
        """
        most = self._most if max_active is None else max_active
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise InvalidParameterError(f"max_active: expected a whole number from 1 on, got {max_active!r}")
        texts = [sentences] if isinstance(sentences, str) else sentences
        options: dict[str, Any] = dict(prompt_name=prompt_name, prompt=prompt, show_progress=show_progress)
        vectors: Any = super().encode(texts, False, batch_size, **options)
        return vectors if most is None else _largest(vectors, most)

    def encode_tokens(self, token_ids: Any, normalize: bool = False, batch_size: int | None = None) -> Any:
        """Sparse vectors of token ids, `[n, V]`, as `Encoder.encode_tokens`; `normalize` has no effect."""
        vectors: Any = super().encode_tokens(token_ids, normalize, batch_size)
        return vectors if self._most is None else _largest(vectors, self._most)

    def _run(self, jobs: Iterable[Job], count: int, normalize: bool, skipped: int, show_progress: bool) -> Any:
        """Results of calls that hold `count` texts. No array has the zeros of more than a call."""
        parts = [scipy.sparse.csr_array((0, self._full_dimension), dtype=np.float32)]
        members: list[int] = []

        def write(job: Job, rows: np.ndarray) -> None:
            parts.append(scipy.sparse.csr_array(rows[: len(job.members)]))
            members.extend(job.members)

        dispatch = lambda job: self._dispatch(job, normalize, skipped)
        run_jobs(jobs, dispatch, write, count, label="encoding", unit="texts", show_progress=show_progress)
        joined: Any = scipy.sparse.vstack(parts, format="csr")
        return joined[np.argsort(members)]

    def decode(self, vectors: scipy.sparse.csr_array, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """Tokens and weights of each vector, the largest weight first; `top_k` of them, or all."""
        given: Any = vectors
        rows = (given[[i]] for i in range(given.shape[0]))
        ordered = ((row, np.argsort(-row.data, kind="stable")[:top_k]) for row in rows)
        return [
            [(self._tokenizer.token(int(row.indices[i])) or "", float(row.data[i])) for i in order]
            for row, order in ordered
        ]


def _largest(vectors: Any, most: int) -> scipy.sparse.csr_array:
    """Sparse vectors `[n, V]` with their `most` largest weights."""
    counts = np.diff(vectors.indptr)
    order = np.lexsort((-vectors.data, np.repeat(np.arange(len(counts)), counts)))
    rank = np.arange(vectors.nnz) - np.repeat(vectors.indptr[:-1], counts)
    kept = np.sort(order[rank < most])
    ends = np.cumsum([0, *np.minimum(counts, most)])
    return scipy.sparse.csr_array((vectors.data[kept], vectors.indices[kept], ends), shape=vectors.shape)


def _read_pooling(folder: Path) -> tuple[str, bool]:
    """Strategy of a folder's SpladePooling, and True if the logarithm is taken twice."""
    entries = list_modules(folder)
    if not entries:
        return "max", False
    if [entry.kind for entry in entries] != ["Transformer", "SpladePooling"]:
        kinds = ", ".join(entry.kind for entry in entries)
        raise UnsupportedModelError(
            f"{folder / 'modules.json'}: {kinds}: expected Transformer, SpladePooling with output='sparse'"
        )
    config = read_json(entries[1].folder / "config.json", optional=True)
    strategy = read_value(config, "pooling_strategy", str, "max")
    activation = read_value(config, "activation_function", str, "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise UnsupportedModelError(
            f"{config.where}: pooling_strategy {strategy!r} with activation_function {activation!r} is not supported; "
            "max and sum with relu and log1p_relu are"
        )
    return strategy, activation == "log1p_relu"
