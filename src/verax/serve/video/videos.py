"""`/v1/videos`: clips are made in the background, watched, downloaded and deleted."""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from verax.errors import QueueFullError
from verax.serve.http.errors import ApiError
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.record import record_of
from verax.serve.http.routing import Parameter, api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, EventStream, named_event, unless_disconnected
from verax.serve.text.answers import VideoDeleted, VideoList, VideoObject
from verax.serve.video.media.process import MediaDecoder
from verax.serve.video.media.store import VARIANTS, ClipStore
from verax.serve.video.video_fields import VideoCreate, read_create, resolve
from verax.serve.video.video_jobs import VideoJob, VideoJobs

__all__ = ["VideoService", "routes"]

POLL_AFTER_MS = 1000
"""Milliseconds after which a client is to ask again for a clip that is not ready."""

MAX_UPLOADS = 8
"""Requests for clips whose bodies are read at once: a body may have 64 MiB, and is held in memory."""

_LISTED = 100
"""Clips of one page of the list."""

_ORDERS = ("desc", "asc")

LIST_PARAMETERS = (
    Parameter("limit", {"type": "integer", "minimum": 1, "maximum": _LISTED, "default": 20}),
    Parameter("after", {"type": "string"}, description="id of the clip before the page"),
    Parameter("order", {"enum": _ORDERS, "default": "desc"}),
)
CONTENT_PARAMETERS = (
    Parameter("variant", {"enum": [*VARIANTS, "preview"], "default": "video"}),
    Parameter("Range", {"type": "string"}, "header", "one range of bytes"),
)

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class VideoService:
    """Handlers of the routes, and the queue behind them, which begins with the first clip."""

    def __init__(self, server: Server):
        self._server = server
        self._decoder = MediaDecoder()
        self._jobs: VideoJobs | None = None
        self._starting = asyncio.Lock()
        self._num_uploads = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context at whose end the queue ends."""
        yield
        if self._jobs is not None:
            await asyncio.to_thread(self._jobs.close)
            self._jobs = None

    async def create(self, request: Request) -> Response:
        """Put a clip into the queue."""
        if self._server.videos is None:
            raise ApiError(404, "model: no video model is served here", param="model", code="model_not_found")
        with self._uploading():
            body, upload = await read_create(request, max_bytes=self._decoder.limits.bytes)
        model = self._server.check_model(body.model, (self._server.videos.name,))
        record_of(request).model = model
        jobs = await self._queue()
        jobs.check_room()
        frames = None
        if upload is not None:
            frames = await unless_disconnected(request, self._decoder.decode(upload.data, name=upload.field))
        resolved = await asyncio.to_thread(resolve, body, frames, jobs.pipeline)
        return _answer(await asyncio.to_thread(jobs.submit, resolved, model))

    async def list(self, request: Request) -> Response:
        """One page of the clips, the newest first unless `order` is `asc`."""
        jobs = self._jobs.newest_last() if self._jobs is not None else []
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        limit = request.query_params.get("limit", "20")
        if order not in _ORDERS:
            raise ApiError(400, f"order: expected asc or desc, got {order[:20]!r}", param="order")
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= _LISTED:
            raise ApiError(400, f"limit: expected 1 to {_LISTED}, got {limit[:20]!r}", param="limit")
        if order == "desc":
            jobs.reverse()
        if after is not None:
            ids = [job.id for job in jobs]
            if after not in ids:
                raise ApiError(400, "after: there is no such video", param="after")
            jobs = jobs[ids.index(after) + 1 :]
        page = jobs[: int(limit)]
        return JsonResponse(
            {
                "object": "list",
                "data": [_video(job) for job in page],
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
                "has_more": len(jobs) > len(page),
            }
        )

    async def get(self, request: Request) -> Response:
        """State of a clip."""
        return _answer(self._job(request)[1])

    async def delete(self, request: Request) -> Response:
        """Cancel a clip, or remove it."""
        jobs, job = self._job(request)
        deleted = await asyncio.to_thread(jobs.delete, job.id)
        return JsonResponse({"id": job.id, "object": "video.deleted", "deleted": deleted})

    async def content(self, request: Request) -> Response:
        """File of a clip, or a part of it."""
        jobs, job = self._job(request)
        variant = request.query_params.get("variant", "video")
        if variant == "preview":
            if job.preview is None:
                raise ApiError(404, "variant: the clip has no preview yet", param="variant", code="video_not_ready")
            return Response(job.preview, media_type="image/jpeg", headers={"Cache-Control": "no-store"})
        if variant not in VARIANTS:
            names = ", ".join((*VARIANTS, "preview"))
            raise ApiError(400, f"variant: expected one of {names}, got {variant[:20]!r}", param="variant")
        if job.error is not None:
            raise ApiError(404, f"the clip failed: {job.error[1]}", code="video_failed")
        path = jobs.store.path(job.id, variant)
        try:
            found = path.stat() if job.status == "completed" else None
        except FileNotFoundError:  # deleted in this moment
            raise _not_found() from None
        if found is None:
            raise ApiError(404, f"the clip is {job.progress}% done", code="video_not_ready")
        _check_range(request, found)
        return FileResponse(
            path,
            media_type=VARIANTS[variant][1],
            filename=f"{job.id}{path.suffix}",
            stat_result=found,
            content_disposition_type="inline",
        )

    async def events(self, request: Request) -> Response:
        """Changes of a clip as they happen."""
        settings = self._server.settings
        return EventStream(
            _events(*self._job(request)),
            ping_interval=settings.ping_interval,
            slow_client_timeout=settings.slow_client_timeout,
        )

    @contextmanager
    def _uploading(self) -> Iterator[None]:
        """Count a body that is being read.

        Raises:
            QueueFullError: if as many are as may be, or the queue is full already.
        """
        if self._jobs is not None:
            self._jobs.check_room()
        if self._num_uploads >= MAX_UPLOADS:
            raise QueueFullError(f"{MAX_UPLOADS} clips are being uploaded, as many as may; try again later")
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    async def _queue(self) -> VideoJobs:
        async with self._starting:
            if self._jobs is None:
                assert self._server.videos is not None
                pipeline = await self._server.videos.get()
                settings = self._server.settings
                self._jobs = VideoJobs(
                    pipeline,
                    ClipStore(settings.max_video_storage_bytes),
                    max_queued=settings.max_queued_videos,
                    max_jobs=settings.max_videos,
                    ttl=settings.video_ttl,
                )
        return self._jobs

    def _job(self, request: Request) -> tuple[VideoJobs, VideoJob]:
        job = self._jobs.get(request.path_params["name"]) if self._jobs is not None else None
        if self._jobs is None or job is None:
            raise _not_found()
        return self._jobs, job


def routes(server: Server) -> list[Route]:
    """Routes of the clips. Their queue and their files end with the server."""
    service = VideoService(server)
    server.contexts.append(service.running)
    return [
        *api_routes(
            "/videos",
            service.create,
            body=VideoCreate,
            files=("input_reference",),
            answer=VideoObject,
            queued=True,
            summary="Queue a clip.",
        ),
        *api_routes(
            "/videos", service.list, ("GET",), parameters=LIST_PARAMETERS, answer=VideoList, summary="List the clips."
        ),
        *api_routes("/videos/{name}", service.get, ("GET",), answer=VideoObject, summary="Describe a clip."),
        *api_routes(
            "/videos/{name}", service.delete, ("DELETE",), answer=VideoDeleted, summary="Cancel or remove a clip."
        ),
        *api_routes(
            "/videos/{name}/content",
            service.content,
            ("GET",),
            parameters=CONTENT_PARAMETERS,
            media=tuple(dict.fromkeys(kind for _, kind in VARIANTS.values())),
            ranges=True,
            summary="Download a clip, or a part of it.",
        ),
        *api_routes("/videos/{name}/events", service.events, ("GET",), streams=True, summary="Watch a clip."),
    ]


def _not_found() -> ApiError:
    return ApiError(404, "there is no such video", code="video_not_found")


def _answer(job: VideoJob) -> Response:
    headers = {} if job.ended else {"openai-poll-after-ms": str(POLL_AFTER_MS)}
    return JsonResponse(_video(job), headers=headers)


def _video(job: VideoJob) -> dict[str, Any]:
    """State of a clip: OpenAI's fields, then the settings by which it can be made again."""
    request = job.request
    return {
        "id": job.id,
        "object": "video",
        "status": job.status,
        "progress": job.progress,
        "model": job.model,
        "prompt": request.prompt,
        "seconds": f"{request.num_frames / request.fps:g}",
        "size": f"{request.width}x{request.height}",
        "created_at": int(job.created_at),
        "completed_at": None if job.completed_at is None else int(job.completed_at),
        "expires_at": None if job.expires_at is None else int(job.expires_at),
        "error": None if job.error is None else {"code": job.error[0], "message": job.error[1]},
        "remixed_from_video_id": None,
        "num_frames": request.num_frames,
        "fps": request.fps,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "flow_shift": request.shift,
        "negative_prompt": request.negative_prompt,
        "seed": request.seed,
    }


async def _events(jobs: VideoJobs, job: VideoJob) -> AsyncGenerator[bytes, None]:
    """Events of a clip: its state now and after each change, previews, and its end."""
    shown, preview = None, None
    with jobs.watch(job) as changed:
        while True:
            changed.clear()
            if job.preview is not preview:
                preview = job.preview
                assert preview is not None
                image = f"data:image/jpeg;base64,{base64.b64encode(preview).decode()}"
                yield named_event("video.preview", {"type": "video.preview", "id": job.id, "image": image})
            ended, state = job.ended, (job.status, job.progress)
            if state != shown or ended:
                shown = state
                kind = "video.deleted" if job.deleted else f"video.{job.status}"
                yield named_event(kind, {"type": kind, "video": _video(job)})
            if ended:
                break
            await changed.wait()
    yield DONE


def _check_range(request: Request, found: os.stat_result) -> None:
    """Check the header Range: one range is served, anything else is ignored, and one behind the end refused."""
    given = request.headers.get("range")
    match = _RANGE.fullmatch(given) if given is not None else None
    if match is None or match[0] == "bytes=-" or (match[1] and match[2] and int(match[1]) > int(match[2])):
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]
    elif int(match[1] or 0) >= found.st_size or (not match[1] and int(match[2]) == 0):
        headers = {"Content-Range": f"bytes */{found.st_size}"}
        raise ApiError(416, f"range: the file has {found.st_size} bytes", param="range", headers=headers)
