"""`Embed`: vectors of the texts of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np

from verax.errors import VeraxError
from verax.ray.actor import one_compiles, set_threads
from verax.ray.rows import Batch

__all__ = ["Embed"]


class Embed:
    """Callable for `Dataset.map_batches`: adds the vector of each text, [D] float32, and the column `error`.

    A row whose text cannot be read has the reason in `error`, and a vector of zeros.

    Args:
        model: as in `Encoder`, and so are `options`.
        column: column of the texts.
        output: column of the vectors.
        options: further arguments of `Encoder`.
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
