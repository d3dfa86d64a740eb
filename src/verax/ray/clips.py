"""`Clips`: clips of the prompts of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from verax.errors import VeraxError
from verax.files import atomic_path
from verax.ray.actor import one_compiles, set_threads
from verax.ray.rows import Batch, columns, rows_of
from verax.video.files import clip_path

__all__ = ["Clips"]


class Clips:
    """Callable for `Dataset.map_batches`: makes a clip of each row's `prompt`, and adds the columns `path` and `error`.

    The file is named by the row's `custom_id`, and written whole or not at all. A clip that is there already is not
    made again. A row whose clip cannot be made has the reason in `error`, and no path.

    Args:
        folder: of the clips, on a file system that all nodes share.
        model: as in `VideoPipeline.from_pretrained`, and so are `options`.
        request: fields of `VideoRequest` for all rows. Columns of these names replace them in a row.
        options: further arguments of `VideoPipeline.from_pretrained`.
    """

    def __init__(
        self,
        folder: str | Path,
        model: str | None = None,
        *,
        request: Mapping[str, Any] | None = None,
        **options: Any,
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
        from verax.video.request import VideoRequest

        path = clip_path(self._folder, str(row["custom_id"]))
        try:
            if not path.exists():
                names = [field.name for field in fields(VideoRequest)]
                own = {name: row[name] for name in names[1:] if row.get(name) is not None}
                clip = self._pipeline(row["prompt"], **{**self._request, **own})
                with atomic_path(path) as partial:
                    clip.save(partial)
        except (VeraxError, TypeError) as error:
            return {"path": None, "error": str(error)}
        return {"path": str(path), "error": None}
