"""diffusers and OpenVINO as baselines of a video benchmark, with our weights. Needs `verax[parity,openvino]`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from verax.bench.embed.baselines import HINTS, import_openvino
from verax.bench.harness import import_torch, torch_versions
from verax.bench.video.work import Work
from verax.machine import num_cores

__all__ = ["DiffusersSide", "OpenVinoSide"]


class DiffusersSide:
    """A stage in PyTorch on the CPU or its GPU, with all cores; transformers' UMT5 for the text."""

    def __init__(self, work: Work, dtype: str, *, compiled: bool = False):
        """Make the model; weights on a CPU share the memory of `work`.

        Args:
            work: of the stage.
            dtype: of weights and inputs.
            compiled: `torch.compile` compiles the model, or the VAE's decoder, in its first call.

        Raises:
            MissingDependencyError: without diffusers, torch or transformers.
        """
        torch, diffusers, transformers = import_torch("diffusers", "transformers")
        self.versions: dict[str, Any] = torch_versions(torch, diffusers, transformers)
        self._torch, self._work, self._dtype = torch, work, getattr(torch, dtype)
        self._device = self.versions["torch_device"]
        torch.set_default_dtype(self._dtype)  # as from_pretrained has it while it makes a model
        try:
            model = _model(work, diffusers, transformers)
        finally:
            torch.set_default_dtype(torch.float32)
        tensors = _translated(torch, work)
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        assert not unexpected, unexpected
        assert set(missing) <= {"encoder.embed_tokens.weight"}, missing
        if work.stage == "text":
            model.tie_weights()
        kept = getattr(model, "_keep_in_fp32_modules", None) or ()
        for name, parameter in model.named_parameters():
            if set(name.split(".")) & set(kept):  # what from_pretrained leaves in float32
                parameter.data = parameter.data.float()
        self.model: Any = model.to(self._device).eval().requires_grad_(False)
        if compiled and work.stage == "vae":  # decode() is a loop over latents around it
            self.model.decoder = torch.compile(self.model.decoder)
        elif compiled:
            self.model = torch.compile(self.model)
        self.arguments = self._prepared()

    def run(self) -> Any:
        """Compute; a tensor, in diffusers' layout, whose values are there."""
        torch = self._torch
        with torch.inference_mode():
            call = self.model.decode if self._work.stage == "vae" else self.model
            result = call(**self.arguments)[0]
            if self._device == "cuda":
                torch.cuda.synchronize()
        return result

    def result(self) -> np.ndarray:
        """Result of `run` in our layout, float32."""
        return in_our_layout(self._work, self.run().float().cpu().numpy())

    def _prepared(self) -> dict[str, Any]:
        torch, inputs = self._torch, self._work.inputs

        def tensor(x: np.ndarray, *axes: int) -> Any:
            array = torch.from_numpy(np.ascontiguousarray(x.transpose(axes) if axes else x))
            return array.to(self._device, self._dtype if array.is_floating_point() else torch.long)

        if self._work.stage == "text":
            tokens = tensor(inputs[0])
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "return_dict": False}
        if self._work.stage == "vae":
            config = self._work.config
            mean, std = np.asarray(config.latents_mean, np.float32), np.asarray(config.latents_std, np.float32)
            return {"z": tensor(inputs[0] * std + mean, 0, 4, 1, 2, 3), "return_dict": False}
        latents, timesteps, text, *image = inputs
        return {
            "hidden_states": tensor(latents, 0, 4, 1, 2, 3),
            "timestep": tensor(timesteps),
            "encoder_hidden_states": tensor(text),
            **({"encoder_hidden_states_image": tensor(image[0])} if image else {}),
            "return_dict": False,
        }


def in_our_layout(work: Work, values: np.ndarray) -> np.ndarray:
    """A result with channels last, where diffusers has them after the batch."""
    return values if work.stage == "text" else values.transpose(0, 2, 3, 4, 1)


def _translated(torch: Any, work: Work) -> Mapping[str, Any]:
    tensors = {}
    for name, weight in work.weights.items():
        names = work.table.forward(name) or (name,)
        for other, rows in zip(names, np.split(weight, len(names)), strict=True):
            bits = torch.from_numpy(rows.view(np.int16) if rows.dtype.itemsize == 2 else rows)
            tensors[other] = bits.view(torch.bfloat16) if rows.dtype.itemsize == 2 else bits
    return tensors


def _model(work: Work, diffusers: Any, transformers: Any) -> Any:
    config = work.config
    if work.stage == "transformer":
        return diffusers.SkyReelsV2Transformer3DModel(
            patch_size=(1, config.patch, config.patch),
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=config.in_dim,
            out_channels=config.out_dim,
            added_kv_proj_dim=None if config.image_dim is None else config.dim,
            **_same(config, "text_dim", "freq_dim", "ffn_dim", "num_layers", "image_dim", "inject_sample_info"),
        )
    if work.stage == "vae":
        lists = ("dim_mult", "temperal_downsample", "latents_mean", "latents_std")
        return diffusers.AutoencoderKLWan(
            scale_factor_spatial=config.pixels_per_latent,
            **{name: list(getattr(config, name)) for name in lists},
            **_same(config, "base_dim", "decoder_base_dim", "in_channels", "out_channels", "is_residual"),
            **_same(config, "patch_size", "z_dim", "num_res_blocks"),
        )
    sizes = _same(config, "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
    return transformers.UMT5EncoderModel(transformers.UMT5Config(feed_forward_proj="gated-gelu", **sizes))


def _same(config: Any, *names: str) -> dict[str, Any]:
    """Fields that both libraries call the same."""
    return {name: getattr(config, name) for name in names}


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
