"""Work of lines in this process: vectors of texts, and clips of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float32

from verax._optional import require_optional
from verax.batch.lines import InputLine, LineError, write_rows
from verax.batch.results import ResultLine
from verax.embed.encoder import Encoder
from verax.errors import InvalidParameterError
from verax.options import options_of
from verax.video.files import clip_path
from verax.video.pipeline import VideoPipeline
from verax.video.request import ResolvedRequest, VideoRequest, make_request

LEAST, MOST = 64, 4096
"""Texts of the first call of the encoder, and the limit of a call."""

RESULTS = "results.jsonl"
"""File of the results, in the folder of the clips."""

NOT_OF_A_LINE = ("latents", "prompt_embeds", "negative_prompt_embeds", "output_type", "callback", "resume")
"""Options of a request that JSON cannot express, or that mean nothing where clips become files."""

_FILES = ("image", "last_image", "video", "mask", "reference_images")
"""Options that are names of files, which a checked request has read."""


class VectorLine(ResultLine, msgspec.Struct, frozen=True):
    """Vector of a text, or the reason why there is none.

    `custom_id`: name of the line; None for a line that could not be read. `embedding`: list of numbers, as JSON; `null`
    if there is an error.
    """

    custom_id: str | None
    embedding: msgspec.Raw = msgspec.Raw(b"null")
    error: LineError | None = None


class Vectors:
    """Callable that gives the vectors of lines. `options`: further arguments of `Encoder.encode`."""

    def __init__(self, encoder: Encoder, field: str, **options: Any):
        self.truncated = 0
        """Texts so far that were longer than the model reads, and lost their end."""
        self._encoder = encoder
        self._field = field
        self._options = options

    def __call__(self, lines: Sequence[InputLine]) -> list[VectorLine]:
        """Results of some lines, in their order."""
        texts = [text for line in lines if isinstance(text := line.fields.get(self._field), str)]
        vectors = iter(self._encoder.encode(texts, show_progress=False, **self._options) if texts else ())
        self.truncated += self._encoder.truncated if texts else 0
        return [
            self._result(line, next(vectors))
            if isinstance(line.fields.get(self._field), str)
            else VectorLine.failure(self._no_text(line), line.custom_id)
            for line in lines
        ]

    def _result(self, line: InputLine, vector: Float32[np.ndarray, "D"]) -> VectorLine:
        if not np.isfinite(vector).all():
            problem = "the model gave no finite numbers for it; check its weights"
            return VectorLine.failure(LineError("server_error", problem, None, None), line.custom_id)
        return VectorLine(line.custom_id, msgspec.Raw(msgspec.json.encode(numbers(vector))), None)

    def _no_text(self, line: InputLine) -> LineError:
        names = ", ".join(map(repr, line.fields)) or "none"
        problem = f"expected a text in the field {self._field!r}; it has {names}"
        return LineError("invalid_request", problem, self._field, None)


def numbers(vector: Float32[np.ndarray, "D"]) -> list[float]:
    """Numbers of a vector as JSON has them: nine digits, which distinguish all float32 numbers."""
    return [float(f"{x:.9g}") for x in vector.tolist()]


def write_vectors(lines: Path, path: Path, dimension: int) -> None:
    """Write the vectors of a file of lines as Parquet, whole or not at all.

    Columns are `custom_id`, `embedding`, a list of float32 `[D]`, and `error`, which is JSON text.

    `lines`: the file that `ResultFile` wrote.
    """
    arrow = require_optional("pyarrow")
    text = arrow.string()

    def row(line: bytes) -> dict[str, Any]:
        result = msgspec.json.decode(line, type=VectorLine)
        error = None if result.error is None else msgspec.json.encode(result.error).decode()
        return {"custom_id": result.custom_id, "embedding": msgspec.json.decode(result.embedding), "error": error}

    vectors = arrow.list_(arrow.float32(), dimension)
    write_rows(lines, path, {"custom_id": text, "embedding": vectors, "error": text}, row)


class ClipLine(ResultLine, msgspec.Struct, frozen=True):
    """Clip that was made, or the reason why it was not.

    `custom_id`: name of the line; None for a line that could not be read. `file`: name of the clip's file, next to the
    file of results. `settings`: the request, with the defaults that it left open.
    """

    custom_id: str | None
    file: str | None = None
    settings: dict[str, Any] | None = None
    seconds: dict[str, float] | None = None
    error: LineError | None = None


class Clips:
    """Callable that makes the clips of lines, and writes each into a folder.

    `options`: fields of `VideoRequest` for lines that do not have them.
    """

    def __init__(self, pipeline: VideoPipeline, folder: Path, options: Mapping[str, Any]):
        self._pipeline = pipeline
        self._folder = folder
        self._options = options

    def __call__(self, lines: Sequence[InputLine]) -> list[ClipLine]:
        """Results of some lines, in their order. A request that cannot be one has an error.

        Raises:
            VeraxError: if a clip cannot be made.
        """
        return [self._clip(line) for line in lines]

    def _clip(self, line: InputLine) -> ClipLine:
        given = {**self._options, **{name: value for name, value in line.fields.items() if value is not None}}
        try:
            resolved = self._pipeline.resolve(_request(given))
        except (TypeError, ValueError, OSError) as error:  # no device work yet, so that the line is to blame
            param = str(error).partition(":")[0] if isinstance(error, InvalidParameterError) else None
            return ClipLine.failure(LineError("invalid_request", str(error), param, None), line.custom_id)
        clip = self._pipeline.generate(resolved)
        path = clip.save(clip_path(self._folder, line.custom_id))
        seconds = {name: round(spent, 3) for name, spent in clip.seconds.items()}
        return ClipLine(line.custom_id, path.name, _settings(resolved, given), seconds, None)


def _request(given: Mapping[str, Any]) -> VideoRequest:
    """Request of a line."""
    for name in NOT_OF_A_LINE:
        if name in given:
            raise InvalidParameterError(f"{name}: it is not an option of a line; leave it out")
    prompt = given.get("prompt")
    if not isinstance(prompt, str) and not (prompt and isinstance(prompt, list)):
        raise InvalidParameterError(f"prompt: expected a text, or a list of one for each segment, got {prompt!r}")
    return make_request(prompt, {name: value for name, value in given.items() if name != "prompt"})


def _settings(request: ResolvedRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that make the clip again: those with defaults too, and images and clips by their names."""
    names = [name for name in options_of(VideoRequest) if name not in NOT_OF_A_LINE]
    values = {name: given.get(name) if name in _FILES else getattr(request, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
