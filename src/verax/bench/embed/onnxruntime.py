"""onnxruntime as a side of `verax bench embed`, on the same weights. Needs `pip install 'verax[onnxruntime]'`."""

from __future__ import annotations

import importlib
import logging
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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

__all__ = ["onnxruntime_side"]

INPUTS, OUTPUT = ("input_ids", "attention_mask"), "vectors"

OPSET = 17
"""Version of ONNX's operators: the first with LayerNormalization. onnxruntime's fusions know what it exports to."""


def onnxruntime_side(
    folder: Path, precision: str, settings: EncoderSettings, texts: list[str], batch_size: int, *, latency: bool
) -> Exported:
    """Model of transformers, exported by torch, fused by onnxruntime's optimizer of transformers.

    On a CPU without bfloat16 kernels, which onnxruntime has for ARM only, bfloat16 is run as float32. int8 is
    onnxruntime's dynamic quantisation: weights by column, activations by tensor as they come; `texts` are not needed.

    Raises:
        MissingDependencyError: without onnxruntime, onnx or torch.
    """
    runtime = require_optional("onnxruntime")
    require_optional("onnx")
    precision = "int8" if precision == "int8" else "float32"
    # Written out, the products and the softmax are the pattern that the optimizer fuses.
    source = pooled_model(folder, settings.pooling, attention="eager")
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        path = _fused(_exported(source, Path(name) / "model.onnx"), source.model.config)
        if precision == "int8":
            path = _quantized(path)

        def session(threads: int) -> Any:
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
            return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        together = partial(_calls, session(num_cores()), 1)
        ways = [Way(f"intra_op_num_threads={num_cores()}", 1 if latency else batch_size, together)]
        if not latency:
            single = partial(_calls, session(1), num_cores())
            setting = f"intra_op_num_threads=1, {num_cores()} calls at once"
            ways += [Way(setting, size, single) for size in sorted({batch_size, 1}, reverse=True)]
    versions = {"onnxruntime": runtime.__version__, "onnxruntime_threads": num_cores()}
    batches = padded_batches(folder, settings, source.padding)
    return Exported(f"onnxruntime {precision}", batches, ways, versions)


def _exported(source: Any, path: Path) -> Path:
    (torch,) = import_torch()
    ids = torch.ones((2, 3), dtype=torch.long)
    dynamic = {INPUTS[0]: {0: "B", 1: "T"}, INPUTS[1]: {0: "B", 1: "T"}, OUTPUT: {0: "B"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer, and that it is the older exporter
        torch.onnx.export(
            source,
            (ids, ids),
            path,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes=dynamic,
            opset_version=OPSET,
            dynamo=False,  # the newer exporter's graphs are not recognised: no attention is fused
        )
    return path


def _fused(path: Path, config: Any) -> Path:
    """File with fused attention, GELU and normalisation, in the same folder."""
    optimizer = importlib.import_module("onnxruntime.transformers.optimizer")
    model = optimizer.optimize_model(
        str(path),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        opt_level=0,  # onnxruntime's own fusions come with the session
    )
    fused = path.with_name("fused.onnx")
    model.save_model_to_file(str(fused), use_external_data_format=True)
    return fused


def _quantized(path: Path) -> Path:
    """File with weights in int8, in the same folder."""
    onnx, quantization = require_optional("onnx"), importlib.import_module("onnxruntime.quantization")
    quantized = path.with_name("quantized.onnx")
    logging.disable(logging.WARNING)  # that shapes should be inferred first, which fused operators do not have
    try:
        quantization.quantize_dynamic(
            path,
            quantized,
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    finally:
        logging.disable(logging.NOTSET)
    return quantized


def _calls(session: Any, at_once: int, batches: Iterable[Batch]) -> list[tuple[list[int], np.ndarray]]:
    def call(batch: Batch) -> tuple[list[int], np.ndarray]:
        return batch.rows, session.run([OUTPUT], dict(zip(INPUTS, (batch.ids, batch.mask), strict=True)))[0]

    if at_once == 1:
        return [call(batch) for batch in batches]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(call, batches))
