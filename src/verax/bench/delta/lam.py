"""LAM's cases of `verax bench delta`: the published rule by itself, the layer around it, the sentence encoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax import checkpoint, ops
from verax.bench.delta.baselines import Baselines, jax_side, torch_side
from verax.bench.harness import Case, Side, count_products
from verax.models.lam import EnhancedHierarchicalDeltaNet, LamConfig, LamModel
from verax.nn import pack_linear_weights
from verax.ops.hierarchical import HierarchicalInputs, Perceptron, ResonanceFlux, orthogonality_loss

__all__ = ["encoder_cases", "layer_case", "rule_case"]

LAM = LamConfig(vocab_size=30522, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
"""The published sizes: the report's 12 heads are 32 wide each."""

SENTENCES = {"Short": (32, 32), "Long": (8, 256)}
"""Sentences and tokens of each, in a batch."""

VARIANTS: dict[str, Literal["hierarchical", "local"]] = {"B": "hierarchical", "C": "local"}
"""The published variants, two states from chunk to chunk and what the published package computes at inference, by their
names in `LamConfig.rule`."""

TOLERANCE = {"cpu": 1e-4, "gpu": 1e-3}
"""Largest relative error of float32 against float64, by device."""

Shape = tuple[int, int, int]
"""Batch, chunks, tokens of a chunk."""

Theirs = Callable[[ModuleType], Sequence[Any]]
"""Function of LAM's PyTorch module, plain or through Cython; it returns a function and its arguments."""


def rule_case(name: str, shape: Shape, baselines: Baselines) -> Case:
    """From queries, keys, values, decays and gates to outputs and states; each side in the layout of its own layer."""
    B, n, C = shape
    with baselines.torch.inference_mode():
        inputs = _layer(baselines, baselines.reference, C).rule_inputs(_hidden(baselines, B, n * C))[:-1]

    def theirs(library: ModuleType) -> Sequence[Any]:
        def run(*inputs: Any) -> Any:
            out, states = library.hierarchical_delta_rule(*inputs, chunk_size=C)
            return out.transpose(1, 2), states

        return run, *inputs, _layer(baselines, library, C).resonance_flux

    q, k, v, beta, decays, gates = jax.tree.map(lambda x: _array(x.transpose(1, 2)), inputs)
    arrays = q, k, v, beta[..., 0], decays, tuple(gate[..., 0] for gate in gates)
    H, K = q.shape[2:]
    rule = HierarchicalInputs(*arrays, _flux(_layer(baselines, baselines.reference, C).resonance_flux))
    operation, ours = ops.operations()["hierarchical_rule"], {}
    run = lambda *inputs: ops.hierarchical_delta_rule(*inputs, chunk_size=C)
    for impl in (impl.name for impl in reversed(operation.supporting(rule, chunk_size=C))):
        with ops.use_implementations(hierarchical_rule=impl):
            ours[impl] = _side(impl, run, *rule)
    moved = _nbytes(arrays) + q.nbytes + 2 * 4 * B * H * K * K
    chosen = operation.select(rule, chunk_size=C).name
    return _case("rule", name, _sizes(shape), moved, chosen, ours, theirs, baselines)


def layer_case(name: str, shape: Shape, baselines: Baselines) -> Case:
    """The layer, with its projections, convolutions, gates and norm: what the report's other side ran."""
    B, n, C = shape
    x = _hidden(baselines, B, n * C)

    def theirs(library: ModuleType) -> Sequence[Any]:
        return lambda layer, x: layer(x)[::3], _layer(baselines, library, C), x

    config = replace(LAM, rule=VARIANTS["B"], chunk_size=C)
    make = lambda: EnhancedHierarchicalDeltaNet(config, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(_loaded(make, _layer(baselines, baselines.reference, C)))

    def run(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, states = nnx.merge(graph, weights)(x)
        return y, orthogonality_loss(states)

    impl = _chosen_implementation("B")
    ours = {impl: _side(impl, run, weights, _array(x))}
    return _case("layer", name, _sizes(shape), _nbytes(weights) + 2 * x.nbytes, impl, ours, theirs, baselines)


def encoder_cases(baselines: Baselines) -> Iterator[Case]:
    """The sentence encoder, from token numbers to vectors of length one, in both variants."""
    for variant in VARIANTS:
        for name, shape in SENTENCES.items():
            yield _encoder_case(f"{name}, variant {variant}", variant, *shape, baselines)


def _encoder_case(name: str, variant: str, B: int, T: int, baselines: Baselines) -> Case:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, LAM.vocab_size, (B, T))
    lengths = rng.integers(T // 2, T, (B,), endpoint=True)
    mask = (np.arange(T) < lengths[:, None]).astype(np.int64)

    def theirs(library: ModuleType) -> Sequence[Any]:
        inputs = (baselines.torch.from_numpy(x).to(baselines.device) for x in (tokens, mask))
        return lambda encoder, *inputs: (encoder(*inputs),), _encoder(baselines, library, variant), *inputs

    config, reference = replace(LAM, rule=VARIANTS[variant]), _encoder(baselines, baselines.reference, variant)
    model = _loaded(lambda: LamModel(config, rngs=nnx.Rngs(0)), reference)
    pack_linear_weights(model)  # as `verax.Encoder` does
    graph, weights = nnx.split(model)

    def run(weights: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = nnx.merge(graph, weights)(tokens, jnp.sum(mask, axis=1))
        total = jnp.sum(x * mask[..., None], axis=1)
        return total / jnp.linalg.norm(total, axis=-1, keepdims=True)

    impl = _chosen_implementation(variant)
    ours = {impl: _side(impl, run, weights, jnp.asarray(tokens), jnp.asarray(mask))}
    # Only these tokens' rows of the embeddings.
    moved = _nbytes(weights) - 4 * LAM.hidden_size * (LAM.vocab_size - tokens.size)
    return _case("encoder", name, {"sentences": B, "tokens": T}, moved, impl, ours, theirs, baselines)


def _side(impl: str, function: Callable[..., Any], *arguments: Any) -> Side:
    """Our side with an implementation of the published rule, whose operations are counted.

    Every implementation but the reference factors the products of whole chunks (docs/lam.md).
    """
    shown = impl if impl == "reference" else "factored"
    flops, _ = count_products(function, *arguments, hierarchical_rule=shown, local_rule=shown)
    return jax_side(function, *arguments, flops=flops)


def _chosen_implementation(variant: str) -> str:
    """The implementation of our rule that runs inside the layer."""
    operation = ops.operations()[f"{VARIANTS[variant]}_rule"]
    (example,) = operation.examples  # it has LAM's heads and dtype
    return operation.select(*example.args, **example.kwargs).name


def _case(
    section: str,
    name: str,
    sizes: Mapping[str, int],
    moved: int,
    chosen: str,
    ours: Mapping[str, Side],
    theirs: Theirs,
    baselines: Baselines,
) -> Case:
    """Our implementations and every way to run the PyTorch one; the float64 result is the PyTorch one's."""
    torch, skipped = baselines.torch, {}
    sides = {f"verax {impl}": side for impl, side in ours.items()}
    if "torch" in baselines.names:
        sides["torch"] = torch_side(torch, *theirs(baselines.reference))
    if baselines.cython is not None:
        sides["torch, Cython"] = torch_side(torch, *theirs(baselines.cython))
    if "torch.compile" in baselines.names:
        function, *inputs = theirs(baselines.reference)
        try:
            compiled = torch.compile(function, dynamic=False)
            sides["torch.compile"] = torch_side(
                torch, compiled, *inputs, flops=sides["torch"].flops if "torch" in sides else 0, compiled=True
            )
        except Exception as error:  # whatever goes wrong inside its compiler
            skipped["torch.compile"] = str(error).strip().partition("\n")[0]
    function, *inputs = theirs(baselines.reference)
    exact = torch_side(torch, function, *jax.tree.map(_double, inputs), flops=0)
    expected = [x.cpu().numpy() for x in exact.call()]
    tolerance = TOLERANCE["cpu" if baselines.device == "cpu" else "gpu"]
    return Case(section, name, moved, f"verax {chosen}", sides, sizes, expected, tolerance, skipped)


def _double(x: Any) -> Any:
    """Modules and floating-point tensors in float64."""
    return x.double() if not hasattr(x, "dtype") or x.dtype.is_floating_point else x


def _layer(baselines: Baselines, library: ModuleType, chunk_size: int) -> Any:
    """A layer of the published sizes, with the same weights every time."""
    baselines.torch.manual_seed(0)
    layer = library.EnhancedHierarchicalDeltaNet(LAM.hidden_size, LAM.num_attention_heads, chunk_size=chunk_size)
    return layer.eval().to(baselines.device)


def _encoder(baselines: Baselines, library: ModuleType, variant: str) -> Any:
    baselines.torch.manual_seed(0)
    sizes = {"d_model": LAM.hidden_size, "num_heads": LAM.num_attention_heads, "num_layers": LAM.num_hidden_layers}
    sizes |= {"vocab_size": LAM.vocab_size, "intermediate_size": LAM.intermediate_size}
    encoder = library.LamSentenceEncoder(**sizes, variant=variant)
    return encoder.eval().to(baselines.device)


def _loaded(abstract: Callable[[], Any], module: Any) -> Any:
    """Our module with the weights of a PyTorch one, through a checkpoint."""
    weights = {name: x.cpu().numpy() for name, x in module.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        saved = checkpoint.Checkpoint.open(checkpoint.save(weights, folder, config={}))
        return checkpoint.load_module(nnx.eval_shape(abstract), saved, dtype=None)


def _flux(module: Any) -> ResonanceFlux:
    networks = module.flux_net, module.token_flux_proj
    chunk, token = (Perceptron(*map(_array, network.parameters())) for network in networks)
    return ResonanceFlux(_array(module.W_bilinear), _array(module.temp), chunk, token)


def _array(tensor: Any) -> jax.Array:
    return jnp.asarray(tensor.detach().cpu().numpy())


def _hidden(baselines: Baselines, batch: int, length: int) -> Any:
    noise = np.random.default_rng(0).standard_normal((batch, length, LAM.hidden_size), np.float32)
    return baselines.torch.from_numpy(noise).to(baselines.device)


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _sizes(shape: Shape) -> dict[str, int]:
    batch, chunks, chunk = shape
    return {"batch": batch, "heads": LAM.num_attention_heads, "chunks": chunks, "chunk": chunk}
