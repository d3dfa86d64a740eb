"""HTML pages that need no network: their frame, style, tables, figures, and plots as SVG."""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from verax._optional import load_pyplot

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px; width: 100% }
th { position: sticky; top: 0; background: #f3f3f3; text-align: left }
th, td { padding: 2px 8px; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
td:first-child { font-family: ui-monospace, monospace }
tbody tr:hover { background: #f7fbff } tr.marked { background: #fde7e7 }
.good, .bad { font-size: 20px; font-weight: bold } .good { color: #15803d } .bad { color: #b91c1c }
figure { margin: 1.5em 0 } figcaption { font-weight: bold } svg { width: 100%; height: auto }
img, video { max-width: 100%; height: auto }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A page. `body`: lines of HTML. Paragraphs of the classes `good` and `bad` are verdicts."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], marked: Iterable[int] = ()) -> list[str]:
    """Lines of a table below its heading."""
    shown, marks = "".join(f"<th>{escaped(name)}</th>" for name in columns), set(marked)
    lines = [f"<h2>{escaped(title)}</h2><table><thead><tr>{shown}</tr></thead><tbody>"]
    for i, row in enumerate(rows):
        cells = "".join(f"<td>{escaped(cell)}</td>" for cell in row)
        kind = ' class="marked"' if i in marks else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    return [*lines, "</tbody></table>"]


def figure(caption: str, svg: str) -> str:
    """A figure with its caption."""
    return f"<figure><figcaption>{escaped(caption)}</figcaption>{svg}</figure>"


def escaped(text: Any) -> str:
    """Text for HTML."""
    return html.escape(str(text))


@contextlib.contextmanager
def svg_style(extra: str) -> Iterator[Any]:
    """`matplotlib.pyplot` with the style of pages: text stays text, and a figure is the same in every run.

    `extra`: extra that installs matplotlib; errors name it.
    """
    plt = load_pyplot(extra)
    with plt.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "verax"}):
        yield plt


def svg_text(figure: Any) -> str:
    """SVG of a figure, for a page. The figure is closed."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    load_pyplot().close(figure)
    text = out.getvalue()
    # Names of the plot's pieces, which nothing refers to, would stand twice in a page with two plots.
    return re.sub(r'<g id="\w+_\d+">', "<g>", text[text.index("<svg") :])
