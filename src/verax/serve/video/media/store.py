"""Files of finished clips: a temporary folder with a folder for each clip, under names that the server made."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import QueueFullError
from verax.models.images import resize
from verax.video.files import write_clip

__all__ = ["VARIANTS", "ClipStore", "StorageFullError", "jpeg"]

VARIANTS = {
    "video": ("clip.mp4", "video/mp4"),
    "gif": ("clip.gif", "image/gif"),
    "thumbnail": ("thumbnail.jpg", "image/jpeg"),
    "spritesheet": ("spritesheet.jpg", "image/jpeg"),
}
"""File and media type of each form of a clip."""

_GIF_SIDE = 320
_THUMBNAIL_SIDE = 512
_SPRITE_SIDE = 160
"""Longest sides in pixels of the small forms of a clip."""

_SPRITES = 16
"""Frames of a sprite sheet, at even distances, in rows of four."""


_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Codes of errors of a full disk, and of a full quota, which Windows has none of."""


class StorageFullError(QueueFullError):
    """Full disk, or more clips than the store may hold."""


class ClipStore:
    """Clips on disk, at most `max_bytes` of them together.

    Raises:
        MissingDependencyError: if PyAV or Pillow is not installed.
    """

    def __init__(self, max_bytes: int):
        require_optional("av")
        require_optional("PIL.Image")
        self.max_bytes = max_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="verax-videos-"))

    def path(self, clip: str, variant: str) -> Path:
        """File of a form of a clip. `clip` is an id of the server's own making, and `variant` one of `VARIANTS`."""
        return self.folder / clip / VARIANTS[variant][0]

    def keep(self, clip: str, name: str, array: np.ndarray) -> np.ndarray:
        """The array, on disk until the clip is written, so that clips that wait take no memory.

        Raises:
            StorageFullError: if it does not fit.
        """
        with self._writing(clip) as folder:
            np.save(folder / f"{name}.npy", array)
        return np.load(folder / f"{name}.npy", mmap_mode="r")

    def write(self, clip: str, frames: UInt8[np.ndarray, "T H W 3"], fps: float) -> None:
        """Write all forms of a clip, and remove what was kept for it.

        Raises:
            StorageFullError: if they do not fit. Nothing of the clip is left then.
        """
        with self._writing(clip) as folder:
            for kept in folder.glob("*.npy"):
                kept.unlink()
            write_clip(frames, self.path(clip, "video"), fps=fps)
            write_clip(_within(frames, _GIF_SIDE), self.path(clip, "gif"), fps=min(fps, 50))
            self.path(clip, "thumbnail").write_bytes(jpeg(_within(frames[len(frames) // 2], _THUMBNAIL_SIDE)))
            self.path(clip, "spritesheet").write_bytes(jpeg(_sprites(frames)))

    def used(self) -> int:
        """Bytes of all files. One that another thread removes meanwhile may count or not."""
        total = 0
        for folder, _, names in os.walk(self.folder):  # which passes over folders that have gone
            for name in names:
                with suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def check_room(self) -> None:
        """Raise StorageFullError if there is no room for another clip."""
        if self.used() >= self.max_bytes:
            raise StorageFullError(f"storage: the clips take {self.max_bytes} bytes, all they may; delete some or wait")

    def remove(self, clip: str) -> None:
        """Remove the files of a clip, if there are any."""
        shutil.rmtree(self.folder / clip, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _writing(self, clip: str) -> Iterator[Path]:
        """Yield the folder of a clip to write to, and remove it if that fails or the store is full."""
        folder = self.folder / clip
        try:
            folder.mkdir(exist_ok=True)
            yield folder
            if self.used() > self.max_bytes:
                raise StorageFullError(
                    f"storage: with this clip, the clips would take more than {self.max_bytes} bytes"
                )
        except BaseException as error:
            self.remove(clip)
            if getattr(error, "errno", None) in _FULL:
                raise StorageFullError("storage: the disk is full") from error
            raise


def jpeg(image: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """Image as a JPEG file."""
    buffer = io.BytesIO()
    require_optional("PIL.Image").fromarray(image).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _within(frames: UInt8[np.ndarray, "*B H W 3"], side: int) -> UInt8[np.ndarray, "*B h w 3"]:
    """Frames whose longer side is at most `side` pixels."""
    height, width = frames.shape[-3:-1]
    scale = min(1.0, side / max(height, width))
    return resize(frames, max(1, round(height * scale)), max(1, round(width * scale)), method="bicubic")


def _sprites(frames: UInt8[np.ndarray, "T H W 3"]) -> UInt8[np.ndarray, "H W 3"]:
    """Frames of the clip in rows of four, the first and the last among them; black where there are fewer."""
    chosen = _within(frames[np.unique(np.linspace(0, len(frames) - 1, _SPRITES).round().astype(int))], _SPRITE_SIDE)
    rows = -(-len(chosen) // 4)
    empty = np.zeros((4 * rows - len(chosen), *chosen.shape[1:]), np.uint8)
    _, height, width, _ = chosen.shape
    grid = np.concatenate([chosen, empty]).reshape(rows, 4, height, width, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 1, 3, 4).reshape(rows * height, 4 * width, 3))
