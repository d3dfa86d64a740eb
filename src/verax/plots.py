"""The way to matplotlib: no display, an error that says how to install it, and figures as text for pages."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

from verax.errors import MissingDependencyError

__all__ = ["pyplot", "svg_style", "svg_text"]


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


@contextlib.contextmanager
def svg_style(extra: str) -> Iterator[Any]:
    """`matplotlib.pyplot` with the style of pages: text stays text, and a figure is the same in every run.

    Args:
        extra: as in `pyplot`.
    """
    plt = pyplot(extra)
    with plt.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "verax"}):
        yield plt


def svg_text(figure: Any) -> str:
    """SVG of a figure, for a page. The figure is closed."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    text = out.getvalue()
    # Names of the plot's pieces, which nothing refers to, would stand twice in a page with two plots.
    return re.sub(r'<g id="\w+_\d+">', "<g>", text[text.index("<svg") :])
