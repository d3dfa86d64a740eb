"""Checkpoints of a training run by Orbax (https://orbax.readthedocs.io), in the folder `state` of the run.

Each device's part of an array is written and read by itself, so that a run may go on with other devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from verax._optional import require_optional
from verax.errors import CheckpointError

__all__ = ["RunStates", "has_state"]

STATE = "state"


def has_state(folder: Path) -> bool:
    """True if a run in this folder can be resumed."""
    return any(path.name.isdecimal() for path in (folder / STATE).glob("*"))


class RunStates:
    """Checkpoints of a run, of which the newest is kept. One that was not written to its end does not count.

    A context manager.

    Args:
        folder: folder of the run.
        settings: what the run was made with, as JSON; a run can only be resumed with equal ones.

    Raises:
        MissingDependencyError: without Orbax.
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

    def save(self, state: Any, step: int) -> None:
        """Save the state after so many steps, a pytree of arrays."""
        args = self._ocp.args
        leaves = jax.tree.leaves(state)
        run = {"settings": self._settings, "shapes": [list(leaf.shape) for leaf in leaves]}
        self._manager.save(step, args=args.Composite(state=args.StandardSave(_named(leaves)), run=args.JsonSave(run)))

    def restore(self, like: Any) -> Any:
        """The newest state, with the structure of `like` and on its devices.

        Raises:
            CheckpointError: if there is none, or it is of a run with other settings or of a model of other sizes.
        """
        if self.step is None:
            raise CheckpointError(f"{self.path}: no training state to resume from; start without resume")
        args = self._ocp.args
        run = self._manager.restore(self.step, args=args.Composite(run=args.JsonRestore()))["run"]
        if different := sorted(
            f"{name} {run['settings'].get(name)!r}, now {self._settings.get(name)!r}"
            for name in {*run["settings"], *self._settings}
            if run["settings"].get(name) != self._settings.get(name)
        ):
            raise CheckpointError(f"{self.path}: made with {'; '.join(different)}; resume with the settings of then")
        leaves, structure = jax.tree.flatten(like)
        if run["shapes"] != [list(leaf.shape) for leaf in leaves]:
            raise CheckpointError(f"{self.path}: belongs to a model of other sizes")
        found = self._manager.restore(self.step, args=args.Composite(state=args.StandardRestore(_named(leaves))))
        return jax.tree.unflatten(structure, [found["state"][name] for name in _named(leaves)])


def _named(leaves: list[Any]) -> dict[str, Any]:
    return {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}
