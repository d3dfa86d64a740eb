"""Files written whole or not at all, JSON files read with errors that name them, and values that JSON has."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verax.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"

_PART = re.compile(r"-\d{5}-of-\d{5}$")
"""End of the name of a file that is one of several."""


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or folder to, next to `path`, and rename it to `path` when the block succeeds.

    A random number is in its name, so that no two write to one file: processes of two containers often have the same
    number. So is the ending of `path`, by which libraries choose a format. If the block raises, what was written is
    removed and what was at `path` stays.
    """
    stem = f".{path.stem}.{secrets.token_hex(4)}"
    partial, replaced = path.with_name(f"{stem}.partial{path.suffix}"), path.with_name(f"{stem}.replaced")
    try:
        yield partial
        if path.is_dir() or (partial.is_dir() and path.exists()):  # no rename replaces these
            path.rename(replaced)
        partial.replace(path)
    except BaseException:
        if replaced.exists():
            replaced.rename(path)
        raise
    finally:
        for left in (replaced, partial):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file with an indent of two spaces, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def json_value(value: Any) -> Any:
    """Value as JSON has it: with None for floats that are not finite, and lists for tuples."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cache_folder() -> Path | None:
    """Folder of verax's caches: `VERAX_CACHE_DIR`, or `~/.cache/verax`.

    None if the variable is empty, or the user has no home: no caches.
    """
    home = os.environ.get("VERAX_CACHE_DIR", "~/.cache/verax")
    try:
        return Path(home).expanduser() if home else None
    except RuntimeError:  # a number without an entry, as containers often run with
        return None


class JsonObject(dict[str, Any]):
    """Object of a JSON file, with the file's name for error messages."""

    def __init__(self, values: Mapping[str, Any], where: object):
        super().__init__(values)
        self.where = str(where)


def read_json(path: Path, kind: type = dict, *, optional: bool = False) -> Any:
    """Read a JSON object, or a list with `kind=list`.

    `kind`: type of the value, `dict` or `list`. `optional`: if True, a missing file is an empty value.

    The result is a `JsonObject` or a list.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except FileNotFoundError as error:
        if optional:
            return JsonObject({}, path) if kind is dict else kind()
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: expected a JSON {'object' if kind is dict else 'list'}")
    return JsonObject(value, path) if kind is dict else value


def refuse_pointer(path: Path) -> None:
    """Refuse the few lines that a clone without Git LFS has in the place of a large file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a pointer of Git LFS, not the file itself; run git lfs pull in its folder, or fetch it again"
            )


def model_name(model: str | Path) -> str:
    """Name of a model without its place: a file's stem, the name of a folder, or the hub id unchanged.

    A folder in the cache of a hub, whose name is a commit, has the name of its repository.
    """
    path = Path(model)
    if not path.exists():
        return str(model)
    path = path.absolute() if path.name not in ("", "..") else path.resolve()
    if path.parent.name == "snapshots":
        return path.parents[1].name.rpartition("--")[2]
    return path.name if path.is_dir() else _PART.sub("", path.stem)
