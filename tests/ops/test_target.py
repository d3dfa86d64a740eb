"""Programs traced on this machine for devices that are not attached to it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from verax import ops
from verax.errors import InvalidParameterError
from verax.models.video_model import ATTENTION
from verax.models.wan.layers import Block, CrossKeys
from verax.nn import Linear
from verax.ops import _target
from verax.ops._target import DeviceMemory

H100 = "gpu", "NVIDIA H100 80GB HBM3"
TPU = "tpu", "TPU v5 lite"


def test_without_a_choice_the_target_is_the_local_device():
    here = ops.target()
    assert (here.platform, here.num_devices) == (jax.default_backend(), jax.device_count())
    assert here.device_kind == jax.devices()[0].device_kind
    assert here.attached
    assert here is ops.target()  # dispatch reads it for every operation
    assert here.memory


def test_a_chosen_target_has_the_given_memory_and_devices():
    with ops.use_target(*TPU, memory=16 << 30, num_devices=8):
        chosen = ops.target()
    assert (chosen.platform, chosen.device_kind, chosen.num_devices) == (*TPU, 8)
    assert chosen.memory == (16 << 30, 16 << 30)
    assert not chosen.attached
    with ops.use_target(*TPU):
        assert ops.target().memory is None
    assert ops.target().attached


def test_the_device_with_the_least_free_memory_counts(monkeypatch):
    memory = {0: DeviceMemory(9, 10), 1: DeviceMemory(5, 10), 2: DeviceMemory(7, 20), 3: None}
    local = ops.target()
    monkeypatch.setattr(jax, "local_devices", lambda: list(memory))
    monkeypatch.setattr(_target, "_device_memory", memory.get)
    assert [local.least_memory(count) for count in (1, 2, 3, 4)] == [memory[0], memory[1], memory[1], None]
    assert local.memory == memory[0]


def test_a_target_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.target().platform = "gpu"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA A100-SXM4-40GB", "8.0"),
        ("NVIDIA L4", "8.9"),
        ("NVIDIA A10G", "8.6"),
        ("Tesla T4", "7.5"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("AMD Instinct MI300X", ""),
    ],
)
def test_the_compute_capability_follows_from_the_devices_name(kind, capability):
    with ops.use_target("gpu", kind):
        assert ops.target().compute_capability == capability


def test_a_platform_of_another_name_is_refused_with_jaxs():
    with (
        pytest.raises(InvalidParameterError, match="expected one of cpu, gpu, tpu, got 'cuda'; 'gpu' covers it"),
        ops.use_target("cuda"),
    ):
        pass


@pytest.mark.parametrize("target", [H100, TPU, ("cpu", "", None, 4)])
def test_kernels_of_a_single_cpu_are_chosen_for_no_other_target(target):
    with ops.use_target(*target):
        for op in ops.operations().values():
            for example in op.examples:
                chosen = op.select(*example.args, **example.kwargs)
                assert not chosen.name.startswith("native"), op.name


@pytest.mark.parametrize(("target", "expected"), [(H100, "cudnn"), (TPU, "reference")])
def test_attention_in_bfloat16_is_cudnns_on_a_gpu_only(target, expected):
    q = jax.ShapeDtypeStruct((1, 64, 4, 128), jnp.bfloat16)
    with ops.use_target(*target):
        assert ops.attention.select(q, q, q).name == expected


@pytest.mark.parametrize("target", [H100, TPU])
def test_a_linear_layer_and_a_block_are_traced_for_another_target(target):
    D, heads, F = 64, 4, 96
    with ops.use_target(*target):
        layer = nnx.eval_shape(lambda: Linear(D, F, bias=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        assert "ffi_call" not in str(trace(layer, jax.ShapeDtypeStruct((2, D), jnp.float32)))
        block = nnx.eval_shape(lambda: Block(D, F, heads, image=False, eps=1e-6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        x = jax.ShapeDtypeStruct((1, 2, 3, 4, D), jnp.float32)
        rotary = (jax.ShapeDtypeStruct((24, D // heads), jnp.float32),) * 2
        keys = jax.ShapeDtypeStruct((1, 5, heads, D // heads), jnp.bfloat16)
        e0 = jax.ShapeDtypeStruct((1, 1, 6, D), jnp.float32)

        def call(block, x, e0, k, v, rotary):
            attend = ATTENTION["auto"]
            return block(x, e0, CrossKeys(k, v, None, None), rotary, attend, attend)

        jaxpr = trace(block, x, e0, keys, keys, rotary, call=call)
    assert [(a.shape, a.dtype) for a in jaxpr.out_avals] == [(x.shape, jnp.float32)]
    assert "ffi_call" not in str(jaxpr)


def trace(module, *inputs, call=lambda module, *inputs: module(*inputs)):
    graph, state = nnx.split(module)
    return jax.make_jaxpr(lambda state, *inputs: call(nnx.merge(graph, state), *inputs))(state, *inputs)
