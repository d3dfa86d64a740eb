"""Clips of a batch: made in the server's queue, then moved into a folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from verax.files import atomic_path
from verax.serve.batch.client import Answer, call
from verax.serve.batch.lines import VIDEOS

__all__ = ["make_clip"]


class _Video(msgspec.Struct):
    id: str
    status: str = ""


async def make_clip(app: ASGIApp, body: bytes, folder: Path) -> Answer:
    """The state of a clip once it is made or has failed, or the refusal of its request.

    Args:
        app: the application.
        body: of a request to create a clip.
        folder: where the file goes, under the clip's id.
    """
    created = await call(app, "POST", VIDEOS, body)
    if created.status >= 400:
        return created
    path = f"{VIDEOS}/{msgspec.json.decode(created.body, type=_Video).id}"
    await call(app, "GET", f"{path}/events")  # they end with the clip
    state = await call(app, "GET", path)
    video = msgspec.json.decode(state.body, type=_Video)
    if video.status == "completed":
        content = await call(app, "GET", f"{path}/content")
        folder.mkdir(exist_ok=True)
        with atomic_path(folder / f"{video.id}.mp4") as partial:
            partial.write_bytes(content.body)
    await call(app, "DELETE", path)  # makes room
    return state
