"""A trace: what each module of one run gave, by name and in the order of the run, in memory or streamed to a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from verax.errors import CheckpointError, InvalidParameterError
from verax.files import write_text

__all__ = ["OUTPUT", "Entry", "Trace", "split_call"]

OUTPUT = "(output)"
"""Name of what the whole call gave."""

INDEX = "trace.json"
"""Written last: a folder without it holds no whole trace."""


@dataclass(frozen=True)
class Entry:
    """Description of a stored array. `dtype` is NumPy's name, or bfloat16."""

    shape: tuple[int, ...]
    dtype: str
    number: int
    """Its place in the trace, from 0, which its file is named by."""


class Trace:
    """An ordered map from names to arrays.

    A name is a module's path, as its key in the checkpoint: `blocks.3.self_attn.q`. A module that runs again is
    `blocks.3.self_attn.q#2`. A module's input, where it is recorded, is `blocks.3.self_attn.input`.
    """

    def __init__(self, folder: str | Path | None = None):
        """Start an empty trace.

        Args:
            folder: where to stream arrays to, one .npy file each, so that memory holds one at a time; None keeps them.

        Raises:
            InvalidParameterError: if the folder has files in it.
        """
        self.folder = None if folder is None else Path(folder)
        self.entries: dict[str, Entry] = {}
        self._kept: dict[str, np.ndarray] = {}
        self._calls: dict[str, int] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise InvalidParameterError(f"folder: {self.folder} is not empty; a trace needs a folder of its own")

    @classmethod
    def open(cls, folder: str | Path) -> Trace:
        """A trace that `save` finished.

        Raises:
            CheckpointError: if there is none.
        """
        trace, path = cls(), Path(folder) / INDEX
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: no trace here, or an unfinished one: {error}") from error
        trace.folder = Path(folder)
        trace.entries = {
            name: Entry(tuple(entry["shape"]), entry["dtype"], entry["number"]) for name, entry in entries.items()
        }
        return trace

    def add(self, path: str, array: np.ndarray) -> str:
        """Append an array, which is copied; the name that it has got."""
        call = self._calls[path] = self._calls.get(path, 0) + 1
        name = path if call == 1 else f"{path}#{call}"
        self.entries[name] = Entry(array.shape, array.dtype.name, len(self.entries))
        if self.folder is None:
            self._kept[name] = np.array(array)
        else:
            # NumPy's files know no bfloat16.
            plain = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
            np.save(self._file(name), plain, allow_pickle=False)
        return name

    def save(self) -> None:
        """Finish a trace that is streamed to a folder, so that `Trace.open` finds it."""
        if self.folder is not None:
            text = json.dumps({name: asdict(entry) for name, entry in self.entries.items()}, indent=1)
            write_text(self.folder / INDEX, text)

    def __getitem__(self, name: str) -> np.ndarray:
        """An array, mapped rather than read where it lies in a file.

        Raises:
            KeyError: for a name that the trace does not have.
        """
        entry = self.entries[name]
        if self.folder is None:
            return self._kept[name]
        # Mapped files have no scalars.
        array = np.load(self._file(name), mmap_mode="r" if entry.shape else None, allow_pickle=False)
        return array.view(ml_dtypes.bfloat16) if entry.dtype == "bfloat16" else array

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.entries[name].number:06d}.npy"


def split_call(name: str) -> tuple[str, int]:
    """A name's path and which call of it that is, from 1: `"mlp#2"` is `("mlp", 2)`."""
    path, _, call = name.partition("#")
    return path, int(call or 1)
