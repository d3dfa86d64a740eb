"""Choice of an implementation: by the call, by name, by environment; a warning when the choice is slow."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from verax import ops
from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.ops._dispatch import _REGISTRY, Operation


@pytest.fixture
def doubled():
    def double_it(x):
        """2 x."""
        return 2 * x

    op = Operation(double_it)
    op.implementation("shifted", platforms=("cpu",), accepts=lambda x: x > 10, slow_on={"cpu": "it is for the test"})(
        lambda x: x + x
    )
    op.implementation("elsewhere", platforms=("tpu",))(lambda x: -1)
    yield op
    del _REGISTRY["double_it"]


def test_a_slow_choice_says_so_once(doubled, caplog):
    with caplog.at_level(logging.WARNING, logger="verax.ops"):
        doubled(30)
        doubled(40)
    assert [record.message for record in caplog.records] == [
        "double_it runs its shifted implementation on cpu: it is for the test"
    ]


def test_a_program_is_traced_again_for_another_choice(doubled):
    def jitted():
        return jax.jit(doubled, static_argnums=0)(3)

    assert jitted() == 6
    with ops.use_implementations(double_it="elsewhere"):
        assert jitted() == -1
        with ops.use_implementations(double_it=lambda x: -2):
            assert jitted() == -2
        with ops.use_earlier_programs():
            assert jitted() == 6
    with ops.use_target("tpu"):
        assert jitted() == -1
    assert jitted() == 6


def test_the_newest_implementation_that_takes_the_call_runs_and_an_experimental_one_where_it_is_named(doubled):
    assert [doubled.select(x).name for x in (3, 30)] == ["reference", "shifted"]
    doubled.implementation("new", accepts=lambda x: x > 5, experimental=True)(lambda x: -3)
    assert doubled.select(30).name == "shifted"
    assert [one.name for one in doubled.supporting(30)] == ["new", "shifted", "reference"]
    with ops.use_implementations(double_it="new"):
        assert [doubled.select(x).name for x in (30, 6, 3)] == ["new", "new", "reference"]


def test_a_choice_by_name_runs_where_another_is_faster_but_not_where_it_would_fail(doubled):
    doubled.implementation("large", accepts=lambda x: x > 5, faster=lambda x: x > 20)(lambda x: x + x)
    assert [doubled.select(x).name for x in (3, 6, 30)] == ["reference", "reference", "large"]
    with ops.use_implementations(double_it="large"):
        assert [doubled.select(x).name for x in (3, 6, 30)] == ["reference", "large", "large"]


@pytest.mark.parametrize(("name", "other"), [("cuda", "gpu"), ("ROCm", "gpu"), ("metal", "")])
def test_a_platform_that_jax_does_not_have_is_refused_at_registration(doubled, name, other):
    with pytest.raises(InvalidParameterError, match=f"double_it.*'fast'.*cpu, gpu, tpu, got '{name}'") as refusal:
        doubled.implementation("fast", platforms=(name,))(lambda x: x)
    assert str(refusal.value).endswith(f"; {other!r} covers it" if other else f"got {name!r}")
    with pytest.raises(InvalidParameterError, match=name):
        doubled.implementation("fast", slow_on={name: "a reason"})(lambda x: x)
    assert "fast" not in doubled.implementations


def test_an_implementation_for_a_single_device_is_left_out_on_a_mesh(doubled):
    doubled.implementation("whole", single_device=True)(lambda x: x + x)
    assert doubled.select(3).name == "whole"
    with ops.use_target("cpu", num_devices=4):
        assert doubled.select(3).name == "reference"


@pytest.mark.parametrize(("axes", "name"), [({"data", "tensor"}, "whole"), ({"data"}, "reference")])
def test_an_implementation_for_a_single_device_runs_where_all_axes_of_a_mesh_are_divided_by_hand(doubled, axes, name):
    doubled.implementation("whole", single_device=True)(lambda x: x + x)
    seen = []

    def step(x):
        seen.append(doubled.select(3).name)
        return x

    mesh = make_mesh((1, 1), ("data", "tensor"))
    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axes, check_vma=False)
    with ops.use_target("cpu", num_devices=4):
        jax.jit(step).lower(jnp.ones(3))
    assert set(seen) == {name}


def test_an_implementation_that_is_not_available_is_left_out(doubled):
    asked = []
    doubled.implementation("absent", accepts=lambda x: x < 10, available=lambda: bool(asked.append(1)))(lambda x: 0)
    assert doubled.select(30).name == "shifted"
    assert not asked  # a call that is not accepted need not load a library
    assert doubled.select(3).name == "reference"
    assert asked


def test_a_choice_can_be_restricted_to_a_trait(doubled):
    doubled.implementation("exact", traits={"exact"})(lambda x: 2 * x)
    doubled.implementation("quick", traits={"quick"})(lambda x: x + x)
    with ops.use_implementations(double_it="shifted"):
        assert doubled.restricted("exact").select(3).name == "exact"
        assert doubled.restricted().select(3).name == "quick"
    assert doubled.restricted("quick")(3) == 6
    with pytest.raises(InvalidParameterError, match=r"double_it has no implementation \(slow\) on cpu"):
        doubled.restricted("slow")(3)


def test_fused_operations_are_switched_off_together():
    x, weights = jnp.ones((300, 32)), [jnp.ones((16, 32))] * 2
    assert not ops.multi_linear.select(x, weights).is_reference
    with ops.use_unfused():
        assert ops.multi_linear.select(x, weights).is_reference
    fused = [name for name, op in ops.operations().items() if op.fused]
    assert fused == ["gelu_mlp", "multi_linear", "norm_rotary", "swiglu", "update_rows"]


def test_every_operation_has_an_example_and_the_choice_for_it_exists():
    for name, row in ops.chosen_implementations().items():
        chosen = [part.split(" (")[0] for part in row["runs"].split(", ")]
        assert set(chosen) | set(row["others"]) == set(ops.operations()[name].implementations)
        assert not set(chosen) & set(row["others"])


@pytest.mark.parametrize(
    ("choice", "named"), [({"nothing": "reference"}, "nothing"), ({"linear": "magic"}, "pad_to_two_rows")]
)
def test_unknown_names_are_refused_with_what_there_is(choice, named):
    with pytest.raises(InvalidParameterError, match=named), ops.use_implementations(**choice):
        pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("linear", "operation=implementation"),
        ("nothing=reference", "nothing"),
        ("conv2d=magic", "conv2d.*magic.*native"),
    ],
)
def test_a_wrong_environment_is_refused_by_the_first_operation(monkeypatch, value, named):
    monkeypatch.setenv("VERAX_IMPLEMENTATIONS", value)
    with pytest.raises(InvalidParameterError, match=f"VERAX_IMPLEMENTATIONS.*{named}"):
        ops.linear(jnp.ones((2, 2)), jnp.ones((3, 2)))


X = jnp.arange(6.0)


@pytest.fixture
def scaled():
    """An operation, and the calls that were traced."""
    traced = []

    def scale_it(x, factor=2, *, by=None):
        traced.append((x.shape, factor))
        return x * factor if by is None else x * by(factor)

    yield Operation(scale_it), traced
    del _REGISTRY["scale_it"]


def test_equal_calls_are_traced_once_and_are_one_function_of_the_program(scaled):
    op, traced = scaled
    program = jax.jit(lambda x: op(op(op(x))) + op(x[:2]).sum()).lower(X)
    assert traced == [((6,), 2), ((2,), 2)]
    assert program.as_text().count("@scale_it") == 2 + 4  # definitions and calls
    assert (program.compile()(X) == 8 * X + 2).all()


def test_calls_with_other_arguments_or_without_a_traced_array_are_not_shared(scaled):
    op, traced = scaled
    for _ in range(2):
        assert (op(X) == 2 * X).all()
        assert (jax.jit(lambda x: op(x, by=lambda factor: factor + 1))(X) == 3 * X).all()
    assert len(traced) == 4


def test_calls_are_traced_again_for_other_choices_and_after_a_registration(scaled, monkeypatch):
    op, _ = scaled

    @Operation
    def outer_it(x):
        return op(x)

    def run():
        return float(jax.jit(lambda x: outer_it(x))(X)[1])

    try:
        assert run() == 2
        with ops.use_implementations(scale_it=lambda x: x * 5):
            assert run() == 5
        op.implementation("other")(lambda x: x * 7)
        assert run() == 7
        monkeypatch.setenv("VERAX_IMPLEMENTATIONS", "scale_it=reference")
        assert run() == 2
    finally:
        del _REGISTRY["outer_it"]


def test_a_function_in_an_operations_place_may_see_values_of_the_program_around_it(scaled):
    op, _ = scaled

    def around(x):
        with ops.use_implementations(scale_it=lambda y: y * x.sum()):
            return op(x)

    for x in (X, 2 * X):
        assert (jax.jit(around)(x) == x * x.sum()).all()


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


PAGED = ones(3, 2, 4, 8), ones(3, 2, 4, 8), jnp.asarray([[1, 2]]), jnp.asarray([7])
CALLS = {
    "linear": (ones(40, 64), ones(48, 64)),
    "grouped_linear": (ones(40, 64), ones(1, 48, 64), jnp.zeros(40, jnp.int32)),
    "layer_norm": (ones(3, 64), ones(64), ones(64)),
    "conv2d": (ones(1, 5, 5, 3), ones(4, 3, 3, 3)),
    "paged_attention": (ones(3, 2, 8), *PAGED, jnp.asarray([0, 3])),
    "paged_decode_attention": (ones(1, 2, 8), *PAGED),
}
"""Calls whose implementations make arrays of their own."""

WITHOUT_NUMBERS = {
    "linear": (ones(40, 0), ones(48, 0)),
    "grouped_linear": (ones(40, 0), ones(1, 48, 0), jnp.zeros(40, jnp.int32)),
    "paged_attention": (ones(3, 2, 8), *PAGED[:2], jnp.zeros((0, 2), int), jnp.zeros(0, int), jnp.zeros(1, int)),
    "paged_decode_attention": (ones(0, 2, 8), *PAGED[:2], jnp.zeros((0, 2), int), jnp.zeros(0, int)),
}
"""Calls whose results are zeros, or of no sequence."""

BLOCKS = ops.BlockQuantizedWeight.from_blocks("Q8_0", np.zeros((48, 68), np.uint8))

OTHER_CALLS = {
    "multi_linear": (ones(40, 64), [ones(48, 64)]),
    "swiglu": (ones(40, 64), ones(48, 64), ones(48, 64)),
    "gelu_mlp": (ones(40, 64), ones(48, 64), ones(32, 48)),
    "rms_norm": (ones(3, 64), ones(64)),
    "attention": (ones(1, 5, 4, 8), ones(1, 5, 2, 8), ones(1, 5, 2, 8)),
    "apply_rotary": (ones(1, 5, 4, 8), ones(5, 4), ones(5, 4)),
    "norm_rotary": (ones(5, 4, 8), ones(5, 2, 8), ones(8), ones(8), ones(5, 4), ones(5, 4), 1e-6),
    "write_pages": (*PAGED[:2], ones(3, 2, 8), ones(3, 2, 8), jnp.asarray([1, 1, 2]), jnp.asarray([0, 1, 2])),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same_with_64_bits(name):
    operation, given = ops.operations()[name], CALLS[name]
    options = {"eps": 1e-6} if name == "layer_norm" else {}
    for implementation in operation.supporting(*given, **options):
        run = jax.jit(partial(implementation, **options))
        plain = run(*given)
        with jax.enable_x64(True):
            wide = run(*given)
        assert wide.dtype == plain.dtype == jnp.float32
        np.testing.assert_allclose(wide, plain, rtol=1e-6)


def taking(operation, given):
    """Implementations for this platform that take a call, faster there or not."""
    chosen = operation.implementations.values()
    return [one for one in chosen if one.runs_on(ops.target()) and one.available() and one.accepts(*given)]


@pytest.mark.parametrize("name", WITHOUT_NUMBERS)
def test_sums_of_nothing_are_zeros_in_every_implementation(name):
    given = WITHOUT_NUMBERS[name]
    for implementation in taking(ops.operations()[name], given):
        assert not np.asarray(implementation(*given)).any()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["paged_attention", "paged_decode_attention"])
def test_pages_and_lengths_may_be_small_integers_without_a_sign(name):
    rng = np.random.default_rng(0)
    cache, q = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 2, 4, 8), (3, 2, 8)))
    integers = [[[1, 2], [2, 0], [0, 0]], [7, 1, 0]] + [[0, 2, 3, 3]] * (name == "paged_attention")
    plain, small = ([jnp.asarray(x, dtype) for x in integers] for dtype in (jnp.int32, jnp.uint8))
    operation = ops.operations()[name]
    expected = operation.reference(q, cache, cache, *plain)
    for implementation in taking(operation, (q, cache, cache, *small)):
        np.testing.assert_allclose(implementation(q, cache, cache, *small), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["grouped_linear", "write_pages"])
def test_every_implementation_takes_arrays_of_numpy(name):
    given = (CALLS | OTHER_CALLS)[name]
    for implementation in taking(ops.operations()[name], given):
        jax.tree.map(np.testing.assert_array_equal, implementation(*map(np.asarray, given)), implementation(*given))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "changes", "options", "begins"),
    [
        ("linear", {0: ones(40, 32)}, {}, "weight: expected"),
        ("linear", {0: [1.0] * 64}, {}, "weight: expected"),
        ("linear", {}, {"bias": ones(1)}, r"bias: expected shape \[48\], got \[1\]"),
        ("linear", {0: ones(4, 32), 1: BLOCKS}, {}, "weight: expected"),
        ("multi_linear", {1: [ones(3, 64)] * 2}, {"biases": [None]}, "biases: expected one for each of 2"),
        ("multi_linear", {1: [ones(3, 64), ones(3, 4)]}, {}, r"weights\[1\]: expected"),
        ("swiglu", {1: ops.PackedWeight.from_weight(ones(32, 64))}, {}, "up: expected"),
        ("gelu_mlp", {2: ones(48, 4)}, {}, "down: expected"),
        ("rms_norm", {1: ones(1)}, {"eps": 1e-6}, "weight: expected"),
        ("layer_norm", {}, {"eps": 1e-6, "residual": ones(1, 64)}, "residual: expected"),
        ("conv2d", {}, {"bias": ones(1)}, "bias: expected"),
        ("attention", {0: ones(1, 5, 3, 8)}, {}, "q: expected a multiple of the 2 heads"),
        ("attention", {2: ones(1, 4, 2, 8)}, {}, "v: expected"),
        ("attention", {}, {"sinks": ones(2)}, "sinks: expected"),
        ("attention", {}, {"segments": jnp.zeros((2, 5), int)}, "segments: expected"),
        ("attention", {}, {"segments": ones(1, 5)}, "segments: expected an array of integers, got float32"),
        ("attention", {1: jnp.ones((1, 5, 2, 8), jnp.int8)}, {}, "k: expected floats, got int8"),
        ("attention", {}, {"window": 2.5}, "window: expected a whole number"),
        ("attention", {}, {"window": 2**31}, "window: expected a whole number"),
        ("attention", {}, {"soft_cap": float("nan")}, "soft_cap: expected"),
        ("grouped_linear", {0: ones(40, 32)}, {}, "weights: expected"),
        ("grouped_linear", {1: ones(48, 64)}, {}, "weights: expected"),
        ("grouped_linear", {1: ones(0, 48, 64)}, {}, "weights: expected"),
        ("grouped_linear", {2: jnp.zeros(40)}, {}, "groups: expected an array of integers"),
        ("grouped_linear", {2: jnp.zeros(3, jnp.int32)}, {}, "groups: expected a shape"),
        ("apply_rotary", {1: ones(5, 5)}, {}, "cos: expected at most 4"),
        ("apply_rotary", {2: ones(1, 4)}, {}, "sin: expected"),
        ("apply_rotary", {1: ones(4, 4), 2: ones(4, 4)}, {}, r"cos: expected angles of tokens \[1, 5\], got \[4\]"),
        ("norm_rotary", {1: ones(5, 2, 6)}, {}, r"k: expected shape \[5, 2, 8\]"),
        ("norm_rotary", {1: ones(1, 2, 8)}, {}, r"k: expected shape \[5, 2, 8\]"),
        ("norm_rotary", {3: ones(1)}, {}, "k_weight: expected"),
        ("norm_rotary", {4: ones(5, 5), 5: ones(5, 5)}, {}, "cos: expected at most 4"),
        ("paged_decode_attention", {3: jnp.asarray([1])}, {}, "page_table: expected"),
        ("paged_decode_attention", {4: jnp.asarray([7, 7])}, {}, "kv_lengths: expected"),
        ("paged_decode_attention", {}, {"sinks": ones(1)}, "sinks: expected"),
        ("paged_attention", {5: jnp.asarray([0, 1, 3])}, {}, "query_starts: expected"),
        ("paged_attention", {5: ones(2)}, {}, "query_starts: expected an array of integers"),
        ("write_pages", {2: ones(3, 1, 8)}, {}, "k: expected"),
        ("write_pages", {4: ones(3)}, {}, "pages: expected an array of integers"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name_whatever_implementation_would_run(name, changes, options, begins):
    given = list((CALLS | OTHER_CALLS)[name])
    for place, array in changes.items():
        given[place] = array
    with pytest.raises(InvalidParameterError, match=f"^{begins}"):
        ops.operations()[name](*given, **options)
