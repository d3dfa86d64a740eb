"""Draws the SVG pictures of the documentation: `python docs/architecture.py`.

architecture.svg has the packages of verax in rows. An import points to the same row or to a lower one, which
`tests/test_docs.py` checks in the sources. The other pictures are flows: stages, and the records that they pass on.
"""

import textwrap
from pathlib import Path

ROWS: list[tuple[str, dict[str, str]]] = [
    ("commands", {"cli": "one file per command", "serve": "HTTP and the page", "ray": "replicas on Ray"}),
    (
        "around engines",
        {
            "bench": "speed, memory",
            "compare": "next to PyTorch",
            "plan": "without a device",
            "train": "fine-tuning",
            "batch": "files of work",
        },
    ),
    ("engines", {"text": "LLM", "video": "VideoPipeline", "embed": "Encoder"}),
    ("one loader", {"loading": "a checkpoint into a model"}),
    ("models and files", {"models": "one file per architecture", "checkpoint": "files to arrays"}),
    ("modules", {"nn": "Linear, RMSNorm, ..."}),
    ("operations", {"ops": "references, and implementations in cpu/ gpu/ tpu/"}),
]
"""Rows of packages from the top, each package with what it holds."""

HELPERS = (
    "_buckets",
    "_compat",
    "_optional",
    "builtin",
    "errors",
    "fields",
    "files",
    "machine",
    "page",
    "plots",
    "progress",
    "published",
    "shapes",
)
"""Modules that every row may import."""

FLOWS: dict[str, list[tuple[str, str, str]]] = {
    "life-of-a-request": [
        ("LLM.generate", "text/engine/llm.py", "a prompt, SamplingParams"),
        ("Engine.prepare, Engine.add", "text/engine/engine.py", "Request with n Sequences"),
        (
            "Scheduler.schedule, BlockManager",
            "text/engine/scheduler.py, text/engine/blocks.py",
            "Schedule of Chunks",
        ),
        ("ModelRunner.run", "text/step/runner.py", "one packed int32 array"),
        ("compiled step: model, cache, sampling", "text/step/step.py", "StepOutput, read one step later"),
        ("Engine: stop conditions", "text/engine/engine.py", "tokens"),
        ("IncrementalDetokenizer", "text/tokens/tokenizer.py", "RequestOutput"),
    ],
    "life-of-a-clip": [
        ("VideoPipeline", "video/pipeline.py", "a prompt and an image"),
        ("request and memory plan", "video/request.py, video/memory.py", "checked request, stages"),
        ("text encoder (UMT5)", "models/umt5.py", "states of the prompts"),
        ("image encoder (CLIP), VAE encoder", "models/clip.py, models/wan/vae.py", "image states, image condition"),
        ("denoising loop over the transformer", "video/denoise.py, models/wan/model.py", "latents"),
        ("VAE decoder", "models/wan/vae.py", "frames, uint8"),
        ("VideoOutput.save", "video/outputs.py, video/files.py", "a video file"),
    ],
}
"""Stages by the picture's name: title, module, and the record that the stage passes on."""

WIDTH, LABEL, BOX, STEP, GAP = 860, 140, 54, 92, 16
LINE = 90
"""Characters of the line below the rows that fit its width."""

COLOURS = ("#dbe9f6", "#e4e0f3", "#d8efe2", "#fbe7cf", "#f6ddd8", "#e9e9ee", "#e3efe9")


def draw() -> str:
    """The picture as the text of an SVG file."""
    helpers = textwrap.wrap(f"imported by every row: {', '.join(HELPERS)}", LINE)
    height = STEP * len(ROWS) + 16 + 18 * len(helpers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'role="img" aria-label="Packages of verax; imports point downwards">'
    ]
    space = WIDTH - LABEL - 2  # the last column's border
    for number, (label, packages) in enumerate(ROWS):
        y = STEP * number + 8
        parts.append(f'<text x="0" y="{y + BOX / 2 + 5}" font-size="14" fill="#888">{label}</text>')
        width = (space - GAP * (len(packages) - 1)) / len(packages)
        for column, (name, holds) in enumerate(packages.items()):
            x = LABEL + column * (width + GAP)
            middle = x + width / 2
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BOX}" rx="7" fill="{COLOURS[number]}" '
                'stroke="#8a8a94"/>'
                f'<text x="{middle:.0f}" y="{y + 23}" font-size="16" font-weight="bold" text-anchor="middle" '
                f'fill="#222">{name}</text>'
                f'<text x="{middle:.0f}" y="{y + 42}" font-size="13" text-anchor="middle" fill="#444">{holds}</text>'
            )
        if number + 1 < len(ROWS):
            x, top, end = LABEL + space / 2, y + BOX + 4, y + STEP - 5
            parts.append(f'<path d="M{x} {top}V{end}m-5 -8l5 8l5 -8" fill="none" stroke="#888" stroke-width="2"/>')
    for number, line in enumerate(helpers):
        y = STEP * len(ROWS) + 26 + 18 * number
        parts.append(f'<text x="{LABEL}" y="{y}" font-size="13" fill="#888">{line}</text>')
    return "\n".join([*parts, "</svg>\n"])


def draw_flow(stages: list[tuple[str, str, str]]) -> str:
    """A flow from top to bottom as the text of an SVG file."""
    width, box, step = 620, 46, 78
    height = step * len(stages) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img" '
        f'aria-label="{"; ".join(title for title, _, _ in stages)}">'
    ]
    for number, (title, module, record) in enumerate(stages):
        y = step * number + 2
        below = y + box
        parts.append(
            f'<rect x="30" y="{y}" width="{width - 60}" height="{box}" rx="7" fill="{COLOURS[number % 6]}" '
            'stroke="#8a8a94"/>'
            f'<text x="{width / 2}" y="{y + 20}" font-size="15" font-weight="bold" text-anchor="middle" fill="#222">'
            f"{title}</text>"
            f'<text x="{width / 2}" y="{y + 37}" font-size="12.5" text-anchor="middle" fill="#444">{module}</text>'
            f'<path d="M{width / 2} {below + 3}v23m-5 -8l5 8l5 -8" fill="none" stroke="#888" stroke-width="2"/>'
            f'<text x="{width / 2 + 14}" y="{below + 20}" font-size="12.5" fill="#888">{record}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def pictures() -> dict[str, str]:
    """Every picture's text by its file name."""
    return {"architecture.svg": draw(), **{f"{name}.svg": draw_flow(stages) for name, stages in FLOWS.items()}}


if __name__ == "__main__":
    for file, text in pictures().items():
        Path(__file__).with_name(file).write_text(text, encoding="utf-8")
