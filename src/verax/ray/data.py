"""Callables for Ray Data that answer prompts, embed texts and make clips, and the arguments of their actor pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from verax._optional import require_optional
from verax.errors import EngineDeadError, InvalidParameterError, VeraxError
from verax.ray.cluster import actor_environment, check_actors, end_actor, one_compiles, set_threads

Batch = dict[str, Any]
"""Columns of a batch by name: arrays of one length."""


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a batch, with Python's own values in place of numpy's, but for arrays of numbers such as pictures.

    Ray has a NaN where a column of numbers has no value, and arrays where an object has lists.
    """
    for values in zip(*batch.values(), strict=True):
        plain = (
            value if isinstance(value, np.ndarray) and value.dtype != object else _plain(value) for value in values
        )
        yield dict(zip(batch, plain, strict=True))


def _plain(value: Any) -> Any:
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Columns of rows that have the same names. Columns of texts can have None."""
    result = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        numbers = all(isinstance(value, int | float) for value in values)
        result[name] = column = np.array(values) if numbers else np.empty(len(values), object)
        column[:] = values
    return result


class Generate:
    """Callable for `Dataset.map_batches`: adds answers to rows with a column `prompt` or `messages`.

    A prompt is a text or token ids; messages are a list, or its JSON text. The columns `text`, `finish_reason`,
    `num_prompt_tokens`, `num_output_tokens` and `error` are added. A row that cannot be answered has its reason in
    `error`, and no text. An engine that fails ends its actor; Ray starts another, which answers the rows again.

    `model`: as in `AsyncLLM`, and so are `options`. `sampling_params`: fields of `SamplingParams` for all rows. A
    column `sampling_params` (a dictionary, or its JSON text) replaces some of them in a row.
    """

    def __init__(self, model: str | None = None, *, sampling_params: Mapping[str, Any] | None = None, **options: Any):
        set_threads()
        from verax.text.engine.async_llm import AsyncLLM

        with one_compiles(model, options):
            # All rows of an actor's batches wait here: what is in flight is bounded by Ray.
            self._llm = AsyncLLM(model, use_tqdm=False, max_queued_requests=1 << 20, **options)
        self._params = self._llm.default_sampling_params(**(sampling_params or {}))

    async def __call__(self, batch: Batch) -> Batch:
        """The batch with its answers, in the order of the rows."""
        answers = await asyncio.gather(*(self._row(row) for row in rows_of(batch)))
        return {**batch, **columns(answers)}

    async def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        nothing = {"text": None, "finish_reason": None, "num_prompt_tokens": 0, "num_output_tokens": 0}
        try:
            output = await self._llm.collect(_prompt(row), self._sampling(row))
        except EngineDeadError as error:
            end_actor(error)
        except (VeraxError, msgspec.MsgspecError) as error:
            return {**nothing, "error": str(error)}
        sample = output.outputs[0]
        return {
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_output_tokens": len(sample.token_ids),
            "error": None,
        }

    def _sampling(self, row: Mapping[str, Any]) -> Any:
        given = row.get("sampling_params")
        if given is None:
            return self._params
        values = msgspec.json.decode(given) if isinstance(given, str) else given
        if not isinstance(values, Mapping):
            raise InvalidParameterError(f"sampling_params: expected an object, got {values!r}")
        known = {field: value for field, value in values.items() if value is not None}
        try:
            return replace(self._params, **known)
        except TypeError as error:
            raise InvalidParameterError(f"sampling_params: {error}") from error


def _prompt(row: Mapping[str, Any]) -> Any:
    """Prompt of a row: text, token ids, or messages."""
    messages = row.get("messages")
    if messages is not None:
        return msgspec.json.decode(messages) if isinstance(messages, str) else list(messages)
    prompt = row.get("prompt")
    if isinstance(prompt, np.ndarray | Sequence):
        return prompt if isinstance(prompt, str) else list(prompt)
    raise InvalidParameterError(f"prompt: expected a text or token ids in the column, got {prompt!r}")


class Embed:
    """Callable for `Dataset.map_batches`: adds the vector of each text, [D] float32, and the column `error`.

    A row whose text cannot be read has the reason in `error`, and a vector of zeros.

    `model`: as in `Encoder`, and so are `options`. `options`: further arguments of `Encoder`.
    """

    def __init__(self, model: str | None = None, *, column: str = "text", output: str = "embedding", **options: Any):
        set_threads()
        from verax.embed.encoder import Encoder

        with one_compiles("embed", model, options):
            self._encoder = Encoder(model, show_progress=False, **options)
        self._column, self._output = column, output

    def __call__(self, batch: Batch) -> Batch:
        """The batch with its vectors."""
        texts = list(batch[self._column])
        errors = np.full(len(texts), None, object)
        try:
            vectors = self._encode(texts)
        except (VeraxError, TypeError):  # one of them is wrong
            vectors = np.zeros((len(texts), self._encoder.dimension), np.float32)
            for row, text in enumerate(texts):
                try:
                    vectors[row] = self._encode([text])[0]
                except (VeraxError, TypeError) as error:
                    errors[row] = str(error)
        return {**batch, self._output: vectors, "error": errors}

    def _encode(self, texts: list[Any]) -> np.ndarray:
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"{self._column}: expected a text, got {wrong[0]!r}")
        return self._encoder.encode(texts, show_progress=False)


class Clips:
    """Callable for `Dataset.map_batches`: makes a clip of each row's `prompt`, and adds the columns `path` and `error`.

    The file is named by the row's `custom_id`, and written whole or not at all. A clip that is there already is not
    made again. A row whose clip cannot be made has the reason in `error`, and no path.

    Args:
        folder: of the clips, on a file system that all nodes share.
        model: as in `VideoPipeline.from_pretrained`, and so are `options`.
        request: fields of `VideoRequest` for all rows. Columns of these names replace them in a row.
    """

    def __init__(
        self, folder: str | Path, model: str | None = None, *, request: Mapping[str, Any] | None = None, **options: Any
    ):
        set_threads()
        from verax.video.pipeline import VideoPipeline

        with one_compiles("clips", model, options):
            self._pipeline = VideoPipeline.from_pretrained(model, show_progress=False, **options)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._request = dict(request or {})

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the paths of its clips."""
        return {**batch, **columns([self._row(row) for row in rows_of(batch)])}

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        from verax.video.files import clip_path
        from verax.video.request import VideoRequest

        path = clip_path(self._folder, str(row["custom_id"]))
        try:
            if not path.exists():
                names = [field.name for field in fields(VideoRequest)]
                own = {name: row[name] for name in names[1:] if row.get(name) is not None}
                # Whole numbers of a column that lacks some are floats.
                own = {name: int(x) if isinstance(x, float) and x.is_integer() else x for name, x in own.items()}
                clip = self._pipeline(row["prompt"], **{**self._request, **own})
                clip.save(path)
        except (VeraxError, TypeError) as error:
            return {"path": None, "error": str(error)}
        return {"path": str(path), "error": None}


BATCH_SIZE = 16

TASKS = 4
"""Blocks that are with an actor at once: one begins while the last rows of another are on their way."""


def actor_pool(
    size: int | tuple[int, int],
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    batch_size: int = BATCH_SIZE,
    **arguments: Any,
) -> dict[str, Any]:
    """Arguments of `Dataset.map_batches` that go with a callable such as `Generate`.

    `size`: number of actors, or the least and the most of them. `num_cpus`: CPUs of each, and threads of its JAX.

    Raises:
        InvalidParameterError: for sizes that make no sense, or a pool that leaves no CPU to those who read files and
            filter checkpoints. A checkpoint has to be configured before.
        MissingDependencyError: if Ray is not installed.

    Examples:
        >>> prompts.map_batches(verax.ray.Generate, **verax.ray.actor_pool(2, num_gpus=1, model="Qwen/Qwen3-0.6B"))
    """
    data = require_optional("ray.data")
    # The filter of a checkpoint is an actor with a CPU of its own; those who read and write take turns with another.
    checkpoint = data.DataContext.get_current().checkpoint_config
    least, most = check_actors("size", size, num_cpus, num_gpus, left=1 if checkpoint is None else 2)
    return {
        "compute": data.ActorPoolStrategy(
            min_size=least,
            max_size=most,
            max_tasks_in_flight_per_actor=2 * TASKS,
            max_concurrent_calls_per_actor=TASKS,
            enable_true_multi_threading=True,
        ),
        "batch_size": batch_size,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "fn_constructor_kwargs": arguments,
        "runtime_env": actor_environment(),
    }
