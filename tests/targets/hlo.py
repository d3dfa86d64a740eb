"""Text of an optimised program: its instructions, and what they do that costs time or memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

LARGE = 1 << 20
"""Bytes of a buffer from which on a copy of it counts. Slots are smaller, and move in and out of the chip."""

_MOVES = frozenset({"copy", "copy-start", "transpose", "concatenate", "convert", "pad", "slice", "reshape"})
"""Operations whose results are their operands' elements in another order or type."""

_FREE = frozenset({"parameter", "bitcast", "constant"})
"""Operations that a fusion of moves may have in addition."""

# `%name = type operation(%operand, ...), attribute=...`; a computation begins with `%name (` or `ENTRY %name (`.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|body|to_apply|\w+_computations?)=\{?(%?[\w.\-]+(?:, %?[\w.\-]+)*)")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_DONATED = re.compile(r"\{[\d,\s]*\}: \((\d+), \{[^}]*\}")
_LABEL = re.compile(r"%([\w.\-]+)")

# libtpu marks memories by number: 1 is the chip's own, 5 the host's. Without a mark an array lies in device memory.
_ON_CHIP, _ON_HOST = "S(1)", "S(5)"
_CALLBACK = re.compile(r'custom_call_target="[^"]*(?:callback|host)[^"]*"', re.IGNORECASE)
_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|cudnn)|kind=kCustom.*__triton_gemm|__triton_nested_gemm_fusion')


class Instruction(NamedTuple):
    """An instruction: its label, type and operation, and what follows its opening parenthesis."""

    label: str
    type: str
    name: str
    rest: str

    def arrays(self) -> list[tuple[str, str, str]]:
        """Element type, shape and layout of each array of the result."""
        return _ARRAY.findall(self.type)

    def called(self) -> list[str]:
        """Names of the computations that the instruction calls, and further words of its attributes."""
        return [name.strip("% ") for names in _CALLED.findall(self.rest) for name in names.split(",")]


def labels(one: Instruction) -> list[str]:
    """Labels of an instruction's operands."""
    return _LABEL.findall(one.rest.partition(")")[0])


def parse_module(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions by computation, and the name of the entry."""
    computations: dict[str, list[Instruction]] = {}
    name = entry = ""
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            name = begin[2]
            computations[name] = []
            entry = name if begin[1] else entry
        elif name and (one := _INSTRUCTION.match(line)):
            computations[name].append(Instruction(*one.groups()))
    return computations, entry


def read_module(text: str) -> dict[str, Any]:
    """Fields of `compile.Compiled` that an optimised HLO module's text has.

    Each instruction counts once, however often a loop runs it.
    """
    computations, name = parse_module(text)
    entry, everything = computations[name], [one for part in computations.values() for one in part]
    kinds = Counter(one.name.removesuffix("-start") for one in everything)
    aliases = text.partition("\n")[0].partition("input_output_alias=")[2].partition("entry_computation_layout")[0]
    donated = set(_DONATED.findall(aliases))
    large = [(one, _number(one) in donated) for one in entry if one.name == "parameter" and _is_large(one)]
    shapes = {array[:2] for one, is_donated in large if is_donated for array in one.arrays()}
    bodies = [body for one in everything if one.name == "while" for body in re.findall(r"body=%?([\w.\-]+)", one.rest)]
    return {
        "collectives": {kind: kinds[kind] for kind in COLLECTIVES if kinds[kind]},
        "host_transfers": sum(map(_is_host_transfer, everything)),
        "donated_copies": sum(_copies(one, shapes) for one in everything),
        "argument_copies": sum(_argument_copies({one.label for one, given in large if not given}, entry, computations)),
        "loops_with_products": sum(_multiplies(body, computations) for body in bodies),
    }


def _number(parameter: Instruction) -> str:
    return parameter.rest.partition(")")[0]


def _is_large(one: Instruction) -> bool:
    return any(_nbytes(*array[:2]) >= LARGE for array in one.arrays())


def _copies(one: Instruction, donated: set[tuple[str, str]]) -> bool:
    """True for a copy of a donated buffer within the memory of the device."""
    if one.name not in ("copy", "copy-start"):
        return False
    # A started copy results in its destination, its source, and a mark.
    arrays = one.arrays()[: 2 if one.name == "copy-start" else 1]
    return arrays[0][:2] in donated and _in_device_memory(arrays)


def _argument_copies(
    arguments: set[str], entry: list[Instruction], computations: dict[str, list[Instruction]]
) -> Iterator[bool]:
    """True for each instruction of the entry that only moves large arguments, such as weights side by side."""
    for one in entry:
        if arguments.isdisjoint(_LABEL.findall(one.rest)):
            continue
        if one.name == "bitcast":
            arguments.add(one.label)
        elif _moves(one, computations):
            yield _nbytes(*one.arrays()[0][:2]) >= LARGE and _in_device_memory(one.arrays()[:1])


def _moves(one: Instruction, computations: dict[str, list[Instruction]]) -> bool:
    """True if an instruction, or each of those that it fuses, only moves elements."""
    if one.name != "fusion":
        return one.name in _MOVES
    return {inner.name for name in one.called() for inner in computations.get(name, [])} <= _MOVES | _FREE


def _in_device_memory(arrays: list[tuple[str, str, str]]) -> bool:
    return not any(_ON_CHIP in layout or _ON_HOST in layout for *_, layout in arrays)


def _is_host_transfer(one: Instruction) -> bool:
    if one.name in ("send", "recv"):
        return "is_host_transfer=true" in one.rest
    if one.name == "custom-call":
        return _CALLBACK.search(one.rest) is not None
    return one.name in ("infeed", "outfeed") or (one.name in ("copy", "copy-start") and _ON_HOST in one.type)


def _multiplies(name: str, computations: dict[str, list[Instruction]]) -> bool:
    """True if a computation, or one that it calls, multiplies matrices. Loops within count for themselves."""
    return any(
        one.name in ("dot", "convolution")
        or _PRODUCT.search(one.rest)
        or (one.name != "while" and any(_multiplies(inner, computations) for inner in one.called()))
        for one in computations.get(name, [])
    )


def _nbytes(element: str, shape: str) -> int:
    named = re.search(r"\d+", element)  # 8 of f8e4m3fn; booleans take a byte
    bits = 8 if named is None else int(named[0])
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8
