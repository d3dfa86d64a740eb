"""Common part of full and LoRA fine-tuning: data, schedule, loop, report."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from verax import builtin, ops, progress
from verax._compat import compiler_options
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import DEQUANTIZE, load_causal_lm
from verax.models import CausalLM, causal_lm
from verax.text.tokens.tokenizer import Tokenizer
from verax.train.finetune.data import Examples, read_examples, shuffled_batches, validation_batches
from verax.train.loop import Loss, Schedule, read_log, train
from verax.train.mesh import batch_sharding, fully_sharded, state_sharding
from verax.train.settings import FinetuneSettings

__all__ = ["Job"]


DEFAULT_MAX_LENGTH = 1024
"""Tokens of the longest example, for models that read at least as many."""


@dataclass(frozen=True)
class Job:
    """A run that is ready to begin."""

    opened: Checkpoint
    examples: Examples
    validation: Examples | None
    settings: FinetuneSettings
    max_length: int
    output: Path
    resume: bool
    stop_at: int | None
    show_progress: bool

    @classmethod
    def open(
        cls,
        model: str | Path | None,
        data: Path,
        validation_data: Path | None,
        settings: FinetuneSettings,
        output: Path,
        resume: bool,
        stop_at: int | None,
        show_progress: bool,
    ) -> Job:
        """Open the checkpoint and read the examples, before any weight is read."""
        opened = Checkpoint.open(builtin.text_model() if model is None else model)
        if opened.packed and not settings.dequantize:
            raise CheckpointError(
                f"{opened.folder}: its weights are quantised, and training needs floats; train the unquantised model, "
                "or dequantize these (--dequantize)"
            )
        longest = causal_lm(opened.config)[1].max_position_embeddings
        max_length = settings.max_length or min(longest, DEFAULT_MAX_LENGTH)
        if max_length > longest:
            raise InvalidParameterError(f"max_length: the model reads {longest} tokens at most, got {max_length}")
        tokenizer = Tokenizer.from_checkpoint(opened)
        examples = read_examples(data, tokenizer, max_length=max_length)
        validation = None
        if validation_data is not None:
            validation = read_examples(validation_data, tokenizer, max_length=max_length)
        return cls(opened, examples, validation, settings, max_length, output, resume, stop_at, show_progress)

    @property
    def schedule(self) -> Schedule:
        """Schedule of the whole run."""
        return self.settings.schedule(len(self.examples))

    @property
    def is_whole(self) -> bool:
        """True if this run goes to the schedule's end."""
        return self.stop_at is None or self.stop_at >= self.schedule.steps

    def load(self, dtype: str) -> CausalLM:
        """The model with its weights in this dtype."""
        quantization = DEQUANTIZE if self.settings.dequantize else None
        with progress.bar("loading", enabled=self.show_progress, count=False) as report:
            return load_causal_lm(self.opened, dtype=dtype, quantization=quantization, progress=report)

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

        data = hashlib.sha256(b"".join(example.tokens.tobytes() for example in self.examples.items)).hexdigest()[:16]
        same = ("batch_size", "gradient_accumulation", "seed", "dtype")
        return train(
            compute,
            params,
            lambda start: shuffled_batches(
                self.examples.items, seed=own.seed, rows=rows, parts=parts, max_length=self.max_length, start=start
            ),
            schedule,
            self.output,
            settings={**settings, **{name: getattr(own, name) for name in same}, "data": data},
            accumulation=parts,
            validate=None if self.validation is None else validate,
            resume=self.resume,
            stop_at=self.stop_at,
            save_every=own.save_every,
            log_every=max(1, min(10, schedule.steps // 50)),
            count=lambda batch: int(np.sum(batch["lengths"])),
            loss_unit="nats per trained token",
            mesh=mesh,
            show_progress=self.show_progress,
        )

    def report(self, folder: Path | None, parameters: int) -> dict[str, Any]:
        """Figures of the run. Losses are None if the log of an earlier run was removed."""
        entries = read_log(self.output)
        figures: dict[str, Any] = {
            "folder": None if folder is None else str(folder),
            "steps": min(self.schedule.steps, self.stop_at or self.schedule.steps),
            "examples": len(self.examples),
            "cut": self.examples.cut,
            "left_out": self.examples.left_out,
            "parameters": parameters,
            "loss": next((entry["loss"] for entry in reversed(entries) if "loss" in entry), None),
        }
        if validated := [entry["validation_loss"] for entry in entries if "validation_loss" in entry]:
            figures.update(validation_loss_before=validated[0], validation_loss=validated[-1])
        return figures
