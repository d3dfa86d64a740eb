"""Sentence encoders: a checkpoint that turns sentences into vectors, with sentence-transformers' habits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from verax import builtin, models, progress
from verax._compat import enable_compilation_cache
from verax._optional import Deferred
from verax.checkpoint import Checkpoint
from verax.checkpoint.checkpoint import DerivedFile
from verax.embed.buckets import (
    Buckets,
    Job,
    PackedBuckets,
    PaddedBuckets,
    Tokens,
    check_batch_size,
    check_texts,
    check_tokens,
    compiled,
    load_for_calls,
    run_jobs,
    tokens_per_call,
)
from verax.embed.modules import Modules, check_precision, cut, load_modules, normalized, open_folder, quantized
from verax.embed.settings import EncoderSettings, Prompts
from verax.errors import CheckpointError, InvalidParameterError
from verax.fields import Positive, Size, read_value
from verax.nn import Sentences
from verax.text.tokens.tokenizer import Tokenizer

# Which derive their encoders from the one here.
_token_encoder: Any = Deferred("verax.embed.token_encoder")
_sparse_encoder: Any = Deferred("verax.embed.sparse_encoder")

_WITH_ADAPTERS = ".parametrizations.weight."
"""Part of the name of a weight that has adapters of tasks."""
_EMBEDDINGS = "_embeddings"


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of `Encoder` that say how a checkpoint is loaded."""

    dtype: str
    quantization: str | None
    max_length: int | None
    pooling: str | None
    dimensions: int | None
    task: str | None
    show_progress: bool

    def load(self, opened: Checkpoint, model_class: type[Any], config: Any, max_length: int) -> Any:
        """Load the transformer in this dtype or quantised; arguments as in `load_for_calls`."""
        given = self.dtype, self.quantization, max_length
        return load_for_calls(opened, model_class, config, *given, show_progress=self.show_progress)


class Encoder:
    """Sentences to vectors: weights on the device, a program for each bucket of lengths.

    A program is compiled when its bucket is first met and kept on disk; `warm_up` compiles all of them. What else is in
    the batch, and how it is padded, does not change a sentence's vector beyond rounding.

    Examples:
        >>> encoder = Encoder()  # the built-in model; or a Hugging Face folder or hub id
        >>> a, b = encoder.encode(["A cat is asleep.", "The cat sleeps."])
        >>> float(a @ b)
    """

    _vectors: ClassVar[str] = "sentence vectors"
    """Name of its vectors in errors."""

    _refused: ClassVar[tuple[str, ...]] = ()
    """Options that these vectors do not have."""

    _matryoshka: tuple[int, ...] = ()
    """Numbers of dimensions that the model was trained for; none if it has all."""

    _include_prompt = _packs = _padding = True
    """True if a prompt's tokens count, texts share rows, and rows may be padded."""

    def __new__(cls, *args: Any, output: str = "sentence", **options: Any) -> Encoder:
        """An encoder of sentences; `TokenEncoder` for `output="tokens"`, `SparseEncoder` for `output="sparse"`."""
        if output not in ("sentence", "tokens", "sparse"):
            raise InvalidParameterError(f"output: expected sentence, tokens or sparse, got {output!r}")
        if cls is not Encoder or output == "sentence":
            return object.__new__(cls)
        return object.__new__(_token_encoder.TokenEncoder if output == "tokens" else _sparse_encoder.SparseEncoder)

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        output: str = "sentence",
        dtype: str = "float32",
        quantization: str | None = None,
        max_length: int | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
        task: str | None = None,
        revision: str | None = None,
        show_progress: bool = True,
    ):
        """Load a checkpoint.

        Args:
            model: a folder with config.json and safetensors, a hub id, or None for the built-in model.
            output: `"sentence"`, `"tokens"` for a vector of each token (ColBERT), see `TokenEncoder`, or `"sparse"` for
                weights of the vocabulary (SPLADE), see `SparseEncoder`.
            dtype: `"float32"`, or `"bfloat16"` for weights and matmul inputs: faster, and about three digits.
            quantization: `"int8"` for matrix products of 8-bit integers, weights by row and inputs by token: faster on
                processors that multiply integers faster than floats. `dtype` is the dtype of the rest.
            max_length: tokens that are read of a sentence; the checkpoint's limit if None.
            pooling: a name of `embed.modules.POOLINGS`; the checkpoint's if None. If that has none, it is the last
                token for a causal language model with its head (`...ForCausalLM`), else the mean.
            dimensions: number of leading dimensions of each vector that are kept, for models that were trained for it
                (Matryoshka); the checkpoint's number if None, all of them if it has none.
            task: a task whose adapter is used, for jina-embeddings-v3 one of `lora_adaptations` in its config.json. Its
                instruction goes before each text that has no other prompt. None uses no adapter.
            revision: branch, tag or commit of a hub id.
            show_progress: a bar while loading, if stderr is a terminal.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
            UnsupportedModelError: if verax has no such architecture or pooling.
            InvalidParameterError: if an argument makes no sense, with its name.
        """
        models.check_dtype(dtype)
        options = LoadOptions(dtype, quantization, max_length, pooling, dimensions, task, show_progress)
        for name in self._refused:
            if getattr(options, name) is not None:
                raise InvalidParameterError(f"{name}: {self._vectors} have none; leave it out")
        enable_compilation_cache()
        begin = time.perf_counter()
        self.truncated = 0
        """Sentences of the last `encode` that were longer than `max_length` and lost their end."""
        self._load(*open_folder(builtin.encoder() if model is None else model, revision), options)
        self.load_seconds = time.perf_counter() - begin

    def _load(self, folder: Path, opened: Checkpoint, options: LoadOptions) -> None:
        """Load the checkpoint of a folder, whose transformer is `opened`, and make the program."""
        opened, instruction = _with_task(opened, options.task)
        model_class, config = models.encoder(opened.config)
        causal = models.is_causal(opened.config)
        self.model_config = config
        heads = read_value(opened.config, "architectures", tuple[str, ...], ())
        default = "lasttoken" if causal and heads and heads[0].endswith("ForCausalLM") else "mean"
        weights = models.DTYPES[options.dtype]
        modules = load_modules(folder, config.hidden_size, pooling=options.pooling, default=default, dtype=weights)
        self.settings = EncoderSettings.from_folder(
            folder,
            opened.folder,
            positions=config.max_position_embeddings,
            pooling=modules.pooling,
            max_length=options.max_length,
        )
        if instruction:
            names = ("query", "document", options.task or "")
            texts = {**dict.fromkeys(names, instruction), **self.settings.prompts.texts}
            self.settings = replace(self.settings, prompts=Prompts(texts, options.task))
        self._include_prompt = modules.include_prompt
        self._full_dimension: int = modules.width
        self._matryoshka = read_value(opened.config, "matryoshka_dimensions", tuple[Size, ...], ())
        self._dimensions = self._full_dimension
        self._dimensions = self.check_dimensions(options.dimensions)
        if options.dimensions is None and self.settings.dimensions is not None:
            self._dimensions = min(self.settings.dimensions, self._full_dimension)
        self._tokenizer = Tokenizer.from_folder(opened.folder, encodes=True, rows=config.vocab_size)
        if self.settings.lower_case:
            self._tokenizer.with_lower_case()
        self._tokenizer.encode_batch((), max_length=self.max_length)  # refuses a limit that leaves no token for a text
        loaded = options.load(opened, model_class, config, self.max_length)
        self._packs = getattr(loaded, "takes_packed_sentences", True)
        place = Sentences.packed if self._packs else Sentences.padded

        def encode(
            parts: tuple[Any, Modules],
            tokens: Int32[Array, "B T"],
            lengths: Int32[Array, "S"],
            normalize: Bool[Array, ""],
            skipped: Int32[Array, ""],
        ) -> Float[Array, "S D"]:
            sentences = place(lengths, tokens.shape[1])
            hidden = models.hidden_states(parts[0], tokens, sentences, causal=causal)
            vectors = parts[1](hidden, sentences, skipped)
            return jnp.where(normalize, normalized(vectors), vectors)

        self._program, self._weights = compiled(encode, (loaded, modules))
        self._padding = not getattr(loaded, "depends_on_padding", False)

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self._dimensions

    @property
    def max_length(self) -> int:
        """Tokens that are read of a sentence, special ones included."""
        return self.settings.max_length

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts of the checkpoint by their names."""
        return dict(self.settings.prompts.texts)

    def encode(
        self,
        sentences: str | Iterable[str],
        normalize: bool = True,
        batch_size: int | None = None,
        show_progress: bool = True,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        precision: str = "float32",
        ranges: Float[np.ndarray, "2 D"] | None = None,
    ) -> Shaped[np.ndarray, "..."]:
        """Vectors of sentences, in their order; of one sentence that is given as a string, one vector.

        Args:
            normalize: vectors of length 1, whose dot products are cosines. False keeps the lengths that pooling gives,
                also where the checkpoint lists a step that normalises.
            batch_size: most sentences in one call of the device; as many as its tokens hold if None.
            show_progress: a bar, if stderr is a terminal and there are several sentences.
            prompt_name: name of the checkpoint's prompt that goes before each sentence; its default if None.
            prompt: text that goes before each sentence, whatever `prompt_name` is.
            dimensions: number of leading dimensions of each vector that are kept; the constructor's number if None.
            precision: a name of `embed.modules.PRECISIONS`: `"int8"` and `"uint8"` of 255 steps a dimension, `"binary"`
                and `"ubinary"` of a bit a dimension, as sentence-transformers' `quantize_embeddings` makes them.
            ranges: smallest and largest number of each dimension, for int8 and uint8; of these sentences if None.

        Raises:
            InvalidParameterError: if a sentence is not a text, a prompt does not exist, or a number makes no sense;
                then nothing is computed.
        """
        check_batch_size(batch_size)
        dimensions = self.check_dimensions(dimensions)
        before = self.settings.prompts.text(prompt_name) if prompt is None else check_texts([prompt], "prompt")[0]
        texts = check_texts([sentences] if isinstance(sentences, str) else sentences, "sentences")
        check_precision(precision, (len(texts), dimensions), ranges)
        skipped = self._prompt_length(before)
        self.truncated = 0

        def tokenize(chunk: Sequence[int]) -> list[Tokens]:
            tokens = [Tokens(ids, left_out=n) for ids, n in self.tokenize([texts[i] for i in chunk], prompt=before)]
            self.truncated += sum(text.left_out > 0 for text in tokens)
            return tokens

        jobs = self._buckets(batch_size).tokenized([len(text) for text in texts], tokenize)
        show = show_progress and len(texts) > 1
        vectors = cut(self._run(jobs, len(texts), normalize, skipped, show), dimensions, normalize)
        vectors = quantized(vectors, precision, ranges)
        return vectors[0] if isinstance(sentences, str) else vectors

    def encode_query(self, sentences: str | Iterable[str], **options: Any) -> Shaped[np.ndarray, "..."]:
        """Vectors of queries: `encode` with the checkpoint's prompt `query`, if it has one.

        Args:
            sentences, options: as in `encode`. A `prompt` or `prompt_name` goes before that prompt.
        """
        return self.encode(sentences, **_with_prompt(options, self.settings.prompts.query))

    def encode_document(self, sentences: str | Iterable[str], **options: Any) -> Shaped[np.ndarray, "..."]:
        """Vectors of the documents that queries look for: `encode` with the checkpoint's prompt for them, if any.

        It is the first of `document`, `passage` and `corpus` that there is.

        Args:
            sentences, options: as in `encode`. A `prompt` or `prompt_name` goes before that prompt.
        """
        return self.encode(sentences, **_with_prompt(options, self.settings.prompts.document))

    def encode_tokens(
        self, token_ids: Iterable[Sequence[int]], normalize: bool = True, batch_size: int | None = None
    ) -> Float32[np.ndarray, "n D"]:
        """Vectors of token ids, in their order. Token ids from `tokenize` give the vectors of `encode`.

        Args:
            token_ids: tokens of each sentence, special ones included. No prompt goes before them.
            normalize, batch_size: as in `encode`.

        Raises:
            InvalidParameterError: as `check_tokens`.
        """
        check_batch_size(batch_size)
        texts = [Tokens(ids) for ids in self.check_tokens(token_ids)]
        jobs = self._buckets(batch_size).jobs(texts)
        return cut(self._run(jobs, len(texts), normalize, 0, False), self._dimensions, normalize)

    def check_tokens(self, token_ids: Iterable[Sequence[int]]) -> list[list[int]]:
        """Token ids of each sentence as lists, if the model takes them.

        Raises:
            InvalidParameterError: for no tokens, more than `max_length`, or one that is not in the vocabulary.
        """
        limits = self.max_length, self.model_config.vocab_size
        return [check_tokens(ids, *limits, number, "token_ids") for number, ids in enumerate(token_ids)]

    def check_dimensions(self, dimensions: int | None) -> int:
        """Number of dimensions that `encode` gives for this argument.

        Raises:
            InvalidParameterError: if it is not a number of 1 to `dimension`, or the checkpoint's config.json has
                `matryoshka_dimensions` without it.
        """
        if dimensions is None:
            return self._dimensions
        available = self._dimensions
        if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= available:
            raise InvalidParameterError(f"dimensions: expected 1 to {available}, got {dimensions!r}")
        if self._matryoshka and dimensions not in (*self._matryoshka, self._full_dimension):
            trained = ", ".join(map(str, self._matryoshka))
            raise InvalidParameterError(f"dimensions: the model was trained for {trained}, got {dimensions}")
        return dimensions

    def tokenize(
        self, sentences: Iterable[str], max_length: int | None = None, *, prompt: str = ""
    ) -> list[tuple[list[int], int]]:
        """Token ids of each sentence, special ones included, and the number of tokens that were cut from its end.

        Args:
            max_length: tokens that are kept of a sentence; at most, and by default, `Encoder.max_length`.

        Raises:
            InvalidParameterError: if a sentence is not a text, or `max_length` leaves no token for it.
        """
        texts = [prompt + text for text in check_texts(sentences, "sentences")]
        longest = self.settings.max_length
        limit = longest if max_length is None else min(max_length, longest)
        return self._tokenizer.encode_batch(texts, max_length=limit)

    def token_counts(self, sentences: Iterable[str]) -> list[int]:
        """Tokens that are read of each sentence, special ones included."""
        return [len(ids) for ids, _ in self.tokenize(sentences)]

    def warm_up(
        self, batch_size: int | None = None, max_length: int | None = None, show_progress: bool = True
    ) -> float:
        """Compile the programs for `batch_size` sentences of up to `max_length` tokens; seconds taken.

        `encode` with the same `batch_size` compiles nothing afterwards.
        """
        check_batch_size(batch_size)
        begin = time.perf_counter()
        longest = min(max_length or self.max_length, self.max_length)
        jobs = self._buckets(batch_size).empty_jobs(longest)
        with progress.bar("compiling programs", enabled=show_progress) as report:
            for done, job in enumerate(jobs, start=1):
                jax.block_until_ready(self._dispatch(job, True, 0))
                report(done, len(jobs))
        return time.perf_counter() - begin

    def num_compiled(self) -> int:
        """Number of programs compiled so far, which stays the same after `warm_up`."""
        return self._program._cache_size()

    def _prompt_length(self, prompt: str) -> int:
        """Tokens of a prompt that poolings leave out: those before the sentence, beginning tokens included."""
        if not prompt or self._include_prompt:
            return 0
        ((ids, _),) = self.tokenize([""], prompt=prompt)
        return len(ids) - (ids[-1] in self._tokenizer.special_token_ids)

    def _buckets(self, batch_size: int | None) -> Buckets:
        if self._packs:
            return PackedBuckets(batch_size, self.max_length, tokens_per_call())
        return PaddedBuckets(batch_size, self.max_length, padding=self._padding)

    def _run(
        self, jobs: Iterable[Job], count: int, normalize: bool, skipped: int, show_progress: bool
    ) -> Float32[np.ndarray, "n D"]:
        """Results of calls that hold `count` sentences."""
        vectors = np.empty((count, self._full_dimension), np.float32)
        dispatch = lambda job: self._dispatch(job, normalize, skipped)

        def write(job: Job, rows: np.ndarray) -> None:
            vectors[job.members] = rows[: len(job.members)]

        run_jobs(jobs, dispatch, write, count, label="encoding", unit="sentences", show_progress=show_progress)
        return vectors

    def _dispatch(self, job: Job, normalize: bool, skipped: int) -> Array:
        return self._program(self._weights, job.tokens, job.lengths, np.bool_(normalize), np.int32(skipped))


def _with_prompt(options: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Arguments of `encode` with a prompt, unless they have one."""
    chosen = options.get("prompt") is not None or options.get("prompt_name") is not None
    return options if chosen else {**options, "prompt": prompt}


def _with_task(opened: Checkpoint, task: str | None) -> tuple[Checkpoint, str]:
    """A checkpoint with the weights of a task, and the instruction that goes before its texts.

    In jina-embeddings-v3 (arXiv:2409.10173) a layer's weight W lies as `parametrizations.weight.original`, next to LoRA
    factors of all tasks: `lora_A [K, r, in]` and `lora_B [K, out, r]`, for embeddings `[K, rows, r]` and `[K, r, D]`.
    A task's weight is `W + B A alpha / r`. As in the published code, W alone is used without a task.

    `task`: a name of `lora_adaptations` in config.json; None for the weights without adapters and no instruction.

    Raises:
        InvalidParameterError: for a task that the checkpoint does not have, with those that it has.
        CheckpointError: for factors of other shapes than config.json says.
    """
    config = opened.config
    tasks = read_value(config, "lora_adaptations", tuple[str, ...], ())
    if task is not None and task not in tasks:
        known = f"the checkpoint has {', '.join(tasks)}" if tasks else "the checkpoint has no adapters of tasks"
        raise InvalidParameterError(f"task: expected one of its tasks, got {task!r}; {known}")
    names = [name.removesuffix("original") for name in opened.names() if name.endswith(f"{_WITH_ADAPTERS}original")]
    if not names:
        if task is not None:
            raise CheckpointError(f"{opened.folder}: no weight has adapters, although config.json names {task!r}")
        return opened, ""
    number = None if task is None else tasks.index(task)
    rank = read_value(config, "lora_rank", Size, 4)
    scale = float(read_value(config, "lora_alpha", Positive, 1.0)) / rank
    files = {}
    for name in names:
        key = name.removesuffix(_WITH_ADAPTERS) + ".weight"
        _check_factors(opened, name, len(tasks), rank)
        source = f"{name}original"
        files[key] = DerivedFile(
            opened.place(source)[0],
            key,
            opened.info(source)._replace(dtype=np.dtype(np.float32)),
            partial(_weight_of_task, opened, name, number, scale),
            partial(opened.release, source),
        )
    instructions = read_value(config, "task_instructions", dict[str, str], {})
    return opened.with_files(files), instructions.get(task or "", "")


def _check_factors(opened: Checkpoint, name: str, tasks: int, rank: int) -> None:
    rows, columns = opened.shape(f"{name}original")
    embeds = name.endswith(_EMBEDDINGS + _WITH_ADAPTERS)
    expected = ((rows, rank), (rank, columns)) if embeds else ((rank, columns), (rows, rank))
    for key, shape in zip((f"{name}0.lora_A", f"{name}0.lora_B"), expected, strict=True):
        if (given := opened.shape(key)) != (tasks, *shape):
            raise CheckpointError(f"{opened.folder}: {key} has shape {list(given)}, expected {[tasks, *shape]}")


def _weight_of_task(opened: Checkpoint, name: str, task: int | None, scale: float) -> np.ndarray:
    """Weight of a layer or an embedding for a task, float32."""
    weight = np.asarray(opened.read(f"{name}original"), np.float32)
    if task is None:
        return weight
    a, b = (np.asarray(opened.read_raw(f"{name}0.lora_{factor}")[task], np.float32) for factor in "AB")
    return weight + (a @ b if name.endswith(_EMBEDDINGS + _WITH_ADAPTERS) else b @ a) * np.float32(scale)
