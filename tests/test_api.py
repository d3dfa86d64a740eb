"""Public signatures of the code equal `tests/api.txt`, so that a change of one is seen in its commit.

`python -m tests.test_api` writes the file.
"""

import importlib
import inspect
import types
from pathlib import Path

FILE = Path(__file__).with_name("api.txt")
MODULES = ("verax", "verax.checkpoint", "verax.compare", "verax.errors", "verax.models", "verax.ops")
PLAIN = (str, int, float, bool, bytes, type(None))


class Text(str):
    """A text that stands in a signature without quotes."""

    __repr__ = str.__str__


def annotation_text(annotation):
    """An annotation in the same words in every version of Python: source code is left unchanged."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return Text(text if isinstance(text, str) else inspect.formatannotation(text))


def default_text(value):
    """Text of a default; `...` for an object, whose own text may differ from run to run."""
    if isinstance(value, tuple):
        return Text(f"({', '.join(map(default_text, value))}{',' * (len(value) == 1)})")
    return Text(repr(value) if isinstance(value, PLAIN) else "...")


def signature_text(function, *, bound=False, returns=True):
    """Parameters in parentheses, without the first one of a method, and the type of the result."""
    signature, empty = inspect.signature(function), inspect.Signature.empty
    text = lambda value, write: value if value is empty else write(value)
    parameters = [
        one.replace(annotation=text(one.annotation, annotation_text), default=text(one.default, default_text))
        for one in list(signature.parameters.values())[bound:]
    ]
    result = text(signature.return_annotation, annotation_text) if returns else empty
    return str(signature.replace(parameters=parameters, return_annotation=result))


def class_lines(name, kind):
    yield f"class {name}" + ("" if issubclass(kind, BaseException) else signature_text(kind, returns=False))
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("verax"):
            continue
        for member, value in vars(base).items():
            if member.startswith("_") and member != "__call__":
                continue
            if isinstance(value, property):
                yield f"{name}.{member}{signature_text(value.fget, bound=True).removeprefix('()')}"
            elif isinstance(value, (staticmethod, classmethod)):
                yield f"{name}.{member}{signature_text(value.__func__, bound=isinstance(value, classmethod))}"
            elif isinstance(value, types.FunctionType):
                yield f"{name}.{member}{signature_text(value, bound=True)}"


def signatures():
    """Lines of all public functions, classes, methods and properties, sorted; one for each name of a constant."""
    lines = set()
    for module in map(importlib.import_module, MODULES):
        for short in module.__all__:
            value, name = getattr(module, short), f"{module.__name__}.{short}"
            if inspect.isclass(value):
                lines.update(class_lines(name, value))
            elif isinstance(value, types.FunctionType) or type(value).__module__.startswith("verax"):
                lines.add(f"{name}{signature_text(value)}")
            elif not inspect.ismodule(value):
                lines.add(name)
    return sorted(lines)


def test_public_signatures_match_the_file():
    expected, found = FILE.read_text().splitlines(), signatures()
    changes = [f"- {line}" for line in expected if line not in found]
    changes += [f"+ {line}" for line in found if line not in expected]
    assert not changes, "public signatures changed; `python -m tests.test_api` writes them:\n" + "\n".join(changes)


if __name__ == "__main__":
    FILE.write_text("\n".join(signatures()) + "\n")
