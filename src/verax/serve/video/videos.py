"""`/v1/videos`: clips are made in the background, watched, downloaded and deleted."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from jaxtyping import UInt8
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from verax.errors import InvalidParameterError, QueueFullError
from verax.serve.http.body import decode, parse_json, read_body
from verax.serve.http.errors import ApiError, JsonResponse, field_error, model_error
from verax.serve.http.openapi import EVENTS, Parameter, api_routes
from verax.serve.http.server import Server
from verax.serve.http.settings import SIZE
from verax.serve.http.sse import DONE, named_event, unless_disconnected
from verax.serve.http.telemetry import record_of
from verax.serve.video.decode import MediaDecoder, read_data_uri
from verax.serve.video.jobs import VARIANTS, ClipStore, VideoJob, VideoJobs
from verax.video.pipeline import VideoPipeline
from verax.video.request import ResolvedRequest, VideoRequest, oriented

MAX_PROMPT = 32_768
"""Characters of a prompt."""

MAX_STEPS = 250

MAX_FPS = 120

MIN_SHIFT = 0.01

MAX_SCALE = 100.0
"""Largest `guidance_scale` and `flow_shift`: beyond, the arithmetic overflows."""

_LARGER = 4
"""Pixels of a frame, in those that the checkpoint was trained on."""

_LONGER = 16
"""Frames of a clip of a model for diffusion forcing, in those that the checkpoint was trained on."""

_SEEDS = 1 << 64
"""Number of different seeds. A client's signed integer counts modulo this."""

_DRAWN_SEEDS = 1 << 32
"""Seeds that are drawn for requests without one: JavaScript, too, has these numbers exactly."""

_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)

_NESTED = re.compile(r"(input_reference|image_reference|last_image|mask)\[(image_url|file_id)\]")

_NUMBERS = (
    *("width", "height", "boundary_ratio", "n"),
    *("num_frames", "fps", "num_inference_steps", "guidance_scale", "guidance_scale_2", "flow_shift", "seed"),
    *("cache_threshold", "cache_max_skip_steps", "cache_retention_ratio", "half_size_steps", "conditioning_scale"),
)

_PARTS = 32
"""Fields of a form."""


MAX_REFERENCES = 8
"""Pictures in `reference_images`."""

_Scale = Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)]


class ImageReference(msgspec.Struct):
    """Image or clip."""

    image_url: str | None = None
    """A data URI. URLs are not fetched."""
    file_id: str | None = None


_INSTEAD = {
    "seconds": ("duration",),
    "num_frames": ("frames",),
    "num_inference_steps": ("steps",),
    "guidance_scale": ("cfg_scale", "true_cfg_scale"),
    "flow_shift": ("shift",),
    "size": ("aspect_ratio", "resolution"),
    "input_reference": ("image", "image_url", "image_path", "video", "first_frame", "first_image"),
    "last_image": ("last_frame", "end_image"),
    "cache": ("enable_teacache",),
    "--video-lora of verax serve": ("lora", "loras", "lora_path"),
    "": (
        *("characters", "sampler", "scheduler", "enable_upscaling", "enable_frame_interpolation", "extra_body"),
        *("extra_params", "diffusers_kwargs"),
    ),
}
"""Fields of other servers that would change the clip, by the field to use instead."""


class VideoCreate(msgspec.Struct):
    """Body of a request, as OpenAI's, vLLM-Omni's and SGLang's servers take it."""

    instead: ClassVar = {name: instead for instead, names in _INSTEAD.items() for name in names}

    prompt: Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT)]
    model: str | None = None
    seconds: str | int | float | None = None
    size: Annotated[str, Meta(extra_json_schema={"pattern": f"^{SIZE}$"})] | None = None
    """`"WIDTHxHEIGHT"` in pixels."""
    width: Annotated[int, Meta(ge=1)] | None = None
    height: Annotated[int, Meta(ge=1)] | None = None
    """Both in place of `size`, as in vLLM-Omni and SGLang."""
    num_frames: Annotated[int, Meta(ge=1)] | None = None
    fps: Annotated[int, Meta(ge=1, le=MAX_FPS)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=MAX_SCALE)] | None = None
    guidance_scale_2: Annotated[float, Meta(ge=0, le=MAX_SCALE)] | None = None
    """Scale with the second of two transformers (Wan2.2's A14B)."""
    boundary_ratio: float | None = None
    """The checkpoint's; others are refused."""
    flow_shift: Annotated[float, Meta(ge=MIN_SHIFT, le=MAX_SCALE)] | None = None
    recipe: Annotated[str, Meta(max_length=40)] | None = None
    """Few steps of a distilled checkpoint: one of `video.recipes.RECIPES`."""
    cache: Annotated[str, Meta(max_length=40)] | None = None
    """Steps that change little are skipped: `teacache` or `magcache`."""
    cache_threshold: Annotated[float, Meta(gt=0, le=MAX_SCALE)] | None = None
    cache_max_skip_steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)] | None = None
    cache_retention_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    half_size_steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)] | None = None
    """Steps, the first ones, at half the height and width."""
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    """A request makes one clip."""
    input_reference: str | ImageReference | None = None
    """A data URI, or an object with one; in a form also a file."""
    image_reference: ImageReference | None = None
    reference_url: str | None = None
    video_url: str | None = None
    """Refused, as URLs are not fetched."""
    last_image: str | ImageReference | None = None
    """Last frame, of the types of `input_reference`, for models that take one."""
    mask: str | ImageReference | None = None
    """VACE: masks of the control clip in `input_reference`, of the same types; white is made new."""
    reference_images: Annotated[list[str | ImageReference], Meta(max_length=MAX_REFERENCES)] | None = None
    """VACE: pictures of things that the clip shows, each of the types of `input_reference`."""
    conditioning_scale: _Scale | Annotated[list[_Scale], Meta(max_length=64)] | None = None
    """VACE: scale of the control layers, or of each of them."""


_OPTIONS = {
    **dict.fromkeys(("input_reference", "image_reference"), "image"),
    **{name: name for name in ("last_image", "mask", "reference_images")},
}
"""Options of the request that images and clips are for, by their fields; `image` may become `video`."""

_CACHES = ("cache", "cache_threshold", "cache_max_skip_steps", "cache_retention_ratio")

_SAME = (
    *("num_inference_steps", "guidance_scale", "guidance_scale_2", "recipe", "negative_prompt", "conditioning_scale"),
    *_CACHES,
)
"""Options of the request that have the names of their fields, and the checkpoint's value if absent."""

_FILES = tuple(name for name in _OPTIONS if name != "image_reference")
"""Fields of a form that may be files; the last one several times."""


@dataclass(frozen=True)
class Upload:
    """File of a client: its contents, and the field that it came in."""

    data: bytes
    field: str


Uploads = dict[str, list[Upload]]
"""Files of a request by option: `image`, with which the clip begins or by which it is controlled, and others."""


async def read_create(request: Request, *, max_bytes: int) -> tuple[VideoCreate, Uploads]:
    """Read a JSON body or a form, and the files in it.

    `request`: with `application/json` or `multipart/form-data`. `max_bytes`: limit of a file, and of a data URI in a
    form.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        body = await read_body(request, VideoCreate)
        return body, _references(body)
    uploads: Uploads = {}
    values: dict[str, Any] = {}
    files, known = len(_FILES) - 1 + MAX_REFERENCES, VideoCreate.__struct_fields__
    async with request.form(max_files=files, max_fields=_PARTS, max_part_size=2 * max_bytes) as form:
        for name, value in form.multi_items():
            name = name.removesuffix("[]")  # as openai-python and PHP name the fields of lists
            if isinstance(value, UploadFile):  # its name is the client's, and is not read
                if name not in _FILES:
                    raise field_error(name[:64], f"expected the file in one of {', '.join(_FILES)}")
                if _OPTIONS[name] in uploads and name != "reference_images":
                    raise field_error(name, "give one file")
                uploads.setdefault(_OPTIONS[name], []).append(Upload(await value.read(), name))
                continue
            nested = _NESTED.fullmatch(name)
            name, value = (nested[1], {nested[2]: value}) if nested else (name, _form_value(name, value))
            if name == "reference_images":
                values.setdefault(name, []).extend(value if isinstance(value, list) else [value])
            elif (field := name.partition("[")[0]) in known and (name != field or name in values):
                raise field_error(name[:64], "give the field once; several values are a JSON list")
            else:
                values[name] = value
    body = decode(VideoCreate, values)
    references = _references(body)
    if both := uploads.keys() & references.keys():
        raise field_error(references[both.pop()][0].field, "give one image, or all as files")
    return body, uploads | references


def _form_value(name: str, text: str) -> Any:
    """Value of a form's field, whose type JSON would show."""
    if name in _NUMBERS and _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("-").isdigit() else float(text)
    if name in (*_OPTIONS, "conditioning_scale") and text.startswith(("{", "[")):
        return parse_json(text.encode())
    return text


def _references(body: VideoCreate) -> Uploads:
    """Images of a body's data URIs."""
    for name in ("reference_url", "video_url"):
        if getattr(body, name) is not None:
            raise field_error(name, "URLs are not fetched; send the file, or a data URI, as input_reference")
    if body.input_reference is not None and body.image_reference is not None:
        raise field_error("image_reference", "give it or input_reference, not both")
    uploads: Uploads = {}
    for field, option in _OPTIONS.items():
        given = getattr(body, field)
        for reference in given if isinstance(given, list) else [] if given is None else [given]:
            name = field
            if isinstance(reference, ImageReference):
                if reference.file_id is not None:
                    problem = f"{name}.file_id: files are not kept here; send a data URI in image_url"
                    raise ApiError(400, problem, param=name)
                reference, name = reference.image_url, f"{name}.image_url"
            if reference is None:
                raise field_error(name, "it is missing")
            uploads.setdefault(option, []).append(Upload(read_data_uri(reference, name=name), name))
    return uploads


def resolve(
    body: VideoCreate,
    media: Mapping[str, Sequence[UInt8[np.ndarray, "T H W 3"]]],
    pipeline: VideoPipeline,
    sizes: Sequence[str] = (),
    rate: float | None = None,
) -> ResolvedRequest:
    """Checked request of the pipeline.

    Args:
        media: decoded images (one frame) and clips of `Uploads`.
        pipeline: the model, whose limits count.
        sizes: sizes that are allowed next to the usual one; within its limits, any if empty.
        rate: frames per second of a clip in `image`, which the result keeps if the body says none; None if unknown.

    Raises:
        InvalidParameterError: naming the client's field, and values that fit.
    """
    if not body.prompt.strip():
        raise InvalidParameterError("prompt: it is empty; expected a description of the clip")
    for name in ("last_image", "reference_images"):
        for frames in media.get(name, ()):
            if len(frames) > 1:
                raise InvalidParameterError(f"{name}: expected one image, got {len(frames)} frames")
    if body.boundary_ratio not in (None, (boundary := pipeline.settings.boundary_ratio)):
        raise InvalidParameterError(f"boundary_ratio: expected the checkpoint's, {boundary}, got {body.boundary_ratio}")
    frames, last, mask = (next(iter(media.get(name, ())), None) for name in ("image", "last_image", "mask"))
    width, height = _size(body, frames, pipeline, sizes)
    is_clip = frames is not None and len(frames) > 1
    usual = pipeline.settings.fps if rate is None or not is_clip else max(1, round(rate))
    fps = usual if body.fps is None else body.fps
    request = VideoRequest(
        body.prompt,
        image=None if frames is None or is_clip else frames[0],
        video=frames if is_clip else None,
        last_image=None if last is None else last[0],
        mask=mask,
        reference_images=[picture[0] for picture in media.get("reference_images", ())],
        height=height,
        width=width,
        num_frames=_num_frames(body, pipeline, fps),
        shift=body.flow_shift,
        half_size_steps=body.half_size_steps or 0,
        fps=fps,
        seed=secrets.randbelow(_DRAWN_SEEDS) if body.seed is None else body.seed % _SEEDS,
        **{name: getattr(body, name) for name in _SAME},
    )
    try:
        return pipeline.resolve(request)
    except InvalidParameterError as error:
        raise InvalidParameterError(_renamed(str(error), body)) from error


def _renamed(message: str, body: VideoCreate) -> str:
    """Message of the pipeline with the name of the field in which the client gave the option."""
    reference = "image_reference" if body.image_reference is not None else "input_reference"
    names = {
        **{"height": "size", "width": "size", "shift": "flow_shift", "image": reference, "video": reference},
        "num_frames": "num_frames" if body.seconds is None else "seconds",
    }
    name, colon, rest = message.partition(": ")
    if name not in names:
        return message
    return f"{names[name]}{colon}{rest}" if names[name] == name else f"{names[name]}{colon}{name} {rest}"


def _size(
    body: VideoCreate, frames: np.ndarray | None, pipeline: VideoPipeline, sizes: Sequence[str]
) -> tuple[int, int]:
    """Width and height: without a size, the usual ones, turned if the image is upright and they are not.

    Frames of each picture's own shape would be programs to compile for each.
    """
    size = body.size
    if given := [name for name in ("width", "height") if getattr(body, name) is not None]:
        if size is not None or len(given) == 1:
            raise InvalidParameterError(f"{given[0]}: give width and height, both of them, or size alone")
        size = f"{body.width}x{body.height}"
    if size is None:
        first = None if frames is None else frames[0]
        height, width = oriented(first, pipeline.settings.height, pipeline.settings.width)
        return width, height
    usual = f"{pipeline.settings.width}x{pipeline.settings.height}"
    if sizes and size not in (usual, *sizes):
        allowed = ", ".join(dict.fromkeys((usual, *sizes)))
        raise InvalidParameterError(f"size: expected one of {allowed}, got {size[:20]!r}; see --video-sizes")
    if not re.fullmatch(SIZE, size):
        raise InvalidParameterError(f"size: expected WIDTHxHEIGHT such as {usual}, got {size[:20]!r}")
    width, height = map(int, size.split("x"))
    limit = _LARGER * pipeline.settings.width * pipeline.settings.height
    if not sizes and width * height > limit:
        raise InvalidParameterError(f"size: expected at most {limit} pixels ({usual} is usual), got {width}x{height}")
    return width, height


def _num_frames(body: VideoCreate, pipeline: VideoPipeline, fps: int) -> int | None:
    """Number of frames: `num_frames`, or the one nearest to `seconds` that the model can make."""
    trained = pipeline.settings.num_frames
    limit = trained * _LONGER if pipeline.settings.kind == "df" else trained
    if body.seconds is None:
        if body.num_frames is not None and not 1 <= body.num_frames <= limit:
            raise InvalidParameterError(f"num_frames: expected 1 to {limit}, got {body.num_frames}")
        return body.num_frames
    if body.num_frames is not None:
        raise InvalidParameterError("seconds: give it or num_frames, not both")
    text = str(body.seconds)
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    step = pipeline.geometry.frames_per_latent
    frames = round((seconds * fps - 1) / step) * step + 1 if 0 < seconds * fps <= limit + step else 0
    if not 1 <= frames <= limit:
        raise InvalidParameterError(
            f"seconds: expected at most {limit / fps:g} ({limit} frames at {fps} frames per second), got {text[:20]!r}"
        )
    return frames


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
    """Handlers of the routes, and their queue, which begins with the first clip."""

    def __init__(self, server: Server):
        self._server = server
        self._decoder = MediaDecoder()
        self._jobs: VideoJobs | None = None
        self._starting = asyncio.Lock()
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context at whose end the queue ends."""
        yield
        if self._jobs is not None:
            await self._jobs.close()
            self._jobs = None

    async def create(self, request: Request) -> Response:
        """Put a clip into the queue."""
        if self._server.videos is None:
            raise model_error("no video model is served here")
        if self._jobs is not None:
            await self._jobs.check_room()
        if self._uploads.locked():
            raise QueueFullError(f"{MAX_UPLOADS} clips are being uploaded, as many as may; try again later")
        async with self._uploads:
            body, uploads = await read_create(request, max_bytes=self._decoder.limits.bytes)
        videos = self._server.videos
        model = self._server.check_model(body.model, (videos.name,), videos.root)
        record_of(request.scope).model = model
        jobs = await self._queue()
        await jobs.check_room()
        decoded = {
            option: [
                await unless_disconnected(request, self._decoder.decode(upload.data, name=upload.field))
                for upload in several
            ]
            for option, several in uploads.items()
        }
        media = {option: [one.frames for one in several] for option, several in decoded.items()}
        rate = next((one.fps for one in decoded.get("image", ())), None)
        sizes = self._server.settings.video_sizes
        resolved = await asyncio.to_thread(resolve, body, media, jobs.pipeline, sizes, rate)
        return _answer(await jobs.submit(resolved, model))

    async def list(self, request: Request) -> Response:
        """One page of the clips, the newest first unless `order` is `asc`."""
        jobs = self._jobs.newest_last() if self._jobs is not None else []
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        limit = request.query_params.get("limit", "20")
        if order not in _ORDERS:
            raise field_error("order", f"expected asc or desc, got {order[:20]!r}")
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= _LISTED:
            raise field_error("limit", f"expected 1 to {_LISTED}, got {limit[:20]!r}")
        if order == "desc":
            jobs.reverse()
        if after is not None:
            ids = [job.id for job in jobs]
            if after not in ids:
                raise field_error("after", "this video does not exist")
            jobs = jobs[ids.index(after) + 1 :]
        page = [_video(job) for job in jobs[: int(limit)]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return JsonResponse({"object": "list", "data": page, **ends, "has_more": len(jobs) > len(page)})

    async def get(self, request: Request) -> Response:
        """State of a clip."""
        return _answer(self._job(request)[1])

    async def delete(self, request: Request) -> Response:
        """Cancel a clip, or remove it."""
        jobs, job = self._job(request)
        deleted = await jobs.delete(job.id)
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
            raise field_error("variant", f"expected one of {names}, got {variant[:20]!r}")
        if job.error is not None:
            raise ApiError(404, f"the clip failed: {job.error[1]}", code="video_failed")
        path = jobs.store.path(job.id, variant)
        try:
            status = path.stat() if job.status == "completed" else None
        except FileNotFoundError:  # deleted in this moment
            raise _not_found() from None
        if status is None:
            raise ApiError(404, f"the clip is {job.progress}% done", code="video_not_ready")
        _check_range(request, status)
        return FileResponse(
            path,
            media_type=VARIANTS[variant][1],
            filename=f"{job.id}{path.suffix}",
            stat_result=status,
            content_disposition_type="inline",
        )

    async def events(self, request: Request) -> Response:
        """Changes of a clip as they happen."""
        return self._server.stream(_events(*self._job(request)))

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
    clip, get = "/videos/{name}", ("GET",)
    kinds = tuple(dict.fromkeys(kind for _, kind in VARIANTS.values()))
    body = {"body": VideoCreate, "files": _FILES, "queued": True}
    file = {"parameters": CONTENT_PARAMETERS, "media": kinds, "ranges": True}
    return [
        *api_routes("/videos", service.create, summary="Queue a clip.", **body),
        *api_routes("/videos", service.list, get, parameters=LIST_PARAMETERS, summary="List the clips."),
        *api_routes(clip, service.get, get, summary="Describe a clip."),
        *api_routes(clip, service.delete, ("DELETE",), summary="Cancel or remove a clip."),
        *api_routes(f"{clip}/content", service.content, get, summary="Download a clip, or a part of it.", **file),
        *api_routes(f"{clip}/events", service.events, get, media=(EVENTS,), summary="Watch a clip."),
    ]


def _not_found() -> ApiError:
    return ApiError(404, "this video does not exist", code="video_not_found")


def _answer(job: VideoJob) -> Response:
    headers = {} if job.ended else {"openai-poll-after-ms": str(POLL_AFTER_MS)}
    return JsonResponse(_video(job), headers=headers)


def _video(job: VideoJob) -> dict[str, Any]:
    """State of a clip: OpenAI's fields, then the settings by which it can be made again."""
    request = job.request
    settings = ("num_frames", "fps", "num_inference_steps", "guidance_scale", "recipe", "negative_prompt", "seed")
    settings += _CACHES if request.cache is not None else _CACHES[:1]
    settings += ("half_size_steps",) if request.half_size_steps else ()
    # Settings of models with two transformers, and of VACE.
    settings += tuple(name for name in ("guidance_scale_2", "conditioning_scale") if getattr(request, name) is not None)
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
        "error": job.error and dict(zip(("code", "message"), job.error, strict=True)),
        "remixed_from_video_id": None,
        "seconds_left": job.seconds_left,
        "flow_shift": request.shift,
        **{name: getattr(request, name) for name in settings},
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
            ended, state = job.ended, (job.status, job.progress, job.seconds_left)
            if state != shown or ended:
                shown = state
                kind = "video.deleted" if job.deleted else f"video.{job.status}"
                yield named_event(kind, {"type": kind, "video": _video(job)})
            if ended:
                break
            await changed.wait()
    yield DONE


def _check_range(request: Request, status: os.stat_result) -> None:
    """Check the header Range: one range is served, anything else is ignored, and one past the end refused."""
    given = request.headers.get("range")
    match = _RANGE.fullmatch(given) if given is not None else None
    if match is None or match[0] == "bytes=-" or (match[1] and match[2] and int(match[1]) > int(match[2])):
        request.scope["headers"] = [(name, value) for name, value in request.scope["headers"] if name != b"range"]
    elif int(match[1] or 0) >= status.st_size or (not match[1] and int(match[2]) == 0):
        headers = {"Content-Range": f"bytes */{status.st_size}"}
        raise ApiError(416, f"range: the file has {status.st_size} bytes", param="range", headers=headers)
