"""New weights for a running engine, and engines that sleep: what those who train a model need of it between steps.

The programs of an engine take its weights as arguments, so other weights of the same shapes compile nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from verax.errors import InvalidParameterError
from verax.loading import divide_model
from verax.models import CausalLM
from verax.nn import packed_copy
from verax.text.engine.engine import Engine
from verax.text.step.program import AbstractModel


def named_leaves(tree: Any) -> dict[str, Any]:
    """Arrays of a module, its `nnx.State`, or a tree of dictionaries and lists, by their names in a checkpoint."""
    state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {".".join(_parts(path)): leaf for path, leaf in paths}


def _parts(path: Iterable[Any]) -> list[str]:
    """Names along the path of a leaf; the attribute of a Flax variable that holds its array has none."""
    parts = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in path]
    return [str(part) for part in parts if part not in (None, "value", "raw_value")]


def new_model(template: AbstractModel, tree: Any) -> CausalLM:
    """Model of the template's structure with the weights of a tree, each checked for its shape and dtype."""
    state = jax.tree.unflatten(template.tree, template.weights)
    expected, given = named_leaves(state), named_leaves(tree)
    for problem, names in (("lack", expected.keys() - given.keys()), ("have", given.keys() - expected.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            known = ", which the model does not have" if problem == "have" else ""
            raise InvalidParameterError(f"update_weights: the weights {problem} {min(names)}{more}{known}")
    for name, leaf in expected.items():
        array = given[name]
        for kind, wanted, got in (
            ("shape", leaf.shape, getattr(array, "shape", None)),
            ("dtype", leaf.dtype, getattr(array, "dtype", None)),
        ):
            if wanted != got:
                raise InvalidParameterError(f"update_weights: {name}: expected {kind} {wanted}, got {got}")
    arrays = [jnp.asarray(given[name]) for name in expected]
    return nnx.merge(template.graph, jax.tree.unflatten(template.tree, arrays))


def placement_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh that an engine's weights are placed on; None for JAX's default device alone, which needs none."""
    alone = mesh is not None and mesh.size == 1 and mesh.devices.flat[0] == jax.local_devices()[0]
    return None if alone else mesh


def placed_model(model: CausalLM, mesh: Mesh | None) -> CausalLM:
    """Copy of a model with weights as an engine on a mesh holds them: divided over it, or packed for one device."""
    mesh = placement_mesh(mesh)
    return packed_copy(model, few_rows=True) if mesh is None else divide_model(model, mesh)


def check_idle(what: str, engines: Iterable[Engine], num_hosts: int) -> None:
    """Check that no request would see two states of an engine."""
    if num_hosts > 1:
        raise InvalidParameterError(f"{what}: an engine over several hosts (nnodes) is not supported")
    if unfinished := sum(engine.num_unfinished_requests for engine in engines):
        raise InvalidParameterError(f"{what}: {unfinished} requests are unfinished; finish or abort them first")


def update_weights(engines: Iterable[Engine], template: AbstractModel, tree: Any) -> None:
    """Give engines other weights, and drop their cached prefixes."""
    model = new_model(template, tree)
    own = {id(leaf) for leaf in jax.tree.leaves(nnx.state(model))}

    def copied(leaf: Array) -> Array:
        # A trainer may donate its arrays to its next step, and the engine's would be gone with them.
        return jnp.copy(leaf) if id(leaf) in own else leaf

    for engine in engines:
        placed = placed_model(model, engine.runner.mesh)
        engine.runner.replace_weights([copied(leaf) for leaf in jax.tree.leaves(nnx.state(placed))])
        engine.scheduler.blocks.reset_prefix_cache()


def sleep(engines: Iterable[Engine], level: int) -> None:
    """Free the memory of engines on their devices: level 1 keeps the weights on the host, level 2 drops them."""
    if isinstance(level, bool) or level not in (1, 2):
        raise InvalidParameterError(
            f"level: expected 1 (weights stay on the host) or 2 (they are dropped), got {level!r}"
        )
    for engine in engines:
        engine.runner.sleep(keep_weights=level == 1)
        engine.scheduler.blocks.reset_prefix_cache()
