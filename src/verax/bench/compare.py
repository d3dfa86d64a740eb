"""Two files of results of the same benchmark: which sides became slower or faster.

The effect is the ratio of the medians, new over old. Its interval is the percentile bootstrap (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13): the stored runs of each result are drawn again, with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verax.bench.results import table, table_lines
from verax.errors import InvalidParameterError

__all__ = ["compare_results", "render"]

RESAMPLES, CONFIDENCE = 10_000, 0.95
"""Draws of the bootstrap, and the confidence of the interval."""

BASELINES = ("torch", "transformers", "llama.cpp", "cython", "fla", "diffusers", "openvino", "onnxruntime")
"""First words of the names of baselines: if one changes, the machine did, or its version."""

SAME = ("cpu", "cores", "platform", "devices", "python", "jax", "jaxlib", "torch", "transformers", "llama_server")
"""Facts of the machine that have to agree, or the difference may be theirs."""


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any], *, threshold: float = 0.05) -> dict[str, Any]:
    """Compare each side of the old results with the same side of the new ones.

    A side is `slower` (`faster`) if the whole interval of the ratio is more than `threshold` above (below) 1, `same` if
    it is within the threshold on both sides, and else `undecided`. It is also undecided where the runs are too few for
    the confidence: even the greatest difference would arise by chance too often (a permutation test's smallest p).

    Args:
        old, new: results of the same subject, by name.
        threshold: relative change of time that matters.

    Raises:
        InvalidParameterError: if the results are not timed, are of different subjects, or have no side in common.
    """
    if not 0 <= threshold < 1:
        raise InvalidParameterError(f"threshold: expected a share from 0 to less than 1, got {threshold}")
    before, after = _series("old", old), _series("new", new)
    subject, other = (next(iter(results.values()))["subject"] for results in (old, new))
    if subject != other:
        raise InvalidParameterError(f"new: expected a result of bench {subject}, got one of bench {other}")
    common = [name for name in before if name in after]
    if not common:
        raise InvalidParameterError(f"new: none of its sides is in old, which has {', '.join(before)}")
    rows = [{"name": name, **_judged(before[name], after[name], threshold)} for name in common]
    for row in rows:
        row["ours"] = not row["name"].rpartition(" / ")[2].startswith(BASELINES)
    return {
        "subject": subject,
        "threshold": threshold,
        "rows": rows,
        "regressions": [row["name"] for row in rows if row["ours"] and row["verdict"] == "slower"],
        "only_in_old": [name for name in before if name not in after],
        "only_in_new": [name for name in after if name not in before],
        "differing": _differing(old, new),
    }


def _series(which: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds of the runs of every timed side, by the names of result, group, case and side."""
    series = {
        " / ".join([name, *(case[key] for key in ("group", "case") if case.get(key)), side]): times["seconds"]
        for name, result in results.items()
        for case in result.get("cases", ())
        for side, times in case["sides"].items()
    }
    if not series:
        raise InvalidParameterError(f"{which}: no timed result of verax bench; expected the JSON that --output wrote")
    return series


def _judged(old: Sequence[float], new: Sequence[float], threshold: float) -> dict[str, Any]:
    """Medians, their ratio, new over old, the ends of its interval, and the verdict."""
    rng = np.random.default_rng(0)  # the same files give the same verdict
    medians = [np.median(rng.choice(np.asarray(runs), (RESAMPLES, len(runs))), axis=1) for runs in (new, old)]
    low, high = np.quantile(medians[0] / medians[1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    verdict = "undecided"
    if 2 / math.comb(len(old) + len(new), len(old)) <= 1 - CONFIDENCE:
        if low > 1 + threshold:
            verdict = "slower"
        elif high < 1 - threshold:
            verdict = "faster"
        elif 1 - threshold <= low and high <= 1 + threshold:
            verdict = "same"
    old_s, new_s = float(np.median(old)), float(np.median(new))
    interval = {"ratio": new_s / old_s, "low": float(low), "high": float(high)}
    return {"old_s": old_s, "new_s": new_s, "runs": [len(old), len(new)], **interval, "verdict": verdict}


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Facts of the machine, and settings, that are not the same in the results of one name."""
    differing: dict[str, list[Any]] = {}
    for name in [name for name in old if name in new]:
        settings = sorted({*old[name]["settings"], *new[name]["settings"]} - {"runs", "warmup"})
        for part, keys in (("machine", SAME), ("settings", settings)):
            for key in keys:
                values = [result[name][part].get(key) for result in (old, new)]
                if values[0] != values[1]:
                    differing[key] = values
        for part, results in (("old", old), ("new", new)):
            if results[name].get("noise", {}).get("busy"):
                differing[f"noise of {part}"] = ["quiet", "busy"]
    return differing


def render(comparison: Mapping[str, Any]) -> str:
    """Markdown of a comparison, for a terminal or a pull request."""
    bad = comparison["regressions"]
    columns = {
        "side": lambda row: row["name"] if row["ours"] else f"{row['name']} (not ours)",
        "old ms": lambda row: f"{1e3 * row['old_s']:.4g}",
        "new ms": lambda row: f"{1e3 * row['new_s']:.4g}",
        "new / old": lambda row: f"{row['ratio']:.3f}",
        f"{100 * CONFIDENCE:g}% interval": lambda row: f"{row['low']:.3f}-{row['high']:.3f}",
        "runs": lambda row: ", ".join(map(str, row["runs"])),
        "verdict": lambda row: f"**{row['verdict']}**" if row["name"] in bad else row["verdict"],
    }
    title = f"bench {comparison['subject']}: " + (f"{len(bad)} slower" if bad else "nothing proven slower")
    lines = table_lines(table(comparison["rows"], columns, title=title))[:-1]
    differing = [f"{name}: {old} and {new}" for name, (old, new) in comparison["differing"].items()]
    notes = {"Only in old": comparison["only_in_old"], "Only in new": comparison["only_in_new"]}
    notes["Not the same in both, so the difference may be theirs"] = differing
    for label, parts in notes.items():
        lines += ["", f"{label}: {'; '.join(parts)}."] if parts else []
    return "\n".join([*lines, ""])
