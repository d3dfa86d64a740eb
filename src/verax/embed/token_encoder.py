"""Token vectors and MaxSim (ColBERT, Khattab and Zaharia, 2020, arXiv:2004.12832): late interaction.

A text has a vector for each token; the score of a document is the sum over the query's tokens of the largest product
with a token of the document. Folders are read as sentence-transformers' `MultiVectorEncoder` reads them: its own,
PyLate's, and colbert-ir's (architecture `HF_ColBERT`).
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from verax import models
from verax.checkpoint import Checkpoint
from verax.embed.buckets import (
    Job,
    PackedBuckets,
    Tokens,
    check_batch_size,
    check_texts,
    compiled,
    run_jobs,
    tokens_per_call,
)
from verax.embed.encoder import Encoder, LoadOptions
from verax.embed.modules import Normalize, list_modules, load_token_modules, normalized
from verax.embed.reranker import RankedDocument, ranked
from verax.embed.settings import (
    MODEL_FILE,
    TOKEN_MODELS,
    EncoderSettings,
    Prompts,
    read_max_length,
    read_model_file,
    read_transformer_file,
)
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import Size, read_value
from verax.files import JsonObject, read_json
from verax.loading import load_model
from verax.nn import Linear, Sentences
from verax.text.tokens.tokenizer import Tokenizer

_QUERY_LENGTH = 32
"""Tokens that ColBERT fills queries up to, where its files do not say."""


@dataclass(frozen=True)
class Expansion:
    """Tokens that fill short queries up."""

    length: int
    token: str | None = None
    """The tokenizer's mask, or else its end of text, if None."""
    is_seen: bool = False
    """True if the query's own tokens see them."""
    cuts: bool = True
    """True if longer queries are cut to `length`."""


@dataclass(frozen=True)
class TokenSettings:
    """Settings by which texts become token vectors."""

    prompts: Prompts
    prefixes: tuple[str, ...] = ()
    """Beginnings of prompts that are one token each, where the tokenizer has it."""
    query_length: int | None = None
    document_length: int | None = None
    expansion: Expansion | None = None
    skipped_words: tuple[str, ...] = ()
    """Tokens whose vectors are left out."""
    skipped_in: tuple[str, ...] = ("document",)
    """Texts that they are left out of: `document`, `query`."""
    projects: bool = False
    """True if the checkpoint itself has the Dense layer, as `linear.weight`."""
    normalizes: bool = False
    """True if vectors have length 1 although no module says so."""
    averages: bool = False
    """True if a score is the mean over the query's vectors, not their sum (`meanmaxsim`)."""


def is_token_model(folder: Path, opened: Checkpoint) -> bool:
    """True if a folder holds a model of token vectors, by its files."""
    model = read_json(folder / MODEL_FILE, optional=True)
    return model.get("model_type") in TOKEN_MODELS or _is_pylate(model) or _is_colbert(opened)


def _is_pylate(model: Mapping[str, Any]) -> bool:
    """True for PyLate's config_sentence_transformers.json, which names no model_type before sentence-transformers 5."""
    return model.get("model_type", "ColBERT" if "query_prefix" in model else None) == "ColBERT"


def _is_colbert(opened: Checkpoint) -> bool:
    """True for a checkpoint of colbert-ir, by its config.json."""
    return "HF_ColBERT" in read_value(opened.config, "architectures", tuple[str, ...], ())


def read_token_settings(folder: Path, opened: Checkpoint) -> TokenSettings:
    """Settings of a folder, in any of the three layouts, or of a model of sentences."""
    model = read_model_file(folder, "SentenceTransformer", *TOKEN_MODELS)
    prompts = Prompts.from_file(model)
    if _is_colbert(opened):
        file = read_json(folder / "artifact.metadata", optional=True)
        prefixes = {
            "query": (read_value(file, "query_token_id", str, None) or "[unused0]") + " ",
            "document": (read_value(file, "doc_token_id", str, None) or "[unused1]") + " ",
        }
        length = read_value(file, "query_maxlen", Size, _QUERY_LENGTH)
        return TokenSettings(
            Prompts({**prefixes, **prompts.texts}),
            tuple(prefixes.values()),
            document_length=read_value(file, "doc_maxlen", Size, None),
            expansion=Expansion(length, is_seen=bool(file.get("attend_to_mask_tokens"))),
            skipped_words=tuple(string.punctuation) if read_value(file, "mask_punctuation", bool, True) else (),
            projects=True,
            normalizes=True,
        )
    tokens = read_transformer_file(opened.folder, "feature-extraction", tokens=True)
    if _is_pylate(model):
        return _pylate(model, prompts, tokens)
    options: dict[str, Any] = {"averages": model.get("similarity_fn_name") == "meanmaxsim"}
    for entry in list_modules(folder):
        if entry.kind == "MultiVectorMask":
            config = read_json(entry.folder / "config.json", optional=True)
            if config.get("keep_only_token_ids"):
                raise UnsupportedModelError(f"{config.where}: keep_only_token_ids is not supported")
            options["skipped_words"] = read_value(config, "skiplist_words", tuple[str, ...], ())
            options["skipped_in"] = read_value(config, "skiplist_tasks", tuple[str, ...], ("document",))
    return TokenSettings(prompts, expansion=_expansion(tokens), **_lengths(tokens), **options)


def _lengths(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read_value(config, name, Size, None) for name in ("query_length", "document_length")}


def _expansion(config: JsonObject) -> Expansion | None:
    """Expansion of queries, in the form of sentence-transformers."""
    given = read_value(config, "query_expansion", dict, None)
    if given is None:
        return None
    given = JsonObject(given, f"{config.where}: query_expansion")
    if (strategy := read_value(given, "strategy", str)) not in ("fixed", "min"):
        raise UnsupportedModelError(f"{given.where}: strategy {strategy!r} is not supported; fixed and min are")
    return Expansion(
        read_value(given, "length", Size),
        read_value(given, "token", str, None),
        is_seen=read_value(given, "attend", bool, False),
        cuts=strategy == "fixed",
    )


def _pylate(model: JsonObject, prompts: Prompts, tokens: JsonObject) -> TokenSettings:
    """Settings of PyLate's config_sentence_transformers.json, whose prefixes go before its prompts."""
    texts, prefixes = dict(prompts.texts), []
    for role in ("query", "document"):
        if prefix := read_value(model, f"{role}_prefix", str, ""):
            texts[role] = prefix + texts.get(role, "").removeprefix(prefix)
            prefixes.append(prefix)
    lengths, expansion = _lengths({**tokens, **model}), _expansion(JsonObject({**tokens, **model}, model.where))
    if "query_expansion" not in model and read_value(model, "do_query_expansion", bool, True):
        seen = model.get("attend_to_expansion_tokens", model.get("attend_to_mask_tokens"))
        expansion = Expansion(lengths.pop("query_length") or _QUERY_LENGTH, is_seen=bool(seen))
    words = read_value(model, "skiplist_words", tuple[str, ...], tuple(string.punctuation))
    prompts = Prompts(texts, prompts.default)
    return TokenSettings(prompts, tuple(prefixes), expansion=expansion, skipped_words=words, normalizes=True, **lengths)


def maxsim(query: Float[np.ndarray, "q D"], document: Float[np.ndarray, "d D"]) -> float:
    """Sum over the query's tokens of the largest product with a token of the document; 0 without tokens."""
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


class TokenEncoder(Encoder):
    """Texts to a vector for each token, by the checkpoint's prompts, lengths and expansion of queries.

    `Encoder`'s arguments load it; `pooling`, `dimensions` and `task` are refused. `max_length` goes before the files'
    length of documents.

    Examples:
        >>> encoder = Encoder("colbert-ir/colbertv2.0", output="tokens")
        >>> encoder.rank("Who wrote Faust?", ["Goethe wrote Faust.", "Faust is a glove."], top_k=1)
    """

    _vectors = "token vectors"
    _refused = ("pooling", "dimensions", "task")

    def _load(self, folder: Path, opened: Checkpoint, options: LoadOptions) -> None:
        model_class, config = models.encoder(opened.config)
        self.model_config, weights = config, models.DTYPES[options.dtype]
        settings = read_token_settings(folder, opened)
        if options.max_length is not None:
            settings = replace(settings, document_length=None)  # a default of the files
        self.token_settings = settings
        expansion = settings.expansion
        if expansion is not None and expansion.length > config.max_position_embeddings:
            raise UnsupportedModelError(
                f"{folder}: queries of {expansion.length} tokens (query_expansion) are longer than the model's "
                f"{config.max_position_embeddings} positions"
            )
        if expansion is not None and not expansion.is_seen and not getattr(model_class, "hides_tokens", False):
            raise UnsupportedModelError(
                f"{folder}: a query's expansion that its own tokens do not see is not supported in model_type "
                f"{opened.config.get('model_type')!r}; the BERT families and ModernBERT are"
            )
        steps, width = load_token_modules(folder, config.hidden_size, dtype=weights)
        if settings.projects:
            width = opened.shape("linear.weight")[0]
            steps = [_load_projection(opened, config.hidden_size, width, weights)]
            # The layer lies next to the encoder's weights, where others are a mistake.
            ignored = {"ignored_weights": (*model_class.ignored_weights, r"^linear\.")}
            model_class = type(model_class.__name__, (model_class,), ignored)
        if settings.normalizes:
            steps.append(Normalize())
        self._is_token_model = is_token_model(folder, opened)
        self._full_dimension = self._dimensions = width
        tokens = read_transformer_file(opened.folder, "feature-extraction", tokens=True)
        self.settings = EncoderSettings(
            "",
            read_max_length(opened.folder, config.max_position_embeddings, options.max_length, tokens),
            lower_case=read_value(tokens, "do_lower_case", bool, False),
            prompts=settings.prompts,
        )
        self._tokenizer = _tokenizer(opened.folder, settings.prefixes, config.vocab_size)
        if self.settings.lower_case:
            self._tokenizer.with_lower_case()
        words = (self._tokenizer.token_id(word) for word in settings.skipped_words)
        self._skipped_ids = np.asarray([word for word in words if word is not None], np.int32)
        loaded = options.load(opened, model_class, config, self.max_length)
        if not getattr(loaded, "takes_packed_sentences", True):
            raise UnsupportedModelError(f"{folder}: {model_class.__name__} has no token vectors here")
        causal = models.is_causal(opened.config)

        def encode(
            parts: tuple[Any, nnx.List[Any]],
            tokens: Int32[Array, "1 T"],
            lengths: Int32[Array, "S"],
            normalize: Bool[Array, ""],
            seen: Int32[Array, "S"] | None = None,
        ) -> Float[Array, "T D"]:
            sentences = Sentences.packed(lengths, tokens.shape[1])
            sentences = sentences if seen is None else sentences.hiding(seen)
            x = models.hidden_states(parts[0], tokens, sentences, causal=causal)
            for step in parts[1]:
                x = step(x, sentences, jnp.int32(0))
            x = x[0].astype(jnp.float32)
            return jnp.where(normalize, normalized(x), x)

        self._program, self._weights = compiled(encode, (loaded, nnx.List(steps)))

    def encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        sentences: str | Iterable[str],
        normalize: bool = True,
        batch_size: int | None = None,
        show_progress: bool = True,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        task: str = "document",
    ) -> Float32[np.ndarray, "T D"] | list[Float32[np.ndarray, "T D"]]:
        """Vectors of each text's tokens, `[T, D]`, in the order of the texts; of one text, one array.

        Args:
            normalize: vectors of length 1. False keeps the lengths that the modules give.
            batch_size, show_progress, prompt_name, prompt: as in `Encoder.encode`.
            task: `"document"`, or `"query"`, which is filled up where the checkpoint says so.
        """
        check_batch_size(batch_size)
        if task not in ("document", "query"):
            raise InvalidParameterError(f"task: expected document or query, got {task!r}")
        before = self.settings.prompts.text(prompt_name) if prompt is None else check_texts([prompt], "prompt")[0]
        texts = check_texts([sentences] if isinstance(sentences, str) else sentences, "sentences")
        settings, self.truncated = self.token_settings, 0
        expansion = settings.expansion if task == "query" else None
        limit = settings.query_length if task == "query" else settings.document_length
        if expansion is not None:
            limit = expansion.length if expansion.cuts else max(limit or self.max_length, expansion.length)
        seen = np.zeros(len(texts), np.int32)
        ids_of: list[Sequence[int]] = [()] * len(texts)
        filler = self._filler(expansion)

        def tokenize(chunk: Sequence[int]) -> list[Tokens]:
            result = []
            for i, (ids, left_out) in zip(
                chunk, self.tokenize([texts[i] for i in chunk], limit, prompt=before), strict=True
            ):
                seen[i] = len(ids)
                ids_of[i] = [*ids, *filler * max(0, 0 if expansion is None else expansion.length - len(ids))]
                result.append(Tokens(ids_of[i], left_out=left_out))
                self.truncated += left_out > 0
            return result

        def dispatch(job: Job) -> Array:
            visible = np.zeros_like(job.lengths)
            visible[: len(job.members)] = seen[job.members]
            hides = expansion is not None and not expansion.is_seen
            return self._program(self._weights, job.tokens, job.lengths, np.bool_(normalize), *[visible] * hides)

        vectors: list[Any] = [None] * len(texts)

        def write(job: Job, rows: np.ndarray) -> None:
            ends = np.cumsum(job.lengths)
            for index, end, length in zip(job.members, ends, job.lengths, strict=False):
                vectors[index] = rows[end - length : end].copy()

        jobs = self._buckets(batch_size).tokenized([len(text) for text in texts], tokenize)
        show = show_progress and len(texts) > 1
        run_jobs(jobs, dispatch, write, len(texts), label="encoding", unit="texts", show_progress=show)
        if task in settings.skipped_in and len(self._skipped_ids):
            vectors = [v[~np.isin(ids, self._skipped_ids)] for v, ids in zip(vectors, ids_of, strict=True)]
        return vectors[0] if isinstance(sentences, str) else vectors

    def encode_query(self, sentences: str | Iterable[str], **options: Any) -> Any:
        """Token vectors of queries, with their prompt and expansion."""
        return super().encode_query(sentences, **options, task="query")

    def encode_tokens(self, token_ids: Any, normalize: bool = True, batch_size: int | None = None) -> Any:
        """Raise an error: prompts and expansions of token vectors are made of texts."""
        raise InvalidParameterError("token_ids: token vectors are made of texts; call encode")

    def score(
        self, query: str, documents: Iterable[str], *, batch_size: int | None = None, show_progress: bool = True
    ) -> Float32[np.ndarray, "n"]:
        """MaxSim of a query with each document, in their order; a better answer has a higher score.

        It is divided by the number of the query's vectors where the files say so (`meanmaxsim`). `truncated` counts
        the query too, if it lost its end.
        """
        # The modules of a model of token vectors say whether these have length 1.
        options: dict[str, Any] = {"batch_size": batch_size, "show_progress": show_progress}
        options["normalize"] = not self._is_token_model
        one = self.encode_query(check_texts([query], "query")[0], **options)
        of_query = self.truncated
        vectors = self.encode_document(check_texts(documents, "documents"), **options)
        self.truncated += of_query
        scores = np.asarray([maxsim(one, vector) for vector in vectors], np.float32)
        return scores / max(len(one), 1) if self.token_settings.averages else scores

    def rank(
        self, query: str, documents: Iterable[str], top_k: int | None = None, **options: Any
    ) -> list[RankedDocument]:
        """Documents with their scores, the best first, as `Reranker.rank`."""
        return ranked(lambda texts: self.score(query, texts, **options), documents, top_k)

    def _buckets(self, batch_size: int | None) -> PackedBuckets:
        # Queries are filled up whatever `max_length` is.
        expansion = self.token_settings.expansion
        longest = max(self.max_length, 0 if expansion is None else expansion.length)
        return PackedBuckets(batch_size, longest, tokens_per_call())

    def _dispatch(self, job: Job, normalize: bool, skipped: int) -> Any:
        """Calls of documents and, where their fillers are hidden, of queries: a warm-up compiles both."""
        expansion = self.token_settings.expansion
        hidden = [] if expansion is None or expansion.is_seen else [(job.lengths,)]
        return [
            self._program(self._weights, job.tokens, job.lengths, np.bool_(normalize), *seen) for seen in [(), *hidden]
        ]

    def _filler(self, expansion: Expansion | None) -> list[int]:
        """Token that fills queries up, alone in a list; an empty list without an expansion."""
        if expansion is None:
            return []
        names = self._tokenizer.special_tokens
        token = expansion.token or names.get("mask_token") or names.get("eos_token")
        token_id = None if token is None else self._tokenizer.token_id(token)
        if token_id is None:
            raise UnsupportedModelError(f"query_expansion: the tokenizer has no token {token or '[MASK]'!r}")
        return [token_id]


def _load_projection(opened: Checkpoint, size_in: int, size_out: int, dtype: Any) -> nnx.Module:
    """The Dense layer that lies next to a BERT's weights."""

    class Projection(nnx.Module):
        ignored_weights = (r"^(?!linear\.)",)

        def __init__(self, config: None, *, dtype: Any, rngs: nnx.Rngs):
            self.linear = Linear(size_in, size_out, dtype=dtype, rngs=rngs)

        def __call__(self, x: Array, *_: Any) -> Array:
            return self.linear(x)

    return load_model(opened, Projection, None, dtype=dtype)


def _tokenizer(folder: Path, prefixes: Iterable[str], rows: int) -> Tokenizer:
    """Tokenizer of a folder that finds prefixes in texts as one token, where it has that token."""
    tokenizer = Tokenizer.from_folder(folder, encodes=True, rows=rows)
    for prefix in prefixes:
        for token in (prefix, *prefix.split()[:1]):
            if (token_id := tokenizer.token_id(token)) is not None:
                if tokenizer.encode(token, add_special_tokens=False) != [token_id]:
                    tokenizer.with_special_token(token)
                break
    return tokenizer
