"""Traces of JAX modules and functions: what is recorded, under which name, and where it is kept."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from verax.compare import Side, Trace, Watch, run_compiled, tap, trace_jax
from verax.compare.trace import OUTPUT
from verax.errors import InvalidParameterError


class Scale(nnx.Module):
    def __init__(self, factor):
        self.factor = nnx.Param(jnp.float32(factor))

    def __call__(self, x):
        return self.factor[...] * x


class Inner(Scale):
    def __call__(self, x):
        return super().__call__(x), jnp.arange(3)


class Model(nnx.Module):
    """Modules in a list, one of them twice, one in a scan, one in a vmap; one gives a tuple."""

    def __init__(self):
        self.layers = nnx.List([Scale(2), Scale(3)])
        self.inner = Inner(5)
        self.scanned = Scale(7)
        self.mapped = Scale(11)

    def __call__(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        x, _ = self.inner(x)
        _, x = jax.lax.scan(lambda carry, row: (carry, self.scanned(row)), None, x)
        return jax.vmap(self.mapped)(tap("before", x))


X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.mark.parametrize("jit", [False, True])
def test_every_call_of_every_module_is_recorded_by_its_path(jit):
    trace = trace_jax(Side(Model(), (X,)), jit=jit)
    recorded = {name: trace[name].tolist() for name in trace}
    assert recorded == {
        "layers.0": (2 * X).tolist(),
        "layers.1": (6 * X).tolist(),
        "layers.0#2": (12 * X).tolist(),
        "inner[0]": (60 * X).tolist(),
        "inner[1]": [0, 1, 2],
        "scanned": (420 * X[0]).tolist(),
        "scanned#2": (420 * X[1]).tolist(),
        "before": (420 * X).tolist(),
        "mapped": (4620 * X[0]).tolist(),
        "mapped#2": (4620 * X[1]).tolist(),
        OUTPUT: (4620 * X).tolist(),
    }


def test_what_a_module_gives_can_be_replaced():
    other = {"layers.1": np.zeros_like(X), "scanned#2": np.ones(2, np.float32)}
    trace = trace_jax(Side(Model(), (X,)), replace=lambda name, shape: other.get(name))
    np.testing.assert_array_equal(trace["layers.1"], 6 * X)  # its own result, from which it was replaced
    np.testing.assert_array_equal(trace["inner[0]"], 0 * X)
    np.testing.assert_array_equal(trace["before"], [[0, 0], [1, 1]])


def test_inputs_and_watched_functions_are_recorded_and_the_class_is_left_as_it_was():
    holder = {"twice": lambda x: 2 * x, "pair": lambda x: (x, x.T)}

    class Caller(nnx.Module):
        def __init__(self):
            self.scale = Scale(3)

        def __call__(self, x):
            return self.scale(holder["twice"](holder["twice"](x)) + holder["pair"](x)[1])

    plain = Scale.__call__
    watches = (
        Watch(holder, "twice", outputs=("once", "again")),
        Watch(holder, "pair", outputs=("a", "b"), axes=(1, 0)),
    )
    trace = trace_jax(Side(Caller(), (X,), watch=watches, inputs=("^scale$",)))
    expected = {"once": 2 * X, "again": 4 * X, "a": X.T, "b": X, "scale.input": 4 * X + X.T}
    assert {name: trace[name].tolist() for name in expected} == {name: x.tolist() for name, x in expected.items()}
    assert Scale.__call__ is plain


def test_the_input_of_a_module_may_be_given_by_name():
    class Caller(nnx.Module):
        def __init__(self):
            self.scale = Scale(3)

        def __call__(self, x):
            return self.scale(x=x + 1)

    side = Side(Caller(), (X,), inputs=("^scale$",))
    np.testing.assert_array_equal(trace_jax(side)["scale.input"], X + 1)
    replaced = trace_jax(side, replace=lambda name, shape: X if name == "scale.input" else None)
    np.testing.assert_array_equal(replaced[OUTPUT], 3 * X)


def test_a_plain_function_is_traced_by_its_taps():
    def function(x):
        return tap("double", 2 * x) + 1

    other = trace_jax(Side(function, (X,)), replace=lambda name, shape: X if name == "double" else None)
    np.testing.assert_array_equal(other["double"], 2 * X)
    np.testing.assert_array_equal(other[OUTPUT], X + 1)
    np.testing.assert_array_equal(function(X), 2 * X + 1)  # outside of a trace


def test_a_trace_in_a_folder_is_the_one_in_memory(tmp_path):
    traces = Trace(tmp_path / "trace"), Trace()
    arrays = [np.float32(3), X.astype(ml_dtypes.bfloat16), X.astype(ml_dtypes.float8_e4m3fn), X[:0], "a text", X > 2]
    for trace in traces:
        assert [trace.add("a", array) for array in arrays] == ["a", "a#2", "a#3", "a#4", "a#5", "a#6"]
        for name, array in zip(trace, arrays, strict=True):
            assert trace[name].dtype == np.asarray(array).dtype
            np.testing.assert_array_equal(trace[name], array)
    assert traces[0].entries == traces[1].entries
    assert traces[0].first_difference(traces[1]) is None
    traces[1].add("b", X)
    assert traces[0].first_difference(traces[1]) == "b"


def test_a_folder_in_use_and_a_compiled_replacement_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidParameterError, match="folder"):
        Trace(tmp_path)
    with pytest.raises(InvalidParameterError, match="jit"):
        trace_jax(Side(Model(), (X,)), jit=True, replace=lambda name, shape: None)


def test_a_compiled_run_keeps_the_output_only_and_takes_arguments_other_than_arrays():
    call = lambda model, x, *, times, on: times * model(x) if on else x
    trace = run_compiled(Side(Model(), (X,), {"times": np.float32(2), "on": True}, call))
    assert {name: trace[name].tolist() for name in trace} == {OUTPUT: (2 * 4620 * X).tolist()}
    plain = run_compiled(Side(lambda x: x + 1, (X,)))
    np.testing.assert_array_equal(plain[OUTPUT], X + 1)
