"""Finished segments of a long clip in a folder, from which another run continues."""

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

KEY = "verax"
"""Key of a file's metadata that describes how its segment was made."""

_COMMON = (
    *("negative_prompt", "height", "width", "num_inference_steps", "guidance_scale", "guidance_scale_2", "shift"),
    *("recipe", "solver", "sigmas", "half_size_steps", "fps", "seed"),
    *("cache", "cache_threshold", "cache_max_skip_steps", "cache_retention_ratio", "cache_ratios", "ar_step"),
    *("causal_block_size", "causal_attention", "overlap_history", "mask", "reference_images", "conditioning_scale"),
    *("addnoise_condition", "image", "video", "latents", "prompt_embeds", "negative_prompt_embeds"),
)
"""Options of a request on which all segments depend."""


class FinishedSegments:
    """Latents of the first segments of a clip. A folder keeps them for the next run, each in a file of its own.

    A file says how the whole clip was made up to its segment. A segment is taken if this clip is made in the same way
    so far, so that later prompts, and the number of segments, may differ from the earlier run.
    """

    def __init__(self, request: ResolvedRequest, sizes: Sequence[int], origin: Mapping[str, Any]):
        """Take the segments of the request's folder that are this clip's.

        `request`: checked request, whose `resume` is the folder, or None. `origin`: model and precision, on which the
        clip depends too.
        """
        self._folder = None if request.resume is None else Path(request.resume)
        self._common = {**origin, **{name: _plain(getattr(request, name)) for name in _COMMON}}
        prompts = request.prompts or (None,)
        self._segments = [
            {"prompt": prompts[min(i, len(prompts) - 1)], "size": size, "last_image": None}
            for i, size in enumerate(sizes)
        ]
        self._segments[-1]["last_image"] = _plain(request.last_image)
        self._latents: list[np.ndarray] = []
        while len(self._latents) < len(sizes) and (latents := self._read(len(self._latents))) is not None:
            self._latents.append(latents)

    def get(self, segment: int) -> Float32[np.ndarray, "1 F h w C"] | None:
        """Latents of a segment, with those that it shares with the segment before; None if it is not finished."""
        return self._latents[segment] if segment < len(self._latents) else None

    def add(self, latents: Float32[Array, "1 F h w C"]) -> None:
        """Write the next segment, if there is a folder; its file is complete, or not there, at any time."""
        if self._folder is None:
            return
        self._latents.append(np.asarray(latents))
        count = len(self._latents)
        origin = {"common": self._common, "segments": self._segments[:count]}
        self._folder.mkdir(exist_ok=True)
        with atomic_path(self._file(count - 1)) as partial:
            save_file({"latents": np.ascontiguousarray(self._latents[-1])}, partial, metadata={KEY: json.dumps(origin)})

    def _file(self, segment: int) -> Path:
        assert self._folder is not None
        return self._folder / f"segment_{segment:04}.safetensors"

    def _read(self, segment: int) -> np.ndarray | None:
        """Latents of a segment's file; None if there is no such file, or the clip is made otherwise from here on."""
        if self._folder is None or not (path := self._file(segment)).exists():
            return None
        try:
            with safe_open(path, "numpy") as file:
                origin = json.loads((file.metadata() or {})[KEY])
                before, common = origin["segments"], origin["common"]
                latents = file.get_tensor("latents")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InvalidParameterError(
                f"resume: {path} is not a finished segment: {error}; name a folder that does not exist yet"
            ) from error
        for name, ours in self._common.items():
            if common.get(name) != ours:
                raise InvalidParameterError(
                    f"resume: {path} is of another clip: {name} was {common.get(name)!r}, now {ours!r}; name another "
                    "folder, or remove it"
                )
        return latents if before == self._segments[: segment + 1] else None


def _plain(value: Any) -> Any:
    """Value as JSON returns it; an array as a digest."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not hasattr(value, "__array__"):
        return value
    array = np.ascontiguousarray(value)
    if array.ndim == 0:
        return array.item()
    return f"{array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
