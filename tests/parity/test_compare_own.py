"""A user's own pair of small models: modules, and functions with taps."""

import copy
import dataclasses
import io
import json
import re
import sys
from collections import namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import typer
from flax import nnx
from rich.console import Console

torch = pytest.importorskip("torch")

from verax import cli
from verax.compare import Case, Side, compare, compare_case, show, tap
from verax.compare.cases import text as cases
from verax.compare.outputs import compare_logits
from verax.compare.trace import OUTPUT
from verax.errors import InvalidParameterError

SIZE = 8
X = np.random.default_rng(0).standard_normal((4, SIZE)).astype(np.float32)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.ModuleList(torch.nn.Linear(SIZE, SIZE) for _ in range(3))
        self.norm = torch.nn.LayerNorm(SIZE)

    def forward(self, x):
        for layer in self.net:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


class JaxNet(nnx.Module):
    def __init__(self, theirs, dtype=jnp.float32):
        self.layers = nnx.List([nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0), dtype=dtype) for _ in theirs.net])
        self.norm = nnx.LayerNorm(SIZE, epsilon=1e-5, rngs=nnx.Rngs(0))
        for layer, other in zip(self.layers, theirs.net, strict=True):
            layer.kernel[...] = jnp.asarray(other.weight.detach().float().numpy().T)
            layer.bias[...] = jnp.asarray(other.bias.detach().float().numpy())

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.norm(x)


NAMES = {"layers.{i}": "net.{i}"}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    return TorchNet()


def test_equal_modules_are_equal_forwards_and_backwards(theirs):
    result = compare(theirs, JaxNet(theirs), X, names=NAMES, inject=True, backward=True)
    assert result.passed, result.failures
    assert result.first is None
    assert [row.reference for row in result.rows] == ["net.0", "net.1", "net.2", "norm", "(output)"]
    assert {(row.name, row.reference) for row in result.gradients} >= {
        ("layers.1.kernel", "net.1.weight"),
        ("norm.scale", "norm.weight"),
    }
    assert len(result.gradients) == 8
    # A square kernel is transposed all the same.
    assert next(row for row in result.gradients if row.name == "layers.1.kernel").layout.endswith("axes (1, 0)")


def test_an_error_is_located_in_the_run_and_in_the_gradients(theirs):
    ours = JaxNet(theirs)
    ours.layers[1].bias[...] += 0.01
    result = compare(theirs, ours, X, names=NAMES, inject=True, backward=True)
    assert not result.passed
    assert result.first.name == "layers.1"
    assert [row.name for row in result.faults] == ["layers.1"]
    assert any("gradients have" in failure for failure in result.failures)


def test_gradients_of_one_side_only_are_named(theirs):
    frozen = copy.deepcopy(theirs)
    frozen.norm.register_parameter("weight", None)
    result = compare(frozen, JaxNet(theirs), X, names=NAMES, backward=True)
    assert result.gradients_only == (["norm.scale"], [])
    assert not result.passed


def test_a_model_keeps_its_gradients_and_what_is_frozen(theirs):
    model = copy.deepcopy(theirs)
    model.net[0].requires_grad_(False)
    model.norm.weight.grad = torch.ones(SIZE)
    assert compare(model, JaxNet(theirs), X, names=NAMES, backward=True).passed
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["net.0.weight", "net.0.bias"]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["norm.weight"]


Batch = namedtuple("Batch", "x y")


@pytest.mark.parametrize(
    ("argument", "combine"),
    [
        (jnp.asarray(X), lambda x: x * 2),
        (torch.from_numpy(X).bfloat16(), lambda x: x * 2),
        (X.astype(ml_dtypes.bfloat16), lambda x: x * 2),
        (X.astype(ml_dtypes.float8_e4m3fn), lambda x: x),
        ([X, {"y": X + 1}], lambda parts: parts[0] - 2 * parts[1]["y"]),
        (Batch(X, X + 1), lambda batch: batch.x - 2 * batch.y),
    ],
)
def test_arrays_of_any_library_and_structures_of_them_are_arguments(argument, combine):
    assert compare(combine, lambda x: combine(jax.tree.map(jnp.asarray, x)), argument).passed


def test_integers_that_jax_would_take_modulo_their_range_are_refused():
    with pytest.raises(InvalidParameterError, match="do not fit into JAX's int32"):
        compare(lambda x: x, lambda x: x, np.array([5, 2**40]))


def test_sides_without_arguments_take_the_given_ones_and_others_are_refused(theirs):
    result = compare(Side(theirs, without=("norm",)), JaxNet(theirs), X, names=NAMES)
    assert result.left_out == ["norm"]
    assert result.passed, result.failures
    with pytest.raises(InvalidParameterError, match="args: both sides have arguments"):
        compare(Side(theirs, (X,)), Side(JaxNet(theirs), (X,)), X, names=NAMES)


@pytest.mark.parametrize("exchange", [False, True])
def test_what_is_not_a_model_of_its_side_is_refused(theirs, exchange):
    if exchange:
        with pytest.raises(InvalidParameterError, match=r"reference: .* PyTorch.* got JaxNet"):
            compare(JaxNet(theirs), theirs, X)
    with pytest.raises(InvalidParameterError, match=r"ours: .* JAX"):
        compare(theirs, theirs if exchange else 3, X)


@pytest.mark.parametrize("names", ["net", "", ("layers", "net"), 3])
def test_names_that_are_not_a_table_are_refused(theirs, names):
    with pytest.raises(InvalidParameterError, match="names: expected a dict"):
        compare(theirs, JaxNet(theirs), X, names=names)
    assert compare(theirs, JaxNet(theirs), X, names=[NAMES], guess=False).passed


def test_entries_of_names_that_match_nothing_are_reported(theirs):
    names = {**NAMES, "layer.{i}": "net.{i}", "norm": "nrom", "norm.scale": "norm.weight"}
    console = Console(file=io.StringIO(), width=200)
    for backward, unused in (
        (False, ["'layer.{i}': 'net.{i}'", "'norm': 'nrom'", "'norm.scale': 'norm.weight'"]),
        (True, ["'layer.{i}': 'net.{i}'", "'norm': 'nrom'"]),
    ):
        result = compare(theirs, JaxNet(theirs), X, names=names, backward=backward, repeat=False)
        assert result.passed, result.failures
        assert result.as_dict()["unused"] == result.alignment.unused == unused
    show(result, console)
    assert "match nothing: 'layer.{i}': 'net.{i}', 'norm': 'nrom'\n" in console.file.getvalue()
    assert compare(theirs, JaxNet(theirs), X, names=NAMES, repeat=False).alignment.unused == []


class TiedTorch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = torch.nn.Embedding(20, SIZE), torch.nn.Linear(SIZE, 20, bias=False)
        self.head.weight = self.wte.weight
        self.order = torch.nn.Parameter(torch.arange(20).flip(0), requires_grad=False)

    def forward(self, ids):
        return self.head(self.wte(self.order[ids]))


class Tied(nnx.Module):
    def __init__(self, theirs):
        self.wte = nnx.Embed(20, SIZE, rngs=nnx.Rngs(0))
        self.wte.embedding[...] = jnp.asarray(theirs.wte.weight.detach().numpy())
        self.head = TiedHead(self.wte.embedding)
        self.order = nnx.Param(jnp.arange(20)[::-1])

    def __call__(self, ids):
        return self.head(self.wte(self.order[...][ids]))


class TiedHead(nnx.Module):
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x @ self.weight[...].T


def test_gradients_of_tied_weights_have_either_name_and_integers_have_none():
    theirs = TiedTorch()
    result = compare(theirs, Tied(theirs), np.arange(6).reshape(2, 3), backward=True)
    assert result.passed, result.failures
    assert [row.name for row in result.gradients] == ["head.weight"]


def test_gradients_of_a_call_without_gradients_are_refused(theirs):
    call = torch.no_grad()(lambda model, x: model(x))
    with pytest.raises(InvalidParameterError, match="no_grad"):
        compare(Side(theirs, (X,), call=call), Side(JaxNet(theirs), (X,)), names=NAMES, backward=True)


class TorchCounter(torch.nn.Module):
    """Has a batch norm, and adds the number of its calls."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(SIZE, momentum=0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.norm(x) + self.calls


class Counter(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(SIZE, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.norm(x) + self.calls[...]


def test_each_run_of_a_model_with_a_state_begins_with_its_first_state():
    theirs, ours = TorchCounter(), Counter()
    result = compare(theirs, ours, X, inject=True, backward=True)
    assert result.passed, result.failures
    assert not result.faults
    assert set(result.runs.values()) == {None}
    assert [int(x) for x in (theirs.calls, theirs.norm.num_batches_tracked, ours.calls[...])] == [0, 0, 0]
    assert not ours.norm.mean[...].any()


def test_layers_are_found_inside_of_nnx_transformations(theirs):
    jitted = Side(JaxNet(theirs), (X,), call=nnx.jit(lambda model, x: model(x)))
    result = compare(Side(theirs, (X,)), jitted, names=NAMES, guess=False)
    assert [row.name for row in result.rows] == ["layers.0", "layers.1", "layers.2", "norm", OUTPUT]
    assert result.passed
    assert set(vars(jitted.model.norm)) == set(vars(JaxNet(theirs).norm))


class Stacked(nnx.Module):
    """`TorchNet` without its norm, with one module for all layers."""

    def __init__(self, theirs):
        self.layers = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
        self.layers.kernel.set_value(jnp.stack([jnp.asarray(layer.weight.detach().numpy().T) for layer in theirs.net]))
        self.layers.bias.set_value(jnp.stack([jnp.asarray(layer.bias.detach().numpy()) for layer in theirs.net]))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + jnp.tanh(layer(x))

        return run(x, self.layers)


def test_stacked_layers_are_calls_of_one_layer(theirs):
    def unnormed(model, x):
        for layer in model.net:
            x = x + torch.tanh(layer(x))
        return x

    result = compare(Side(theirs, (X,), call=unnormed), Side(Stacked(theirs), (X,)))
    assert [str(pair) for pair in result.guessed] == ["layers = net.0", "layers#2 = net.1", "layers#3 = net.2"]
    assert result.passed, result.failures


@dataclasses.dataclass
class Result:
    states: object


def test_injection_reaches_the_fields_of_a_dataclass(theirs):
    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Wrapped(theirs.net[0]), theirs.net[1]

        def forward(self, x):
            return self.second(self.first(x).states)

    class Wrapped(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return Result(self.layer(x))

    class Ours(nnx.Module):
        def __init__(self):
            net = JaxNet(theirs)
            self.first, self.second = OursWrapped(net.layers[0]), net.layers[1]

        def __call__(self, x):
            return self.second(self.first(x).states)

    class OursWrapped(nnx.Module):
        def __init__(self, layer):
            self.layer = layer

        def __call__(self, x):
            return Result(self.layer(x) * 1.5)

    result = compare(Theirs(), Ours(), X, inject=True)
    assert [row.name for row in result.faults] == ["first[states]"]


@pytest.mark.parametrize(("slope", "passes"), [(1e-12, True), (0.1, False)])
def test_a_gradient_of_zero_is_measured_against_the_others(slope, passes):
    """The reference's is exactly zero, ours is rounding, or more."""

    class Reference(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = (torch.nn.Parameter(torch.full([SIZE], x)) for x in (2.0, 0.0))

        def forward(self, x):
            return x * self.weight + 0 * self.bias

    class Ours(nnx.Module):
        def __init__(self):
            self.weight, self.bias = (nnx.Param(jnp.full(SIZE, x)) for x in (2.0, 0.0))

        def __call__(self, x):
            return x * self.weight + slope * self.bias

    assert compare(Reference(), Ours(), X, backward=True).passed == passes


def test_without_names_layers_and_their_gradients_are_matched_by_shape_and_order(theirs):
    result = compare(theirs, JaxNet(theirs), X, backward=True)
    assert [str(pair) for pair in result.guessed] == [f"layers.{i} = net.{i}" for i in range(3)]
    assert result.as_dict()["guessed"] == ["layers.0 = net.0", "layers.1 = net.1", "layers.2 = net.2"]
    assert result.passed, result.failures
    assert ("layers.2.kernel", "net.2.weight") in {(row.name, row.reference) for row in result.gradients}
    assert compare(theirs, JaxNet(theirs), X, guess=False).alignment.reference_only == ["net.0", "net.1", "net.2"]


def test_functions_are_compared_by_their_taps(theirs):
    def reference(x):
        return torch.cos(tap("half", x / 2))

    assert compare(reference, lambda x: jnp.cos(tap("half", x / 2)), X).passed
    result = compare(reference, lambda x: jnp.cos(tap("half", x / 2 + 0.01)), X, inject=True)
    assert result.first.name == "half"
    assert [row.name for row in result.faults] == ["half"]
    with pytest.raises(InvalidParameterError, match="backward"):
        compare(reference, lambda x: jnp.cos(x / 2), X, backward=True)


@pytest.mark.parametrize("careless", [False, True])
def test_at_a_lower_precision_float32_is_the_arbiter(theirs, careless):
    def reference(dtype):
        model = copy.deepcopy(theirs).to(getattr(torch, dtype))
        return Side(model, (X,), call=lambda model, x: model(x.to(model.norm.weight.dtype)))

    def ours(dtype):
        model = JaxNet(copy.deepcopy(theirs).bfloat16(), dtype=jnp.bfloat16)
        if careless:
            model.layers[2].bias[...] += 0.05
        return Side(model, (X,))

    case = Case("net", reference, ours, NAMES)
    result = compare_case(case, dtype="bfloat16")
    assert result.dtypes[("bfloat16", "bfloat16")] == 3
    assert result.passed != careless
    assert (result.output.ratio > 1.1) == careless
    assert (result.first.name if result.first else None) == ("layers.2" if careless else None)
    with pytest.raises(InvalidParameterError, match="max_rel: gradients in bfloat16 need a bound"):
        compare_case(case, dtype="bfloat16", backward=True)
    bounded = compare_case(case, dtype="bfloat16", backward=True, max_rel=0.03)
    assert bounded.passed != careless


PAIR = """
import numpy as np, torch
from tests.parity.test_compare_own import JaxNet, TorchNet

torch.manual_seed(0)
reference = TorchNet()
ours = JaxNet(reference)
inputs = (np.ones((2, 8), np.float32),)
"""


@pytest.fixture
def own(tmp_path, monkeypatch, capsys):
    """`verax compare own` on a file; exit status and both outputs."""

    def run(*arguments, text=PAIR, answer=None):
        (tmp_path / "pair.py").write_text(text)
        monkeypatch.setattr(sys, "argv", ["verax", "compare", "own", str(tmp_path / "pair.py"), *map(str, arguments)])
        monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: answer is not None, raising=False)
        monkeypatch.setattr(typer, "confirm", lambda question, **options: answer)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


FUNCTIONS = """
import numpy as np
reference = ours = lambda x: x * 2
inputs = {inputs}
"""


@pytest.mark.parametrize("inputs", ["np.ones((3, 2), np.float32)", "3.0", "[np.ones(2)]", "dict(x=np.ones(2))"])
def test_one_input_needs_no_tuple(own, inputs):
    assert own(text=FUNCTIONS.format(inputs=inputs))[0] == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("def reference(x): raise RuntimeError('of its own')", "RuntimeError: of its own"),
        ("import nosuchmodule", "nosuchmodule"),
        ("open('/nosuchfile')", "error: .*/nosuchfile"),
        ("import sys; sys.exit(0)", "pair.py: it ended the program"),
        ("ours = 3", "ours: expected"),
    ],
)
def test_a_file_that_fails_is_not_a_difference(own, more, message):
    status, _, err = own(text=FUNCTIONS.format(inputs="np.ones(2)") + more)
    assert status == 2
    assert re.search(message, err)


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(own, tmp_path):
    (tmp_path / "file").touch()
    status, out, err = own("--output", tmp_path / "file" / "report", text="raise SystemExit")
    assert (status, out) == (2, "")
    assert f"{tmp_path / 'file'} is a file; a folder is written" in err


@pytest.mark.parametrize(
    ("arguments", "answer", "status"), [(["--yes"], None, 0), ([], True, 0), ([], False, 2), ([], None, 2)]
)
def test_guessed_layers_are_shown_and_taken_when_a_person_says_so(own, arguments, answer, status):
    ended, out, err = own(*arguments, answer=answer)
    assert ended == status
    assert "layers.1 = net.1" in err
    assert ("--yes" in err) == (arguments == [] and answer is None)
    assert ("matched by shape and order only, to be confirmed: layers.0 = net.0" in out) == (status == 0)


def test_a_table_of_names_leaves_nothing_to_ask(own):
    status, out, err = own("--json", text=PAIR + 'names = {"layers.{i}": "net.{i}"}\n')
    assert (status, err) == (0, "")
    assert json.loads(out)["guessed"] == []


def test_given_arrays_are_arguments_of_both_calls(own, tmp_path):
    np.savez(tmp_path / "x.npz", x=X[:1])
    status, out, _ = own("--inputs", tmp_path / "x.npz", "--yes", "--json", text=PAIR.replace("inputs =", "unused ="))
    assert status == 0
    assert json.loads(out)["passed"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [("ours = 1", [], "defines no reference"), (PAIR, ["--dtype", "bfloat16"], "`case`")],
)
def test_a_file_that_does_not_define_enough_is_an_error(own, text, arguments, message):
    status, _, err = own(*arguments, text=text)
    assert status == 2
    assert message in err


def test_the_command_reports_writes_and_sets_the_exit_status(theirs, monkeypatch, capsys, tmp_path):
    sides = (lambda dtype: Side(theirs, (X,))), (lambda dtype: Side(JaxNet(theirs), (X,)))
    case = Case("net", *sides, NAMES, judge=compare_logits)
    monkeypatch.setattr(cases, "text_case", lambda *arguments, **options: case)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["verax", "compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr().out

    status, out = run("text", "--inject", "--output", str(tmp_path))
    assert status == 0
    assert out.rstrip().endswith("equal")
    assert "the likeliest token is the same at 100.0% of positions" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".html", ".md", ".json"}
    status, out = run("text", "--max-rel", "1e-12", "--json")
    assert status == 1
    found = json.loads(out)
    assert found["passed"] is False
    assert found["output"]["positions"] == len(X)
