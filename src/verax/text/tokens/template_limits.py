"""A jinja2 sandbox whose templates cannot exhaust the machine: work, texts, numbers and time have limits.

jinja2's own sandbox keeps a template from Python's attributes, but lets `'a' * 10**10` take all memory. Here each
operation that can grow a value is checked before it runs, and each loop body, macro and call is counted.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

__all__ = ["BoundedEnvironment", "bounded"]

MAX_OPERATIONS = 200_000
"""Loop bodies, calls and filters of one rendering: a conversation of 1,000 messages takes about 20,000."""

MAX_LENGTH = 1 << 24
"""Characters of a text, or elements of a list: four times a prompt of a million tokens."""

MAX_CHARACTERS = 1 << 27
"""Characters that all texts of one rendering have together, which bounds the memory that they can take."""

MAX_WIDTH = 1000
"""Characters that a filter or a format may pad to, or indent by."""

MAX_BITS = 1024
"""Bits of a whole number."""

MAX_SECONDS = 0.75
"""Processor time of one rendering: a conversation of 1,000 messages takes some 20 ms."""

_ELEMENT = 8
"""Characters that an element of a list counts as: the bytes of its reference."""

_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson")
"""Filters and methods whose whole numbers are widths or counts."""

_TEXTS = (
    "join",
    "format",
    "replace",
    "string",
    "tojson",
    "pprint",
    "center",
    "indent",
    "wordwrap",
    "xmlattr",
    "urlize",
)
_TEXTS += ("trim", "upper", "lower", "capitalize", "title", "escape", "e", "forceescape", "striptags", "urlencode")
_TEXTS += ("unique", "sort", "dictsort", "groupby", "min", "max")
"""Filters that write, or compare, all that a value holds."""

_SLOW = ("striptags", "urlize", "wordwrap", "pprint", "title", "wordcount")
"""Filters that jinja2 runs in Python, some in a time that grows with the square of the text."""

MAX_SLOW_LENGTH = 100_000
"""Characters of a text for those filters."""

_CODECS = ("utf-8", "utf8", "ascii", "latin-1")
"""Encodings that take a time in proportion to the text, as `punycode` does not."""

_NUMBER = re.compile(r"\d+")


class _Budget:
    """Work that a rendering may still do."""

    def __init__(self) -> None:
        self.operations = MAX_OPERATIONS
        self.characters = MAX_CHARACTERS
        self.end = time.thread_time() + MAX_SECONDS

    def count(self, operations: int = 1, characters: int = 0) -> None:
        """Take work off the budget.

        Raises:
            SecurityError: if there is none left, with what was exceeded.
        """
        self.operations -= operations
        self.characters -= characters
        if self.operations < 0:
            raise SecurityError(f"it takes more than {MAX_OPERATIONS} operations")
        if self.characters < 0:
            raise SecurityError(f"its texts have more than {MAX_CHARACTERS} characters together")
        if time.thread_time() > self.end:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def bounded() -> Iterator[None]:
    """Give the rendering within the block a budget of its own."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


class _Counting(NodeTransformer):
    """Puts a count of the work before the body of each loop and macro, and checks before comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if any(isinstance(side, nodes.Const) for side in sides):
            return node  # a number or a short text is compared at once
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _weighed(node) if node.ctx == "load" else node

    def _counted(self, node: Any) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count"), [nodes.Const(written)], [], None, None)
        node.body = [nodes.ExprStmt(call).set_lineno(node.lineno), *node.body]
        return node


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, "weighed_", [], [], None, None, lineno=node.lineno)


class _Generator(CodeGenerator):
    """Compiles `~` to a checked concatenation."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenate((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits. Templates are rendered within `bounded()`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any):
        # Unoptimised: nothing is computed while a template is compiled.
        super().__init__(optimized=False, finalize=_written, **options)
        self.globals.pop("lipsum")
        self.filters["weighed_"] = lambda value: value

    def bound_filters(self) -> None:
        """Check the filters that are there."""
        for name, function in self.filters.items():
            self.filters[name] = _checked_filter(name, function)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)

    def count(self, written: int) -> None:
        """Count the body of a loop or macro, which writes so many characters of the template; `call` counts it once."""
        _budget.get().count(0, written)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """The parts as texts, joined."""
        _charge(sum(_weigh(part) for part in parts))
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result before it is computed."""
        _budget.get().count()
        if operator == "+":
            if _is_sized(left) and _is_sized(right):
                _charge_sized(left, _length(left) + _length(right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(left, right)
        elif operator == "**":
            _check_bits(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if _is_sized(one) and isinstance(times, int):
                    _charge_sized(one, _length(one) * max(times, 0))
            _check_bits(_bits(left) + _bits(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Check the size of a method's result before it is computed, and count the call."""
        _budget.get().count()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_text(getattr(__obj, "__name__", ""), owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, (str, bytes)):
            _charge(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with checked widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


@pass_context
def _written(context: Context, value: Any) -> Any:
    """A value that is written to the prompt."""
    _charge(_weigh(value))
    return value


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.count()
        value, *options = args[passed:]
        if name in _TEXTS or name == "weighed_":
            weight = sum(map(_weigh, [value, *options, *kwargs.values()]))
            if name != "weighed_":
                _charge(weight)
        _check_text(name, value, options, kwargs)
        if name == "sum" and _is_sized(value):
            _charge(sum(_length(one) for one in value if _is_sized(one)) * len(value))
        result = function(*args, **kwargs)
        if _is_sized(result):
            budget.count(characters=_length(result) * (1 if isinstance(result, str) else _ELEMENT))
        return result

    return checked


def _check_text(name: str, value: Any, options: Any, named: Mapping[str, Any]) -> None:
    """Check the arguments of a filter, or of a text's method of that name, that makes a text longer."""
    given = [*options, *named.values()]
    if name in _PADDING and any(isinstance(one, int) and abs(one) > MAX_WIDTH for one in given):
        raise SecurityError(f"{name}: it pads or divides by more than {MAX_WIDTH}")
    if name in _SLOW and _weigh(value) > MAX_SLOW_LENGTH:
        raise SecurityError(f"{name}: its text has more than {MAX_SLOW_LENGTH} characters")
    if name in ("encode", "decode") and not {str(one).lower() for one in given[:1]} <= {*_CODECS}:
        raise SecurityError(f"{name}: expected one of {', '.join(_CODECS)}")
    longest = max((_length(one) for one in given if _is_sized(one)), default=0)
    length = _length(value) if _is_sized(value) else 0
    if name == "replace" and given:
        old = given[0]
        count = value.count(old) if isinstance(value, type(old)) else length + 1
        _charge(length + count * longest)
    elif name == "join":
        parts = value if not isinstance(value, (str, bytes)) or not given else given[0]
        separator = value if parts is not value else (given[0] if given else "")
        if _is_sized(parts):
            _charge(_weigh(parts) + _length(parts) * _length(separator if _is_sized(separator) else ""))
        separator_only = _length(value) * longest if isinstance(value, (str, bytes)) else 0
        _charge(separator_only)
    elif name in ("indent", "wordwrap", "expandtabs", "translate"):
        widths = [abs(one) for one in given if isinstance(one, int)] if name != "wordwrap" else [0]
        widest = max(longest, *widths or [8])
        pieces = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else length
        _charge(length + pieces * widest)
    elif name == "tojson":
        indent = max((one for one in given if isinstance(one, int)), default=0)
        _charge(_weigh(value) * (1 + indent))
    elif name in ("split", "rsplit", "splitlines", "list", "batch", "slice"):
        _charge(length * _ELEMENT)
    elif name == "format":
        _check_format(value, (*options, *named.values()))


def _check_format(pattern: Any, values: Any) -> None:
    """Refuse widths beyond `MAX_WIDTH`, and those that are themselves formatted."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)
    _charge(len(text) + _weigh(values))
    numbers = (number for number in _NUMBER.findall(text))
    nested = re.search(r"\{[^{}]*\{", text.replace("{{", "")) or re.search(r"%[^%a-zA-Z]*\*", text)
    if nested or any(len(number) > 4 or int(number) > MAX_WIDTH for number in numbers if _is_width(text, number)):
        raise SecurityError(f"it formats to a width of more than {MAX_WIDTH}, or to one that is computed")


def _is_width(text: str, number: str) -> bool:
    """True if a number of a format follows `%`, a flag, a colon or a point, as a width or precision does."""
    return re.search(rf"(%[-+ #0.\d]*|:[^{{}}]*|\.){number}", text) is not None


def _weigh(value: Any) -> int:
    """Length of a value written out, at most; containers are walked as often as they are referenced."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple, dict, set, frozenset)):
        return 0 if value is None or isinstance(value, (bool, int, float)) else 1
    budget, total, steps, todo = _budget.get(), 0, 0, [value]
    while todo:
        one = todo.pop()
        steps += 1
        total += len(one) if isinstance(one, (str, bytes)) else 1
        if total > MAX_LENGTH or steps > MAX_LENGTH // 16:
            raise SecurityError(f"a value has more than {MAX_LENGTH // 16} elements or {MAX_LENGTH} characters")
        if isinstance(one, dict):
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo.extend(one)
        if not steps % 1024:
            budget.count()
    return total


def _charge(length: int) -> None:
    """Take a text or a list that is about to be made off the budget."""
    if length > MAX_LENGTH:
        raise SecurityError(f"a value would have more than {MAX_LENGTH} characters or elements")
    _budget.get().count(0, length)


def _charge_sized(kind: Any, length: int) -> None:
    _charge(length if isinstance(kind, (str, bytes)) else length * _ELEMENT)


def _is_sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _length(value: Any) -> int:
    return len(value) if _is_sized(value) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"a number would have more than {MAX_BITS} bits")
