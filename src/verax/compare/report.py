"""Reports of a comparison of layers, and of two clips: for a terminal, as Markdown, as one HTML page, as JSON."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import rich.table
from rich.console import Console
from rich.markup import escape

from verax._optional import require_optional
from verax.compare.comparison import MAX_RATIO, SMALL, Comparison, Row, some
from verax.compare.trace import OUTPUT
from verax.compare.videos import DEFINITIONS, QUALITY, VideoComparison, differences
from verax.files import write_json, write_text
from verax.page import escaped, figure, page, svg_style, svg_text, table
from verax.video import files

ROWS = 40
"""Most rows that a terminal gets without `every`: the blocks of a larger model, and what stands out."""

_WORDS = ("layer", "parameter", "run", "dtype", "figure")
"""Columns of words. All other columns are numbers."""

FPS = 24.0
"""Frame rate of the side-by-side clip if neither clip has one."""

FLOOR = 1e-9
"""Position of zero errors on the logarithmic axis of a plot; smaller errors are drawn there too."""

SIDE, OTHER, BOUND, MARK = "#1f77b4", "#ff7f0e", "#888888", "#d62728"

_SIDES = {"ours": "ours", "reference": "the reference"}

Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class _Table:
    """Table of a report: texts, and the numbers of the rows that stand out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Collection[int] = ()

    def show(self, console: Console) -> None:
        drawn = rich.table.Table(title=self.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(self.columns):
            # On a narrow terminal the layers' names are what gives way.
            width = None if name in ("layer", "parameter") else max(map(len, (name, *(row[i] for row in self.rows))))
            drawn.add_column(name, no_wrap=True, justify="left" if name in _WORDS else "right", min_width=width)
        for i, row in enumerate(self.rows):
            drawn.add_row(*map(escape, row), style="red" if i in self.marked else None)
        console.print(drawn)

    def markdown(self) -> list[str]:
        rows = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return ["", f"## {self.title}", "", *lines]


@dataclass(frozen=True)
class _Page:
    """Report as a page: a title, a verdict, what was found, tables, and definitions."""

    title: str
    verdict: str
    passed: bool
    findings: Sequence[str]
    tables: Sequence[_Table]
    definitions: Sequence[str]

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", f"**{self.verdict}**", "", *(f"- {line}" for line in self.findings)]
        for section in self.tables:
            lines += section.markdown()
        return "\n".join([*lines, "", *(f"- {line}" for line in self.definitions), ""])

    def html(self, figures: Iterable[str]) -> str:
        def items(lines: Iterable[str]) -> list[str]:
            return ["<ul>", *(f"<li>{escaped(line)}</li>" for line in lines), "</ul>"]

        kind = "good" if self.passed else "bad"
        body = [f"<h1>{escaped(self.title)}</h1>", f'<p class="{kind}">{self.verdict}</p>', *items(self.findings)]
        body += figures
        for section in self.tables:
            body += table(section.title, section.columns, section.rows, section.marked)
        return page(f"{self.title}: {self.verdict}", [*body, *items(self.definitions)])

    def write(self, folder: Path, stem: str, record: Mapping[str, Any], figures: Iterable[str]) -> list[Path]:
        """Write JSON, Markdown and HTML into a folder, which is made; return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}.{kind}" for kind in ("json", "md", "html")]
        write_json(paths[0], record)
        write_text(paths[1], self.markdown())
        write_text(paths[2], self.html(figures))
        return paths


def show(result: Comparison, console: Console, *, every: bool = False) -> None:
    """Print the tables and the verdict.

    Args:
        every: print all rows, however many.
    """
    rows = result.rows if every else _chosen(result)
    largest = sorted(result.gradients, key=lambda row: -max(row.errors.l2, row.errors.worst))
    gradients = result.gradients if every else largest[:8]
    _table(f"{result.title}, {result.dtype}", rows, _columns(result), result).show(console)
    if gradients:
        _table("gradients by parameter", gradients, _columns(result, gradients=True), result).show(console)
    if result.fused:
        _table(_OUTPUT_TITLE, _outputs(result), _output_columns(result), result).show(console)
    left = len(result.rows) - len(rows)
    if left:
        console.print(f"{left} rows more within the blocks: --all shows them, --output DIR writes them.")
    for line in _findings(result):
        console.print(line, highlight=False, markup=False)  # [ids] is a path here
    console.print("[bold green]equal[/]" if result.passed else "[bold red]different[/]", highlight=False)


def write(result: Comparison, folder: str | Path) -> list[Path]:
    """Write `compare.json`, `compare.md` and `compare.html` into a folder, which is made; return their paths.

    Raises:
        MissingDependencyError: without matplotlib, which draws the page's plots.
    """
    plots = [figure("Errors by layer, in the order of the run", _by_layer(result))]
    columns = [*_columns(result), ("reference", lambda row: row.reference), _ARRANGED]
    tables = [_table("Layers", result.rows, columns, result)]
    if result.fused:
        tables.insert(0, _table(_OUTPUT_TITLE, _outputs(result), _output_columns(result), result))
    if result.gradients:
        tables.append(_table("Gradients", result.gradients, [*_columns(result, gradients=True), _ARRANGED], result))
        series = [("relative L2 error", SIDE, "o", [row.errors.l2 for row in result.gradients])]
        plots.append(figure("Errors of gradients by parameter", _draw(result.gradients, series, result.bound)))
    verdict = "equal" if result.passed else "different"
    report = _Page(
        f"{result.title}, {result.dtype}", verdict, result.passed, _findings(result), tables, _definitions(result)
    )
    return report.write(Path(folder), "compare", result.as_dict(), plots)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], result: Comparison) -> _Table:
    standing_out = {id(row) for row in (result.first, *result.faults) if row is not None}
    marked = [i for i, row in enumerate(rows) if id(row) in standing_out or row.problem is not None]
    return _Table(title, [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows], marked)


_OUTPUT_TITLE = "output, layer by layer and as one compiled program"


def _outputs(result: Comparison) -> list[Row]:
    """The outputs of both runs of our model, named by the run."""
    runs = (result.outputs, "layer by layer"), (result.fused, "one compiled program")
    return [replace(row, name=row.name.replace(OUTPUT, name)) for rows, name in runs for row in rows]


def _output_columns(result: Comparison) -> list[Column]:
    return [("run", lambda row: row.name), *_columns(result)[1:]]


_ARRANGED: Column = ("arranged", lambda row: row.layout)


def _columns(result: Comparison, *, gradients: bool = False) -> list[Column]:
    columns: list[Column] = [
        ("parameter" if gradients else "layer", lambda row: row.name),
        ("max abs", lambda row: f"{row.errors.max_abs:.1e}"),
        ("max / mean", lambda row: f"{row.errors.max_rel:.1e}"),
        ("rel. L2", lambda row: f"{row.errors.l2:.1e}"),
        ("worst", lambda row: f"{row.errors.worst:.1e}"),
        ("1 - cosine", lambda row: f"{1 - row.errors.cosine:.0e}"),
        (
            "dtype",
            lambda row: row.dtype if row.dtype == row.reference_dtype else f"{row.dtype} / {row.reference_dtype}",
        ),
    ]
    if not gradients and any(row.own for row in result.rows):
        columns.insert(5, ("own rel. L2", lambda row: f"{row.own.l2:.1e}" if row.own else ""))
    if not gradients and any(row.against_truth for row in result.rows):
        columns.insert(5, ("ours : f32", lambda row: f"{row.against_truth[0]:.1e}" if row.against_truth else ""))
        columns.insert(6, ("ref. : f32", lambda row: f"{row.against_truth[1]:.1e}" if row.against_truth else ""))
        columns.insert(7, ("ratio", lambda row: "" if row.ratio is None else f"{row.ratio:.2f}"))
    return columns


def _findings(result: Comparison) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in result.about.items())] if result.about else []
    for what, outputs in (("", result.outputs), (" as one compiled program", result.fused)):
        lines += [
            f"{row.name.replace(OUTPUT, 'output')}{what}: max / mean {row.errors.max_rel:.1e}, relative L2 "
            f"{row.errors.l2:.1e}"
            + (f", error ratio against float32 {row.ratio:.2f}" if row.ratio is not None else "")
            + (f", arranged as the reference's: {row.layout}" if row.layout else "")
            for row in outputs
        ]
    if result.judged is not None:
        lines += result.judged.lines()
    kinds = [
        f"{n} of {ours}" + (f" (reference {theirs})" * (ours != theirs)) for (ours, theirs), n in result.dtypes.items()
    ]
    outputs, layers = len(result.outputs), len(result.rows) - len(result.outputs)
    lines.append(f"{outputs + layers} arrays compared, {outputs} outputs and {layers} of layers: {', '.join(kinds)}")
    lines += [f"first NaN or infinity of {_SIDES[side]}: {origin}" for side, origin in result.origins.items()]
    for side, name in result.runs.items():
        repeated = "the same bit for bit" if name is None else f"different, first in {name}: it is not deterministic"
        lines.append(f"a second run of {_SIDES[side]} is {repeated}")
    if (first := result.first) is not None:
        worst = f", worst {first.errors.worst_at}: {first.errors.worst:.1e}" if first.errors.worst_at else ""
        lines.append(f"first error beyond the trend: {first.name} ({first.errors.l2:.1e}{worst})")
    if any(row.own for row in result.rows):
        faults = ", ".join(f"{row.name} ({row.own.l2:.1e})" for row in result.faults if row.own)
        lines.append(f"errors of their own, on the reference's activations: {faults or 'none stands out'}")
    if result.guessed:
        lines.append("matched by shape and order only, to be confirmed: " + "; ".join(map(str, result.guessed)))
    alone = (("in ours only", result.alignment.ours_only), ("in the reference only", result.alignment.reference_only))
    unused = ("entries of names that match nothing", result.alignment.unused)
    for what, names in (*alone, ("left out by a side", result.left_out), unused):
        if names:
            lines.append(f"{what}: {some(names)}")
    if result.peak_memory is not None:
        lines.append(f"memory: the process held {result.peak_memory / 1e9:.2f} GB at most")
    return lines + list(result.failures)


def _definitions(result: Comparison) -> list[str]:
    lines = [
        "max abs: the largest absolute difference",
        "max / mean: the largest absolute difference over the mean absolute value of the reference's activations",
        "rel. L2: the norm of the difference over the norm of the reference",
        "worst: the same of the worst row or channel of the last axis; a norm counts for at least the median of all "
        f"and {SMALL:g} of the largest",
    ]
    if any(row.own for row in result.rows):
        lines.append("own: with each layer's inputs, and what stands before it, taken from the reference")
    if result.fused:
        lines.append(
            "one compiled program: as the engines run the model, with fused operations, whose layers have no results "
            "of their own"
        )
    if any(row.against_truth for row in result.rows):
        lines.append(
            f"f32: the reference in float32 with the same rounded weights; a ratio up to {MAX_RATIO} counts as equal"
        )
    if result.bound is not None:
        lines.append(
            f"equal: rel. L2 of at most {result.bound:.0e}, worst of at most {result.worst_bound:.0e}, in each line of "
            "floats"
        )
    lines.append("in every line all numbers are finite; integers, booleans and texts are equal")
    return lines


def _chosen(result: Comparison) -> list[Row]:
    """Rows for a terminal: the outermost modules, what stands out, and the largest errors."""
    if len(result.rows) <= ROWS:
        return result.rows
    depths = sorted({row.name.count(".") for row in result.rows})
    wanted: set[int] = set()
    for depth in depths:
        level = {i for i, row in enumerate(result.rows) if row.name.count(".") == depth}
        if len(wanted | level) > ROWS:
            break
        wanted |= level
    problems = [row for row in result.rows if row.problem is not None]
    for row in (result.first, *result.faults[:8], *problems[:8], *result.outputs):
        if row is not None:
            wanted.add(next(i for i, other in enumerate(result.rows) if other is row))
    return [result.rows[i] for i in sorted(wanted)]


@dataclass(frozen=True)
class VideoReport:
    """Comparison of two clips, and the clips themselves."""

    comparison: VideoComparison
    first: np.ndarray
    """Frames of the first clip, uint8 `[T, H, W, 3]`."""
    second: np.ndarray
    """Frames of the second clip, uint8 `[T, H, W, 3]`."""
    names: tuple[str, str]
    fps: float | None = None
    min_psnr: float | None = None
    """Least PSNR of every frame in dB; None for no bound."""
    deterministic: Mapping[str, bool | None] = field(default_factory=dict)
    """By side, whether a second run has given the same clip; empty without second runs."""

    @property
    def failures(self) -> list[str]:
        """Reasons that the clips do not count as equal; empty if they do."""
        frame = self.comparison.worst_frame
        psnr = self.comparison.psnr[frame]
        if self.min_psnr is None or psnr >= self.min_psnr:
            return []
        return [f"frame {frame}: {psnr:.2f} dB, below the minimum of {self.min_psnr:g}"]

    def as_dict(self) -> dict[str, Any]:
        """The comparison for JSON."""
        bound = {} if self.min_psnr is None else {"min_psnr": self.min_psnr, "failures": self.failures}
        runs = {"deterministic": dict(self.deterministic)} if self.deterministic else {}
        return {"clips": self.names, **self.comparison.to_dict(), **bound, **runs}

    def show(self, console: Console, *, every: bool = False) -> None:
        """Print the figures of the clip, and with `every` the figures of each frame."""
        for section in self._tables() if every else self._tables()[:1]:
            section.show(console)
        for line in self._runs():
            console.print(line, highlight=False)

    def write(self, folder: Path) -> list[Path]:
        """Write videos.json, videos.md, videos.html and side-by-side.mp4 into a folder; return their paths.

        The folder is created if missing. The HTML page has the plot, the worst frame and the clip in it, and needs no
        network and no other file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        clip = files.write_clip(self.panels(), folder / "side-by-side.mp4", fps=self.fps or FPS)
        worst, encoded = self.comparison.worst_frame, io.BytesIO()
        require_optional("PIL.Image").fromarray(self.panels()[worst]).save(encoded, format="png")
        triple = f"{self.names[0]}, {self.names[1]}, and their difference times {self.gain}"
        figures = [
            figure("By frame", _by_frame(self.comparison)),
            figure(triple, f'<video src="{_data("video/mp4", clip.read_bytes())}" controls loop muted></video>'),
            figure(f"Frame {worst}, the worst", f'<img alt="" src="{_data("image/png", encoded.getvalue())}">'),
        ]
        comparison = self.comparison
        sizes = f"{comparison.frames} frames of {comparison.width} x {comparison.height}"
        levels = "; ".join(f"{name} from {psnr:g} dB and SSIM {ssim:g}" for name, psnr, ssim in QUALITY)
        report = _Page(
            "Clips compared",
            comparison.verdict,
            not self.failures,
            [f"{self.names[0]} and {self.names[1]}: {sizes}", *self._runs(), *self.failures],
            self._tables(),
            [
                f"verdict: by the whole clip, {levels}; poor below",
                *(f"{name}: {text}" for name, text in DEFINITIONS.items()),
            ],
        )
        return [*report.write(folder, "videos", self.as_dict(), figures), clip]

    @property
    def gain(self) -> int:
        """Factor on differences that makes them visible, 1 to 255: 99% of them become at most half as bright as white.

        Pictures have steps of 1/255, so that a larger factor would show nothing more.
        """
        shown = self.comparison.p99_difference or self.comparison.max_difference
        return min(255, max(1, int(0.5 / shown))) if shown else 1

    def panels(self) -> np.ndarray:
        """Clip of three panels, uint8 `[T, h, w, 3]`: the first clip, the second, and their difference times `gain`.

        Odd heights and widths are padded to even ones by repeating the edge.
        """
        off = differences(self.first, self.second)
        bright = np.minimum(off, 255 // self.gain) * np.uint8(self.gain)
        joined = np.concatenate([self.first, self.second, bright], axis=2)
        odd = [(0, 0), (0, joined.shape[1] % 2), (0, joined.shape[2] % 2), (0, 0)]
        return np.pad(joined, odd, mode="edge")

    def _runs(self) -> list[str]:
        return [
            f"a second run of {side} is {'the same bit for bit' if same else 'different: it is not deterministic'}"
            for side, same in self.deterministic.items()
        ]

    def _tables(self) -> list[_Table]:
        comparison = self.comparison
        by_frame = zip(comparison.mse, comparison.psnr, comparison.ssim, strict=True)
        frames = [[str(i), f"{mse:.3g}", _db(psnr), f"{ssim:.6f}"] for i, (mse, psnr, ssim) in enumerate(by_frame)]
        return [
            _Table(" and ".join(self.names), ["figure", "value"], [*_summary(comparison).items()]),
            _Table("Every frame", ["frame", "MSE", "PSNR, dB", "SSIM"], frames, [comparison.worst_frame]),
        ]


def _summary(comparison: VideoComparison) -> dict[str, str]:
    """Figures of the whole clip as text, by their names."""
    worst = comparison.worst_frame
    relative = comparison.relative_difference
    figures = {
        "verdict": comparison.verdict,
        "PSNR of the clip": f"{_db(comparison.clip_psnr)} dB",
        f"PSNR of the worst frame ({worst})": f"{_db(comparison.psnr[worst])} dB",
        "SSIM of the clip": f"{comparison.clip_ssim:.6f}",
        "SSIM of its worst frame": f"{min(comparison.ssim):.6f}",
        "MSE": f"{sum(comparison.mse) / comparison.frames:.3g}",
        "identical frames": f"{comparison.identical_frames} of {comparison.frames}",
        "mean difference": f"{comparison.mean_difference:.4%}",
        "95th percentile": f"{comparison.p95_difference:.4%}",
        "99th percentile": f"{comparison.p99_difference:.4%}",
        "largest difference": f"{comparison.max_difference:.4%}",
    }
    if relative is not None:
        figures["relative to the first clip's mean"] = f"{relative:.4%}"
    return figures


def _db(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "∞"


def _data(kind: str, content: bytes) -> str:
    """Data URL with the content in base64; `kind` is its media type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _by_frame(comparison: VideoComparison) -> str:
    """Plot of PSNR and SSIM by frame, as SVG text."""
    with svg_style("compare") as plt:
        drawn, (upper, lower) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
        numbers = range(comparison.frames)
        upper.plot(numbers, [p if math.isfinite(p) else math.nan for p in comparison.psnr], "o-", ms=3, color=SIDE)
        same = [i for i, error in enumerate(comparison.mse) if error == 0]
        for i in same:
            upper.axvline(i, color="tab:green", alpha=0.3)
        upper.set(ylabel="PSNR, dB", title="green: identical frames" if same else "")
        lower.plot(numbers, comparison.ssim, "o-", ms=3, color=OTHER)
        lower.set(ylabel="SSIM", xlabel="frame")
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
            axes.ticklabel_format(useOffset=False)
        return svg_text(drawn)


def _by_layer(result: Comparison) -> str:
    rows = result.rows
    series = [("relative L2 error", SIDE, "o", [row.errors.l2 for row in rows])]
    if any(row.against_truth for row in rows):
        pairs = [row.against_truth or (math.nan, math.nan) for row in rows]
        series = [
            ("ours against float32", SIDE, "o", [ours for ours, _ in pairs]),
            ("the reference against float32", OTHER, "s", [theirs for _, theirs in pairs]),
        ]
    if any(row.own for row in rows):
        own = [row.own.l2 if row.own else math.nan for row in rows]
        series.append(("the layer's own, on the reference's activations", OTHER, "v", own))
    marked = [row for row in (result.first, *result.faults) if row is not None]
    return _draw(rows, series, result.bound, [rows.index(row) for row in marked])


def _draw(
    rows: Sequence[Row],
    series: Sequence[tuple[str, str, str, list[float]]],
    bound: float | None,
    marked: Sequence[int] = (),
) -> str:
    with svg_style("compare") as plt:
        figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
        size = 5 if len(rows) <= 60 else 3
        for label, color, marker, values in series:
            at = [(i, max(v, FLOOR)) for i, v in enumerate(values) if math.isfinite(v)]
            line = 0.8 if marker == "o" else 0  # a layer's own errors have nothing to do with its neighbours'
            axes.plot([i for i, _ in at], [v for _, v in at], color=color, marker=marker, ms=size, lw=line, label=label)
        for i in sorted(set(marked)):
            axes.axvline(i, color=MARK, lw=1, ls=":")
        if marked:
            more = f" and {len(set(marked)) - 1} more" if len(set(marked)) > 1 else ""
            where = {"xycoords": ("data", "axes fraction"), "ha": "left" if marked[0] < len(rows) / 2 else "right"}
            axes.annotate(rows[marked[0]].name + more, (marked[0], 1.02), color=MARK, va="bottom", **where)
        if bound is not None:
            axes.axhline(bound, color=BOUND, lw=1, ls="--", label=f"bound {bound:.0e}")
        axes.set_yscale("log")
        axes.set_ylabel(f"relative error (0 at {FLOOR:.0e})")
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlim(-0.5, len(rows) - 0.5)
        step = max(1, math.ceil(len(rows) / 60))
        shown = range(0, len(rows), step)
        # Anchored at their ends: a browser's letters are not as wide as those that the plot is laid out for.
        anchored = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
        axes.set_xticks(list(shown), [rows[i].name for i in shown], fontsize=6 if step == 1 else 5, **anchored)
        figure.legend(loc="outside upper center", ncols=4, fontsize=8)
        return svg_text(figure)
