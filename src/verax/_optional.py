"""Imports of the packages that `pip install 'verax[video]'` adds, at the place where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from verax.errors import MissingDependencyError

__all__ = ["require_optional"]

_PACKAGES = {"av": "PyAV", "PIL": "Pillow", "ftfy": "ftfy"}


def require_optional(module: str) -> Any:
    """Import a module of one of the packages PyAV, Pillow and ftfy.

    Args:
        module: its full name, such as `"PIL.Image"`.

    Raises:
        MissingDependencyError: if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _PACKAGES[module.partition(".")[0]]
        raise MissingDependencyError(f"{package} is not installed: pip install 'verax[video]'") from error
