"""Settings of fine-tuning, each declared once, for Python and the command line. The module imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verax.errors import InvalidParameterError
from verax.options import check_options, documented, option

if TYPE_CHECKING:
    from verax.train.loop import Schedule

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers but the output head."""

_OPTIMISER, _RUN = "Optimiser", "Run"


@documented
@dataclass(frozen=True)
class FinetuneSettings:
    """Data, optimiser and devices of a run."""

    learning_rate: float = option(
        2e-4, "Peak of the learning rate, which falls by a cosine to a twentieth.", low=0, above=True, panel=_OPTIMISER
    )
    batch_size: int = option(8, "Examples that are computed at once, on all devices together.", low=1, panel=_OPTIMISER)
    gradient_accumulation: int = option(
        1,
        "Batches that make a step. Their gradients are added, by the number of their trained tokens.",
        low=1,
        panel=_OPTIMISER,
    )
    epochs: float = option(3.0, "Times that the run goes through the examples.", low=0, above=True, panel=_OPTIMISER)
    steps: int | None = option(None, "Steps, in place of epochs.", low=1, panel=_OPTIMISER)
    max_length: int | None = option(
        None, "Tokens that are kept of an example.", low=2, shown="1024, or what the model reads if that is less"
    )
    warmup_steps: int | None = option(
        None, "Steps in which the learning rate rises.", low=0, panel=_OPTIMISER, shown="a twentieth of all"
    )
    weight_decay: float = option(0.0, "Weight decay of AdamW, for matrices only.", low=0, panel=_OPTIMISER)
    seed: int = option(0, "Seed of the order of examples, and of a new adapter.", low=0, panel=_RUN)
    dtype: str = option(
        "bfloat16",
        "bfloat16 or float32. Dtype of products, and of the model that full fine-tuning writes: float32 is trained.",
        choices=("bfloat16", "float32"),
    )
    dequantize: bool = option(False, "Train on the floats of a quantised checkpoint.", panel=_RUN)
    gradient_checkpointing: bool = option(
        False, "Compute each layer again in the backward pass, for less memory and a third more work.", panel=_RUN
    )
    devices: int = option(1, "Devices that divide batches, weights and optimiser.", low=1, panel=_RUN)
    save_every: int = option(100, "Steps between states, each with the loss on the validation data.", low=1, panel=_RUN)

    def __post_init__(self) -> None:
        check_options(self)
        if self.batch_size % self.devices:
            raise InvalidParameterError(
                f"batch_size: {self.batch_size} examples do not divide over {self.devices} devices; use a multiple"
            )

    def schedule(self, examples: int) -> Schedule:
        """Schedule of a run over the given number of examples."""
        from verax.train.loop import Schedule

        steps = self.steps or max(1, -int(-self.epochs * examples // (self.batch_size * self.gradient_accumulation)))
        warmup = steps // 20 if self.warmup_steps is None else self.warmup_steps
        if not 0 <= warmup < steps:
            raise InvalidParameterError(f"warmup_steps: expected fewer than the {steps} steps, got {warmup}")
        return Schedule(steps, self.learning_rate, warmup, weight_decay=self.weight_decay, beta2=0.999)


@documented
@dataclass(frozen=True)
class LoraSettings:
    """Size and place of an adapter, by PEFT's names."""

    rank: int = option(16, "Rank of the adapter's matrices.", low=1)
    alpha: float = option(32.0, "Their product is multiplied by alpha / rank.", low=0, above=True)
    target_modules: str = option(
        ALL_LINEAR, "Layers to adapt: all-linear, or names between commas such as q_proj,v_proj."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not isinstance(self.target_modules, str):
            raise InvalidParameterError(
                f"target_modules: expected {ALL_LINEAR}, or names in a text between commas, got {self.target_modules!r}"
            )
