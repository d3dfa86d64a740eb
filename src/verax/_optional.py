"""Imports where they are used: of packages that extras add (`video`, `server`), and of modules that load slowly."""

from __future__ import annotations

import importlib
from typing import Any

from verax.errors import MissingDependencyError

_PACKAGES = {
    "accelerate": ("accelerate", "parity"),
    "av": ("PyAV", "video"),
    "PIL": ("Pillow", "video"),
    "diffusers": ("diffusers", "parity"),
    "ftfy": ("ftfy", "video"),
    "httpx": ("httpx", "bench"),
    "httptools": ("httptools", "server"),
    "jax_plugins": ("jax-cuda13-plugin", "plan-cuda"),
    "libtpu": ("libtpu", "plan-tpu"),
    "llama_cpp": ("llama-cpp-python", "llama-cpp"),
    "llguidance": ("llguidance", "server"),
    "matplotlib": ("matplotlib", "compare"),
    "markdown_it": ("markdown-it-py", "server"),
    "opentelemetry": ("opentelemetry-exporter-otlp-proto-http", "otel"),
    "nh3": ("nh3", "server"),
    "nncf": ("nncf", "openvino"),
    "onnx": ("onnx", "onnxruntime"),
    "onnxruntime": ("onnxruntime", "onnxruntime"),
    "openvino": ("openvino", "openvino"),
    "optax": ("optax", "train"),
    "orbax": ("orbax-checkpoint", "train"),
    "prometheus_client": ("prometheus-client", "server"),
    "pyarrow": ("pyarrow", "ray"),
    "pygments": ("Pygments", "server"),
    "ray": ("Ray", "ray"),
    "skimage": ("scikit-image", "compare"),
    "starlette": ("Starlette", "server"),
    "torch": ("torch", "parity"),
    "transformers": ("transformers", "parity"),
    "uvicorn": ("uvicorn", "server"),
    "zmq": ("pyzmq", "hosts"),
}
"""Package and extra by module."""


def require_optional(module: str, extra: str | None = None) -> Any:
    """Import a module of a package that an extra installs.

    `module`: full name of the module, such as `"PIL.Image"`. `extra`: extra that the error names; the usual one of the
    package if None.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, usual = _PACKAGES[module.partition(".")[0]]
        raise MissingDependencyError(f"{package} is not installed: pip install 'verax[{extra or usual}]'") from error


def load_pyplot(extra: str = "train") -> Any:
    """Import `matplotlib.pyplot`, set to draw into files only."""
    require_optional("matplotlib", extra).use("Agg")
    return importlib.import_module("matplotlib.pyplot")


class Deferred:
    """A module that is imported when its first name is used."""

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
