"""Cases: the two sides of a comparison, each made when it is needed, and inputs from a file in place of random ones."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from verax.checkpoint.formats.safetensors import SafetensorsFile
from verax.compare.align import Names
from verax.compare.outputs import LogitsComparison, VectorsComparison
from verax.compare.trace import Watch
from verax.errors import CheckpointError, InvalidParameterError


@dataclass(frozen=True)
class Side:
    r"""A model and the call that is compared.

    Attributes:
        model: a module, or a function with taps.
        args, kwargs: arguments of the call; arrays of NumPy, JAX and PyTorch become the side's own.
        call: `call(model, *args, **kwargs)`, for more than the model's own call.
        watch: functions to record in addition to the modules.
        inputs: patterns of paths of modules whose input is recorded too.
        without: patterns of names of outputs that are not compared, such as `r"attn\[1\]$"`, since the other side does
            not have them. The report lists what they left out.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] | None = None
    watch: tuple[Watch, ...] = ()
    inputs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def run(self, model: Any, args: Any, kwargs: Any) -> Any:
        """Result of the call on this model and these arguments, which stand for the side's own."""
        return model(*args, **kwargs) if self.call is None else self.call(model, *args, **kwargs)


@dataclass(frozen=True)
class Case:
    """Two sides to compare.

    Attributes:
        title: title of the report.
        reference, ours: each side in a dtype, `"float32"` or `"bfloat16"`; made when it is needed, and dropped after.
        names: tables between our names and the reference's.
        about: description of the run, for the report.
        judge: `judge(reference, ours)` compares the two outputs as texts or vectors, in the reference's layout.
    """

    title: str
    reference: Callable[[str], Side]
    ours: Callable[[str], Side]
    names: Names | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    judge: Callable[[np.ndarray, np.ndarray], LogitsComparison | VectorsComparison] | None = None


def pair_case(
    reference: Any, ours: Any, *args: Any, names: Names | None = None, title: str = "comparison", **kwargs: Any
) -> Case:
    """The case of two models in whatever dtype they have.

    `reference`, `ours`, `names`, `title`: as in `compare`. `args`, `kwargs`: arguments of both calls, where a model is
    not a `Side` with its own arguments.

    Raises:
        InvalidParameterError: if the sides are exchanged, one cannot be called, or both have arguments of their own.
    """
    sides = [given if isinstance(given, Side) else Side(given) for given in (reference, ours)]
    if (args or kwargs) and all(side.args or side.kwargs for side in sides):
        raise InvalidParameterError("args: both sides have arguments of their own, and would take no others")
    theirs, mine = (side.model for side in sides)
    callables = [callable(side.model) or side.call is not None for side in sides]
    if isinstance(theirs, nnx.Module) or not callables[0]:
        raise InvalidParameterError(
            f"reference: expected PyTorch's model or function, first, got {type(theirs).__name__}"
        )
    if hasattr(mine, "named_parameters") or not callables[1]:
        raise InvalidParameterError(f"ours: expected JAX's model or function, second, got {type(mine).__name__}")
    whole = [side if side.args or side.kwargs else replace(side, args=args, kwargs=kwargs) for side in sides]
    return Case(title, lambda dtype: whole[0], lambda dtype: whole[1], names)


Shape = tuple[int | None, ...]
"""Expected shape of an array; None for any size."""


@dataclass(frozen=True)
class Inputs:
    """Texts, arrays by the names of the reference's arguments, or neither.

    `origin`: file of the inputs, for reports; empty without a file.
    """

    texts: tuple[str, ...] = ()
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    origin: str = ""

    @property
    def about(self) -> dict[str, str]:
        """Entries of a report: the origin of given inputs, if any."""
        return {"inputs": self.origin} if self.origin else {}

    def checked(self, known: Mapping[str, Shape], *, texts: bool = False) -> Mapping[str, np.ndarray]:
        """The arrays, if the call takes them.

        `known`: shapes of what it takes, by name. `texts`: True if the call takes texts too.
        """
        takes = ", ".join(f"{name} {_written(shape)}" for name, shape in known.items()) or "no arrays"
        if self.texts and not texts:
            raise InvalidParameterError(f"inputs: it does not take texts; it takes {takes}")
        for name, array in self.arrays.items():
            if name not in known:
                raise InvalidParameterError(f"inputs: it does not take {name!r}; it takes {takes}")
            shape = known[name]
            fits = len(shape) == array.ndim and all(a in (None, b) for a, b in zip(shape, array.shape, strict=True))
            if not fits or array.size == 0:
                raise InvalidParameterError(
                    f"inputs: {name} has shape {list(array.shape)}, expected {_written(shape)}, not empty"
                )
        return self.arrays


def read_inputs(path: str | Path) -> Inputs:
    """Read a file: `.txt` has a text in each line, `.safetensors` and `.npz` have arrays by name."""
    path = Path(path).expanduser()
    try:
        if path.suffix == ".txt":
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            inputs = Inputs(texts=tuple(line for line in lines if line.strip()), origin=str(path))
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as opened:
                inputs = Inputs(arrays={name: opened[name] for name in opened.files}, origin=str(path))
        elif path.suffix == ".safetensors":
            opened = SafetensorsFile(path)
            inputs = Inputs(arrays={name: np.array(opened.read(name)) for name in opened.tensors}, origin=str(path))
        else:
            raise InvalidParameterError(f"inputs: expected a .txt, .npz or .safetensors file, got {path}")
    except (OSError, ValueError, zipfile.BadZipFile, CheckpointError) as error:
        if isinstance(error, InvalidParameterError):
            raise
        raise InvalidParameterError(f"inputs: {path} cannot be read: {error}") from error
    if not inputs.texts and not inputs.arrays:
        raise InvalidParameterError(f"inputs: {path} has nothing in it")
    return inputs


def _written(shape: Shape) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
