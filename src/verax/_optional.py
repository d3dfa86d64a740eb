"""Imports where they are used: of packages that extras add (`video`, `server`), and of modules that load slowly."""

from __future__ import annotations

import importlib
from typing import Any

from verax.errors import MissingDependencyError

_EXTRAS = {
    **dict.fromkeys(("accelerate", "diffusers", "torch", "transformers"), "parity"),
    **dict.fromkeys(("av", "PIL", "ftfy"), "video"),
    **dict.fromkeys(("httptools", "llguidance", "markdown_it", "nh3"), "server"),
    **dict.fromkeys(("prometheus_client", "pygments", "starlette", "uvicorn"), "server"),
    **dict.fromkeys(("matplotlib", "skimage"), "compare"),
    **dict.fromkeys(("onnx", "onnxruntime"), "onnxruntime"),
    **dict.fromkeys(("nncf", "openvino"), "openvino"),
    **dict.fromkeys(("optax", "orbax"), "train"),
    **dict.fromkeys(("pyarrow", "ray"), "ray"),
    **{"httpx": "bench", "jax_plugins": "plan-cuda", "libtpu": "plan-tpu", "opentelemetry": "otel", "zmq": "hosts"},
}
"""Extra that installs a module."""

_PACKAGES = (
    {"av": "PyAV", "PIL": "Pillow", "jax_plugins": "jax-cuda13-plugin", "markdown_it": "markdown-it-py"}
    | {"opentelemetry": "opentelemetry-exporter-otlp-proto-http", "orbax": "orbax-checkpoint", "pygments": "Pygments"}
    | {"prometheus_client": "prometheus-client", "ray": "Ray", "skimage": "scikit-image", "starlette": "Starlette"}
    | {"zmq": "pyzmq"}
)
"""Package of a module with another name."""


def require_optional(module: str, extra: str | None = None) -> Any:
    """Import a module of a package that an extra installs.

    `module`: full name of the module, such as `"PIL.Image"`. `extra`: extra that the error names; the usual one of the
    package if None.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingDependencyError(
            f"{_PACKAGES.get(name, name)} is not installed: pip install 'verax[{extra or _EXTRAS[name]}]'"
        ) from error


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
