"""One sequence on eight devices: the same as on one, gradients too. A process of its own, for its eight devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.support.delta import inputs, options
from tests.support.devices import run_on_devices
from verax import ops
from verax._compat import make_mesh


def compare(rule, check_vma):
    x = {name: jnp.asarray(a, jnp.float32) for name, a in inputs(rule, B=1, T=160, K=8, V=6).items()}
    state = jnp.ones((1, x["v"].shape[2], 8, 6))

    def one(x, state):
        return getattr(ops, rule)(**x, **options(rule), initial_state=state, output_final_state=True)

    mesh, parts = make_mesh((8,), ("t",)), (P(None, "t"), P())

    @partial(jax.shard_map, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=check_vma)
    def eight(x, state):
        split = ops.delta.sequence_parallel(getattr(ops, rule), "t")
        first = [x[name] for name in "qkv"]
        rest = {name: a for name, a in x.items() if name not in "qkv"}
        return split(*first, **rest, **options(rule), initial_state=state, output_final_state=True)

    def results(run):
        if rule != "gated_delta_rule":
            return jax.jit(run)(x, state)

        def loss(x, state):
            out, final = run(x, state)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final)), (out, final)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, state)

    for a, b in zip(jax.tree.leaves(results(one)), jax.tree.leaves(results(eight)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_sequence_split_over_eight_devices():
    assert run_on_devices(8, "tests.ops.test_delta_parallel") == "equal"


if __name__ == "__main__":
    for rule in ("gated_delta_rule", "gated_delta_product"):
        compare(rule, check_vma=True)
    compare("gated_delta_rule", check_vma=False)
    print('"equal"')
