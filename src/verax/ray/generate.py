"""`Generate`: answers to the prompts of a data set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from verax.errors import EngineDeadError, InvalidParameterError, VeraxError
from verax.ray.actor import end_actor, one_compiles, set_threads
from verax.ray.rows import Batch, columns, rows_of

__all__ = ["Generate"]


class Generate:
    """Callable for `Dataset.map_batches`: adds answers to rows with a column `prompt` or `messages`.

    A prompt is a text or token ids; messages are a list, or its JSON text. The columns `text`, `finish_reason`,
    `num_prompt_tokens`, `num_output_tokens` and `error` are added. A row that cannot be answered has its reason in
    `error`, and no text. An engine that fails ends its actor; Ray starts another, which answers the rows again.

    Args:
        model: as in `AsyncLLM`, and so are `options`.
        sampling_params: fields of `SamplingParams` for all rows. A column `sampling_params` (a dictionary, or its JSON
            text) replaces some of them in a row.
        options: further arguments of `AsyncLLM`.
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
        found = await asyncio.gather(*(self._row(row) for row in rows_of(batch)))
        return {**batch, **columns(found)}

    async def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            output = await self._llm.collect(_prompt(row), self._sampling(row))
        except EngineDeadError as error:
            end_actor(error)
        except (VeraxError, msgspec.MsgspecError) as error:
            return _result(error=str(error))
        sample = output.outputs[0]
        return _result(sample.text, sample.finish_reason, len(output.prompt_token_ids), len(sample.token_ids))

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
    """Prompt of a row: text, token ids, or messages.

    Raises:
        InvalidParameterError: if it has none.
    """
    messages = row.get("messages")
    if messages is not None:
        return msgspec.json.decode(messages) if isinstance(messages, str) else list(messages)
    prompt = row.get("prompt")
    if isinstance(prompt, np.ndarray | Sequence):
        return prompt if isinstance(prompt, str) else [int(token) for token in prompt]
    raise InvalidParameterError(f"prompt: expected a text or token ids in the column, got {prompt!r}")


def _result(
    text: str | None = None,
    finish_reason: str | None = None,
    num_prompt_tokens: int = 0,
    num_output_tokens: int = 0,
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "text": text,
        "finish_reason": finish_reason,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "error": error,
    }
