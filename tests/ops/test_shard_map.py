"""Operations in `jax.shard_map` as it is by default, with types that tell which arrays differ between devices.

Results and gradients of a batch that two devices share, with weights that both have, are those of one device.
"""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.ops.test_delta_scan import GRADIENTS, SCANS
from tests.ops.test_hierarchical import FLUX
from tests.support.delta import inputs, options
from tests.support.devices import run_on_devices
from verax import ops
from verax._compat import make_mesh


def compare(function, batch, weights):
    """`function(batch, weights)` on two devices and on one; `batch` by its first axis, `weights` on both."""
    batch, weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (batch, weights))

    def loss(batch, weights):
        out = function(batch, weights)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

    gradient, mesh = jax.grad(loss, argnums=(0, 1), has_aux=True), make_mesh((2,), ("data",))
    two = jax.shard_map(gradient, mesh=mesh, in_specs=(P("data"), P()), out_specs=((P("data"), P()), P("data")))
    expected, got = (jax.tree.leaves(jax.jit(run)(batch, weights)) for run in (gradient, two))
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def compare_layers():
    rng = np.random.default_rng(0)
    x, heads, frames = (rng.standard_normal(shape) for shape in ((2, 9, 16), (2, 9, 4, 8), (2, 3, 5, 6, 4)))
    square, row = rng.standard_normal((16, 16)) / 4, rng.standard_normal(16)
    weights = {"a": square, "b": square.T, "row": row, "bias": 0.1 * row}
    compare(lambda x, w: ops.linear(x, w["a"], w["bias"]), x, weights)
    compare(lambda x, w: ops.multi_linear(x, (w["a"], w["b"])), x, weights)
    compare(lambda x, w: ops.layer_norm(x, w["row"], w["bias"], 1e-6), x, weights)
    # By tanh: the derivative of the error function, JAX 0.12's own, is not taken there.
    compare(lambda x, w: ops.gelu_mlp(x, w["a"], w["b"], w["bias"], approximate=True), x, weights)
    compare(lambda x, w: ops.swiglu(ops.rms_norm(x, w["row"], 1e-6), w["a"], w["b"]), x, weights)
    compare(lambda x, w: ops.short_convolution(x, w), x, rng.standard_normal((16, 1, 4)))
    compare(lambda q, w: ops.attention(q, w * q, q), heads, row[:8])
    angles = {"cos": np.cos(heads[0, :, 0, :4]), "sin": np.sin(heads[0, :, 0, :4]), "row": row[:8]}
    compare(lambda q, w: ops.norm_rotary(q, q, w["row"], w["row"], w["cos"][None], w["sin"][None], 1e-6), heads, angles)
    kernel = rng.standard_normal((6, 4, 3, 3, 3)) / 10  # sums of 108 products, of 162 in the gradient
    compare(lambda x, w: ops.conv3d(x, w, padding=1), frames, kernel)


def compare_rules():
    def run(rule, x, scale):
        final = {"output_final_state": True, "chunk_size": 16}
        return getattr(ops, rule)(**x | {"v": scale * x["v"]}, **options(rule), **final)

    for rule in ("kda", "gated_delta_product", "dplr_delta_rule"):
        compare(partial(run, rule), inputs(rule), 1.5)
    with ops.use_implementations(delta_recurrence="reference"):
        compare(partial(run, "gated_delta_rule"), inputs("gated_delta_rule", T=5), 1.5)
    scans = {"delta_chunk_scan": SCANS["tpu"], "delta_chunk_scan_backward": GRADIENTS["tpu"]}
    with ops.use_implementations(delta_recurrence="chunk", **scans):
        compare(partial(run, "gated_delta_rule"), inputs("gated_delta_rule", T=32, K=16, V=32), 1.5)


def compare_hierarchical():
    (H, K, V), rng = FLUX.bilinear.shape, np.random.default_rng(1)
    x = {name: rng.standard_normal((2, 48, H, size)) for name, size in (("q", K), ("k", K), ("v", V))}
    x |= {name: rng.uniform(0.2, 0.9, (2, 48, H)) for name in ("beta", "fast", "slow")}

    def run(rule, x, flux):
        x = dict(x)
        gates = x.pop("fast"), x.pop("slow")
        decays = "log_decays" if rule is ops.hierarchical_gated_delta_rule else "decays"
        factors = tuple(map(jnp.log, gates)) if decays == "log_decays" else gates
        interval = {"coupling_interval": 16} if "coupling_interval" in inspect.signature(rule).parameters else {}
        return rule(**x, **{decays: factors}, gates=gates, flux=flux, **interval)[0]

    compare(partial(run, ops.hierarchical_gated_delta_rule), x, FLUX)
    compare(partial(run, ops.local_delta_rule), x, FLUX)


def test_two_devices_give_what_one_gives():
    assert run_on_devices(2, "tests.ops.test_shard_map") == "equal"


if __name__ == "__main__":
    compare_layers()
    compare_rules()
    compare_hierarchical()
    print('"equal"')
