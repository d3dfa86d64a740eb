"""The delta rule against PyTorch: transformers' functions and, where installed, fla's plain ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta import HOUSEHOLDERS, inputs
from verax import ops
from verax.bench.delta.baselines import naive_fla
from verax.errors import MissingDependencyError

torch = pytest.importorskip("torch")


def as_jax(x):
    return {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}


def as_torch(x):
    return {name: torch.from_numpy(np.asarray(a, np.float32)) for name, a in x.items()}


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=2e-5, atol=3e-6)


def references(family):
    try:
        return naive_fla(family)
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("implementation", "mode"),
    [("torch_chunk_gated_delta_rule", "chunk"), ("torch_recurrent_gated_delta_rule", "recurrent")],
)
def test_transformers_gated_delta_rule(implementation, mode):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = inputs("gated_delta_rule", T=75, H=2, HV=2)
    state = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 2, 12, 20)).astype(np.float32))
    arrays = as_torch(x)
    theirs = getattr(modeling, implementation)(
        *(arrays.pop(name) for name in "qkv"),
        **arrays,
        initial_state=state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    ours = ops.gated_delta_rule(
        **as_jax(x), initial_state=jnp.asarray(state), output_final_state=True, use_qk_l2norm=True, mode=mode
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_fla_recurrent_implementations(rule):
    x = inputs(rule, H=2, HV=2)
    theirs = getattr(references(rule), f"naive_recurrent_{rule}")(**as_torch(x), output_final_state=True)
    assert_same(getattr(ops, rule)(**as_jax(x), output_final_state=True, mode="chunk"), theirs)


def test_fla_comba():
    # Its chunked implementation, which like its kernels reads before the decay; `naive_recurrent_comba` reads after.
    x = inputs("comba", H=2, HV=2)
    theirs = references("comba").naive_chunk_comba(**as_torch(x), output_final_state=True)
    assert_same(ops.comba(**as_jax(x), output_final_state=True, mode="chunk"), theirs)


def test_fla_gated_delta_product():
    x = inputs("gated_delta_product", H=2, HV=2)
    theirs = references("gated_delta_product").naive_recurrent_gated_delta_product(
        **as_torch(x), scale=0.5, output_final_state=True, num_householder=HOUSEHOLDERS
    )
    ours = ops.gated_delta_product(
        **as_jax(x), scale=0.5, output_final_state=True, num_householder=HOUSEHOLDERS, mode="chunk"
    )
    assert_same(ours, theirs)


def test_fla_dplr():
    x = inputs("dplr_delta_rule")
    theirs = as_torch({name: a.swapaxes(1, 2) for name, a in x.items()})
    alpha, beta = theirs.pop("a"), theirs.pop("b")
    out, state = references("generalized_delta_rule.dplr").dplr_recurrence(**theirs, alpha=alpha, beta=beta)
    ours = ops.dplr_delta_rule(**as_jax(x), output_final_state=True, mode="chunk")
    assert_same(ours, (out.transpose(1, 2), state))


def test_fla_delta_rule():
    x = inputs("delta_rule", H=2, HV=2)
    theirs = as_torch({name: a.swapaxes(1, 2) for name, a in x.items()})
    out, state = references("delta_rule").delta_rule_recurrence(**theirs)
    assert_same(ops.delta_rule(**as_jax(x), output_final_state=True, mode="chunk"), (out.transpose(1, 2), state))
