"""Requests for clips as clients send them, and their conversion to the pipeline's requests."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import UInt8
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.requests import Request

from verax.errors import InvalidParameterError
from verax.serve.http.errors import ApiError
from verax.serve.http.fields import decode, parse_json, read_body
from verax.serve.video.media.data_uri import read_data_uri
from verax.video.pipeline import VideoPipeline
from verax.video.request import ResolvedRequest, VideoRequest

__all__ = ["ImageReference", "Upload", "VideoCreate", "read_create", "resolve"]

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

_SEEDS = 1 << 32
"""Number of different seeds. A client's signed integer counts modulo this."""

_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_NESTED = re.compile(r"(input_reference|image_reference)\[(image_url|file_id)\]")
_NUMBERS = ("num_frames", "fps", "num_inference_steps", "guidance_scale", "guidance_scale_2", "flow_shift", "seed")
_PARTS = 32
"""Fields of a form."""


class ImageReference(msgspec.Struct):
    """Image or clip with which the clip begins."""

    image_url: str | None = None
    """A data URI. URLs are not fetched."""
    file_id: str | None = None


def _within(least: float, most: float | None = None) -> Meta:
    """Bounds for the description of the API. `resolve` checks them, with messages that say what fits the model."""
    return Meta(extra_json_schema={"minimum": least} | ({} if most is None else {"maximum": most}))


class VideoCreate(msgspec.Struct):
    """Body of a request, as OpenAI's, vLLM-Omni's and SGLang's servers take it."""

    prompt: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_PROMPT})]
    model: str | None = None
    seconds: str | int | float | None = None
    size: Annotated[str, Meta(extra_json_schema={"pattern": f"^{_SIZE.pattern}$"})] | None = None
    """`"WIDTHxHEIGHT"` in pixels."""
    num_frames: Annotated[int, _within(1)] | None = None
    fps: Annotated[int, _within(1, MAX_FPS)] | None = None
    num_inference_steps: Annotated[int, _within(1, MAX_STEPS)] | None = None
    guidance_scale: Annotated[float, _within(0, MAX_SCALE)] | None = None
    guidance_scale_2: Annotated[float, _within(0, MAX_SCALE)] | None = None
    """Scale with the second of two transformers (Wan2.2's A14B)."""
    flow_shift: Annotated[float, _within(MIN_SHIFT, MAX_SCALE)] | None = None
    negative_prompt: Annotated[str, Meta(extra_json_schema={"maxLength": MAX_PROMPT})] | None = None
    seed: int | None = None
    input_reference: str | ImageReference | None = None
    """A data URI, or an object with one; in a form also a file."""
    image_reference: ImageReference | None = None


@dataclass(frozen=True)
class Upload:
    """File of a client: its contents, and the field that it came in."""

    data: bytes
    field: str


async def read_create(request: Request, *, max_bytes: int) -> tuple[VideoCreate, Upload | None]:
    """Read a JSON body or a form, and the file in it.

    Args:
        request: with `application/json` or `multipart/form-data`.
        max_bytes: limit of the file, and of a data URI in a form.

    Raises:
        ApiError: 400 or 415, naming the field.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        body = await read_body(request, VideoCreate)
        return body, _reference(body)
    upload: Upload | None = None
    values: dict[str, Any] = {}
    async with request.form(max_files=1, max_fields=_PARTS, max_part_size=2 * max_bytes) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):  # its name is the client's, and is not read
                if name != "input_reference":
                    raise ApiError(400, f"{name[:64]}: expected the file in input_reference", param=name[:64])
                upload = Upload(await value.read(), name)
            elif nested := _NESTED.fullmatch(name):
                values.setdefault(nested[1], {})[nested[2]] = value
            else:
                values[name] = _form_value(name, value)
    body = decode(VideoCreate, values)
    reference = _reference(body)
    if upload is not None and reference is not None:
        raise ApiError(400, f"{reference.field}: give one image", param=reference.field)
    return body, upload or reference


def _form_value(name: str, text: str) -> Any:
    """Value of a form's field, whose type JSON would show."""
    if name in _NUMBERS and _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("-").isdigit() else float(text)
    if name in ("input_reference", "image_reference") and text.startswith("{"):
        return parse_json(text.encode())
    return text


def _reference(body: VideoCreate) -> Upload | None:
    """Image of a body's data URI."""
    given = {"input_reference": body.input_reference, "image_reference": body.image_reference}
    found = {name: reference for name, reference in given.items() if reference is not None}
    if len(found) > 1:
        raise ApiError(400, "image_reference: give it or input_reference, not both", param="image_reference")
    for name, reference in found.items():
        if isinstance(reference, ImageReference):
            if reference.file_id is not None:
                raise ApiError(
                    400, f"{name}.file_id: files are not kept here; send a data URI in image_url", param=name
                )
            reference, name = reference.image_url, f"{name}.image_url"
        if reference is None:
            raise ApiError(400, f"{name}: it is missing", param=name)
        return Upload(read_data_uri(reference, name=name), name)
    return None


def resolve(body: VideoCreate, frames: UInt8[np.ndarray, "T H W 3"] | None, pipeline: VideoPipeline) -> ResolvedRequest:
    """Checked request of the pipeline.

    Args:
        body: request of the client.
        frames: decoded image (one frame) or clip, or None.
        pipeline: the model, whose limits count.

    Raises:
        InvalidParameterError: naming the client's field, and values that fit.
    """
    _check_numbers(body)
    width, height = _size(body, pipeline)
    fps = body.fps if body.fps is not None else pipeline.settings.fps
    request = VideoRequest(
        body.prompt,
        image=frames[0] if frames is not None and len(frames) == 1 else None,
        video=frames if frames is not None and len(frames) > 1 else None,
        negative_prompt=body.negative_prompt,
        height=height,
        width=width,
        num_frames=_num_frames(body, pipeline, fps),
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        guidance_scale_2=body.guidance_scale_2,
        shift=body.flow_shift,
        fps=fps,
        seed=secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS,
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


def _check_numbers(body: VideoCreate) -> None:
    if not body.prompt.strip():
        raise InvalidParameterError("prompt: it is empty; expected a description of the clip")
    for name in ("prompt", "negative_prompt"):
        if len(getattr(body, name) or "") > MAX_PROMPT:
            raise InvalidParameterError(f"{name}: longer than {MAX_PROMPT} characters")
    limits = {
        "fps": (1, MAX_FPS),
        "num_inference_steps": (1, MAX_STEPS),
        "guidance_scale": (0, MAX_SCALE),
        "guidance_scale_2": (0, MAX_SCALE),
        "flow_shift": (MIN_SHIFT, MAX_SCALE),
    }
    for name, (least, most) in limits.items():
        value = getattr(body, name)
        if value is not None and not least <= value <= most:
            raise InvalidParameterError(f"{name}: expected {least} to {most:g}, got {value:g}")


def _size(body: VideoCreate, pipeline: VideoPipeline) -> tuple[int, int] | tuple[None, None]:
    """Width and height."""
    if body.size is None:
        return None, None
    found = _SIZE.fullmatch(body.size)
    usual = f"{pipeline.settings.width}x{pipeline.settings.height}"
    if found is None:
        raise InvalidParameterError(f"size: expected WIDTHxHEIGHT such as {usual}, got {body.size[:20]!r}")
    width, height = int(found[1]), int(found[2])
    most = _LARGER * pipeline.settings.width * pipeline.settings.height
    if width * height > most:
        raise InvalidParameterError(f"size: expected at most {most} pixels ({usual} is usual), got {width}x{height}")
    return width, height


def _num_frames(body: VideoCreate, pipeline: VideoPipeline, fps: int) -> int | None:
    """Number of frames: `num_frames`, or the one nearest to `seconds` that the model can make."""
    trained = pipeline.settings.num_frames
    most = trained * _LONGER if pipeline.settings.kind == "df" else trained
    if body.seconds is None:
        if body.num_frames is not None and not 1 <= body.num_frames <= most:
            raise InvalidParameterError(f"num_frames: expected 1 to {most}, got {body.num_frames}")
        return body.num_frames
    if body.num_frames is not None:
        raise InvalidParameterError("seconds: give it or num_frames, not both")
    text = str(body.seconds)
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    each = pipeline.geometry.frames_per_latent
    frames = round((seconds * fps - 1) / each) * each + 1 if 0 < seconds * fps <= most + each else 0
    if not 1 <= frames <= most:
        raise InvalidParameterError(
            f"seconds: expected at most {most / fps:g} ({most} frames at {fps} frames per second), got {text[:20]!r}"
        )
    return frames
