"""A plan for people and for scripts: tables in the terminal, one HTML page with two pictures, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from verax.files import write_json, write_text
from verax.page import escaped, figure, page, table
from verax.video.memory import format_bytes

__all__ = ["show", "write"]

MEANING = (
    "Times are bounds, not predictions: a program takes at least so long, at the full rates of the device's sheet. "
    "Measured ones are longer."
)


class _Section(NamedTuple):
    """A table of a plan."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: tuple[int, ...] = (0,)
    """Numbers of the columns that hold words."""


def show(plan: Mapping[str, Any], console: Console) -> None:
    """Print a plan's tables and verdict."""
    console.print(f"[bold]{_title(plan)}[/]", _settings(plan), sep="\n", highlight=False, end="\n\n")
    for section in _sections(plan):
        shown = Table(title=section.title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for i, name in enumerate(section.columns):
            shown.add_column(name, justify="left" if i in section.words else "right", overflow="fold")
        for row in section.rows:
            shown.add_row(*row)
        console.print(shown)
        console.print()
    for line in (*_findings(plan), MEANING):
        console.print(line, highlight=False, soft_wrap=True)
    console.print("[bold green]fits[/]" if plan["fits"] else "[bold red]does not fit[/]", highlight=False)


def write(plan: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `plan.json` and `plan.html` into a folder, which is made; their paths.

    Raises:
        MissingDependencyError: without matplotlib, which draws the page's pictures.
    """
    from verax.plan.plots import memory_bar, roofline

    verdict, kind = ("fits", "good") if plan["fits"] else ("does not fit", "bad")
    title = _title(plan)
    body = [f"<h1>{escaped(title)}</h1>", f'<p class="{kind}">{verdict}</p>', f"<p>{escaped(_settings(plan))}</p>"]
    body += ["<ul>", *(f"<li>{escaped(line)}</li>" for line in _findings(plan)), "</ul>", f"<p>{escaped(MEANING)}</p>"]
    body.append(figure("Memory of a device", memory_bar(plan)))
    body.append(figure("Roofline: the device's limits, and the work of each program", roofline(plan)))
    for section in _sections(plan):
        body += table(section.title, section.columns, section.rows)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "plan.json", folder / "plan.html"]
    write_json(paths[0], plan)
    write_text(paths[1], page(f"{title}: {verdict}", body))
    return paths


def _title(plan: Mapping[str, Any]) -> str:
    count = plan["settings"].get("devices", 1)
    return f"{plan['model']} on {f'{count} x ' if count > 1 else ''}{plan['device']['name']}"


def _settings(plan: Mapping[str, Any]) -> str:
    given = {name: value for name, value in plan["settings"].items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())


def _sections(plan: Mapping[str, Any]) -> list[_Section]:
    device, count = plan["device"], plan["settings"].get("devices", 1)
    rates = ", ".join(f"{dtype} {rate / 1e12:,.1f}" for dtype, rate in device["flops"].items())
    facts = [
        ("memory", format_bytes(device["memory"])),
        ("bandwidth", f"{device['bandwidth'] / 1e9:,.0f} GB/s"),
        ("dense products, TFLOP/s", rates),
        ("links, one direction", f"{device['links'] / 1e9:,.0f} GB/s" if device["links"] else "-"),
        ("source", device["source"]),
    ]
    columns = ("part", "precision", "weights", "bytes") + (("per device",) if count > 1 else ())
    weights = [
        (row["part"], row["precision"], f"{row['weights']:,}", format_bytes(row["nbytes"]))
        + ((format_bytes(row["per_device"]),) if count > 1 else ())
        for row in plan["weights"]
    ]
    memory = [(name, format_bytes(size), f"{size / device['memory']:.1%}") for name, size in plan["memory"].items()]
    total = sum(plan["memory"].values())
    memory.append(("all", format_bytes(total), f"{total / device['memory']:.1%}"))
    staged = [
        (row["stage"], *(format_bytes(row[name]) for name in ("weights", "others", "work", "together")))
        for row in plan.get("stages", ())
    ]
    columns_of_stages = ("stage", "weights", "other models", "work, at least", "together")
    sections = [
        _Section("device", ("device", plan["device"]["name"]), facts, (0, 1)),
        _Section("weights", columns, weights, (0, 1)),
        *([_Section("memory of a device by stage", columns_of_stages, staged)] if staged else []),
        _Section("memory of a device" + (", largest stage" if staged else ""), ("memory", "bytes", "share"), memory),
        _Section(
            "least times",
            ("program", "calls", "TFLOP", "GB per device", "at least", "limited by"),
            [_program(row) for row in plan["programs"]],
            (0, 5),
        ),
    ]
    return sections + (_compiled(plan["compiled"]) if "compiled" in plan else [])


def _compiled(compiled: Mapping[str, Any]) -> list[_Section]:
    """Tables of what the device's compiler made of the programs."""
    sizes = ("arguments", "results", "aliased", "temporaries", "code", "needed")
    memory, counts = [], []
    for row in compiled["programs"]:
        shown = ["-" if row["refused"] and not row[name] else format_bytes(row[name]) for name in sizes]
        memory.append((row["name"], *shown, _seconds(row["seconds"])))
        if (found := row["findings"]) is not None:
            collectives = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items())
            others = ("host_transfers", "donated_copies", "argument_copies", "loops_with_products")
            counts.append((row["name"], collectives or "none", *(str(found[name]) for name in others)))
    sections = [_Section("compiled: bytes of a device", ("program", *sizes, "compiled in"), memory)]
    if counts:
        copies = ("copies of donated", "of other arguments")
        columns = ("program", "collectives", "host transfers", *copies, "loops with products")
        sections.append(_Section("compiled: each instruction once", columns, counts, (0, 1)))
    return sections


def _program(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        str(row["times"]),
        f"{row['flops'] / 1e12:,.3g}",
        f"{row['bytes_per_device'] / 1e9:,.3f}",
        _seconds(row["at_least_s"]),
        row["limit"],
    )


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def _findings(plan: Mapping[str, Any]) -> Sequence[str]:
    """Sentences on what the plan comes to."""
    lines = [f"At most {value:,.1f} {name}." for name, value in plan.get("at_most", {}).items()]
    least = {name.removeprefix("seconds "): value for name, value in plan.get("at_least", {}).items()}
    lines += [f"At least {_seconds(value)} {name}." for name, value in least.items()]
    if plan["kind"] == "text":
        lines += _text_findings(plan)
    elif plan["kind"] == "video" and "compiled" not in plan:
        lines += _video_findings(plan)
    elif "compiled" not in plan:
        lines.append("Memory is that of weights, inputs and results. What lies between is known after compiling only.")
    opaque = sorted({name for row in plan["programs"] for name in row["uncounted"]})
    if opaque:
        lines.append(f"Not counted: {', '.join(opaque)}.")
    return lines + (_compiler_findings(plan["compiled"]) if "compiled" in plan else [])


def _video_findings(plan: Mapping[str, Any]) -> list[str]:
    lines = [
        "Memory beside the weights is the least that a stage needs: of a step latents, cross-attention keys, residual "
        "stream and the operands of its largest product. `verax video --plan` compiles the programs and counts all."
    ]
    if (sent := plan["collectives"]) is not None:
        step, clip = (format_bytes(sent[name]) for name in ("bytes_a_step", "bytes_a_clip"))
        if sent["seconds_a_step"] is None:
            time = "The speed of the links is not known, and their time is not counted."
        else:
            time = (
                f"At the links' full rate that takes {_seconds(sent['seconds_a_step'])} of a step: "
                f"{sent['share_of_a_step']:.1%}, if both are at their bounds and do not overlap."
            )
        lines.append(f"Each device sends {step} in a step, and {clip} for the clip. {time}")
    return lines


def _compiler_findings(compiled: Mapping[str, Any]) -> list[str]:
    """Sentences on the compilation: by what, how much of the model, what was refused."""
    lines = [f"Compiled by {compiled['compiler']} with JAX {compiled['jax']}; nothing ran."]
    if compiled["depth"] is not None:
        lines.append(f"Compiled with {compiled['depth']} layers only: bytes and counts are those of so many.")
    for row in compiled["programs"]:
        if row["refused"]:
            lines.append(f"Refused: {row['name']}: {row['refused']}")
    return lines


def _text_findings(plan: Mapping[str, Any]) -> list[str]:
    settings, room = plan["settings"], plan["cache_room"]
    batch, context, fewest = plan["largest_batch"], plan["largest_context"], plan["fewest_devices"]
    return [
        f"The engine has {format_bytes(room)} for its cache beside the weights. {settings['max_num_seqs']} sequences "
        f"of {settings['context']} tokens need {format_bytes(plan['memory']['cache'])}.",
        f"Largest batch of {settings['context']} tokens each: {batch}."
        if batch
        else f"Not even one sequence of {settings['context']} tokens fits.",
        f"Largest context of {settings['max_num_seqs']} sequences: {context} tokens."
        if context
        else f"{settings['max_num_seqs']} sequences fit at no context.",
        f"Fewest devices that it fits on: {fewest}." if fewest else "It fits on no number of devices that divides it.",
    ]
