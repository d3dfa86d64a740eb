"""The way to matplotlib: no display, and an error that says how to install it."""

from __future__ import annotations

from typing import Any

from verax.errors import MissingDependencyError

__all__ = ["pyplot"]


def pyplot(extra: str = "train") -> Any:
    """`matplotlib.pyplot`, drawing into files only.

    Args:
        extra: the one that installs it for what is being done; errors name it.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(f"the plot needs matplotlib: pip install 'verax[{extra}]'") from error
    return pyplot
