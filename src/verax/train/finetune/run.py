"""Fine-tuning: a checkpoint and a file of examples become an adapter, or a changed checkpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float

from verax import builtin, checkpoint, ops, progress
from verax._compat import compiler_options
from verax.checkpoint import Checkpoint
from verax.checkpoint.checkpoint import config_of_floats, fingerprint
from verax.checkpoint.load import stacked_keys
from verax.checkpoint.lora import save_adapter
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.loading import DEQUANTIZE, load_causal_lm, model_shapes
from verax.models import CausalLM, causal_lm, language_config
from verax.text.features.lora import AdaptedLayers
from verax.text.step.program import AbstractModel
from verax.text.tokens.tokenizer import Tokenizer
from verax.train.finetune.data import read_examples, shuffled_batches, validation_batches
from verax.train.loop import Loss, RunStates, Schedule, batch_sharding, fully_sharded, read_log, state_sharding, train
from verax.train.loss import rounded_gradient_linear, weighted_next_token_loss
from verax.train.settings import ALL_LINEAR, FinetuneSettings, LoraSettings

DEFAULT_MAX_LENGTH = 1024
"""Tokens of the longest example, for models that read at least as many."""


class Job:
    """A run that is ready to begin."""

    def __init__(
        self,
        model: str | Path | None,
        data: Path,
        validation_data: Path | None,
        settings: FinetuneSettings,
        output: Path,
        resume: bool,
        show_progress: bool,
    ):
        # Before any weight is read.
        if output.exists() and not output.is_dir():
            raise InvalidParameterError(f"output: {output} is a file; expected a folder")
        self.opened = opened = Checkpoint.open(builtin.text_model() if model is None else model)
        self.settings, self.output = settings, output
        self.resume, self.show_progress = resume, show_progress
        if opened.packed and not settings.dequantize:
            raise CheckpointError(
                f"{opened.folder}: its weights are quantised, and training needs floats; train the unquantised model, "
                "or dequantize these (--dequantize)"
            )
        sizes = causal_lm(opened.config)[1]
        if language_config(opened.config).get("output_router_logits"):
            raise UnsupportedModelError(
                f"{opened.folder}: output_router_logits is not supported: in transformers it adds a loss of the "
                "experts' balance; set it to false in config.json to train without that loss"
            )
        longest = sizes.max_position_embeddings
        self.max_length = max_length = settings.max_length or min(longest, DEFAULT_MAX_LENGTH)
        if max_length > longest:
            raise InvalidParameterError(f"max_length: the model reads {longest} tokens at most, got {max_length}")
        self.started = datetime.now()
        if resume:  # templates that write the date would make other examples each day
            with RunStates(output, {}) as states:
                self.started = datetime.fromisoformat(states.saved_settings().get("started", str(self.started)))
        tokenizer = Tokenizer.from_checkpoint(opened)
        read = partial(read_examples, tokenizer=tokenizer, max_length=max_length, now=self.started)
        self.examples = read(data)
        self.validation = None if validation_data is None else read(validation_data)
        largest = max(
            int(tokens.max()) for read in (self.examples, self.validation) if read for tokens, _ in read.items
        )
        if largest >= sizes.vocab_size:
            raise CheckpointError(
                f"{opened.folder}: its tokenizer gives {tokenizer.token(largest)!r} the number {largest}, and the "
                f"model has {sizes.vocab_size} tokens; resize its embeddings, or use the tokenizer of its training"
            )

    @property
    def schedule(self) -> Schedule:
        """Schedule of the whole run."""
        return self.settings.schedule(len(self.examples))

    def load(self, dtype: str) -> CausalLM:
        """The model with its weights in this dtype."""
        quantization = DEQUANTIZE if self.settings.dequantize else None
        with progress.bar("loading", enabled=self.show_progress, count=False) as report:
            return load_causal_lm(
                self.opened,
                max_model_len=self.max_length,
                dtype=dtype,
                quantization=quantization,
                progress=report,
            )

    def train(self, loss: Loss, params: Any, settings: dict[str, Any]) -> Any:
        """The trained parameters, of a loss by parameters and batch."""
        own, schedule = self.settings, self.schedule
        mesh = fully_sharded(own.devices)
        rows, parts = own.batch_size, own.gradient_accumulation
        compute: Any = loss if isinstance(loss, Partial) else Partial(loss)
        if mesh is not None:
            compute = jax.device_put(compute, state_sharding(mesh, compute))
        evaluate: Any = jax.jit(
            lambda compute, params, batch: compute(params, batch),
            compiler_options=compiler_options(ops.target().platform),
        )

        def validate(params: Any) -> float:
            assert self.validation is not None
            total = 0.0
            for batch in validation_batches(self.validation.items, rows=rows, max_length=self.max_length):
                given: Any = batch if mesh is None else jax.device_put(batch, batch_sharding(mesh, batch))
                total += float(evaluate(compute, params, given))
            return total

        data = hashlib.sha256()
        for tokens, trained in self.examples.items:
            data.update(b"%d " % len(tokens) + tokens.tobytes() + trained.tobytes())
        contents = {"base": fingerprint(self.opened), "data": data.hexdigest()[:16], "started": str(self.started)}
        same = ("batch_size", "gradient_accumulation", "seed", "dtype")
        return train(
            compute,
            params,
            lambda start: shuffled_batches(
                self.examples.items, seed=own.seed, rows=rows, parts=parts, max_length=self.max_length, start=start
            ),
            schedule,
            self.output,
            settings={**settings, **{name: getattr(own, name) for name in same}, **contents},
            accumulation=parts,
            validate=None if self.validation is None else validate,
            resume=self.resume,
            save_every=own.save_every,
            log_every=max(1, min(10, schedule.steps // 50)),
            count=lambda batch: int(np.sum(batch["lengths"])),
            loss_unit="nats per trained token",
            mesh=mesh,
            show_progress=self.show_progress,
        )

    def report(self, folder: Path, parameters: int) -> dict[str, Any]:
        """Figures of the run. Losses are None if the log of an earlier run was removed."""
        entries = read_log(self.output)
        figures: dict[str, Any] = {
            "folder": str(folder),
            "steps": self.schedule.steps,
            "examples": len(self.examples),
            "cut": self.examples.cut,
            "left_out": self.examples.left_out,
            "parameters": parameters,
            "loss": next((entry["loss"] for entry in reversed(entries) if "loss" in entry), None),
        }
        validated = {entry["step"]: entry["validation_loss"] for entry in entries if "validation_loss" in entry}
        if validated.keys() >= {0, self.schedule.steps}:
            figures.update(validation_loss_before=validated[0], validation_loss=validated[self.schedule.steps])
        return figures


def train_lora(
    model: str | Path | None,
    data: Path,
    output: Path,
    settings: FinetuneSettings,
    lora: LoraSettings = LoraSettings(),  # noqa: B008  (it is frozen)
    *,
    validation_data: Path | None = None,
    resume: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train a LoRA adapter, and write it as PEFT does to `output / "adapter"`.

    `output` also receives the training state, the log and the loss plot, see `loop.train`.

    `model`: folder, hub id or GGUF file of the base; the built-in model if None. Its weights are not changed.

    Returns:
        `folder`, `steps`, `examples`, `cut`, `left_out`, `parameters` (trained numbers), `loss` of the last batch, and,
        if validation data were given at the first and at the last step, `validation_loss_before` and `validation_loss`,
        in nats per trained token.

    Raises:
        InvalidParameterError: for a wrong line of a file, a setting out of range, or an unknown target.
        CheckpointError: for quantised weights without `dequantize`, or as `loop.train`.
        UnsupportedModelError: for a model that verax does not have, or that adapters cannot change.
    """
    run = Job(model, data, validation_data, settings, output, resume, show_progress)
    base = run.load(settings.dtype)
    abstract = AbstractModel.from_module(base)
    weights = tuple(jax.tree.leaves(nnx.state(base)))
    adapter = TrainedAdapter.of(abstract, lora)

    def loss(weights: tuple[Array, ...], matrices: Any, batch: dict[str, Array]) -> Float[Array, ""]:
        model = adapter.model(weights, matrices, batch["tokens"].size)
        return batch_loss(recompute_layers(model) if settings.gradient_checkpointing else model, batch)

    trained = run.train(Partial(loss, weights), adapter.initial(settings.seed), {"lora": asdict(lora)})
    folder = adapter.save(trained, output / "adapter", run.opened, str(model or run.opened.folder))
    return run.report(folder, adapter.num_parameters)


Matrices = Mapping[str, Mapping[str, Array]]
"""`lora_A [r, in]` and `lora_B [out, r]`, float32, by the layer's path."""


@dataclass(frozen=True)
class TrainedAdapter:
    """The layers of a model that an adapter changes, and the adapter's size (Hu et al., 2021, arXiv:2106.09685).

    The layers and the low-rank products are the engine's, which later runs the adapter.
    """

    abstract: AbstractModel
    layers: AdaptedLayers
    settings: LoraSettings

    @classmethod
    def of(cls, abstract: AbstractModel, settings: LoraSettings) -> TrainedAdapter:
        """The adapter of a model."""
        layers = AdaptedLayers.of(abstract.build, abstract.weights, max_loras=1, max_rank=settings.rank)
        chosen = _targeted(layers.shapes, settings.target_modules)
        return cls(abstract, replace(layers, shapes={path: layers.shapes[path] for path in chosen}), settings)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(self.settings.rank * (F + D) for F, D in self.layers.shapes.values())

    def initial(self, seed: int) -> Matrices:
        """A as PEFT draws it, uniform with a variance of a third of one over the inputs; B of zeros."""
        keys = jax.random.split(jax.random.key(seed), len(self.layers.shapes))
        rank, matrices = self.settings.rank, {}
        for key, (path, (F, D)) in zip(keys, self.layers.shapes.items(), strict=True):
            bound = D**-0.5
            matrices[path] = {
                "lora_A": jax.random.uniform(key, (rank, D), jnp.float32, -bound, bound),
                "lora_B": jnp.zeros((F, rank), jnp.float32),
            }
        return matrices

    def model(self, weights: tuple[Array, ...], matrices: Matrices, num_tokens: int) -> CausalLM:
        """The model with the adapter, in the base's dtype, for a pass of `num_tokens` in all."""
        model = self.abstract.build(weights)
        scale = self.settings.alpha / self.settings.rank
        pairs = [(matrices[path]["lora_A"], scale * matrices[path]["lora_B"]) for path in self.layers.shapes]
        arrays = tuple(matrix.astype(self.layers.dtype) for pair in pairs for matrix in pair)
        self.layers.attach(model, arrays, jnp.zeros(num_tokens, jnp.int32))
        return model

    def save(self, matrices: Matrices, folder: Path, opened: Checkpoint, base: str) -> Path:
        """Write the adapter as PEFT does, by the names that its base has in its checkpoint."""
        names = {path: name for name, path in self.layers.names.items() if path in self.layers.shapes}
        keys = {name.removesuffix(".weight") for name in opened.names() if name.endswith(".weight")}
        # Published keys of models with a vision tower, and the names of the modules in transformers 5.
        keys = {re.sub(r"^language_model\.model\.", "model.language_model.", key) for key in keys}
        names |= {path: name for name, path in self.layers.names.items() if path in names and name in keys}
        pairs = {names[p]: (np.asarray(m["lora_A"]), np.asarray(m["lora_B"])) for p, m in matrices.items()}
        settings = self.settings
        return save_adapter(folder, pairs, rank=settings.rank, alpha=settings.alpha, base=base, modules=keys)


def _targeted(shapes: Mapping[str, tuple[int, int]], targets: str) -> list[str]:
    """Paths of the layers that a user's text chooses, as PEFT matches names."""
    if targets == ALL_LINEAR:
        return list(shapes)
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if not any(_matches(path, name) for path in shapes):
            known = ", ".join(sorted({path.split(".")[-1] for path in shapes}))
            raise InvalidParameterError(
                f"target_modules: no linear layer is named {name!r}; expected {ALL_LINEAR}, or some of {known}"
            )
    return [path for path in shapes if any(_matches(path, name) for name in names)]


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def train_full(
    model: str | Path | None,
    data: Path,
    output: Path,
    settings: FinetuneSettings,
    *,
    validation_data: Path | None = None,
    resume: bool = False,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Train all weights of a model, and write it as a checkpoint to `output / "model"`.

    Arguments, results and errors as in `train_lora`. A GGUF file cannot be written back.
    """
    run = Job(model, data, validation_data, settings, output, resume, show_progress)
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
    patterns = getattr(module, "stacked_weights", ())  # as the base has them, whose layout transformers reads
    folder = checkpoint.save(
        rounded(trained),
        output / "model",
        config=config_of_floats(language_config(run.opened.config), settings.dtype),
        generation_config=dict(run.opened.generation_config) or None,
        tokenizer_from=run.opened.folder,
        stacked=any(stacked_keys(name, (1,), patterns) for name in run.opened.names()),
    )
    return run.report(folder, sum(leaf.size for leaf in jax.tree.leaves(trained)))


def batch_loss(model: CausalLM, batch: dict[str, Array]) -> Float[Array, ""]:
    """Weighted next-token loss of a batch, in nats. No causal layer sees the padding after a row's end.

    Products of the backward pass are in bfloat16, for a model of that dtype.
    """
    chosen = {"linear": rounded_gradient_linear} if model.dtype == jnp.bfloat16 else {}
    with ops.use_implementations(**chosen):
        hidden = model(batch["tokens"])
        return weighted_next_token_loss(model.logits, hidden, batch["targets"], batch["weights"])


class _Recomputed(nnx.Module):
    """A layer that is computed again in the backward pass."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        return jax.checkpoint(lambda x: self.layer(x, *args, **options))(x)


def recompute_layers(model: CausalLM) -> CausalLM:
    """Let the layers of a model, which is being traced, be computed again; return the model."""
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
