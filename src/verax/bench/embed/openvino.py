"""OpenVINO as a side of `verax bench embed`, on the same weights. Needs `pip install 'verax[openvino]'`."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verax._optional import require_optional
from verax.bench.embed.exported import Batch, Exported, Way, padded_batches
from verax.bench.embed.transformers import pooled_model
from verax.bench.harness import import_torch
from verax.embed.settings import EncoderSettings
from verax.machine import num_cores

__all__ = ["HINTS", "import_openvino", "openvino_side"]

CALIBRATION_TEXTS = 128
"""Most texts from which int8 takes the ranges of activations; NNCF's own default is 300."""

HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
"""INFERENCE_PRECISION_HINT by precision: of an int8 model, of the operations that stay in floating point."""


def openvino_side(
    folder: Path, precision: str, settings: EncoderSettings, texts: list[str], batch_size: int, *, latency: bool
) -> Exported:
    """Model of transformers, converted by `openvino.convert_model`.

    int8 is NNCF's post-training quantisation of weights and activations (W8A8, SmoothQuant), calibrated with `texts`.

    Raises:
        MissingDependencyError: without openvino, torch, or, for int8, nncf.
    """
    openvino = import_openvino()
    (torch,) = import_torch()
    nncf = require_optional("nncf") if precision == "int8" else None
    source = pooled_model(folder, settings.pooling)
    batches = padded_batches(folder, settings, source.padding)
    ids = torch.ones((2, 3), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        model = openvino.convert_model(source, example_input={"input_ids": ids, "attention_mask": ids})
    if nncf is not None:
        model = _quantized(nncf, model, batches(texts[:CALIBRATION_TEXTS], 1))
    core = openvino.Core()

    def compiled(hint: str) -> Any:
        options = {
            "PERFORMANCE_HINT": hint,
            "INFERENCE_PRECISION_HINT": HINTS[precision],
            "INFERENCE_NUM_THREADS": num_cores(),
        }
        return core.compile_model(model, "CPU", options)

    first = partial(_one_at_a_time, compiled("LATENCY").create_infer_request())
    ways = [Way("PERFORMANCE_HINT=LATENCY", 1 if latency else batch_size, first)]
    if not latency:
        streams = compiled("THROUGHPUT")
        setting = f"PERFORMANCE_HINT=THROUGHPUT ({streams.get_property('NUM_STREAMS')} streams)"
        run = partial(_in_streams, openvino.AsyncInferQueue(streams))
        ways += [Way(setting, size, run) for size in sorted({batch_size, 1}, reverse=True)]
    versions = {"openvino": openvino.__version__.partition("-")[0], "openvino_threads": num_cores()}
    if nncf is not None:
        versions["nncf"] = nncf.__version__
    return Exported(f"openvino {precision}", batches, ways, versions)


def import_openvino() -> Any:
    """Import OpenVINO, which sends nothing.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    # It would send usage statistics, from forks of this process. OpenVINO and NNCF do without it.
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]
    return require_optional("openvino")


def _quantized(nncf: Any, model: Any, batches: Iterable[Batch]) -> Any:
    nncf.set_log_level(logging.ERROR)
    inputs = [{"input_ids": batch.ids, "attention_mask": batch.mask} for batch in batches]
    with contextlib.redirect_stdout(sys.stderr):  # its bars
        return nncf.quantize(
            model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs)
        )


def _one_at_a_time(request: Any, batches: Iterable[Batch]) -> list[tuple[list[int], np.ndarray]]:
    vectors = []
    for batch in batches:
        request.infer([batch.ids, batch.mask], share_inputs=True)
        vectors.append((batch.rows, request.get_output_tensor().data.copy()))
    return vectors


def _in_streams(queue: Any, batches: Iterable[Batch]) -> list[tuple[list[int], np.ndarray]]:
    vectors: list[tuple[list[int], np.ndarray]] = []
    queue.set_callback(lambda request, rows: vectors.append((rows, request.get_output_tensor().data.copy())))
    for batch in batches:
        queue.start_async([batch.ids, batch.mask], batch.rows)
    queue.wait_all()
    return vectors
