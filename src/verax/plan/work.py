"""Work of a traced program: operations of its products, and bytes that have to cross the device's memory.

Counted are products (matrices and convolutions, two operations for each number that is added up), those in a loop once
for each turn, and none whose result nothing needs. Of a branch the cheapest side counts. Bytes are those of arguments
that are read and of results that are written, each at most once: a lookup reads its rows, an update in place writes
them, and what lies between is taken to stay on the chip. Rows looked up in a table that a product reads too are
among those of the product. So both numbers are the least that any implementation needs.

A program that is one `jax.shard_map` is counted as a device runs it: on shards, with the bytes that it sends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, mul
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from verax.plan.stand_ins import REGISTERED, CallWork, PagedWork, Span, use_stand_ins

__all__ = ["Work", "count", "trace"]

_VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "optimization_barrier"}
"""Equations whose result is their first operand in another form."""

_LOOKUPS = {"gather", "dynamic_slice"}
"""Equations that read as much of their first operand as their result holds, at places that only values tell."""

_UPDATES = {"scatter": 2, "scatter-add": 2, "dynamic_update_slice": 1}
"""Equations whose result is their first operand with changes, and the operand that holds the changes."""

_COLLECTIVES = {"psum": 2, "all_gather": 1, "all_to_all": 1}
"""Equations that send, and how often: a ring of n devices sends (n - 1) / n of the result, of sums twice."""

_OPAQUE = {"ffi_call", "custom_call", "pallas_call", "triton_kernel_call", "io_callback", "pure_callback"}
"""Equations that nothing is known about."""


@dataclass(frozen=True)
class Work:
    """Work of a program, or of several programs of the same arguments.

    Attributes:
        flops: operations of products, by dtype of their operands.
        reads: bytes read of each array of the arguments.
        writes: bytes of each array of the arguments that are changed in place.
        results: bytes of new results.
        sent: bytes that a device sends to others.
        uncounted: names of what could not be counted: kernels that are not open, loops whose turns are not known.
    """

    flops: Mapping[str, int]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    results: int
    sent: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def total_flops(self) -> int:
        """Operations of all products."""
        return sum(self.flops.values())

    def bytes_moved(self, shares: Sequence[float] | None = None) -> int:
        """Bytes read and written.

        Args:
            shares: share of each array of the arguments that one device holds; None for whole arrays.
        """
        moved = [read + written for read, written in zip(self.reads, self.writes, strict=True)]
        return round(sum(map(mul, moved, shares or [1] * len(moved)))) + self.results

    def __add__(self, other: Work) -> Work:
        return Work(
            dict(Counter(self.flops) + Counter(other.flops)),
            tuple(map(add, self.reads, other.reads)),
            tuple(map(add, self.writes, other.writes)),
            self.results + other.results,
            self.sent + other.sent,
            tuple(dict.fromkeys((*self.uncounted, *other.uncounted))),
        )

    def __mul__(self, times: int) -> Work:
        return Work(
            {dtype: times * flops for dtype, flops in self.flops.items()},
            tuple(times * size for size in self.reads),
            tuple(times * size for size in self.writes),
            times * self.results,
            times * self.sent,
            self.uncounted,
        )


def trace(function: Callable[..., Any], *arguments: Any) -> ClosedJaxpr:
    """Program of a function of arrays for `ops.target()`, from shapes alone, with stand-ins (`plan.stand_ins`)."""
    with use_stand_ins():
        return jax.make_jaxpr(function)(*arguments)


def count(program: ClosedJaxpr, spans: Sequence[Span] = ()) -> Work:
    """Work of a program of `trace`.

    Args:
        program: the program.
        spans: sequences of the step, for programs with a paged cache.
    """
    jaxpr, axes = _of_device(program.jaxpr)
    found = _Count(spans, axes).program(jaxpr)
    outputs = zip(jaxpr.outvars, found.roots, strict=True)
    return Work(
        dict(found.flops),
        tuple(min(read, _nbytes(var)) for read, var in zip(found.least_reads, jaxpr.invars, strict=True)),
        tuple(found.writes),
        sum(_nbytes(var) for var, root in outputs if root is None),
        found.sent,
        tuple(dict.fromkeys(found.uncounted)),
    )


def _of_device(jaxpr: Any) -> tuple[Any, Mapping[str, int]]:
    """The program that one device runs, and the sizes of the mesh's axes."""
    if [equation.primitive.name for equation in jaxpr.eqns] != ["shard_map"]:
        return jaxpr, {}
    params = jaxpr.eqns[0].params
    return params["jaxpr"], params["mesh"].shape


@dataclass
class _Found:
    """Work of a program and what its caller has to know."""

    flops: Counter[str]
    reads: list[int]
    """Bytes read of each argument, but for lookups."""
    lookups: list[int]
    """Bytes that are looked up in each argument. They may be among those that are read otherwise."""
    writes: list[int]
    """Bytes of changes to each argument."""
    sent: int = 0
    """Bytes that a device sends to others."""
    roots: list[int | None] = field(default_factory=list)
    """By result: the argument that it is, with changes perhaps; None for a new array."""
    uncounted: list[str] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int]:
        """Order of the branches of a program."""
        return sum(self.flops.values()), sum(self.least_reads)

    @property
    def least_reads(self) -> list[int]:
        """Bytes of each argument that have to be read."""
        return list(map(max, self.reads, self.lookups))

    def behind(self, others: int) -> _Found:
        """The same for a caller that has so many other operands first."""
        before = [0] * others
        self.reads, self.lookups, self.writes = before + self.reads, before + self.lookups, before + self.writes
        self.roots = [None if root is None else root + others for root in self.roots]
        return self


class _Count:
    """A walk through a program and those that it calls."""

    def __init__(self, spans: Sequence[Span], axes: Mapping[str, int]):
        self._spans = spans
        self._axes = axes

    def program(self, jaxpr: Any) -> _Found:
        """Work of a program whose variables are those of one scope."""
        roots: dict[Any, int] = {var: i for i, var in enumerate(jaxpr.invars)}
        none = [0] * len(jaxpr.invars)
        found = _Found(Counter(), reads=[*none], lookups=[*none], writes=[*none])
        for equation in _used(jaxpr):
            self._equation(equation, roots, found)
        found.roots = [None if isinstance(var, Literal) else roots.get(var) for var in jaxpr.outvars]
        return found

    def _equation(self, equation: Any, roots: dict[Any, int], found: _Found) -> None:
        name, operands, results = equation.primitive.name, equation.invars, equation.outvars
        origins = [None if isinstance(var, Literal) else roots.get(var) for var in operands]
        reads, lookups, writes = [_nbytes(var) for var in operands], [0] * len(operands), [0] * len(operands)
        if name in _VIEWS or name in _UPDATES:
            reads[0] = 0
            for result, origin in zip(results, origins, strict=False):
                if origin is not None:
                    roots[result] = origin
        if name in _UPDATES:
            writes[0] = _nbytes(operands[_UPDATES[name]])
        elif name in _VIEWS:
            reads = [0] * len(reads)
        elif name in _LOOKUPS:
            reads[0], lookups[0] = 0, _nbytes(results[0])
        elif name == "slice":
            reads[0] = _nbytes(results[0])
        elif equation.primitive is REGISTERED:
            reads = self._registered(equation.params["work"], operands, found.flops)
        elif name in _COLLECTIVES:
            found.sent += self._sent(equation)
        elif name in _OPAQUE:
            found.uncounted.append(name)
        elif name in _PRODUCTS:
            found.flops[operands[0].aval.dtype.name] += _PRODUCTS[name](equation)
        elif inner := self._called(equation):
            reads, lookups, writes = inner.reads, inner.lookups, inner.writes
            found.flops += inner.flops
            found.sent += inner.sent
            found.uncounted += inner.uncounted
            for result, root in zip(results, inner.roots, strict=True):
                origin = None if root is None else origins[root]
                if origin is not None:
                    roots[result] = origin
        for origin, read, looked_up, written in zip(origins, reads, lookups, writes, strict=True):
            if origin is not None:
                found.reads[origin] += read
                found.lookups[origin] += looked_up
                found.writes[origin] += written

    def _registered(self, work: CallWork | PagedWork, operands: Sequence[Any], flops: Counter[str]) -> list[int]:
        """Bytes read of each operand of a registered call, whose operations are added."""
        stored = [_nbytes(var) for var in operands[1:]]
        if isinstance(work, CallWork):
            flops[work.dtype] += work.flops
            return [_nbytes(operands[0]), *(round(size * work.share) for size in stored)]
        flops[work.dtype] += work.flops_per_score * sum(span.scores(work.window) for span in self._spans)
        tokens = sum(span.cached(work.window) for span in self._spans)
        return [_nbytes(operands[0]), *(size * tokens // work.tokens for size in stored)]

    def _sent(self, equation: Any) -> int:
        """Bytes that a device sends in a collective."""
        params = equation.params
        names = params["axes"] if "axes" in params else params["axis_name"]
        n = math.prod(self._axes[name] for name in ((names,) if isinstance(names, str) else names))
        return _COLLECTIVES[equation.primitive.name] * sum(map(_nbytes, equation.outvars)) * (n - 1) // n

    def _called(self, equation: Any) -> _Found | None:
        """Work of the programs that an equation calls; None if it calls none."""
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            branches = [self.program(branch.jaxpr) for branch in params["branches"]]
            return min(branches, key=lambda found: found.cost).behind(1)  # the number of the branch comes first
        if name == "scan":
            return self._scan(equation)
        if name == "while":
            return self._while(equation)
        inner = [program for value in params.values() if (program := _as_jaxpr(value)) is not None]
        if len(inner) != 1 or len(inner[0].invars) != len(equation.invars):
            return None
        return self.program(inner[0])

    def _scan(self, equation: Any) -> _Found:
        params = equation.params
        length, consts, carries = params["length"], params["num_consts"], params["num_carry"]
        found = self.program(params["jaxpr"].jaxpr)
        found.flops = Counter({dtype: length * flops for dtype, flops in found.flops.items()})
        # An array that is carried on was read by the turn before.
        turns = [length] * consts + [1] * carries + [length] * (len(found.reads) - consts - carries)
        whole = [_nbytes(var) for var in equation.invars]
        found.reads, found.lookups = (
            [min(n * size, most) for n, size, most in zip(turns, sizes, whole, strict=True)]
            for sizes in (found.reads, found.lookups)
        )
        found.writes = [length * size for size in found.writes]
        found.sent *= length
        found.roots = [root if i < carries and root == consts + i else None for i, root in enumerate(found.roots)]
        return found

    def _while(self, equation: Any) -> _Found:
        """One turn of a loop, of which nobody knows how many it takes."""
        params = equation.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        found = self.program(params["body_jaxpr"].jaxpr)
        if found.flops:
            found.uncounted.append("while loop with products")
        found.behind(tests)
        found.roots = [root if root == tests + consts + i else None for i, root in enumerate(found.roots)]
        return found


def _used(jaxpr: Any) -> list[Any]:
    """Equations of a program that its results depend on: a compiler leaves out the others."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    used: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        # The effect of a collective is the name of its axis.
        acts = equation.effects and equation.primitive.name not in _COLLECTIVES
        if acts or not needed.isdisjoint(equation.outvars):
            used.append(equation)
            needed.update(var for var in equation.invars if not isinstance(var, Literal))
    return used[::-1]


def _as_jaxpr(value: Any) -> Any:
    """A program among an equation's parameters, without its constants."""
    if isinstance(value, ClosedJaxpr):
        return value.jaxpr
    return value if hasattr(value, "eqns") and hasattr(value, "invars") else None


def _nbytes(var: Any) -> int:
    """Bytes of a variable; of a key of random numbers, those of its words."""
    aval = var.aval
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * math.prod(shape[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(equation.outvars[0]) * (math.prod(kernel) // outputs)


def _ragged(equation: Any) -> int:
    """Each row is multiplied by one matrix `[K, N]`."""
    return 2 * _size(equation.outvars[0]) * equation.invars[0].aval.shape[-1]


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)


_PRODUCTS: Mapping[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged,
    "ragged_dot_general": _ragged,
}
