"""Finished segments of a long clip in a file, from which another run continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from verax.errors import InvalidParameterError
from verax.files import atomic_path
from verax.video.request import ResolvedRequest

__all__ = ["FinishedSegments"]

KEY = "verax"
"""Key of the file's metadata that describes how its segments were made."""

_COMMON = (
    *("negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "guidance_scale_2", "shift"),
    *("fps", "seed"),
    *("cache", "cache_threshold", "ar_step", "causal_block_size", "causal_attention", "overlap_history"),
    *("addnoise_condition", "image", "video", "latents", "prompt_embeds", "negative_prompt_embeds"),
)
"""Options of a request on which all segments depend."""


class FinishedSegments:
    """Latents of the first segments of a clip. A file keeps them for the next run."""

    def __init__(self, request: ResolvedRequest, sizes: Sequence[int], origin: Mapping[str, Any]):
        """Take the segments of the request's file that are this clip's.

        A segment is taken if it and those before it have the same prompt and size, so that later prompts, and the
        number of segments, may differ from the earlier run.

        Args:
            request: checked request, whose `resume` is the file, or None.
            sizes: latent frames of each segment.
            origin: model and precision, on which the clip depends too.

        Raises:
            InvalidParameterError: if the file has other contents, or its clip was made otherwise; with what differs.
        """
        self._path = None if request.resume is None else Path(request.resume)
        self._common = {**origin, **{name: _plain(getattr(request, name)) for name in _COMMON}}
        prompts = request.prompts or (None,)
        self._segments = [
            {"prompt": prompts[min(i, len(prompts) - 1)], "size": size, "last_image": None}
            for i, size in enumerate(sizes)
        ]
        self._segments[-1]["last_image"] = _plain(request.last_image)
        self._latents: list[np.ndarray] = []
        if self._path is not None and self._path.exists():
            self._latents = self._read(self._path)

    def get(self, segment: int) -> Float32[np.ndarray, "1 F h w C"] | None:
        """Latents of a segment, with those that it shares with the segment before; None if it is not finished."""
        return self._latents[segment] if segment < len(self._latents) else None

    def add(self, latents: Float32[Array, "1 F h w C"]) -> None:
        """Write the next segment, if there is a file. It is replaced as a whole, so that it is complete at any time."""
        if self._path is None:
            return  # without waiting for the device
        self._latents.append(np.asarray(latents))
        origin = {"common": self._common, "segments": self._segments[: len(self._latents)]}
        tensors = {f"segment.{i}": np.ascontiguousarray(one) for i, one in enumerate(self._latents)}
        with atomic_path(self._path) as partial:
            save_file(tensors, partial, metadata={KEY: json.dumps(origin)})

    def _read(self, path: Path) -> list[np.ndarray]:
        try:
            with safe_open(path, "numpy") as file:
                origin = json.loads((file.metadata() or {})[KEY])
                before, common = origin["segments"], origin["common"]
                latents = [file.get_tensor(f"segment.{i}") for i in range(len(before))]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InvalidParameterError(
                f"resume: {path} is not a file of finished segments: {error}; name one that does not exist yet"
            ) from error
        for name, ours in self._common.items():
            if common.get(name) != ours:
                raise InvalidParameterError(
                    f"resume: {path} has segments of another clip: {name} was {common.get(name)!r}, now {ours!r}; name "
                    "another file, or remove it"
                )
        same = [one == other for one, other in zip(before, self._segments, strict=False)]
        return latents[: (*same, False).index(False)]


def _plain(value: Any) -> Any:
    """Value as JSON returns it; an array as a digest."""
    if not hasattr(value, "__array__"):
        return value
    array = np.ascontiguousarray(value)
    if array.ndim == 0:
        return array.item()
    return f"{array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
