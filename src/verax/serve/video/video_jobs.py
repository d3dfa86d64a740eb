"""Jobs of clips: a bounded queue, a thread that makes one clip after the other, and what becomes of each."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from verax.errors import InvalidParameterError, QueueFullError, RequestRefusedError
from verax.serve.video.media.preview import LatentPreview
from verax.serve.video.media.store import ClipStore, StorageFullError
from verax.video.outputs import VideoProgress
from verax.video.pipeline import VideoPipeline
from verax.video.request import ResolvedRequest

__all__ = ["VideoJob", "VideoJobs"]

_SHARES = {
    "text": (0.0, 0.03),
    "image": (0.03, 0.04),
    "encode": (0.04, 0.06),
    "denoise": (0.06, 0.88),
    "decode": (0.88, 1),
}
"""Parts of a segment's progress at which each stage begins and ends, roughly as long as they take."""

_SWEEP = 10.0
"""Seconds between the looks for clips that have expired."""

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
    deleted: bool = False
    watchers: set[Callable[[], object]] = field(default_factory=set)
    """Functions that are called after every change, on the thread that made it."""

    @property
    def ended(self) -> bool:
        """True if nothing of the job changes any more."""
        return self.deleted or self.status in ("completed", "failed")


class VideoJobs:
    """Queue of clips in front of a pipeline, which only the queue's thread runs.

    Args:
        pipeline: the model.
        store: files of the clips. It is closed with the queue.
        max_queued: clips that may wait.
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
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._preview: LatentPreview | None = None
        self._thread = threading.Thread(target=self._work, name="verax-videos", daemon=True)
        self._thread.start()

    def check_room(self) -> None:
        """Raise QueueFullError if no further clip can be taken now."""
        self._sweep()
        if len(self._waiting) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} clips wait, as many as may; try again later")
        if len(self._jobs) >= self._max_jobs:
            raise QueueFullError(f"{self._max_jobs} clips are kept, as many as may; delete some or wait")
        self.store.check_room()

    def submit(self, request: ResolvedRequest, model: str) -> VideoJob:
        """Put a request into the queue.

        Raises:
            QueueFullError: if the queue or the disk is full.
        """
        name = f"video_{secrets.token_hex(16)}"
        images = ("image", "last_image", "video")
        given = {part: found for part in images if (found := getattr(request, part)) is not None}
        self.check_room()
        kept = {part: self.store.keep(name, part, array) for part, array in given.items()}
        job = VideoJob(name, model, replace(request, **kept), self._clock())
        try:
            with self._changed:
                self.check_room()
                self._jobs[name] = job
                self._waiting.append(job)
                self._changed.notify()
        except QueueFullError:
            self.store.remove(name)
            raise
        return job

    def get(self, name: str) -> VideoJob | None:
        """Job with an id, or None."""
        self._sweep()
        return self._jobs.get(name)

    def newest_last(self) -> list[VideoJob]:
        """All jobs, in the order of their creation."""
        self._sweep()
        with self._changed:
            return list(self._jobs.values())

    def delete(self, name: str) -> bool:
        """Forget a clip and its files. One that is being made ends after its step. False if there is no such clip."""
        with self._changed:
            job = self._jobs.pop(name, None)
            if job is None:
                return False
            job.deleted = True
            if job.status == "queued":
                self._waiting.remove(job)
            if job.status != "in_progress":  # the thread removes the files of the one that it works on
                self.store.remove(name)
        _notify(job)
        return True

    @contextmanager
    def watch(self, job: VideoJob) -> Iterator[asyncio.Event]:
        """Context of an event that is set on this event loop after every change of the job."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        wake = partial(loop.call_soon_threadsafe, changed.set)
        job.watchers.add(wake)
        try:
            yield changed
        finally:
            job.watchers.discard(wake)

    def close(self) -> None:
        """End the clip that is being made after its step, forget all others, and remove the files."""
        with self._changed:
            self._closed = True
            for name in list(self._jobs):
                self.delete(name)
            self._changed.notify()
        self._thread.join(_LONGEST_STEP)
        self.store.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait(_SWEEP)
                    self._sweep()
                if self._closed:
                    return
                job = self._waiting.popleft()
                job.status = "in_progress"
            _notify(job)
            self._run(job)

    def _run(self, job: VideoJob) -> None:
        try:
            if self._preview is None:
                self._preview = LatentPreview(self.pipeline.stages.encode, self.pipeline.geometry.pixels_per_latent)
            made = self.pipeline.generate(replace(job.request, callback=partial(self._report, job)))
            if not job.deleted:
                self.store.write(job.id, made.frames, made.fps)
        except StorageFullError as error:
            self._end(job, ("storage_full", str(error)))
        except (InvalidParameterError, RequestRefusedError) as error:
            self._end(job, ("invalid_request", str(error)))
        except Exception:
            _log.exception("the clip %s failed", job.id)
            self._end(job, ("server_error", "making the clip failed; the server's log has more"))
        else:
            self._end(job, None)

    def _end(self, job: VideoJob, error: tuple[str, str] | None) -> None:
        with self._changed:
            if job.deleted or error is not None:
                self.store.remove(job.id)
            job.error = error
            job.completed_at = self._clock()
            job.expires_at = job.completed_at + self._ttl
            job.progress = job.progress if error else 100
            job.status = "failed" if error else "completed"
        _notify(job)

    def _report(self, job: VideoJob, now: VideoProgress) -> bool:
        """Callback of the pipeline: False once the job is deleted."""
        begin, end = _SHARES[now.stage]
        done = (now.segment + begin + (end - begin) * now.done / now.total) / now.segments
        job.progress = max(job.progress, min(99, int(100 * done)))
        if now.latents is not None and self._preview is not None:
            job.preview = self._preview.jpeg(now.latents)
        _notify(job)
        return not job.deleted

    def _sweep(self) -> None:
        """Forget clips that have expired."""
        now = self._clock()
        with self._changed:
            for job in [job for job in self._jobs.values() if job.expires_at is not None and job.expires_at <= now]:
                self.delete(job.id)


def _notify(job: VideoJob) -> None:
    for wake in tuple(job.watchers):
        try:
            wake()
        except RuntimeError:  # its event loop is closed
            job.watchers.discard(wake)
