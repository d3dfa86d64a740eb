"""diffusers and OpenVINO as baselines of a video benchmark, with our weights. Needs `verax[parity,openvino]`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from verax._optional import require_optional
from verax.bench.embed.engines import compile_openvino
from verax.bench.harness import import_torch, torch_device
from verax.compare.cases.video import reference_model
from verax.video.programs import Component


@dataclass(frozen=True)
class Work:
    """One stage that all sides compute.

    Attributes:
        settings: diffusers' config.json, from which both sides make their models.
        component: our model, with the weights when it is used.
        weights: weights by our names.
        inputs: inputs in our layout.
        function: traced function of the module and the inputs.
        prepare: function from the module and the inputs to the inputs of `function`; our side calls it once, untimed.
    """

    stage: str
    settings: Mapping[str, Any]
    component: Component[Any]
    weights: Mapping[str, np.ndarray]
    inputs: tuple[np.ndarray, ...]
    function: Callable[..., Any]
    prepare: Callable[..., Any]

    def run(self, weights: Any, *inputs: Any) -> Any:
        """Call `function` with weights in their place."""
        return self.function(self.component.module(weights), *inputs)

    def prepared(self, weights: Any, *inputs: Any) -> Any:
        """Call `prepare` with weights in their place."""
        return self.prepare(self.component.module(weights), *inputs)

    @property
    def shapes(self) -> Any:
        """Shapes and dtypes of the inputs of `function`."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs]
        return jax.eval_shape(self.prepared, self.component.shapes, *shapes)


def make_baseline(name: str, work: Work, dtype: str) -> tuple[Callable[[], Any], Callable[[Any], np.ndarray]]:
    """Call of a stage with our weights in `diffusers`, `torch.compile` or `openvino`, and a function from its result to
    float32 in our layout."""
    torch = import_torch()
    device = torch_device(torch)
    weight = lambda name: np.asarray(work.weights[name], np.float32)
    model = reference_model(work.stage, work.settings, weight, dtype).to(device)
    arguments = _arguments(work, torch, device, getattr(torch, dtype))
    in_our_layout = lambda x: x.transpose(0, 2, 3, 4, 1)  # diffusers has channels first
    if name == "openvino":
        run = _openvino_call(torch, model, arguments, dtype)
        return run, lambda tensor: in_our_layout(tensor.data.astype(np.float32))
    if name == "torch.compile" and work.stage == "vae":  # decode() is a loop over latents around it
        model.decoder = torch.compile(model.decoder)
    elif name == "torch.compile":
        model = torch.compile(model)

    def run() -> Any:
        with torch.inference_mode():
            return (model.decode if work.stage == "vae" else model)(**arguments)[0]

    return run, lambda tensor: in_our_layout(tensor.float().cpu().numpy())


def _arguments(work: Work, torch: Any, device: str, dtype: Any) -> dict[str, Any]:
    """Inputs of a stage by diffusers' names, in its layout."""

    def tensor(x: np.ndarray, *axes: int) -> Any:
        array = torch.from_numpy(np.ascontiguousarray(x.transpose(axes) if axes else x))
        return array.to(device, dtype if array.is_floating_point() else torch.long)

    inputs, config = work.inputs, work.component.config
    if work.stage == "vae":
        mean, std = (np.asarray(x, np.float32) for x in (config.latents_mean, config.latents_std))
        return {"z": tensor(inputs[0] * std + mean, 0, 4, 1, 2, 3), "return_dict": False}
    latents, timesteps, text, *image = inputs
    return {
        "hidden_states": tensor(latents, 0, 4, 1, 2, 3),
        "timestep": tensor(timesteps),
        "encoder_hidden_states": tensor(text),
        **({"encoder_hidden_states_image": tensor(image[0])} if image else {}),
        "return_dict": False,
    }


def _openvino_call(torch: Any, model: Any, arguments: dict[str, Any], dtype: str) -> Callable[[], Any]:
    """The model converted by `openvino.convert_model`, compiled for its sizes on all cores."""
    openvino = require_optional("openvino")  # its usage statistics are off, see `bench.embed.engines`
    # With constants in bfloat16, results of OpenVINO 2026.4 are wrong by half. The hint rounds them again.
    model.float()
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}

    class Positional(torch.nn.Module):
        """The model with tensors as its only arguments, in order, which is what converting can trace."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            return self.model(**dict(zip(inputs, values, strict=True)), return_dict=False)[0]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        converted = openvino.convert_model(Positional(), example_input=tuple(inputs.values()))
    converted.reshape({i: list(value.shape) for i, value in enumerate(inputs.values())})
    request = compile_openvino(openvino, converted, "LATENCY", dtype).create_infer_request()
    values = [value.numpy() for value in inputs.values()]

    def run() -> Any:
        request.infer(values, share_inputs=True)
        return request.get_output_tensor()

    return run
