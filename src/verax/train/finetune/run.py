"""Fine-tuning: a checkpoint and a file of examples become an adapter, or a changed checkpoint."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float

from verax import checkpoint, ops
from verax.errors import CheckpointError, UnsupportedModelError
from verax.loading import model_shapes
from verax.models import CausalLM, causal_lm
from verax.text.step.program import AbstractModel
from verax.train.finetune.job import Job
from verax.train.finetune.lora import TrainedAdapter
from verax.train.loss import rounded_gradient_linear, weighted_next_token_loss
from verax.train.settings import FinetuneSettings, LoraSettings

__all__ = ["batch_loss", "recompute_layers", "train_full", "train_lora"]


def train_lora(
    model: str | Path | None,
    data: Path,
    output: Path,
    settings: FinetuneSettings,
    lora: LoraSettings = LoraSettings(),  # noqa: B008  (it is frozen)
    *,
    validation_data: Path | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train a LoRA adapter, and write it as PEFT does to `output / "adapter"`.

    `output` also receives the training state, the log and the loss plot, see `loop.train`.

    Args:
        model: folder, hub id or GGUF file of the base; the built-in model if None. Its weights are not changed.
        data: JSONL file of examples, see `data.read_examples`.
        output: folder, created if missing.
        settings: data, optimiser and devices.
        lora: size and place of the adapter.
        validation_data: another such file, on which the loss is measured.
        resume: continue from the state in `output`.
        stop_at: last step of this run, if it is to end before the schedule does. No adapter is written then.
        show_progress: show progress bars on a terminal.

    Returns:
        `folder`, `steps`, `examples`, `cut`, `left_out`, `parameters` (trained numbers), `loss` of the last batch, and
        with validation data `validation_loss_before` and `validation_loss`, in nats per trained token.

    Raises:
        InvalidParameterError: for a wrong line of a file, a setting out of range, or an unknown target.
        CheckpointError: for quantised weights without `dequantize`, or as `loop.train`.
        UnsupportedModelError: for a model that verax does not have, or that adapters cannot change.
    """
    run = Job.open(model, data, validation_data, settings, output, resume, stop_at, show_progress)
    base = run.load(settings.dtype)
    abstract = AbstractModel.from_module(base)
    weights = tuple(jax.tree.leaves(nnx.state(base)))
    adapter = TrainedAdapter.of(abstract, lora)

    def loss(weights: tuple[Array, ...], matrices: Any, batch: dict[str, Array]) -> Float[Array, ""]:
        model = adapter.model(weights, matrices, batch["tokens"].size)
        return batch_loss(recompute_layers(model) if settings.gradient_checkpointing else model, batch)

    trained = run.train(Partial(loss, weights), adapter.initial(settings.seed), {"lora": asdict(lora)})
    folder = None
    if run.is_whole:
        folder = adapter.save(trained, output / "adapter", run.opened, str(model or run.opened.folder))
    return run.report(folder, adapter.num_parameters)


def train_full(
    model: str | Path | None,
    data: Path,
    output: Path,
    settings: FinetuneSettings,
    *,
    validation_data: Path | None = None,
    resume: bool = False,
    stop_at: int | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train all weights of a model, and write it as a checkpoint to `output / "model"`.

    Arguments, results and errors as in `train_lora`. A GGUF file cannot be written back.
    """
    run = Job.open(model, data, validation_data, settings, output, resume, stop_at, show_progress)
    if run.opened.metadata:
        raise CheckpointError(f"{run.opened.folder}: a GGUF file cannot be written back; train the model's folder")
    module: Any = run.load("float32")
    graph, params = nnx.split(module)
    # Most weights, but not all, are computed with in the dtype of the run.
    shapes: Any = model_shapes(*causal_lm(run.opened.config), dtype=settings.dtype)
    used = nnx.state(shapes)

    def rounded(params: Any) -> Any:
        return nnx.merge(graph, jax.tree.map(lambda weight, shape: weight.astype(shape.dtype), params, used))

    def loss(params: Any, batch: dict[str, Array]) -> Float[Array, ""]:
        model = rounded(params)
        return batch_loss(recompute_layers(model) if settings.gradient_checkpointing else model, batch)

    trained = run.train(loss, params, {})
    count, folder = sum(leaf.size for leaf in jax.tree.leaves(trained)), None
    if run.is_whole:
        config = {**run.opened.config, "torch_dtype": settings.dtype}
        for name in ("quantization_config", "dtype"):  # the latter is what newer versions of transformers call it
            config.pop(name, None)
        folder = checkpoint.save(
            rounded(trained),
            output / "model",
            config=config,
            generation_config=dict(run.opened.generation_config) or None,
            tokenizer_from=run.opened.folder,
        )
    return run.report(folder, count)


def batch_loss(model: CausalLM, batch: dict[str, Array]) -> Float[Array, ""]:
    """Weighted next-token loss of a batch, in nats. No causal layer sees the padding after a row's end."""
    with _rounded_gradients(model):
        hidden = model(batch["tokens"])
        return weighted_next_token_loss(model.logits, hidden, batch["targets"], batch["weights"])


def _rounded_gradients(model: CausalLM) -> AbstractContextManager[None]:
    """Products of the backward pass in bfloat16, for a model of that dtype."""
    return ops.use_implementations(linear=rounded_gradient_linear) if model.dtype == jnp.bfloat16 else nullcontext()


class _Recomputed(nnx.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        return jax.checkpoint(lambda x: self.layer(x, *args, **options))(x)


def recompute_layers(model: CausalLM) -> CausalLM:
    """Let the layers of a model, which is being traced, be computed again; return the model.

    Raises:
        UnsupportedModelError: if the model has no list of its layers.
    """
    depth = model.config.num_hidden_layers
    module: Any = model
    stacks = [
        (owner, name, layers)
        for _, owner in nnx.iter_modules(module)
        for name, layers in vars(owner).items()
        if isinstance(layers, nnx.List) and len(layers) == depth
    ]
    if not stacks:
        raise UnsupportedModelError(
            f"gradient_checkpointing: {type(model).__name__} has no nnx.List of its {depth} layers; leave it out"
        )
    for owner, name, layers in stacks:
        setattr(owner, name, nnx.List([_Recomputed(layer) for layer in layers]))
    return model
