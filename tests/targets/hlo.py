"""Findings in the text of an optimised program: collectives, transfers to the host, copies, products in loops."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["COLLECTIVES", "Findings", "Instruction", "parse_module", "read_module"]

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

LARGE = 1 << 20
"""Bytes of a buffer from which on a copy of it counts. Slots are smaller, and move in and out of the chip."""

_MOVES = frozenset({"copy", "copy-start", "transpose", "concatenate", "convert", "pad", "slice", "reshape"})
"""Operations whose results are their operands' elements in another order or type."""

_FREE = frozenset({"parameter", "bitcast", "constant"})
"""Operations that a fusion of moves may have in addition."""

# `%name = type operation(%operand, ...), attribute=...`; a computation begins with `%name (` or `ENTRY %name (`.
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<label>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<name>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|body|to_apply|\w+_computations?)=\{?(%?[\w.\-]+(?:, %?[\w.\-]+)*)")
_ARRAY = re.compile(r"(?P<element>[a-z]+\d*\w*)\[(?P<shape>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_DONATED = re.compile(r"\{[\d,\s]*\}: \((\d+), \{[^}]*\}")
_LABEL = re.compile(r"%([\w.\-]+)")

# libtpu marks memories by number: 1 is the chip's own, 5 the host's. Without a mark an array lies in device memory.
_ON_CHIP, _ON_HOST = "S(1)", "S(5)"
_CALLBACK = re.compile(r'custom_call_target="[^"]*(?:callback|host)[^"]*"', re.IGNORECASE)
_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|cudnn)|kind=kCustom.*__triton_gemm|__triton_nested_gemm_fusion')


class Findings(NamedTuple):
    """Findings in a program. Each instruction counts once, however often a loop runs it.

    Attributes:
        collectives: number of collectives by kind; those that do not occur are left out.
        host_transfers: number of transfers to or from the host within the program.
        donated_copies: number of copies of donated buffers of a megabyte and more in the memory of the device.
        argument_copies: number of results of a megabyte and more in the memory of the device that only hold other
            arguments again, such as weights side by side.
        loops_with_products: number of loops that multiply matrices in each turn.
    """

    collectives: dict[str, int]
    host_transfers: int
    donated_copies: int
    argument_copies: int
    loops_with_products: int


class Instruction(NamedTuple):
    """An instruction: its label, operation and type, and what follows its opening parenthesis."""

    label: str
    name: str
    type: str
    rest: str


def read_module(text: str) -> Findings:
    """Findings in the text of an optimised HLO module, as `jax.stages.Compiled.as_text()` gives it."""
    computations, entry = parse_module(text)
    everything = [one for instructions in computations.values() for one in instructions]
    kinds = Counter(one.name.removesuffix("-start") for one in everything)
    numbers = _donated_numbers(text)
    donated = _donated(numbers, computations[entry])
    bodies = [body for one in everything if one.name == "while" for body in re.findall(r"body=%?([\w.\-]+)", one.rest)]
    return Findings(
        {kind: kinds[kind] for kind in COLLECTIVES if kinds[kind]},
        sum(map(_is_host_transfer, everything)),
        sum(_copies(one, donated) for one in everything),
        sum(_argument_copies(numbers, computations[entry], computations)),
        sum(_multiplies(body, computations) for body in bodies),
    )


def parse_module(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions by computation, and the name of the entry."""
    computations: dict[str, list[Instruction]] = {}
    name = entry = ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            name = begin["name"]
            computations[name] = []
            entry = name if begin["entry"] else entry
        elif name and (one := _INSTRUCTION.match(line)):
            computations[name].append(Instruction(one["label"], one["name"], one["type"], one["rest"]))
    return computations, entry


def _donated_numbers(text: str) -> set[str]:
    """Numbers of the donated parameters."""
    head = text.partition("\n")[0]
    aliases = head.partition("input_output_alias=")[2].partition("entry_computation_layout")[0]
    return set(_DONATED.findall(aliases))


def _parameters(entry: list[Instruction]) -> Iterator[tuple[str, Instruction]]:
    """Each parameter with its number."""
    return ((one.rest.partition(")")[0], one) for one in entry if one.name == "parameter")


def _donated(numbers: set[str], entry: list[Instruction]) -> set[tuple[str, str]]:
    """Element types and shapes of the large donated buffers."""
    arrays = [array for number, one in _parameters(entry) if number in numbers for array in _arrays(one.type)]
    return {(element, shape) for element, shape, _ in arrays if _nbytes(element, shape) >= LARGE}


def _copies(one: Instruction, donated: set[tuple[str, str]]) -> bool:
    """True for a copy of a donated buffer within the memory of the device."""
    if one.name not in ("copy", "copy-start"):
        return False
    # A started copy results in its destination, its source, and a mark.
    arrays = list(_arrays(one.type))[: 2 if one.name == "copy-start" else 1]
    return arrays[0][:2] in donated and _in_device_memory(arrays)


def _argument_copies(
    donated: set[str], entry: list[Instruction], computations: dict[str, list[Instruction]]
) -> Iterator[bool]:
    """True for each instruction of the entry that only moves large arguments that are not donated."""
    arguments = {
        one.label
        for number, one in _parameters(entry)
        if number not in donated and any(_nbytes(*array[:2]) >= LARGE for array in _arrays(one.type))
    }
    for one in entry:
        if arguments.isdisjoint(_LABEL.findall(one.rest)):
            continue
        if one.name == "bitcast":
            arguments.add(one.label)
        elif _moves(one, computations):
            first = next(_arrays(one.type))
            yield _nbytes(*first[:2]) >= LARGE and _in_device_memory([first])


def _moves(one: Instruction, computations: dict[str, list[Instruction]]) -> bool:
    """True if an instruction, or each of those that it fuses, only moves elements."""
    if one.name != "fusion":
        return one.name in _MOVES
    return {inner.name for name in _called(one) for inner in computations.get(name, [])} <= _MOVES | _FREE


def _in_device_memory(arrays: list[tuple[str, str, str]]) -> bool:
    return not any(_ON_CHIP in layout or _ON_HOST in layout for *_, layout in arrays)


def _is_host_transfer(one: Instruction) -> bool:
    if one.name in ("infeed", "outfeed"):
        return True
    if one.name in ("send", "recv"):
        return "is_host_transfer=true" in one.rest
    if one.name == "custom-call":
        return _CALLBACK.search(one.rest) is not None
    return one.name in ("copy", "copy-start") and _ON_HOST in one.type


def _multiplies(name: str, computations: dict[str, list[Instruction]]) -> bool:
    """True if a computation, or one that it calls, multiplies matrices."""
    for one in computations.get(name, []):
        if one.name in ("dot", "convolution") or _PRODUCT.search(one.rest):
            return True
        # Loops within count for themselves.
        if one.name != "while" and any(_multiplies(inner, computations) for inner in _called(one)):
            return True
    return False


def _called(one: Instruction) -> list[str]:
    """Names of the computations that an instruction calls, and further words of its attributes."""
    return [name.strip("% ") for names in _CALLED.findall(one.rest) for name in names.split(",")]


def _arrays(text: str) -> Iterator[tuple[str, str, str]]:
    """Element type, shape and layout of each array of a type."""
    for array in _ARRAY.finditer(text):
        yield array["element"], array["shape"], array["layout"] or ""


def _nbytes(element: str, shape: str) -> int:
    named = re.search(r"\d+", element)  # 8 of f8e4m3fn; booleans take a byte
    bits = 8 if named is None else int(named[0])
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8
