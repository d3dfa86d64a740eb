"""Imports of packages that extras add, `video`, `server`, `plan-tpu` and others, where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from verax.errors import MissingDependencyError

__all__ = ["require_optional"]

_PACKAGES = {
    "av": ("PyAV", "video"),
    "PIL": ("Pillow", "video"),
    "ftfy": ("ftfy", "video"),
    "httpx": ("httpx", "bench"),
    "httptools": ("httptools", "server"),
    "jax_plugins": ("jax-cuda13-plugin", "plan-cuda"),
    "libtpu": ("libtpu", "plan-tpu"),
    "llguidance": ("llguidance", "server"),
    "markdown_it": ("markdown-it-py", "server"),
    "python_multipart": ("python-multipart", "server"),
    "opentelemetry": ("opentelemetry-exporter-otlp-proto-http", "otel"),
    "nh3": ("nh3", "server"),
    "nncf": ("nncf", "openvino"),
    "onnx": ("onnx", "onnxruntime"),
    "onnxruntime": ("onnxruntime", "onnxruntime"),
    "openvino": ("openvino", "openvino"),
    "orbax": ("orbax-checkpoint", "train"),
    "prometheus_client": ("prometheus-client", "server"),
    "pyarrow": ("pyarrow", "ray"),
    "pygments": ("Pygments", "server"),
    "ray": ("Ray", "ray"),
    "starlette": ("Starlette", "server"),
    "uvicorn": ("uvicorn", "server"),
    "zmq": ("pyzmq", "hosts"),
}
"""Package and extra by module."""


def require_optional(module: str) -> Any:
    """Import a module of a package that an extra adds.

    Args:
        module: its full name, such as `"PIL.Image"`.

    Raises:
        MissingDependencyError: if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, extra = _PACKAGES[module.partition(".")[0]]
        raise MissingDependencyError(f"{package} is not installed: pip install 'verax[{extra}]'") from error
