"""Settings of a fine-tuning run, checked before any file is read."""

from __future__ import annotations

from dataclasses import dataclass

from verax.errors import InvalidParameterError
from verax.models import check_dtype
from verax.train.loop import Schedule

__all__ = ["FinetuneSettings"]


@dataclass(frozen=True)
class FinetuneSettings:
    """Data, optimiser and devices of a run."""

    learning_rate: float
    """Peak of a schedule with a linear warm-up and a cosine down to a twentieth."""
    batch_size: int = 8
    """Examples that are computed at once, on all devices together."""
    gradient_accumulation: int = 1
    """Batches that make a step. Their gradients are added, by the number of their trained tokens."""
    epochs: float = 3.0
    """Times that the examples are gone through, if `steps` is None."""
    steps: int | None = None
    max_length: int | None = None
    """Tokens that are kept of an example; if None 1,024, or all that the model reads if these are fewer."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises; a twentieth of all if None."""
    weight_decay: float = 0.0
    seed: int = 0
    dtype: str = "bfloat16"
    """Dtype of the products, and of the model that full fine-tuning writes. What is trained is float32."""
    dequantize: bool = False
    """True to train beside the floats of a quantised checkpoint."""
    gradient_checkpointing: bool = False
    """True to compute each layer again in the backward pass: less memory, and a third more work."""
    devices: int = 1
    save_every: int = 100
    """Steps between checkpoints, at each of which the loss on the validation data is computed."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "gradient_accumulation", "steps", "max_length", "devices", "save_every"):
            value, least = getattr(self, name), 2 if name == "max_length" else 1
            if value is not None and value < least:
                raise InvalidParameterError(f"{name}: expected at least {least}, got {value}")
        for name in ("learning_rate", "epochs"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidParameterError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < float("inf"):
            raise InvalidParameterError(f"weight_decay: expected at least 0, got {self.weight_decay}")
        if self.batch_size % self.devices:
            raise InvalidParameterError(
                f"batch_size: {self.batch_size} examples do not divide over {self.devices} devices; use a multiple"
            )
        check_dtype(self.dtype)

    def schedule(self, examples: int) -> Schedule:
        """Schedule of a run over so many examples.

        Raises:
            InvalidParameterError: if the warm-up leaves no step.
        """
        steps = self.steps or max(1, -int(-self.epochs * examples // (self.batch_size * self.gradient_accumulation)))
        warmup = steps // 20 if self.warmup_steps is None else self.warmup_steps
        if not 0 <= warmup < steps:
            raise InvalidParameterError(f"warmup_steps: expected fewer than the {steps} steps, got {warmup}")
        return Schedule(steps, self.learning_rate, warmup, weight_decay=self.weight_decay, beta2=0.999)
