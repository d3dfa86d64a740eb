"""Memory of a run, stage by stage, from the compiled programs, before weights are read or anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from verax import ops
from verax.models.video_model import LatentGeometry
from verax.video.programs import Component, ProgramCall
from verax.video.request import ResolvedRequest
from verax.video.run import Stage

SPARE = 0.9
"""Share of the memory that fewer or smaller frames are fitted to: not everything shrinks with them."""


class StageMemory(NamedTuple):
    """Bytes of one stage.

    `others`: weights of other models that are on the device at the time. `work`: inputs, results and buffers in
    between.
    """

    stage: str
    weights: int
    others: int
    work: int

    @property
    def peak(self) -> int:
        """Sum of all."""
        return self.weights + self.others + self.work


def plan_memory(stages: Sequence[Stage], components: Iterable[Component[Any]] = ()) -> list[StageMemory]:
    """Memory of a run, with one row for each stage and model, of the largest segment.

    Compiles the programs of the largest calls, which the run then finds compiled.

    Args:
        stages: stages of the run, as `run.stages_of` lists them.
        components: models that may be on the device since an earlier run.
    """
    # The largest call of each program counts, over all stages of one name; others are shorter segments, or steps at
    # half size.
    calls: dict[tuple[str, str], dict[int, ProgramCall]] = {}
    for stage in stages:
        for call in stage.calls():
            programs = calls.setdefault((stage.name, call.component.name), {})
            known = programs.get(id(call.program))
            if known is None or call.argument_bytes > known.argument_bytes:
                programs[id(call.program)] = call
    work: list[tuple[str, Component[Any], int]] = []
    for (name, _), programs in calls.items():
        component = next(iter(programs.values())).component
        work.append((name, component, max(call.memory().peak for call in programs.values()) - component.size))
    return add_residents(work, {one.name: one.size for one in components if one.loaded})


def add_residents(
    stages: Iterable[tuple[str, Component[Any], int]], loaded: Mapping[str, int] | None = None
) -> list[StageMemory]:
    """Memory of stages in their order, each with the models that stay on the device meanwhile.

    Args:
        stages: name, model and bytes of the work of each.
        loaded: bytes of each model that is on the device before the first stage.
    """
    plan: list[StageMemory] = []
    resident = dict(loaded or {})
    for name, component, work in stages:
        others = sum(size for other, size in resident.items() if other != component.name)
        plan.append(StageMemory(name, component.size, others, work))
        if component.keep:
            resident[component.name] = component.size
    return plan


def largest(plan: Sequence[StageMemory]) -> StageMemory:
    """Stage with the highest peak."""
    return max(plan, key=lambda stage: stage.peak)


def free_memory(components: Sequence[Component[Any]]) -> int | None:
    """Bytes of each device that a run may take, its models included; None if that is unknown."""
    devices = max((one.mesh.size for one in components if one.mesh is not None), default=1)
    target = ops.target()
    if (memory := target.least_memory(devices)) is None:
        return None
    sharing = devices if target.platform == "cpu" else 1  # the devices of a CPU have one memory
    return memory.free // sharing + sum(one.size for one in components if one.loaded)


def _alternatives(
    request: ResolvedRequest, geometry: LatentGeometry, plan: Sequence[StageMemory], free: int, devices: int
) -> list[dict[str, int | str]]:
    """Changes to a request that may make it fit, the least loss first.

    Fewer and smaller frames are estimated from the memory of a latent, with some to spare.
    """
    changes: list[dict[str, int | str]] = []
    if request.guided and request.guidance == "batch":
        changes.append({"guidance": "sequential"})
    if request.attention not in ("auto", "flash"):
        changes.append({"attention": "flash"})
    # The stage that exceeds the free memory most decides.
    share = min((free - one.weights - one.others) / one.work for one in plan) * SPARE
    if share <= 0:
        return changes
    name = "base_num_frames" if len(request.segments(geometry)) > 1 else "num_frames"
    size = geometry.latents(getattr(request, name))
    block = request.causal_block_size
    fewer = int(size * share) // block * block
    if fewer > (geometry.latents(request.overlap_history) if name == "base_num_frames" else 0):
        changes.append({name: (fewer - 1) * geometry.frames_per_latent + 1})
    token = geometry.pixels_per_token
    sides = ((request.height, token), (request.width, token * devices))
    height, width = (int(side * share**0.5) // step * step for side, step in sides)
    if min(height, width) >= token * (2 if request.half_size_steps else 1):
        changes.append({"height": height, "width": width})
    return changes


def out_of_memory_message(
    request: ResolvedRequest,
    geometry: LatentGeometry,
    plan: Sequence[StageMemory],
    free: int,
    replan: Callable[[Mapping[str, Any]], Sequence[StageMemory] | None],
    *,
    devices: int = 1,
) -> str | None:
    """Message for a request that does not fit in the free memory, with changes that would fit; None if it fits.

    `replan`: function that returns the plan of the request with some changes; None where that is not a request that the
    model takes. `devices`: devices that divide the tokens of a frame, of which changes leave a multiple in each row.
    """
    worst = largest(plan)
    if worst.peak <= free:
        return None
    fit: list[str] = []
    for change in _alternatives(request, geometry, plan, free, devices):
        changed = replan(change)
        if changed is not None and (peak := largest(changed).peak) <= free:
            fit.append(f"{', '.join(f'{name}={value!r}' for name, value in change.items())} ({format_bytes(peak)})")
    if max(one.peak - one.others for one in plan) <= free:
        fit.append("offload=True")
    parts = (("weights", worst.weights), ("other models", worst.others), ("work", worst.work))
    needs = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    advice = f"these would fit: {'; '.join(fit)}" if fit else "neither fewer nor smaller frames would fit"
    return (
        f"memory: {worst.stage} needs {format_bytes(worst.peak)} ({needs}), and {format_bytes(free)} are free; {advice}"
    )


def format_bytes(size: int) -> str:
    """Bytes in MB or GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
