"""Page of `verax bench text`: times of all sides, start-up, parts of a decode step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verax.bench.lines import rounds, sides_lines

__all__ = ["KIND", "render", "slug"]

KIND = "text"

USUAL_PROMPTS = {"short-prompts": 4, "prompt": 1, "repeat": 1}
"""Prompts of a workload if no other number is given."""


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines: settings, times of all sides, start-up, and the parts of a decode step if they were measured."""
    settings, start = result["settings"], result["start_up"]
    lines = [
        f"# Text: {settings['workload']}, {settings['model']}, {precision(settings)}",
        "",
        f"{settings['requests']} prompts ({settings['prompt_tokens']} tokens), {settings['new_tokens']} new tokens, "
        f"temperature {settings['temperature']}; {rounds(result)}."
        + (" Tokens are the prompts'." if settings["workload"] == "prompt" else ""),
        *sides_lines(result, "tokens/s", digits=2, rate_digits=1),
        "",
        f"Start-up: weights of {start['weights_gb']:.2f} GB in {start['load_s']:.1f} s"
        + (f" (memory grew by {start['load_peak_gb']:.2f} GB at most)" if start["load_peak_gb"] else "")
        + f", {start['programs']} programs in {start['compile_s']:.1f} s; {start['compiled_during_runs']} compiled "
        f"during the runs. Cache: {start['kv_cache']}.",
    ]
    if "spec_decode" in result:
        drafts, most = result["spec_decode"], settings["speculative_config"]["num_speculative_tokens"]
        lines += [
            "",
            f"Drafts of at most {most} tokens: {drafts['num_accepted_tokens']} of {drafts['num_draft_tokens']} held "
            f"({drafts['acceptance_rate']:.0%}), in {drafts['num_drafts']} steps of a sequence, warm-up included.",
        ]
    if "decode_breakdown" in result:
        lines += _breakdown_table(result["decode_breakdown"])
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: model, workload, precision, and the workload's size where it is not the usual one.

    A checkpoint is named first, random weights by their shapes if these are not the usual ones.
    """
    settings = result["settings"]
    shapes = settings.get("shapes", "qwen3")
    model = [Path(settings["model"]).stem.lower()] if shapes is None else []
    others = [shapes] if shapes not in (None, "qwen3") else []
    drafts = ["drafts"] if settings.get("speculative_config") else []
    return [*model, settings["workload"], *others, precision(settings), *drafts, *_size(settings)]


def _size(settings: Mapping[str, Any]) -> list[str]:
    count, workload = settings["requests"], settings["workload"]
    usual = USUAL_PROMPTS.get(workload, count)
    prompts = [] if count == usual else [f"{count}-prompt{'s' if count > 1 else ''}"]
    return prompts + ([f"{settings['prompt_tokens'] // count}-tokens"] if workload == "prompt" else [])


def precision(settings: Mapping[str, Any]) -> str:
    """Precision of verax's weights, and of its cache if that is another."""
    weights = settings["quantization"] or settings["dtype"]
    cache = settings["kv_cache_dtype"]
    return weights if cache == "auto" else f"{weights}, {cache} cache"


def _breakdown_table(step: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"A decode step of {step['rows']} sequences of about {step['length']} tokens: {step['whole_ms']:.1f} ms, "
        f"{step['weight_gb_per_s']:.1f} GB/s of weights, {100 * step['fraction_of_bandwidth']:.0f}% of the measured "
        "bandwidth.",
        "",
        "| part | ms |",
        "|---|---|",
    ]
    lines += [f"| {part} | {ms:.1f} |" for part, ms in step["parts_ms"].items()]
    return [*lines, f"| host (beside the device) | {step['host_ms']:.1f} |"]
