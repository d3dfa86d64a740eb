"""Two models count as equal only if every output is: each leaf by its path, of any dtype, finite on both sides."""

import dataclasses
import re
import sys
import warnings
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
outputs = pytest.importorskip("transformers.modeling_outputs")

from verax import cli
from verax.compare import Case, Side, compare, compare_case, tap

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
Pair = namedtuple("Pair", "logits ids")


@dataclasses.dataclass
class Output:
    logits: object
    ids: object


DIFFERENT = {
    "the second member of a tuple": (lambda x: (x, x + 1), lambda x: (x, x + 2), r"1 of 2 layers.*\(output\)\[1\]"),
    "the second value of a dict": (lambda x: {"b": x, "a": x}, lambda x: {"b": x, "a": x + 1}, r"\(output\)\[a\]"),
    "a nested value": (lambda x: (x, [x, {"y": x}]), lambda x: (x, [x, {"y": -x}]), r"\(output\)\[1\]\[1\]\[y\]"),
    "a missing output": (lambda x: (x, x + 1), lambda x: (x,), r"missing outputs.*\(output\)\[1\]"),
    "an extra output": (lambda x: x, lambda x: (x, x), r"extra outputs.*\(output\)\[1\]"),
    "None in place of an array": (lambda x: (x, x), lambda x: (x, None), r"missing outputs.*\(output\)\[1\]"),
    "another key": (lambda x: {"a": x, "b": x}, lambda x: {"a": x, "c": x}, r"extra.*\[c\].*missing.*\[b\]"),
    "no output": (
        lambda x: tap("x", x).ndim > 9 or None,
        lambda x: (tap("x", x), {})[1],
        "outputs could not be compared",
    ),
    "NaN of ours": (lambda x: (x, x), lambda x: (x, x * jnp.nan), r"\[1\]: ours has 32 NaN of 32 numbers"),
    "NaN of both": (lambda x: x * torch.nan, lambda x: x * jnp.nan, "ours has 32 NaN.*the reference has 32 NaN"),
    "one NaN in padding": (lambda x: x, lambda x: x.at[3, 7].set(jnp.nan), r"ours has 1 NaN.*\(nan\) at \[3, 7\]"),
    "infinities of both": (lambda x: x / 0, lambda x: x / 0, "ours has 32 infinities"),
    "an overflow of float16": (lambda x: (x.half() * 6e4) ** 2, lambda x: (x * 6e4) ** 2, "the reference has 32 inf"),
    "integers off by one": (lambda x: (x, x.argmax(-1)), lambda x: (x, x.argmax(-1).at[2].add(1)), "1 of 4 differ"),
    "large integers": (lambda x: (x.shape[0] + 2**24, x), lambda x: (x.shape[0] + 2**24 + 1, x), "1 of 1 diff"),
    "booleans": (lambda x: (x, x > 0), lambda x: (x, x >= -9), r"\(output\)\[1\] \(bool\): \d+ of 32 differ"),
    "integers for floats": (lambda x: (x, x.round()), lambda x: (x, x.round().astype(int)), "dtype is int32"),
    "floats for booleans": (lambda x: (x, x > 0), lambda x: (x, (x > 0) * 1.0), "the reference's bool"),
    "complex numbers": (lambda x: x * (1 + 1j), lambda x: x * (1 + 2j), "layers have a relative L2 error"),
    "real for complex numbers": (lambda x: x * (1 + 0j), lambda x: x, "float32, the reference's complex64"),
    "texts": (lambda x: (x, "yes"), lambda x: (x, "no"), "1 of 1 differ, the first at .*: no, the reference yes"),
    "objects": (lambda x: (x, object()), lambda x: (x, object()), r"not an array.*without="),
    "a single number for three": (lambda x: x[0, :3], lambda x: x[0, :1], r"\[1\] is not an arrangement of \[3\]"),
    "empty arrays of other shapes": (lambda x: (x, x[:0]), lambda x: (x, x[:, :0]), r"\[4, 0\] is not an arrangement"),
    "a field of a dataclass": (lambda x: Output(x, x > 0), lambda x: Output(x, x < 0), r"\(output\)\[ids\] \(bool\)"),
    "an output of transformers": (
        lambda x: outputs.BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=x[0]),
        lambda x: (x, x[1]),
        r"1 of 2 layers.*\(output\)\[1\]",
    ),
    "a value of a tap": (lambda x: tap("a", (x, x))[0], lambda x: tap("a", (x, -x))[0], r"1 of 3 layers.*a\[1\]"),
    "a missing value of a tap": (lambda x: tap("a", (x, x))[0], lambda x: tap("a", x), r"missing outputs.*a\[1\]"),
}


@pytest.mark.parametrize(("reference", "ours", "reason"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_of_any_output_counts(reference, ours, reason):
    result = compare(reference, ours, X)
    assert not result.passed
    assert re.search(reason, " ".join(result.failures)), result.failures


SAME = {
    "a tuple and a tuple": (lambda x: (x, x.argmax(-1)), lambda x: (x, x.argmax(-1)), 2),
    "a dict in another order": (lambda x: {"b": x, "a": x + 1}, lambda x: {"a": x + 1, "b": x}, 2),
    "None and nothing": (lambda x: (x, None), lambda x: x, 1),
    "zeros of two signs": (lambda x: x * 0.0, lambda x: x * -0.0, 1),
    "two empty arrays": (lambda x: (x, x[:0]), lambda x: (x, x[:0]), 2),
    "complex numbers": (lambda x: x * (1 + 1j), lambda x: x * (1 + 1j), 1),
    "texts and numbers": (lambda x: (x, "yes", 3, True, None), lambda x: (x, "yes", 3, True, None), 4),
    "an output of transformers and a tuple": (
        lambda x: outputs.BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=x[0]),
        lambda x: (x, x[0]),
        2,
    ),
    "a named tuple and a dataclass": (lambda x: Pair(x, x > 0), lambda x: Output(x, x > 0), 2),
}


@pytest.mark.parametrize(("reference", "ours", "count"), SAME.values(), ids=SAME)
def test_outputs_that_are_the_same_are_equal_and_counted(reference, ours, count):
    result = compare(reference, ours, X)
    assert result.passed, result.failures
    assert result.as_dict()["compared"] == {"outputs": count, "layers": 0}


class Theirs(torch.nn.Module):
    def __init__(self, broken=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.broken = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3), broken

    def forward(self, x):
        mask = torch.full((8,), -torch.inf).masked_fill(torch.ones(8) > 0, 0.0)  # harmless
        y = self.body(x + mask)
        return self.head(y.abs().add(1).log() if not self.broken else y.log()), y.argmax(-1)


class Log(nnx.Module):
    def __call__(self, x):
        return jnp.log(x)


class Ours(nnx.Module):
    def __init__(self, of, broken=False):
        make = lambda layer: nnx.Linear(layer.in_features, layer.out_features, rngs=nnx.Rngs(0))
        self.body, self.head, self.log, self.broken = make(of.body), make(of.head), Log(), broken
        for mine, other in ((self.body, of.body), (self.head, of.head)):
            mine.kernel[...] = jnp.asarray(other.weight.detach().numpy().T)
            mine.bias[...] = jnp.asarray(other.bias.detach().numpy())

    def __call__(self, x):
        y = self.body(jnp.where(x > 1e9, -jnp.inf, x))
        return self.head(self.log(y if self.broken else jnp.abs(y) + 1)), jnp.argmax(y, -1)


def test_the_first_nan_of_each_side_is_traced_to_its_layer_and_operation():
    fine = Theirs()
    assert compare(fine, Ours(fine), X, backward=True, fused=True).passed
    result = compare(fine, Ours(fine, broken=True), X)
    assert not result.passed
    assert set(result.origins) == {"ours"}
    assert result.origins["ours"] == ("log", "the operation log in log")
    result = compare(Theirs(broken=True), Ours(fine), X)
    assert set(result.origins) == {"reference"}
    assert result.origins["reference"] == ("head", "the operation log")
    ours = Ours(fine)
    ours.body.bias[...] = ours.body.bias[...].at[1].set(jnp.nan)
    assert compare(fine, ours, X).origins["ours"] == ("body", "the weight body.bias")


def test_a_model_of_torchscript_has_its_output_compared():
    fine = Theirs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated it
        scripted = torch.jit.script(fine)
    result = compare(scripted, Ours(fine), X, backward=True)
    assert result.passed
    assert result.as_dict()["compared"] == {"outputs": 2, "layers": 0}


def test_an_error_in_one_output_of_a_layer_is_located_and_injected():
    class Reference(torch.nn.Module):
        def forward(self, x):
            return x * 2, {"ids": x.argmax(-1), "w": x + 1}

    class Port(nnx.Module):
        def __init__(self, off):
            self.off = off

        def __call__(self, x):
            return x * 2, {"ids": jnp.argmax(x, -1), "w": x + 1 + self.off}

    class Twice(nnx.Module):
        def __init__(self, off):
            self.a, self.b = Port(off), Port(0)

        def __call__(self, x):
            y, more = self.a(x)
            z, last = self.b(y + more["w"])
            return z, more["ids"], last["w"]

    class TwiceReference(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Reference(), Reference()

        forward = Twice.__call__

    assert compare(TwiceReference(), Twice(0), X, inject=True, fused=True).passed
    result = compare(TwiceReference(), Twice(0.1), X, inject=True, fused=True)
    assert result.first.name == "a[1][w]"
    assert [row.name for row in result.faults] == ["a[1][w]"]
    assert [row.name for row in result.fused if row.errors.l2 > 1e-4] == ["(output)[0]", "(output)[2]"]


def test_an_overflow_is_traced_to_the_operation_within_a_scan():
    def ours(x):
        return tap("x", jax.lax.scan(lambda carry, row: (carry, jnp.exp(row * 100)), 0, x)[1])

    result = compare(lambda x: tap("x", x), ours, X)
    assert result.origins["ours"] == ("x", "the operation exp")
    branching = compare(lambda x: x, lambda x: jnp.log(-abs(x)) if x[0, 0] > -9 else x, X)
    assert branching.origins["ours"].operation.startswith("an operation that could not be traced: Attempted boolean")
    bits = compare(lambda x: tap("x", (x * 6e4).half()), lambda x: tap("x", x), X).origins["reference"]
    assert bits == ("x", "the operation half")


def test_a_second_run_says_whether_a_side_is_deterministic():
    dropout = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    result = compare(dropout, lambda x: x[:, :8], X)
    assert result.runs == {"reference": "1", "ours": None}
    assert result.as_dict()["deterministic"] == {"reference": False, "ours": True}
    assert compare(dropout, lambda x: x, X, repeat=False).runs == {}


def test_outputs_of_one_side_can_be_left_out_by_name():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    expected = attention(*[torch.from_numpy(X)[None]] * 3)[0].detach().numpy()
    theirs = Side(attention, (X[None],) * 3, {"need_weights": True}, without=(r"^\(output\)\[1\]$",))
    result = compare(theirs, Side(lambda x: x, (expected,)))
    assert result.passed, result.failures
    assert result.left_out == ["(output)[1]"]


def test_at_a_lower_precision_every_output_is_judged():
    def side(model):
        return lambda dtype: Side(model(dtype), (X,))

    class Low(torch.nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.dtype = getattr(torch, dtype)

        def forward(self, x):
            return x.to(self.dtype), (x.to(self.dtype) * 1.5) ** 2, x.argmax(-1)

    def low(wrong=0, ids=0):
        return lambda dtype: lambda x: (x.astype(dtype), ((x.astype(dtype) * 1.5) ** 2) + wrong, x.argmax(-1) + ids)

    for ours, passes in ((low(), True), (low(wrong=1), False), (low(ids=1), False)):
        result = compare_case(Case("low", side(Low), side(ours)), dtype="bfloat16")
        assert result.passed == passes, result.failures


@pytest.mark.parametrize(("ours", "status"), [("x + 1", 0), ("x + 2", 1), ("x * float('nan')", 1)])
def test_the_command_ends_with_1_if_any_output_differs(ours, status, tmp_path, monkeypatch, capsys):
    (tmp_path / "pair.py").write_text(
        f"import numpy as np\nreference = lambda x: {{'a': x, 'b': x + 1}}\nours = lambda x: {{'a': x, 'b': {ours}}}\n"
        "inputs = (np.ones((2, 3), np.float32),)\n"
    )
    monkeypatch.setattr(sys, "argv", ["verax", "compare", "own", str(tmp_path / "pair.py"), "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0) == status
    shown = capsys.readouterr().out
    assert "\n(output)[b] " in shown
    assert "2 arrays compared, 2 outputs and 0 of layers" in shown
    assert ("first NaN or infinity of ours: in layer (output)[b], from the operation mul" in shown) == ("nan" in ours)
    assert "a second run of ours is the same bit for bit" in shown
