"""The engine that every replica of a simulation is: of a plan for a device, or one that runs here."""

from __future__ import annotations

from dataclasses import dataclass, field

from verax.bench.simulate.overheads import Overheads
from verax.bench.simulate.replica import Replica
from verax.bench.simulate.step_times import LeastTimes, MeasuredTimes, StepTimes
from verax.errors import InvalidParameterError
from verax.models.causal_lm import has_recurrent_layers
from verax.plan.text import TextPlan
from verax.text.engine.llm import LLM
from verax.text.step.sizes import RunnerConfig, plan_sizes

__all__ = ["Engines", "measured_engines", "planned_engines"]


@dataclass(frozen=True)
class Engines:
    """Description of the engine that each replica of a fleet is.

    Attributes:
        config: sizes of the engine.
        times: seconds of its steps.
        vocab_size: of the model.
        devices: devices of a replica.
        prefix_caching: True if the engine keeps full blocks for prompts that begin alike.
        overheads: seconds of a replica's host.
    """

    config: RunnerConfig
    times: StepTimes
    vocab_size: int
    devices: int = 1
    prefix_caching: bool = True
    overheads: Overheads = field(default_factory=Overheads)

    def new(self, count: int) -> list[Replica]:
        """Replicas with nothing to do."""
        return [
            Replica(
                self.config,
                self.times,
                self.overheads,
                vocab_size=self.vocab_size,
                prefix_caching=self.prefix_caching,
            )
            for _ in range(count)
        ]


def planned_engines(plan: TextPlan, *, efficiency: float = 1.0, overheads: Overheads | None = None) -> Engines:
    """Engines on the plan's devices, with the cache that fits beside the weights.

    Args:
        plan: the model on its devices.
        efficiency: as in `LeastTimes`.
        overheads: of the host; none if None.

    Raises:
        InvalidParameterError: if weights and one sequence do not fit, or a value is out of range.
    """
    if plan.cache_bytes(num_seqs=1) > plan.cache_room:
        raise InvalidParameterError(
            f"device: the weights and one sequence of {plan.context} tokens do not fit on {plan.devices} x "
            f"{plan.device.name}; verax plan says what would"
        )
    # The cache is divided over the devices if its heads are.
    room = min(plan.cache_bytes(), plan.cache_room)
    on_all = room * plan.whole_cache_bytes() // plan.cache_bytes()
    with plan.target():
        options = plan.options.with_options({"kv_cache_memory": on_all})
        config = plan_sizes(plan.config, plan.dtype, options)
    return Engines(
        config,
        LeastTimes(plan, efficiency=efficiency),
        plan.config.vocab_size,
        plan.devices,
        not has_recurrent_layers(plan.config),
        overheads or Overheads(),
    )


def measured_engines(llm: LLM, times: MeasuredTimes, overheads: Overheads | None = None) -> Engines:
    """Engines like one that runs here.

    Args:
        llm: the engine.
        times: of its steps, as `measure_steps` gives them.
        overheads: of the host; none if None.
    """
    return Engines(
        llm.engine.runner.config,
        times,
        llm.engine.vocab_size,
        prefix_caching=llm.engine.scheduler.blocks.enable_prefix_caching,
        overheads=overheads or Overheads(),
    )
