"""The delta rules' step on states in slots: the reference, and the kernels for GPUs and TPUs, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.delta import RULES, extremes, inputs, options, oracle
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.delta import delta_slot_recurrence
from verax.ops.delta._recurrence import step_by
from verax.ops.gpu import delta as gpu_kernel
from verax.ops.tpu import delta as tpu_kernel

CHOICES = {
    "reference": "reference",
    "triton": step_by(partial(gpu_kernel.delta_step, interpret=True)),
    "pallas": step_by(
        partial(tpu_kernel.delta_step, interpret=pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True))
    ),
}

SLOTS = 5


@pytest.fixture(params=CHOICES)
def choice(request):
    return request.param


def run(choice, rule, x, slots, **settings):
    """`rule` by one implementation; outputs and the states of all slots."""
    with ops.use_implementations(delta_slot_recurrence=CHOICES[choice]):
        return getattr(ops, rule)(**x, **settings, **options(rule), slots=slots, output_final_state=True)


def in_slots(slot, fresh):
    return ops.StateSlots(jnp.asarray(slot, jnp.int32), jnp.asarray(fresh))


def problem(rule, dtype=jnp.float32, slots=SLOTS, **sizes):
    """Arguments of one token and their values in float64, states of all slots included."""
    x = inputs(rule, T=1, **sizes)
    shape = oracle(rule, x)[1].shape[1:]
    x["initial_state"] = np.random.default_rng(9).standard_normal((slots, *shape)).astype(np.float32)
    given = {name: jnp.asarray(a, jnp.float32 if name == "initial_state" else dtype) for name, a in x.items()}
    return given, {name: np.asarray(a, np.float64) for name, a in given.items()}


def expected(rule, x, slots, **settings):
    """Outputs of all rows, and the states of all slots: token by token in float64."""
    x, (slot, fresh) = dict(x), (np.asarray(a) for a in slots)
    states = x.pop("initial_state").copy()
    here = slot < len(states)
    before = np.where((fresh | ~here)[:, None, None, None], 0.0, states[np.minimum(slot, len(states) - 1)])
    out, after = oracle(rule, x, before, **settings)
    states[slot[here]] = after[here]
    return out, states


def check(computed, exact, tolerance=2e-6):
    for mine, theirs in zip(computed, exact, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, theirs, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_its_equation(choice, rule):
    given, exact = problem(rule)
    slots = in_slots([3, 1], [False, True])
    check(run(choice, rule, given, slots), expected(rule, exact, slots))


# Columns and keys that fill no program, several programs a state, one column.
@pytest.mark.parametrize(("K", "V"), [(60, 100), (128, 33), (3, 1), (256, 8)])
def test_sizes_that_fill_no_program(choice, K, V):
    given, exact = problem("kda", B=3, H=1, HV=3, K=K, V=V)
    slots = in_slots([0, 4, 2], [False] * 3)
    check(run(choice, "kda", given, slots), expected("kda", exact, slots))


def test_normalisation_scale_and_bfloat16(choice):
    given, exact = problem("gated_delta_rule", jnp.bfloat16)
    given["k"], exact["k"] = given["k"].at[0, 0, 1].set(0.0), exact["k"].copy()
    exact["k"][0, 0, 1] = 0.0
    for name in "qk":
        exact[name] = exact[name] / np.sqrt((exact[name] ** 2).sum(-1, keepdims=True) + 1e-6)
    slots = in_slots([2, 0], [False, False])
    computed = run(choice, "gated_delta_rule", given, slots, scale=0.3, use_qk_l2norm=True)
    check(computed, expected("gated_delta_rule", exact, slots, scale=0.3))


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "comba"])
def test_keys_and_gates_that_break_exponentials(choice, rule):
    x, kinds = extremes(rule, 1, 20, 12)
    x["g"][0] = -np.inf
    x["initial_state"] = np.random.default_rng(9).standard_normal((len(kinds), 2, 20, 12)).astype(np.float32)
    slots = in_slots(np.arange(len(kinds)), [False] * len(kinds))
    given = {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}
    check(run(choice, rule, given, slots), expected(rule, x, slots))


# Slot 5 of five is none. Before all sequences, between them, after them, and without any.
@pytest.mark.parametrize("slot", [[5, 5, 3, 0], [3, 5, 9, 0], [0, 3, 5, 5], [5, 5, 5, 5]])
def test_rows_of_padding_change_no_state_and_have_finite_outputs(choice, slot):
    given, exact = problem("gated_delta_rule", B=4)
    slots = in_slots(slot, [False, True, False, False])
    out, states = run(choice, "gated_delta_rule", given, slots)
    exact_out, exact_states = expected("gated_delta_rule", exact, slots)
    here = np.asarray(slot) < SLOTS
    check((out[here], states), (exact_out[here], exact_states)) if here.any() else check([states], [exact_states])
    assert np.isfinite(out).all()


def test_nan_in_a_slot_that_no_row_reads_stays_there_bit_by_bit(choice):
    given, _ = problem("gated_delta_rule", B=3)
    slots = in_slots([3, 1, 5], [False, True, False])
    clean = run(choice, "gated_delta_rule", given, slots)
    unread = np.asarray([0, 1, 2, 4])  # 1 starts from zeros
    before = np.array(given["initial_state"])
    before[unread] = np.nan
    out, states = run(choice, "gated_delta_rule", given | {"initial_state": jnp.asarray(before)}, slots)
    np.testing.assert_array_equal(out, clean[0])
    np.testing.assert_array_equal(states[np.asarray([1, 3])], clean[1][np.asarray([1, 3])])
    untouched = np.asarray([0, 2, 4])
    np.testing.assert_array_equal(np.asarray(states)[untouched].view(np.int32), before[untouched].view(np.int32))


def test_packed_prompts_continue_from_their_slots():
    given, exact = problem("gated_delta_rule", B=1)
    x = inputs("gated_delta_rule", B=1, T=5)
    slots, cu_seqlens = in_slots([4, 5, 0], [False, False, True]), jnp.asarray([0, 2, 2, 5])
    packed = {name: jnp.asarray(a, jnp.float32) for name, a in x.items()} | {"initial_state": given["initial_state"]}
    out, states = run("reference", "gated_delta_rule", packed, slots, cu_seqlens=cu_seqlens)
    wanted = exact["initial_state"].copy()
    for slot, begin, end, before in ((4, 0, 2, wanted[4:].copy()), (0, 2, 5, None)):
        part = {name: a[:, begin:end] for name, a in x.items()}
        exact_out, after = oracle("gated_delta_rule", part, before)
        np.testing.assert_allclose(out[:, begin:end], exact_out, atol=1e-5)
        wanted[slot] = after[0]
    np.testing.assert_allclose(states, wanted, atol=1e-5)


@pytest.mark.parametrize("kernel", ["triton", "pallas"])
def test_gradients_equal_the_references(kernel):
    given, _ = problem("gated_delta_rule")
    slots = in_slots([3, 1], [False, True])

    def gradients(choice):
        call = partial(run, choice, "gated_delta_rule", slots=slots, use_qk_l2norm=True)
        return jax.jit(jax.grad(lambda x: sum(jnp.sum(jnp.sin(a)) for a in call(x))))(given)

    mine, theirs = gradients(kernel), gradients("reference")
    for name, exact in theirs.items():
        np.testing.assert_allclose(mine[name], exact, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("padding", [-1, SLOTS])
def test_a_row_of_padding_leaves_the_states_of_all_slots_whatever_number_marks_it(padding):
    given, _ = problem("gated_delta_rule")
    slots = in_slots([padding, 1], [False, False])
    _, states = run("reference", "gated_delta_rule", given, slots)
    changed = np.any(np.asarray(states) != given["initial_state"], axis=(1, 2, 3))
    np.testing.assert_array_equal(changed, np.arange(SLOTS) == 1)
    x, before = jnp.ones((2, 1, 6)), jnp.zeros((SLOTS, 3, 6))
    _, after = ops.short_convolution(x, jnp.ones((6, 1, 4)), initial_state=before, slots=slots)
    np.testing.assert_array_equal(np.any(np.asarray(after) != 0, axis=(1, 2)), np.arange(SLOTS) == 1)


def test_slots_need_the_states_that_lie_in_them():
    given, _ = problem("gated_delta_rule")
    slots = in_slots([3, 1], [False, True])
    with pytest.raises(InvalidParameterError, match="slots: expected initial_state"):
        run("reference", "gated_delta_rule", {k: a for k, a in given.items() if k != "initial_state"}, slots)
    with pytest.raises(InvalidParameterError, match=r"slots: expected initial_state.* mode auto"):
        run("reference", "gated_delta_rule", given, slots, mode="step")
    with pytest.raises(InvalidParameterError, match=r"slots: expected shape \[2\], got \[3\]"):
        run("reference", "gated_delta_rule", given, in_slots([3, 1, 0], [False] * 3))
    x, before = jnp.ones((2, 1, 6)), jnp.zeros((SLOTS, 3, 6))
    with pytest.raises(InvalidParameterError, match=r"slots\.fresh: expected shape \[2\], got \[1\]"):
        ops.short_convolution(x, jnp.ones((6, 1, 4)), initial_state=before, slots=in_slots([3, 1], [True]))
    with pytest.raises(InvalidParameterError, match="slots: expected none"):
        ops.delta.sequence_parallel(ops.gated_delta_rule, "sequence")(given["q"], given["k"], given["v"], slots=slots)


def chosen(B=2, T=1, H=2, HV=4, K=128, V=128, dtype="float32", state="float32", slots=8, **settings):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    key, gate = array(B, T, H, K), array(B, T, HV)
    x = ops.delta.DeltaInputs(key, key, key, array(B, T, HV, V), gate, gate)
    where = ops.StateSlots(*(jax.ShapeDtypeStruct((B,), kind) for kind in ("int32", "bool")))
    return delta_slot_recurrence.select(x, jax.ShapeDtypeStruct((slots, HV, K, V), state), where, **settings).name


@pytest.mark.parametrize(
    ("kernel", "platform", "kind", "taken", "refused"),
    [
        ("triton", "gpu", "NVIDIA H100 80GB HBM3", [{"K": 60, "V": 33}, {"slots": 1 << 15}], [{"K": 320}]),
        ("pallas", "tpu", "TPU v5 lite", [{"K": 256, "HV": 16}], [{"K": 64}, {"V": 96}, {"HV": 50}]),
    ],
)
def test_a_kernel_runs_where_it_is_named_and_takes_the_call(kernel, platform, kind, taken, refused):
    with ops.use_target(platform, kind):
        assert chosen() == "reference"
        with ops.use_implementations(delta_slot_recurrence=kernel):
            taken = [*taken, {}, {"T": 4}, {"dtype": "bfloat16"}, {"scale": 0.3}]
            assert [chosen(**change) for change in taken] == [kernel] * len(taken)
            packed = {"cu_seqlens": jax.ShapeDtypeStruct((3,), "int32")}
            refused = [*refused, {"state": "float64"}, {"scale": jnp.ones(())}, {"B": 0}, {"T": 5}, packed]
            assert [chosen(**change) for change in refused] == ["reference"] * len(refused)
    with ops.use_implementations(delta_slot_recurrence=kernel):
        assert chosen() == "reference"
