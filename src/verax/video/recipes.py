"""Recipes for checkpoints and LoRA files that were distilled to few steps without guidance.

A recipe is what the authors of a distillation run it with: the noise levels of its steps and their shift, and the
solver. The noise levels are given before the shift, as diffusers' schedulers take them. None was tried with published
weights here; the arithmetic is compared with diffusers' schedulers and with the authors' formulas.

The module imports the standard library only, because the options of the command line name the recipes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from verax.errors import InvalidParameterError

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Solver and noise levels of a distillation.

    Attributes:
        solver: one of `solvers.SOLVERS`.
        sigmas: noise level of each step before the shift, from 1 down.
        shift: shift of the noise levels towards noise.
        whole_timesteps: True if the model sees timesteps rounded to whole numbers; False for `1000 sigma` itself.
    """

    solver: str
    sigmas: tuple[float, ...]
    shift: float
    whole_timesteps: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the options that the recipe sets."""
        return {
            "solver": self.solver,
            "sigmas": self.sigmas,
            "num_inference_steps": len(self.sigmas),
            "shift": self.shift,
            "guidance_scale": 1.0,
        }


_QUARTERS = (1.0, 0.75, 0.5, 0.25)

# Timesteps 1000, 757 and 522 of distribution matching distillation (DMD), which are these levels shifted by 8.
_DMD = Recipe(solver="lcm", sigmas=(1.0, 0.28, 0.12), shift=8.0, whole_timesteps=True)

RECIPES: Mapping[str, Recipe] = {
    "lightx2v": Recipe(solver="euler", sigmas=_QUARTERS, shift=5.0),
    "self-forcing": Recipe(solver="lcm", sigmas=_QUARTERS, shift=5.0),
    "causvid": _DMD,
    "fastwan": _DMD,
}
"""Recipes by name.

- `lightx2v`: LightX2V's 4-step LoRAs and models for Wan 2.1 and both transformers of Wan 2.2's A14B
  (`WanStepDistillScheduler`).
- `self-forcing`: Self-Forcing (arXiv:2506.08009), its timesteps warped by the shift; all frames are denoised together.
- `causvid`: CausVid (arXiv:2412.07772), the bidirectional DMD of its configurations.
- `fastwan`: FastVideo's DMD for Wan 2.2's 5B, and LoRA files of Wan 2.1's (`DmdDenoisingStage`).
"""


def with_recipe(request: R) -> R:
    """Request with the options that its recipe sets; itself without a recipe.

    Raises:
        InvalidParameterError: for an unknown recipe, or an option of the request that contradicts it.
    """
    given: Any = request
    if given.recipe is None:
        return request
    if not isinstance(given.recipe, str) or given.recipe not in RECIPES:
        raise InvalidParameterError(f"recipe: expected one of {', '.join(RECIPES)}, got {given.recipe!r}")
    settings = RECIPES[given.recipe].settings
    for name, value in {**settings, "guidance_scale_2": 1.0}.items():
        own = getattr(given, name)
        own = tuple(own) if isinstance(own, Iterable) and not isinstance(own, str) else own
        if own not in (None, value):
            raise InvalidParameterError(
                f"recipe: {given.recipe} sets {name} to {_shown(value)}, and {name} is {_shown(own)}; leave one out"
            )
    # A request that is resolved already keeps its values, which are of other types.
    return dataclasses.replace(
        given, **{name: value for name, value in settings.items() if getattr(given, name) is None}
    )


def describe_recipe(name: str) -> str:
    """Options that a recipe sets, in words."""
    settings = RECIPES[name].settings
    return f"recipe {name}: " + ", ".join(f"{option} {_shown(value)}" for option, value in settings.items())


def _shown(value: Any) -> str:
    """Value as a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
