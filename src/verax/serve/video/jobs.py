"""Jobs of clips: a bounded queue, a thread that makes one clip after the other, their files and previews."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import math
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from verax._optional import require_optional
from verax.errors import InvalidParameterError, QueueFullError, RequestRefusedError
from verax.models.images import resize
from verax.video.files import write_clip
from verax.video.outputs import VideoProgress
from verax.video.pipeline import VideoPipeline
from verax.video.request import ResolvedRequest

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

_GIF_FPS = 50
"""Most frames per second of a GIF: browsers show the fastest ones slowly. Of a faster clip it has every second frame,
or fewer."""

_SPRITES = 16
"""Frames of a sprite sheet, at even distances, in rows of four."""

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), None)
"""Codes of errors of a full disk, of a full quota, which Windows has none of, and of NumPy, which gives none."""


class StorageFullError(QueueFullError):
    """Full disk, or more clips than the store may hold."""


class ClipStore:
    """Clips on disk, at most `max_bytes` of them together."""

    def __init__(self, max_bytes: int):
        require_optional("av")
        require_optional("PIL.Image")
        self.max_bytes = max_bytes
        # It removes itself where an error ends the server before `close`.
        self._temporary = tempfile.TemporaryDirectory(prefix="verax-videos-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        # Sizes are noted as files are written: a look at the files would hold up the event loop.
        self._sizes: dict[str, int] = {}

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
            every = math.ceil(fps / _GIF_FPS)
            write_clip(_within(frames[::every], _GIF_SIDE), self.path(clip, "gif"), fps=fps / every)
            self.path(clip, "thumbnail").write_bytes(jpeg(_within(frames[len(frames) // 2], _THUMBNAIL_SIDE)))
            self.path(clip, "spritesheet").write_bytes(jpeg(_sprites(frames)))

    def used(self) -> int:
        """Bytes of all clips."""
        return sum(tuple(self._sizes.values()))

    def check_room(self) -> None:
        """Raise StorageFullError if another clip does not fit."""
        if self.used() >= self.max_bytes:
            raise StorageFullError(f"storage: the clips take {self.max_bytes} bytes, all they may; delete some or wait")

    def remove(self, clip: str) -> None:
        """Remove the files of a clip, if there are any."""
        shutil.rmtree(self.folder / clip, ignore_errors=True)
        self._sizes.pop(clip, None)

    def close(self) -> None:
        """Remove everything."""
        self._temporary.cleanup()
        self._sizes.clear()

    @contextmanager
    def _writing(self, clip: str) -> Iterator[Path]:
        """Yield the folder of a clip to write to, and remove it if that fails or the store is full."""
        folder = self.folder / clip
        try:
            folder.mkdir(exist_ok=True)
            yield folder
            self._sizes[clip] = sum(path.stat().st_size for path in folder.iterdir())
            if self.used() > self.max_bytes:
                raise StorageFullError(
                    f"storage: with this clip, the clips would take more than {self.max_bytes} bytes"
                )
        except BaseException as error:
            self.remove(clip)
            if isinstance(error, OSError) and error.errno in _FULL:
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


_SHARES = {
    "text": (0.0, 0.03),
    "image": (0.03, 0.04),
    "encode": (0.04, 0.06),
    "denoise": (0.06, 0.88),
    "decode": (0.88, 1),
}
"""Parts of a segment's progress at which each stage begins and ends, roughly as long as they take."""

_PREVIEWS = 0.04
"""Share of a clip's time that previews may take."""

_PREVIEW_SIDE = 256
"""Longer side of a preview in pixels, at most."""

_PICTURES = ("image", "last_image", "video", "mask")
"""Options of a request that are one picture or clip each; `reference_images` are several."""

_LONGEST_STEP = 30.0
"""Seconds that the end of the server waits for the step of the clip that is being made."""

_log = logging.getLogger("verax.serve")


@dataclass(eq=False)
class VideoJob:
    """A clip that waits, is being made, or was made."""

    id: str
    model: str
    request: ResolvedRequest
    created_at: float
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = 0
    """Per cent: it never falls, and is below 100 until the clip can be downloaded."""
    completed_at: float | None = None
    expires_at: float | None = None
    error: tuple[str, str] | None = None
    """Code and message, of a job that failed."""
    preview: bytes | None = None
    """Latest preview, a JPEG file."""
    preview_seconds: float = 0.0
    """Seconds that previews took, without the first."""
    started: float = 0.0
    """Time at which the making began, of `time.perf_counter`."""
    rate: float | None = None
    """Seconds that a segment takes, by its denoising so far."""
    seconds_left: int | None = None
    """Seconds that the making takes from now on, once denoising has begun."""
    deleted: bool = False
    watchers: set[asyncio.Event] = field(default_factory=set)
    """Events that are set after every change."""

    def notify(self) -> None:
        """Say that something has changed."""
        for changed in self.watchers:
            changed.set()

    @property
    def elapsed(self) -> float:
        """Seconds since the making began."""
        return time.perf_counter() - self.started

    @property
    def ended(self) -> bool:
        """True if nothing of the job changes any more."""
        return self.deleted or self.status in ("completed", "failed")


class VideoJobs:
    """Queue of clips in front of a pipeline, which runs in one thread at a time. All else is on one event loop.

    Args:
        store: files of the clips. It is closed with the queue.
        max_jobs: clips that are remembered, made or not.
        ttl: seconds for which a clip can be downloaded.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        pipeline: VideoPipeline,
        store: ClipStore,
        *,
        max_queued: int,
        max_jobs: int,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ):
        self.pipeline = pipeline
        self.store = store
        self._max_queued, self._max_jobs, self._ttl, self._clock = max_queued, max_jobs, ttl, clock
        self._jobs: dict[str, VideoJob] = {}
        self._waiting: deque[VideoJob] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def check_room(self) -> None:
        """Raise QueueFullError if no further clip can be taken now."""
        for job in [job for job in self._jobs.values() if self._has_expired(job)]:
            await self.delete(job.id)
        if len(self._waiting) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} clips wait, as many as may; try again later")
        if len(self._jobs) >= self._max_jobs:
            raise QueueFullError(f"{self._max_jobs} clips are kept, as many as may; delete some or wait")
        self.store.check_room()

    async def submit(self, request: ResolvedRequest, model: str) -> VideoJob:
        """Put a request into the queue.

        Raises:
            QueueFullError: if the queue or the disk is full.
        """
        name = f"video_{secrets.token_hex(16)}"
        given = {part: array for part in _PICTURES if (array := getattr(request, part)) is not None}
        await self.check_room()

        async def keep(part: str, array: np.ndarray) -> np.ndarray:
            return await asyncio.to_thread(self.store.keep, name, part, array)

        kept: dict[str, Any] = {part: await keep(part, array) for part, array in given.items()}
        pictures = enumerate(request.reference_images)
        kept["reference_images"] = tuple([await keep(f"reference_{i}", picture) for i, picture in pictures])
        try:
            await self.check_room()
        except QueueFullError:
            await asyncio.to_thread(self.store.remove, name)
            raise
        job = self._jobs[name] = VideoJob(name, model, replace(request, **kept), self._clock())
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return job

    def get(self, name: str) -> VideoJob | None:
        """Job with an id, or None."""
        job = self._jobs.get(name)
        return None if job is None or self._has_expired(job) else job

    def newest_last(self) -> list[VideoJob]:
        """All jobs, in the order of their creation."""
        return [job for job in self._jobs.values() if not self._has_expired(job)]

    async def delete(self, name: str) -> bool:
        """Forget a clip and its files. One that is being made ends after its step. False if it does not exist."""
        job = self._jobs.pop(name, None)
        if job is None:
            return False
        job.deleted = True
        if job.status == "queued":
            self._waiting.remove(job)
        job.notify()
        if job.status != "in_progress":  # the files of that one are removed once it has ended
            await asyncio.to_thread(self.store.remove, name)
        return True

    @contextmanager
    def watch(self, job: VideoJob) -> Iterator[asyncio.Event]:
        """Context of an event that is set after every change of the job."""
        changed = asyncio.Event()
        job.watchers.add(changed)
        try:
            yield changed
        finally:
            job.watchers.discard(changed)

    async def close(self) -> None:
        """End the clip that is being made after its step, forget all others, and remove the files."""
        for name in list(self._jobs):
            await self.delete(name)
        if self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker], timeout=_LONGEST_STEP)
        await asyncio.to_thread(self.store.close)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            job = self._waiting.popleft()
            job.status = "in_progress"
            job.started = time.perf_counter()
            job.notify()
            result: asyncio.Future[tuple[str, str] | None] = loop.create_future()
            # A daemon: a step that takes minutes does not hold up the end of the process.
            threading.Thread(target=self._make, args=(job, loop, result), name="verax-videos", daemon=True).start()
            job.error = await result
            # Arrays that are read from removed files would keep these on the disk.
            job.request = replace(job.request, **dict.fromkeys(_PICTURES), reference_images=())
            job.completed_at = self._clock()
            job.expires_at = job.completed_at + self._ttl
            job.seconds_left = None
            job.progress = 100 if job.error is None else job.progress
            job.status = "completed" if job.error is None else "failed"
            job.notify()
            try:
                if job.deleted or job.error is not None:
                    await asyncio.to_thread(self.store.remove, job.id)
            except Exception:  # the clip may stay on disk, but the next one is made
                _log.exception("the files of the clip %s could not be removed", job.id)
            loop.call_later(self._ttl, lambda name=job.id: asyncio.ensure_future(self.delete(name)))

    def _make(self, job: VideoJob, loop: asyncio.AbstractEventLoop, result: asyncio.Future[Any]) -> None:
        """Make a clip and write its files; the result is code and message of the error, if it fails."""
        error = None
        try:
            clip = self.pipeline.generate(replace(job.request, callback=partial(self._report, job, loop)))
            if not job.deleted:
                self.store.write(job.id, clip.frames, clip.fps)
        except StorageFullError as failure:
            error = "storage_full", str(failure)
        except (InvalidParameterError, RequestRefusedError) as failure:
            error = "invalid_request", str(failure)
        except Exception as failure:
            _log.exception("the clip %s failed", job.id)
            # Other messages may hold what is not for clients, such as paths.
            error = "server_error", f"making the clip failed ({type(failure).__name__}); the server's log has more"
            if isinstance(failure, MemoryError) or "RESOURCE_EXHAUSTED" in str(failure):
                problem = "making the clip took more memory than there is; ask for fewer frames or a smaller size"
                error = "out_of_memory", problem
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(result.set_result, error)

    def _report(self, job: VideoJob, loop: asyncio.AbstractEventLoop, now: VideoProgress) -> bool:
        """Callback of the pipeline: False once the job is deleted."""
        begin, end = _SHARES[now.stage]
        done = (now.segment + begin + (end - begin) * now.done / now.total) / now.segments
        job.progress = max(job.progress, min(99, int(100 * done)))
        if now.stage == "denoise":
            job.rate = now.seconds * now.total / (now.done * (end - begin))
        if job.rate is not None:
            job.seconds_left = round(job.rate * now.segments * max(0.0, 1 - done))
        # The first preview compiles and fits; later ones take a small share of the clip's time.
        if now.preview is not None and (job.preview is None or job.preview_seconds < _PREVIEWS * job.elapsed):
            is_first, started = job.preview is None, time.perf_counter()
            job.preview = jpeg(_within(now.preview(), _PREVIEW_SIDE))
            job.preview_seconds += 0 if is_first else time.perf_counter() - started
        loop.call_soon_threadsafe(job.notify)
        return not job.deleted

    def _has_expired(self, job: VideoJob) -> bool:
        return job.expires_at is not None and job.expires_at <= self._clock()
