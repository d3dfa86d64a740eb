"""Draws docs/comparison.svg, the picture of the README, out of benchmarks/results: `python docs/comparison.py`.

A bar is the factor by which verax is faster than its strongest peer, from one interleaved run: the median over the
rounds of the ratio within a round. Each peer has the newest of its runs.
"""

import json
import math
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results"

PROCESSORS = {
    "amd-epyc-zen4-2c": ("AMD Zen 4, bfloat16", "#00695c"),
    "amd-epyc-2c": ("AMD EPYC, faster bfloat16", "#4db6ac"),
    "amd-epyc-avx2-2c": ("AMD EPYC, AVX2 only", "#90a4ae"),
    "intel-xeon-2c": ("Intel Xeon, AMX", "#ef6c00"),
}
"""Label and colour of each processor, two cores of it, by the name in the files of results."""

WORKLOADS: list[tuple[str, str, str, str, int]] = [
    ("4 x 100 tokens, Qwen3-0.6B's shapes, bfloat16", "text", "short-prompts-bfloat16", "", 0),
    ("the same in int4", "text", "short-prompts-int4", "", 0),
    ("one sequence, bfloat16", "text", "short-prompts-bfloat16-1-prompt", "", 0),
    ("32 sequences, bfloat16", "text", "short-prompts-bfloat16-32-prompts", "", 0),
    ("32 sequences, int8", "text", "short-prompts-int8-32-prompts", "", 0),
    ("32 sequences, int8 with inputs of 8 bits", "text", "short-prompts-w8a8-32-prompts", "", 0),
    ("a prompt of 512 tokens, bfloat16", "text", "prompt-bfloat16-512-tokens", "", 0),
    ("Gemma 3 270M, published GGUF file, 4 x 100", "text", "gemma-3-270m-q4-k-m-short-prompts-bfloat16", "", 0),
    ("SmolLM2 135M, published GGUF file, one", "text", "smollm2-135m-*-short-prompts-bfloat16-1-prompt", "", 0),
    ("all-MiniLM-L6-v2, float32", "embed", "float32", "", 0),
    ("all-MiniLM-L6-v2, bfloat16", "embed", "bfloat16", "", 0),
    ("all-MiniLM-L6-v2, int8", "embed", "int8", "", 0),
    ("Wan 1.3B, forward pass, bfloat16", "video", "1-3b*transformer*bfloat16-9x272x480", "transformer", 9),
    ("the same in float32", "video", "1-3b*transformer*float32-9x272x480", "transformer", 9),
    ("Wan VAE, decoding, bfloat16", "video", "1-3b*vae*9x272x480", "vae", 9),
    ("a clip of 4 steps, 10 layers of Wan 1.3B", "video", "1-3b-10-layers-clip*", "", 9),
    ("a clip of 4 steps, Wan 1.3B, UMT5 in Q4_0", "video", "1-3b-clip*", "", 5),
]
"""Label, subject, name of the result (a pattern), stage of the case, and its frames."""

OTHERS = ("", "-peers", "-openvino-genai", "-ik-native")
"""Ends of the names of one workload's results: engines in environments of their own have runs of their own."""

ROW, GAP, LEFT, WIDTH, TOP = 11, 10, 300, 760, 44
MOST = 4.0
"""Ratio at the right edge; the scale is logarithmic, from half to this."""


def equal(side: str, name: str) -> bool:
    """True unless the name of a side says that it computes in another precision than the result's name does."""
    return {"int8", "bfloat16", "float32"}.isdisjoint({*side.split()} - {*name.split("-")})


def speeds(result: dict[str, Any], stage: str, frames: int, name: str) -> dict[str, float]:
    """Factors by which verax is faster than the peers of a run."""
    for case in result.get("cases", ()):
        if (case.get("stage", stage), case.get("frames", frames)) == (stage, frames):
            peers = [side for side in case["ratios"] if not side.startswith("verax") and equal(side, name)]
            return {side: case["ratios"][side] for side in peers}
    return {}


def bars() -> list[tuple[str, list[tuple[str, float, str]]]]:
    """Label of each workload, and processor, ratio and peer of its bars."""
    rows = []
    for label, subject, name, stage, frames in WORKLOADS:
        row = []
        for processor in PROCESSORS:
            path = RESULTS / f"{subject}-{processor}.json"
            results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
            runs = [result for key, result in results.items() if any(Path(key).match(name + end) for end in OTHERS)]
            ratios: dict[str, float] = {}
            for result in sorted(runs, key=lambda run: run["date"]):
                ratios |= speeds(result, stage, frames, name)
            if ratios:
                peer = min(ratios, key=ratios.__getitem__)
                row.append((processor, ratios[peer], peer))
        rows.append((label, row))
    return [(label, row) for label, row in rows if row]


def x(ratio: float) -> float:
    """Position of a ratio."""
    share = math.log(min(max(ratio, 0.5), MOST) / 0.5) / math.log(MOST / 0.5)
    return LEFT + share * (WIDTH - LEFT - 150)


def picture() -> str:
    """The SVG. Its colours can be read on white and on black."""
    rows = bars()
    height = TOP + sum(len(row) * ROW + GAP for _, row in rows) + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11" fill="#808080">',
        "<title>Speed of verax divided by the speed of its strongest peer</title>",
    ]
    at = 8
    for processor, (label, colour) in PROCESSORS.items():
        if any(processor == bar[0] for _, row in rows for bar in row):
            parts.append(f'<rect x="{at}" y="6" width="10" height="10" fill="{colour}"/>')
            parts.append(f'<text x="{at + 14}" y="15">{label}</text>')
            at += 30 + 6 * len(label)
    for tick in (0.5, 1, 2, 4):
        line = "#808080" if tick == 1 else "#80808040"
        parts.append(f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="{TOP - 8}" y2="{height - 18}" stroke="{line}"/>')
        parts.append(f'<text x="{x(tick):.0f}" y="{height - 5}" text-anchor="middle">{tick:g}x</text>')
    y = TOP
    for label, row in rows:
        middle = y + len(row) * ROW / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{label}</text>')
        for processor, ratio, peer in row:
            one, end = sorted((x(1), x(ratio)))
            colour = PROCESSORS[processor][1]
            parts.append(f'<rect x="{one:.1f}" y="{y}" width="{end - one:.1f}" height="{ROW - 2}" fill="{colour}"/>')
            text = f"{ratio:.2f}x {peer}"
            parts.append(f'<text x="{max(x(ratio), x(1)) + 4:.0f}" y="{y + 8}" font-size="9">{text}</text>')
            y += ROW
        y += GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "comparison.svg").write_text(picture(), encoding="utf-8")
