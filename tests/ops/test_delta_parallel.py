"""One sequence on eight devices: the same as on one, gradients too. A process of its own, for its eight devices."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from tests.support.delta import inputs, options
from verax import ops

assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()), ("t",))


def compare(rule):
    x = {name: jnp.asarray(a, jnp.float32) for name, a in inputs(rule, B=1, T=160, K=8, V=6).items()}
    state = jnp.ones((1, x["v"].shape[2], 8, 6))

    def one(x, state):
        return getattr(ops, rule)(**x, **options(rule), initial_state=state, output_final_state=True)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "t"), P()), out_specs=(P(None, "t"), P()), check_vma=False)
    def eight(x, state):
        x = dict(x)
        split = ops.delta.sequence_parallel(getattr(ops, rule), "t")
        q, k, v = x.pop("q"), x.pop("k"), x.pop("v")
        return split(q, k, v, **x, **options(rule), initial_state=state, output_final_state=True)

    def results(run):
        if rule != "gated_delta_rule":
            return jax.jit(run)(x, state)

        def loss(x, state):
            out, final = run(x, state)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final)), (out, final)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, state)

    for a, b in zip(jax.tree.leaves(results(one)), jax.tree.leaves(results(eight)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


for rule in ("gated_delta_rule", "gated_delta_product"):
    compare(rule)
print("equal")
"""


def test_a_sequence_split_over_eight_devices():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("equal"), done.stderr
