"""What `pip install 'verax[video]'` adds, imported where it is used."""

from __future__ import annotations

import importlib
from typing import Any

from verax.errors import MissingDependencyError

__all__ = ["needed"]

_PACKAGES = {"av": "PyAV", "PIL": "Pillow", "ftfy": "ftfy"}


def needed(module: str) -> Any:
    """The module of that name, of the packages PyAV, Pillow and ftfy.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _PACKAGES[module.partition(".")[0]]
        raise MissingDependencyError(f"{package} is not installed: pip install 'verax[video]'") from error
