"""Report of two clips in a folder: JSON, Markdown, HTML, and the clips side by side."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from verax import plots
from verax._optional import require_optional
from verax.compare.videos import DEFINITIONS, QUALITY, VideoComparison, differences
from verax.files import atomic_path
from verax.video import files

__all__ = ["VideoReport", "summary"]

FPS = 24.0
"""Frame rate of the side-by-side clip if neither clip has one."""

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{border-bottom:1px solid #ddd;padding:.25rem .9rem;text-align:right}
td:first-child,th:first-child{text-align:left}img,video,svg{max-width:100%;height:auto}.worst{background:#fff3d6}
dt{font-weight:600}dd{margin:0 0 .5rem 0}details{margin:1rem 0}"""


@dataclass(frozen=True)
class VideoReport:
    """Comparison of two clips, and the clips themselves."""

    comparison: VideoComparison
    first: np.ndarray
    """uint8 `[T, H, W, 3]`, as is `second`."""
    second: np.ndarray
    names: tuple[str, str]
    fps: float | None = None
    min_psnr: float | None = None
    """Least PSNR of every frame in dB; None for no bound."""

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
        return {"clips": self.names, **self.comparison.to_dict(), **bound}

    def show(self, console: Console, *, every: bool = False) -> None:
        """Print the figures of the clip, and with `every` those of each frame."""
        table = Table(title=" and ".join(self.names), show_header=False, title_justify="left")
        for name, value in summary(self.comparison).items():
            table.add_row(name, value)
        console.print(table)
        if every:
            table = Table("frame", "MSE", "PSNR, dB", "SSIM", box=None, pad_edge=False)
            for row in _frame_rows(self.comparison):
                table.add_row(*row)
            console.print(table)

    def write(self, folder: Path) -> list[Path]:
        """Write videos.json, videos.md, videos.html and side-by-side.mp4 into a folder; return their paths.

        The folder is created if missing. The page of HTML needs no network and no other file.

        Raises:
            MissingDependencyError: without PyAV, Pillow or matplotlib.
        """
        folder.mkdir(parents=True, exist_ok=True)
        clip = files.write_clip(self.panels(), folder / "side-by-side.mp4", fps=self.fps or FPS)
        texts = {
            "videos.json": json.dumps(self.as_dict(), indent=2) + "\n",
            "videos.md": self.markdown(),
            "videos.html": self.html(clip),
        }
        for name, text in texts.items():
            with atomic_path(folder / name) as partial:
                partial.write_text(text, encoding="utf-8")
        return [*(folder / name for name in texts), clip]

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

    def markdown(self) -> str:
        """Page of the comparison in Markdown."""
        rows = [f"| {name} | {value} |" for name, value in summary(self.comparison).items()]
        frames = [f"| {' | '.join(row)} |" for row in _frame_rows(self.comparison)]
        lines = [
            f"# Clips compared: {self.comparison.verdict}",
            "",
            f"{self.names[0]} and {self.names[1]}: {_sizes(self.comparison)}.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            _levels(),
            "",
            *(f"- {name}: {text}" for name, text in DEFINITIONS.items()),
            "",
            "| frame | MSE | PSNR, dB | SSIM |",
            "|---|---|---|---|",
            *frames,
        ]
        return "\n".join(lines) + "\n"

    def html(self, clip: Path) -> str:
        """Page of the comparison in HTML. The plot, the worst frame and the clip (a video file) are embedded in it."""
        comparison = self.comparison
        worst = comparison.worst_frame
        names = [html.escape(name) for name in self.names]
        rows = "".join(f"<tr><td>{name}<td>{value}" for name, value in summary(comparison).items())
        frames = "".join(
            f"<tr{' class=worst' if i == worst else ''}><td>" + "<td>".join(row)
            for i, row in enumerate(_frame_rows(comparison))
        )
        terms = "".join(f"<dt>{name}<dd>{html.escape(text)}" for name, text in DEFINITIONS.items())
        triple = f"{names[0]}, {names[1]}, and their difference times {self.gain}"
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Clips compared: {comparison.verdict}</title>'
            f"<style>{_STYLE}</style>\n<h1>Clips compared: {comparison.verdict}</h1>\n"
            f"<p>{names[0]} and {names[1]}: {_sizes(comparison)}.\n<table>{rows}</table>\n<p>{_levels()}\n"
            f"<h2>By frame</h2>\n{_plot(comparison)}\n"
            f"<h2>Side by side</h2>\n<p>{triple}.\n"
            f'<video src="{_data("video/mp4", clip.read_bytes())}" controls loop muted></video>\n'
            f"<p>The worst frame, number {worst}:\n"
            f'<p><img alt="the worst frame" src="{_picture(self.panels()[worst])}">\n'
            f"<details><summary>Every frame</summary><table><tr><th>frame<th>MSE<th>PSNR, dB<th>SSIM{frames}</table>"
            f"</details>\n<h2>Definitions</h2>\n<dl>{terms}</dl>\n</html>\n"
        )


def summary(comparison: VideoComparison) -> dict[str, str]:
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


def _frame_rows(comparison: VideoComparison) -> list[list[str]]:
    return [
        [str(i), f"{mse:.3g}", _db(psnr), f"{ssim:.6f}"]
        for i, (mse, psnr, ssim) in enumerate(zip(comparison.mse, comparison.psnr, comparison.ssim, strict=True))
    ]


def _db(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "∞"


def _sizes(comparison: VideoComparison) -> str:
    return f"{comparison.frames} frames of {comparison.width} x {comparison.height}"


def _levels() -> str:
    levels = "; ".join(f"{name} from {psnr:g} dB and SSIM {ssim:g}" for name, psnr, ssim in QUALITY)
    return f"The verdict goes by the whole clip: {levels}; poor below."


def _plot(comparison: VideoComparison) -> str:
    """Plot of PSNR and SSIM by frame, as SVG text."""
    pyplot = plots.pyplot("compare")
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    numbers = range(comparison.frames)
    upper.plot(numbers, [p if math.isfinite(p) else math.nan for p in comparison.psnr], "o-", markersize=3)
    same = [i for i, error in enumerate(comparison.mse) if error == 0]
    for i in same:
        upper.axvline(i, color="tab:green", alpha=0.3)
    upper.set_ylabel("PSNR, dB")
    upper.set_title("green: identical frames" if same else "")
    lower.plot(numbers, comparison.ssim, "o-", markersize=3, color="tab:orange")
    lower.set_ylabel("SSIM")
    lower.set_xlabel("frame")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.ticklabel_format(useOffset=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def _picture(pixels: np.ndarray) -> str:
    encoded = io.BytesIO()
    require_optional("PIL.Image").fromarray(pixels).save(encoded, format="png")
    return _data("image/png", encoded.getvalue())


def _data(kind: str, content: bytes) -> str:
    """Data URL with the content in base64; `kind` is its media type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
