"""OpenVINO as a side of `verax bench video`, on diffusers' model with our weights. Needs `verax[parity,openvino]`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from verax.bench.embed.openvino import HINTS, import_openvino
from verax.bench.video.diffusers import DiffusersSide, in_our_layout
from verax.bench.video.work import Work
from verax.machine import num_cores

__all__ = ["OpenVinoSide"]


class OpenVinoSide:
    """A stage converted by `openvino.convert_model`, compiled for its sizes on all cores of the CPU."""

    def __init__(self, work: Work, dtype: str):
        """Convert and compile.

        Raises:
            MissingDependencyError: without openvino, or what diffusers' side needs.
        """
        openvino = import_openvino()
        side = DiffusersSide(work, dtype)
        import torch

        # With constants in bfloat16, results of OpenVINO 2026.4 are wrong by half. The hint rounds them again.
        side.model.float()
        inputs = {
            name: value.float() if value.is_floating_point() else value
            for name, value in side.arguments.items()
            if isinstance(value, torch.Tensor)
        }

        class Positional(torch.nn.Module):
            """The model with tensors as its only arguments, in order, which is what converting can trace."""

            def __init__(self) -> None:
                super().__init__()
                self.model = side.model

            def forward(self, *values: torch.Tensor) -> torch.Tensor:
                return self.model(**dict(zip(inputs, values, strict=True)), return_dict=False)[0]

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's tracer
            model = openvino.convert_model(Positional(), example_input=tuple(inputs.values()))
        model.reshape({i: list(value.shape) for i, value in enumerate(inputs.values())})
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": HINTS[dtype],
            "INFERENCE_NUM_THREADS": num_cores(),
        }
        self._request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
        self._inputs = [value.numpy() for value in inputs.values()]
        self._work = work
        self.versions: dict[str, Any] = {
            **side.versions,
            "openvino": openvino.__version__.partition("-")[0],
            "openvino_threads": num_cores(),
        }

    def run(self) -> Any:
        """Compute; OpenVINO's tensor, in diffusers' layout."""
        self._request.infer(self._inputs, share_inputs=True)
        return self._request.get_output_tensor()

    def result(self) -> np.ndarray:
        """Result of `run` in our layout, float32."""
        return in_our_layout(self._work, self.run().data.astype(np.float32))
