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


def annotation_text(annotation):
    """Text of an annotation, the same in every version of Python: source code is left unchanged."""
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else inspect.formatannotation(text)


def default_text(value):
    """Text of a default; `...` for an object, whose own text may differ from run to run."""
    if isinstance(value, tuple):
        return f"({', '.join(map(default_text, value))}{',' * (len(value) == 1)})"
    return repr(value) if isinstance(value, PLAIN) else "..."


def parameters(function, *, bound=False):
    """Parameters in parentheses, without the first one of a method."""
    names = list(inspect.signature(function).parameters.values())[bound:]
    parts, keywords, positional = [], False, False
    for parameter in names:
        if positional and parameter.kind is not parameter.POSITIONAL_ONLY:
            parts.append("/")
        positional = parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            parts.append("*")
        keywords |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY)
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation_text(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default_text(parameter.default)}"
        parts.append(text)
    return f"({', '.join([*parts, '/'] if positional else parts)})"


def returned(function):
    annotation = inspect.signature(function).return_annotation
    return "" if annotation is inspect.Signature.empty else f" -> {annotation_text(annotation)}"


def class_lines(name, kind):
    yield f"class {name}{parameters(kind)}" if not issubclass(kind, BaseException) else f"class {name}"
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("verax"):
            continue
        for member, value in vars(base).items():
            if member.startswith("_") and member != "__call__":
                continue
            if isinstance(value, property):
                yield f"{name}.{member}{returned(value.fget)}"
            elif isinstance(value, staticmethod):
                yield f"{name}.{member}{parameters(value.__func__)}{returned(value.__func__)}"
            elif isinstance(value, classmethod):
                yield f"{name}.{member}{parameters(value.__func__, bound=True)}{returned(value.__func__)}"
            elif isinstance(value, types.FunctionType):
                yield f"{name}.{member}{parameters(value, bound=True)}{returned(value)}"


def signatures():
    """Lines of all public functions, classes, methods and properties, sorted; one for each name of a constant."""
    lines = set()
    for module in map(importlib.import_module, MODULES):
        for short in module.__all__:
            value, name = getattr(module, short), f"{module.__name__}.{short}"
            if inspect.isclass(value):
                lines.update(class_lines(name, value))
            elif isinstance(value, types.FunctionType) or type(value).__module__.startswith("verax"):
                lines.add(f"{name}{parameters(value)}{returned(value)}")
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
