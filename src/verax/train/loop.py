"""Training loop: optimiser steps, checkpoints that resume exactly, a log and a plot of the loss.

Orbax (https://orbax.readthedocs.io) writes the checkpoints into the folder `state` of the run. Each device's part of an
array is written and read by itself, so that a run may continue on other devices.

Several devices divide each batch, and each keeps a shard of every weight and of its optimiser state (Zhao et al., 2023,
arXiv:2304.11277). XLA adds the communication.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import Partial
from jaxtyping import Array, Float

from verax import ops, progress
from verax._compat import compiler_options, make_mesh
from verax._optional import load_pyplot, require_optional
from verax.errors import CheckpointError, InvalidParameterError
from verax.files import write_text

if TYPE_CHECKING:
    import optax

LOG = "log.jsonl"

Loss = Callable[[Any, dict[str, Array]], Float[Array, ""]]


@dataclass(frozen=True)
class Schedule:
    """Optimiser and learning rates: linear warm-up, then a cosine.

    The optimiser is AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101).
    """

    steps: int
    peak_learning_rate: float
    warmup_steps: int = 100
    final_fraction: float = 0.05
    """Learning rate at the last step, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    beta2: float = 0.98
    clip: float = 1.0
    """Largest global norm of a gradient."""

    def of(self, steps: int | None) -> Schedule:
        """Schedule of another number of steps, with at most a quarter of them for warm-up; the same one for None."""
        if steps is None:
            return self
        return replace(self, steps=steps, warmup_steps=min(self.warmup_steps, steps // 4))

    def optimizer(self) -> optax.GradientTransformation:
        """Optax chain of the schedule."""
        if not 0 <= self.warmup_steps < self.steps:
            raise InvalidParameterError(f"steps: {self.steps} leave none after a warm-up of {self.warmup_steps}")
        return require_optional("optax").chain(require_optional("optax").clip_by_global_norm(self.clip), self.update())

    def update(self) -> optax.GradientTransformation:
        """The optimiser itself, of clipped gradients."""
        rate = self.rate(self.peak_learning_rate)
        return require_optional("optax").adamw(rate, b2=self.beta2, weight_decay=self.weight_decay, mask=matrices)

    def rate(self, peak: float) -> optax.Schedule:
        """Learning rates with this peak."""
        return require_optional("optax").warmup_cosine_decay_schedule(
            0.0, peak, self.warmup_steps, self.steps, self.final_fraction * peak
        )


def matrices(params: Any) -> Any:
    """True for each leaf that has weight decay."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def train(
    loss: Loss,
    params: Any,
    batches: Callable[[int], Iterator[dict[str, np.ndarray]]],
    schedule: Schedule,
    folder: Path,
    *,
    settings: Mapping[str, Any] = MappingProxyType({}),
    accumulation: int = 1,
    validate: Callable[[Any], float] | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    save_every: int = 200,
    log_every: int = 10,
    average: float | None = None,
    counted: str = "tokens",
    count: Callable[[dict[str, np.ndarray]], int] | None = None,
    loss_unit: str = "nats per token",
    mesh: Mesh | None = None,
    show_progress: bool = True,
) -> Any:
    """Minimise `loss(params, batch)`; the trained parameters, or their running mean.

    Args:
        loss: mean over the batch, differentiable in `params`. The arrays of a `jax.tree_util.Partial`, such as weights
            that are not trained, are arguments of the compiled step.
        batches: `batches(step)` yields the batches from that step on, the same ones at every call.
        folder: receives `state` (parameters, optimiser, mean), `log.jsonl`, `loss.png`.
        settings: further settings that a resumed run must share with the run that it continues, as JSON.
        accumulation: parts of a batch that are computed one after the other, along a first axis of each entry of the
            batch if there are more than one. Their losses and gradients are added.
        validate: loss on other data, of parameters; logged before the first step and at each checkpoint.
        resume: continue from `state`; the results are bit-identical to an uninterrupted run's.
        stop_at: last step of this run, if it is to end before the schedule does.
        save_every: steps between checkpoints; the last step is always saved.
        log_every: steps between entries of the log.
        average: decay of the running mean of the parameters per step; None for no mean. The decay is smaller in the
            first steps, so that the mean forgets the initial parameters.
        counted: unit of the logged speed.
        count: number of these units in a batch; the size of the entry of this name if None.
        loss_unit: unit of the loss, for the plot.
        mesh: devices over which batches and state are divided, from `fully_sharded`. A run may continue on other
            devices; its numbers are then the same up to rounding.

    Raises:
        CheckpointError: if `resume` finds no state, or one of another model or schedule; if there is a state but no
            `resume`, which would overwrite it.
        InvalidParameterError: if a loss or a gradient is not finite. It is noticed before a state is written.
        MissingDependencyError: without optax, Orbax or matplotlib.
    """
    load_pyplot()  # before the work, not after it
    optimizer = schedule.optimizer()
    # The mean starts as a copy: the parameters' own buffers are given away to the first step.
    state = (params, optimizer.init(params), None if average is None else jax.tree.map(jnp.copy, params))
    compute: Any = loss if isinstance(loss, Partial) else Partial(loss)
    count = count or (lambda batch: batch[counted].size)
    placed = None
    if mesh is not None:
        shardings = state_sharding(mesh, state)
        state, placed = jax.device_put(state, shardings), (shardings, None, None)
        compute = jax.device_put(compute, state_sharding(mesh, compute))

    def update(
        compute: Loss, state: Any, batch: dict[str, Array], taken: Float[Array, ""]
    ) -> tuple[Any, Float[Array, ""], Float[Array, ""]]:
        params, optimizer_state, mean = state
        value, gradient = _value_and_gradient(compute, params, batch, accumulation)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
        params = jax.tree.map(jnp.add, params, updates)
        if average is not None:
            keep = jnp.minimum(average, (1.0 + taken) / (10.0 + taken))
            mean = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, mean, params)
        return (params, optimizer_state, mean), value, norm

    update = jax.jit(
        update, donate_argnums=1, out_shardings=placed, compiler_options=compiler_options(ops.target().platform)
    )
    last = min(schedule.steps, stop_at or schedule.steps)
    with RunStates(folder, {**asdict(schedule), **settings}) as states:
        step = 0
        if resume:
            state, step = states.restore(state), states.step or 0
        elif states.step is not None:
            raise CheckpointError(f"{states.path}: a run has its state here; resume it, or choose another folder")
        with _Log(folder, step) as log, progress.bar("training", enabled=show_progress) as report:
            if validate is not None and step == 0:
                log.write(step=0, validation_loss=validate(state[0]))
            begin, done = time.perf_counter(), 0
            for batch in batches(step):
                if step >= last:
                    break
                axis = 1 if accumulation > 1 else 0
                given = batch if mesh is None else jax.device_put(batch, batch_sharding(mesh, batch, axis))
                state, value, norm = update(compute, state, given, np.float32(step))
                step += 1
                done += count(batch)
                saved = step % save_every == 0 or step == last
                logged = step % log_every == 0 or step == last
                if (saved or logged) and not np.isfinite([float(value), float(norm)]).all():
                    raise InvalidParameterError(
                        f"learning_rate: the loss was {float(value)} at step {step}, with a gradient of norm "
                        f"{float(norm)}; take a smaller one, or more warm-up steps, in another folder"
                    )
                entry: dict[str, Any] = {"step": step}
                if logged:
                    speed = done / (time.perf_counter() - begin)
                    entry.update(loss=float(value), gradient_norm=float(norm))
                    entry[f"{counted}_per_second"] = round(speed)
                    report(step, last, f"loss {entry['loss']:.3f}, {speed:,.0f} {counted}/s")
                if saved and validate is not None:
                    paused = time.perf_counter()
                    entry.update(validation_loss=validate(state[0]))
                    begin += time.perf_counter() - paused
                if len(entry) > 1:
                    log.write(**entry)
                if saved:
                    states.save(state, step)
    plot_loss(folder, loss_unit)
    return state[0] if average is None else state[2]


def _value_and_gradient(loss: Loss, params: Any, batch: dict[str, Array], parts: int) -> tuple[Float[Array, ""], Any]:
    """Loss and gradient, added over the parts of a batch, which are computed one after the other."""
    compute = jax.value_and_grad(lambda params, part: loss(params, part))
    if parts == 1:
        return compute(params, batch)
    sums = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, compute(params, part)), None), sums, batch)[0]


class _Log:
    """The file of a run's entries. Entries of steps after the last state are removed: these steps are made again.

    Without a state, all are: of a run that left none, maybe of another model.
    """

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        kept = [entry for entry in read_log(folder) if step and entry["step"] <= step]
        write_text(folder / LOG, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._file = (folder / LOG).open("a")

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, **entry: float) -> None:
        """Append an entry, so that it is there when the process ends."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def plot_loss(folder: Path, unit: str = "nats per token") -> Path:
    """Draw `log.jsonl` as `loss.png`: the loss, its running mean, and the loss on validation data."""
    pyplot = load_pyplot()
    entries = [e for e in read_log(folder) if "loss" in e]
    validated = [e for e in read_log(folder) if "validation_loss" in e]
    steps, losses = [e["step"] for e in entries], np.asarray([e["loss"] for e in entries])
    window = max(1, len(losses) // 50)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="batch")
    if entries:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, linewidth=1.5, label=f"mean of {window}")
    if validated:
        points = [e["step"] for e in validated], [e["validation_loss"] for e in validated]
        axes.plot(*points, "o-", markersize=3, label="validation")
    axes.set(xlabel="step", ylabel=f"loss ({unit})", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=120)
    pyplot.close(figure)
    return folder / "loss.png"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Entries of a run's `log.jsonl`, without one that was not written to its end; none without the file."""
    path = folder / LOG
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []


STATE = "state"


class RunStates:
    """Checkpoints of a run, of which the newest is kept. One that was not written to its end does not count.

    A context manager.

    `settings`: settings of the run, as JSON; a run can only be resumed with equal ones.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self.path = folder / STATE
        self._settings = json.loads(json.dumps(settings))
        self._ocp: Any = require_optional("orbax.checkpoint")
        # Not in the background: the next step takes the buffers that would still be written.
        options = self._ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = self._ocp.CheckpointManager(self.path.resolve(), options=options)

    def __enter__(self) -> RunStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.close()

    @property
    def step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def saved_settings(self) -> dict[str, Any]:
        """Settings with which the newest checkpoint was made; empty if there is none."""
        return {} if self.step is None else self._saved_run()["settings"]

    def _saved_run(self) -> dict[str, Any]:
        return self._restored(run=self._ocp.args.JsonRestore())["run"]

    def _restored(self, **args: Any) -> Any:
        """Parts of the newest checkpoint."""
        try:
            return self._manager.restore(self.step, args=self._ocp.args.Composite(**args))
        except Exception as error:  # of whichever of its libraries notices it
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{self.path / str(self.step)}: this state cannot be read, it may be damaged: {reason}; start again in "
                "another folder"
            ) from error

    def save(self, state: Any, step: int) -> None:
        """Save the state, a pytree of arrays, after `step` steps."""
        args = self._ocp.args
        leaves = jax.tree.leaves(state)
        run = {"settings": self._settings, "shapes": [list(leaf.shape) for leaf in leaves]}
        self._manager.save(step, args=args.Composite(state=args.StandardSave(_named(leaves)), run=args.JsonSave(run)))

    def restore(self, like: Any) -> Any:
        """The newest state, with the structure of `like` and on its devices."""
        if self.step is None:
            raise CheckpointError(f"{self.path}: no training state to resume from; start without resume")
        run = self._saved_run()
        if different := sorted(
            f"{name} {run['settings'].get(name)!r}, now {self._settings.get(name)!r}"
            for name in {*run["settings"], *self._settings}
            if run["settings"].get(name) != self._settings.get(name)
        ):
            raise CheckpointError(f"{self.path}: made with {'; '.join(different)}; resume with the settings of then")
        leaves, structure = jax.tree.flatten(like)
        if run["shapes"] != [list(leaf.shape) for leaf in leaves]:
            raise CheckpointError(f"{self.path}: belongs to a model of other sizes")
        restored = self._restored(state=self._ocp.args.StandardRestore(_named(leaves)))
        return jax.tree.unflatten(structure, [restored["state"][name] for name in _named(leaves)])


def _named(leaves: list[Any]) -> dict[str, Any]:
    return {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}


AXIS = "fsdp"


def fully_sharded(devices: int) -> Mesh | None:
    """Mesh of the given number of devices, which divide batches, weights and optimiser; None for one."""
    if devices > jax.device_count():
        raise InvalidParameterError(
            f"devices: {devices} are asked for, and there are {jax.device_count()}; JAX_NUM_CPU_DEVICES={devices} with "
            "JAX_PLATFORMS=cpu makes virtual ones, to try this out"
        )
    return None if devices == 1 else make_mesh([devices], [AXIS], jax.devices()[:devices])


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """Sharding of each leaf: divided along its first divisible axis, replicated if no axis is divisible."""

    def place(leaf: Any) -> NamedSharding:
        axis = next((i for i, size in enumerate(jnp.shape(leaf)) if size % mesh.size == 0), None)
        return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS))

    return jax.tree.map(place, state)


def batch_sharding(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """Sharding of a batch: this axis over all devices. Leaves that they do not divide are replicated."""

    def place(leaf: Any) -> NamedSharding:
        shape = jnp.shape(leaf)
        divides = len(shape) > axis and shape[axis] % mesh.size == 0
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS) if divides else PartitionSpec())

    return jax.tree.map(place, batch)
