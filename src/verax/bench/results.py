"""Results as files that can be compared later (JSON) and read now (Markdown)."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verax.bench.delta import page as delta_page
from verax.bench.lines import noise_line, outliers, rounds
from verax.bench.video import page as video_page
from verax.files import write_text

__all__ = ["markdown", "write", "write_whole"]


PEAKS = {"host": "host_peak_gb", "device": "device_peak_gb"}


def markdown(result: dict[str, Any]) -> str:
    """A benchmark as a page."""
    page = {
        "text": _text_page,
        "ops": _ops_page,
        "quality": _quality_page,
        "delta": delta_page.page,
        "embed": _embed_page,
        "video": video_page.page,
        "teacache": video_page.cache_page,
    }[result["kind"]]
    return "\n".join([*page(result), "", _about(result), ""])


def _text_page(result: dict[str, Any]) -> list[str]:
    settings, start = result["settings"], result["start_up"]
    lines = [
        f"# Text: {settings['workload']}, {settings['model']}, {precision(settings)}",
        "",
        f"{settings['requests']} prompts ({settings['prompt_tokens']} tokens), {settings['new_tokens']} new tokens, "
        f"temperature {settings['temperature']}; {rounds(result)}."
        + (" Tokens are the prompts'." if settings["workload"] == "prompt" else ""),
        "",
        "| side | median s | P10-P90 s | tokens/s |",
        "|---|---|---|---|",
    ]
    for name, side in result["sides"].items():
        lines.append(
            f"| {name} | {side['median_s']:.2f} | {side['p10_s']:.2f}-{side['p90_s']:.2f} | {side['rate']:.1f} |"
        )
    lines += [*outliers(result["sides"]), *_ratios(result), *_work(result)]
    lines += [
        "",
        f"Start-up: weights of {start['weights_gb']:.2f} GB in {start['load_s']:.1f} s"
        + (f" (memory grew by {start['load_peak_gb']:.2f} GB at most)" if start["load_peak_gb"] else "")
        + f", {start['programs']} programs in {start['compile_s']:.1f} s; {start['compiled_during_runs']} compiled "
        f"during the runs. Cache: {start['kv_cache']}.",
    ]
    if "decode_step" in result:
        lines += _split_table(result["decode_step"])
    return lines


def _embed_page(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    lines = [
        f"# Embeddings: {settings['model']}, {settings['dtype']}",
        "",
        f"{settings['sentences']} sentences of {settings['shortest']} to {settings['longest']} tokens "
        f"({settings['tokens']} in all), {settings['batch_size']} at once; {rounds(result)}, tokenizer included. The "
        f"first run, which compiled, took {result['first_s']:.1f} s; {result['compiled_during_runs']} programs "
        "compiled afterwards.",
        "",
        "| side | median s | P10-P90 s | sentences/s |",
        "|---|---|---|---|",
    ]
    for name, side in result["sides"].items():
        lines.append(
            f"| {name} | {side['median_s']:.3f} | {side['p10_s']:.3f}-{side['p90_s']:.3f} | {side['rate']:.0f} |"
        )
    lines += [*outliers(result["sides"]), *_ratios(result), *_work(result)]
    if result["ratios"]:
        lines += ["", f"Largest difference of two vectors' numbers: {result['largest_difference']:.1e}."]
    return lines


def _ops_page(result: dict[str, Any]) -> list[str]:
    settings, cases = result["settings"], result["cases"]
    columns = ["operation", "case", "runs", "median ms", "P10-P90 ms", "GB/s", "memory GB/s", "GFLOP/s", "of the limit"]
    others = sorted({name for case in cases for name in case["ratios"]})
    lines = [
        "# Operations",
        "",
        f"The weight of linear is {settings['size_out']} x {settings['size_in']}. CPU kernels: "
        f"{settings['cpu_level'] or 'none'}. {rounds(result)}; the implementations take turns "
        "in a round, each called again and again for 20 ms, the first call not counted, weights of linear never from "
        "a cache. GB/s counts what has to be moved once, as it is stored; memory GB/s is a read of 512 MiB that takes "
        "its turn with the implementations. The limit is that, or the products at the measured rate. The last columns: "
        "how many times faster than that implementation.",
        "",
        "| " + " | ".join([*columns, *others]) + " |",
        "|" + "---|" * (len(columns) + len(others)),
    ]
    for case in cases:
        side = case["sides"][case["runs"]]
        cells = [
            *(case[name] for name in ("operation", "case", "runs")),
            f"{1e3 * side['median_s']:.2f}",
            f"{1e3 * side['p10_s']:.2f}-{1e3 * side['p90_s']:.2f}",
            f"{case['gb_per_s']:.1f}",
            f"{case['bandwidth_gb_per_s']:.1f}",
            f"{case['gflop_per_s']:.0f}",
            f"{100 * case['fraction_of_limit']:.0f}%",
            *(f"{case['ratios'][name]:.2f}x" if name in case["ratios"] else "" for name in others),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines + [
        line
        for case in cases
        for line in outliers(
            {f"{case['operation']}, {case['case']}, {case['runs']}": case["sides"][case["runs"]]}, unit=1e3, name="ms"
        )
    ]


def _quality_page(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    lines = [
        f"# Quality: {settings['model']}",
        "",
        f"{settings['scored_tokens']:,} tokens of text ({settings['text']}; contexts of up to {settings['window']}) "
        f"and {settings['additions']} held-out additions. KL divergence and the share of equal best tokens are against "
        "float32. The number after int4: inputs that share a scale; int8 weights have one a row, an int8 cache one a "
        "token and head.",
        "",
        "| precision | perplexity | KL, nats | same best token | additions | weights, MB | cache, bytes a token |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["variants"].items():
        if "left_out" in row:
            lines.append(f"| {name} | left out: {row['left_out']} | | | | | |")
            continue
        exact = row["additions_exact"]
        cells = [
            f"{row['perplexity']:.4f}",
            f"{row['kl_divergence']:.2g}",
            f"{100 * row['top1_agreement']:.2f}%",
            "" if exact is None else f"{100 * exact:.1f}%",
            f"{row['weights_mb']:.1f}",
            str(row["cache_bytes_per_token"]),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    limits = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.get("measured", {}).items())
    shown = (
        "cpu",
        "cores",
        "memory_gib",
        "platform",
        "devices",
        "python",
        "jax",
        "jaxlib",
        "torch",
        "diffusers",
        "transformers",
        "llama_cpp_python",
    )
    about = ", ".join(f"{name} {machine[name]}" for name in shown if name in machine)
    memory = result.get("memory", {})
    peaks = [f"{where} {memory[key]:.2f} GB" for where, key in PEAKS.items() if memory.get(key) is not None]
    parts = (
        f"Machine: {about}.",
        f"Measured: {limits}." if limits else "",
        f"Peak memory of the process: {', '.join(peaks)}." if peaks else "",
        noise_line(result["noise"]) if "noise" in result else "",
        result.get("date", ""),
    )
    return " ".join(part for part in parts if part)


def _ratios(result: dict[str, Any]) -> list[str]:
    if not result["ratios"]:
        return []
    lines = ["", "Ratios are medians over the rounds of the ratio within a round.", ""]
    return [*lines, *(f"- {name}: {ratio:.2f}x" for name, ratio in result["ratios"].items())]


def _work(result: dict[str, Any]) -> list[str]:
    """What our side did at least, against the machine's limits."""
    if "work" not in result:
        return []
    work = result["work"]
    return [
        "",
        f"verax read {work['bytes_moved'] / 1e9:.1f} GB of weights and did {work['flops'] / 1e12:.3g} TFLOP of "
        f"products with them (attention left out): {work['gb_per_s']:.1f} GB/s, {work['gflop_per_s']:.0f} GFLOP/s, "
        f"{100 * work['fraction_of_limit']:.0f}% of the measured limit.",
    ]


def precision(settings: dict[str, Any]) -> str:
    """What our side's weights are, and its cache if that is something else."""
    weights = settings["quantization"] or settings["dtype"]
    cache = settings["kv_cache_dtype"]
    return weights if cache == "auto" else f"{weights}, {cache} cache"


def _split_table(split: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"A decode step of {split['rows']} sequences of about {split['length']} tokens: {split['whole_ms']:.1f} ms, "
        f"{split['weight_gb_per_s']:.1f} GB/s of weights, {100 * split['fraction_of_bandwidth']:.0f}% of the measured "
        "bandwidth.",
        "",
        "| part | ms |",
        "|---|---|",
    ]
    lines += [f"| {part} | {ms:.1f} |" for part, ms in split["parts_ms"].items()]
    return [*lines, f"| host (beside the device) | {split['host_ms']:.1f} |"]


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write `NAME.json` and `NAME.md` into a folder, named by date, machine and workload; the JSON's path."""
    now = datetime.now(UTC)
    result = {**result, "date": now.strftime("%Y-%m-%d %H:%M UTC")}
    settings = result["settings"]
    where = re.sub(
        r"[^a-z0-9]+",
        "-",
        str(
            result["machine"]["devices"][0] if result["machine"]["platform"] != "cpu" else result["machine"]["cpu"]
        ).lower(),
    ).strip("-")
    what = {
        "text": lambda: [
            settings["workload"],
            *_other_shapes(settings),
            precision(settings),
            *_fewer_prompts(settings),
        ],
        "ops": lambda: settings["operations"],
        "delta": lambda: [*settings["operations"], *_some_configurations(settings)],
        "quality": lambda: [Path(settings["model"]).name.lower()],
        "embed": lambda: [settings["dtype"]],
        "video": lambda: _video_name(result),
        "teacache": lambda: [Path(settings["model"]).name.lower()],
    }[result["kind"]]()
    what = [re.sub("[^a-z0-9]+", "-", part) for part in what]
    name = "-".join([f"{now:%Y-%m-%d}", where, f"{result['machine']['cores']}c", result["kind"], *what])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path.with_suffix(".md"), markdown(result))
    return write_whole(path, json.dumps(result, indent=2) + "\n")


def _some_configurations(settings: dict[str, Any]) -> list[str]:
    """Where one run would be too long, each configuration of the delta rules is a result of its own."""
    from verax.bench.delta.run import CONFIGURATIONS

    chosen = settings["configurations"]
    return [] if len(chosen) == len(CONFIGURATIONS) else [name.lower() for name in chosen]


def _other_shapes(settings: dict[str, Any]) -> list[str]:
    return [settings["shapes"]] if settings.get("shapes") not in (None, "qwen3") else []


def _fewer_prompts(settings: dict[str, Any]) -> list[str]:
    """Another number of prompts than the founding case's, or another length, is another result, beside it."""
    count, workload = settings["requests"], settings["workload"]
    usual = {"founding": 4, "prompt": 1}.get(workload, count)
    fewer = [] if count == usual else [f"{count}-prompt{'s' if count > 1 else ''}"]
    return fewer + ([f"{settings['prompt_tokens'] // count}-tokens"] if workload == "prompt" else [])


def write_whole(path: Path, text: str) -> Path:
    """Write a text file whole or not at all; its path."""
    write_text(path, text)
    return path


def _video_name(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    frames = "-".join(map(str, settings["frames"]))
    what = settings["stages"] if result["cases"] else ["memory"]
    fewer = [f"{settings['layers']}-layers"] if settings["layers"] else []
    return [settings["size"], *fewer, *what, settings["dtype"], f"{frames}x{settings['height']}x{settings['width']}"]
