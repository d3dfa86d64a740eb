"""From what a user names (a folder, a hub id) to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from verax.errors import CheckpointError

__all__ = ["resolve"]

WANTED = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer*",
    "vocab*",
    "merges.txt",
)
"""Files of a hub repository that a checkpoint needs: weights in other formats stay where they are."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(model: str | Path, *, revision: str | None = None) -> Path:
    """The folder of a checkpoint: itself if it is one, else the snapshot of a Hugging Face hub id.

    `HF_HOME` and `HF_HUB_OFFLINE` are respected; what was downloaded before is used when offline.

    Raises:
        CheckpointError: if there is no such folder, and no such id could be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model}: expected a folder with config.json and safetensors files, this is a file")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model}: no such folder, and not a hub id of the form organisation/name")
    return _download(model, revision)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here, and no such model on the hub (or it needs a token)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here, not in the local cache, and the hub cannot be reached (offline?)"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: could not be fetched from the hub: {first_line}") from error
