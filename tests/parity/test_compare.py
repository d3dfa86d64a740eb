"""A planted error is found at the layer where it was planted, in a language model against transformers; an error of a
fused operation, in the output of the compiled program."""

import jax.numpy as jnp
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from verax import ops
from verax.compare import align, compare_case, trace_jax, trace_torch
from verax.compare.cases.text import text_case
from verax.compare.comparison import Comparison, measure_rows
from verax.compare.run import _injection

LAYER = "model.layers.1"


class Text:
    """The reference's trace, and runs of our model against it."""

    def __init__(self, folder):
        case = text_case("random", folder, tokens=9)
        side = case.reference("float32")
        self.reference = trace_torch(side)
        self.ours = case.ours("float32")

    def run(self):
        ours = trace_jax(self.ours)
        alignment = align(ours, self.reference)
        own = trace_jax(self.ours, replace=_injection(alignment.pairs, self.reference))
        return Comparison("text", measure_rows(alignment.pairs, ours, self.reference, own=own), alignment)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text(tmp_path_factory.mktemp("random"))


def found(result):
    """Layers that an error is traced to: by errors that grow, and by each layer's own."""
    assert not result.passed
    return result.first.name, [row.name for row in result.faults]


def test_without_an_error_nothing_stands_out(text):
    result = text.run()
    assert result.passed
    assert result.first is None
    assert result.faults == []
    assert {f"{LAYER}.self_attn.rotary_q", f"{LAYER}.self_attn.o_proj.input", f"{LAYER}.mlp.down_proj", LAYER} <= {
        row.name for row in result.rows
    }


def test_a_wrong_epsilon_is_located(text, monkeypatch):
    monkeypatch.setattr(text.ours.model.model.layers[1].post_attention_layernorm, "eps", 1e-3)
    assert found(text.run()) == (f"{LAYER}.post_attention_layernorm", [f"{LAYER}.post_attention_layernorm"])


def test_a_swapped_rotary_half_is_located(text, monkeypatch):
    monkeypatch.setattr(ops, "apply_rotary", lambda x, cos, sin, plain=ops.apply_rotary: plain(x, cos, -sin))
    first, faults = found(text.run())
    assert first == "model.layers.0.self_attn.rotary_q"
    assert faults == [f"model.layers.{i}.self_attn.rotary_{x}" for i in range(3) for x in "qk"]


def test_a_bfloat16_cast_in_one_norm_is_located(text, monkeypatch):
    layer = text.ours.model.model.layers[1]
    norm = layer.input_layernorm

    class Rounded(type(norm)):
        def __call__(self, x):
            return super().__call__(x).astype(jnp.bfloat16).astype(jnp.float32)

    rounded = Rounded(norm.weight.shape[0], eps=norm.eps, dtype=jnp.float32)
    rounded.weight[...] = norm.weight[...]
    monkeypatch.setattr(layer, "input_layernorm", rounded)
    assert found(text.run()) == (f"{LAYER}.input_layernorm", [f"{LAYER}.input_layernorm"])


def test_a_transposed_weight_is_located(text):
    weight = text.ours.model.model.layers[1].self_attn.o_proj.weight
    weight[...] = weight[...].T
    try:
        result = text.run()
    finally:
        weight[...] = weight[...].T
    # It ends the attention, whose own result it therefore is.
    assert found(result) == (f"{LAYER}.self_attn.o_proj", [f"{LAYER}.self_attn.o_proj"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_program_is_compared_with_the_layers(tmp_path, dtype):
    result = compare_case(text_case("random", tmp_path, tokens=9), dtype=dtype, fused=True)
    assert result.passed, result.failures
    (fused,) = result.fused
    assert fused.name == "(output)"
    assert 0 < fused.errors.l2 < 2 * result.output.errors.l2
    assert (fused.ratio is None) == (dtype == "float32")


def test_a_wrong_fused_operation_is_found_only_in_the_compiled_program(tmp_path, monkeypatch):
    def wrong(x, weights, biases=None, dtypes=None):
        return tuple(ops.linear(x, weight) * 1.01 for weight in weights)

    monkeypatch.setitem(ops.multi_linear.implementations, "wrong", ops.Implementation("wrong", wrong))
    case = text_case("random", tmp_path, tokens=9)
    assert compare_case(case).passed
    result = compare_case(case, fused=True)
    assert result.first is None
    assert [failure.split(" of ")[0] for failure in result.failures] == [
        "(output) as one compiled program has a relative L2 error"
    ]
    assert result.as_dict()["fused"][0]["errors"]["l2"] > 1e-4
