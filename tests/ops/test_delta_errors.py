"""Arguments that do not fit are refused by name. Annotations are not checked here: users have no checker either."""

import jax.numpy as jnp
import pytest

from verax import ops
from verax.errors import InvalidParameterError

pytestmark = pytest.mark.usefixtures("unchecked")


def arrays(**changes):
    shapes = {"q": (2, 5, 2, 4), "k": (2, 5, 2, 4), "v": (2, 5, 4, 3), "g": (2, 5, 4), "beta": (2, 5, 4)} | changes
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"q": (5, 2, 4)}, "q: expected shape"),
        ({"k": (2, 5, 2, 6)}, r"k: expected shape \[2, 5, 2, 4\]"),
        ({"v": (2, 5, 3, 3), "g": (2, 5, 3)}, "v: expected a multiple of the 2 heads"),
        ({"v": (2, 6, 4, 3), "g": (2, 6, 4)}, "v: expected shape"),
        ({"g": (2, 5, 4, 4)}, r"g: expected shape \[2, 5, 4\]"),
        ({"beta": (2, 5, 2)}, r"beta: expected shape \[2, 5, 4\]"),
        ({"initial_state": (2, 4, 3, 4)}, r"initial_state: expected shape \[2, 4, 4, 3\]"),
    ],
)
def test_shapes(changes, begins):
    with pytest.raises(InvalidParameterError, match=r"^" + begins):
        ops.gated_delta_rule(**arrays(**changes))


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({"mode": "fast"}, "mode: expected auto, recurrent, chunk, step, got 'fast'"),
        ({"mode": "step"}, "mode: step takes one token"),
        ({"chunk_size": 48}, "chunk_size: expected a power of two"),
        ({"chunk_size": 8}, "chunk_size: expected a power of two"),
        ({"cu_seqlens": jnp.asarray([0, 5])}, "cu_seqlens: .* batch of 2"),
    ],
)
def test_options(options, begins):
    with pytest.raises(InvalidParameterError, match=r"^" + begins):
        ops.gated_delta_rule(**arrays(), **options)


def test_arguments_of_the_other_rules():
    x = arrays()
    q, k, v, g, beta = x.values()
    with pytest.raises(InvalidParameterError, match=r"^g: expected shape \[2, 5, 4, 4\]"):
        ops.kda(q, k, v, g, beta)
    with pytest.raises(InvalidParameterError, match=r"^p: expected shape"):
        ops.comba(q, k, v, k[:, :1])
    with pytest.raises(InvalidParameterError, match=r"^num_householder: expected at least 1"):
        ops.gated_delta_product(q, k, v, g, beta, 0)
    with pytest.raises(InvalidParameterError, match=r"^k: expected shape \[2, 10, 2, 4\]"):
        ops.gated_delta_product(q, k, v, g, beta, 2)
    with pytest.raises(InvalidParameterError, match=r"^b: expected shape"):
        ops.dplr_delta_rule(q, k, v[:, :, :2], k, k[..., :2])
    with pytest.raises(InvalidParameterError, match=r"^v: expected shape"):
        ops.dplr_delta_rule(q, k, v, k, k)
    with pytest.raises(InvalidParameterError, match=r"^cu_seqlens: packed sequences cannot be split"):
        ops.delta.sequence_parallel(ops.delta_rule, "t")(q, k, v, cu_seqlens=jnp.asarray([0, 5]))
