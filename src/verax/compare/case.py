"""Cases: the two sides of a comparison, each made when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from verax.compare.align import Names
from verax.compare.outputs import LogitsComparison, VectorsComparison
from verax.compare.recorder import Watch

__all__ = ["Case", "Side", "pair_case"]


@dataclass(frozen=True)
class Side:
    """A model and the call that is compared.

    Attributes:
        model: a module, or a function with taps.
        args, kwargs: of the call; NumPy arrays become the side's own.
        call: `call(model, *args, **kwargs)`, for more than the model's own call.
        watch: functions to record beside the modules.
        inputs: patterns of paths of modules whose input is recorded too.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    call: Callable[..., Any] | None = None
    watch: tuple[Watch, ...] = ()
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Two sides to compare.

    Attributes:
        title: for the report.
        reference, ours: each side in a dtype, `"float32"` or `"bfloat16"`; made when it is needed, and dropped after.
        names: between our names and the reference's.
        about: for the report.
        judge: `judge(reference, ours)` compares the two outputs as texts or vectors, in the reference's layout.
    """

    title: str
    reference: Callable[[str], Side]
    ours: Callable[[str], Side]
    names: Names | None = None
    about: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    judge: Callable[[np.ndarray, np.ndarray], LogitsComparison | VectorsComparison] | None = None


def pair_case(
    reference: Any, ours: Any, *args: Any, names: Names | None = None, title: str = "comparison", **kwargs: Any
) -> Case:
    """The case of two models as they are, in whatever dtype.

    Args:
        reference, ours, names, title: as in `compare`.
        args, kwargs: of both calls, where the models are no `Side` with arguments of its own.
    """

    def side(given: Any) -> Callable[[str], Side]:
        made = given if isinstance(given, Side) else Side(given, args, kwargs)
        return lambda dtype: made

    return Case(title, side(reference), side(ours), names)
