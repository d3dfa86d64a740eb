"""transformers, onnxruntime and OpenVINO as sides of `verax bench embed`, on the same weights.

Each runs with the settings that were its fastest ones on four processors, of those that its documentation proposes:
threads for a call or for calls at once, batches or single texts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from verax._optional import require_optional
from verax.bench.harness import import_torch, torch_device
from verax.bench.settings import EmbedSettings
from verax.compare.cases.text import transformers
from verax.embed.settings import EncoderSettings
from verax.machine import num_cores
from verax.text.tokens.tokenizer import Tokenizer

Encode = Callable[[list[str]], Float32[np.ndarray, "n D"]]
"""Function from texts to their vectors, in order."""


class Batch(NamedTuple):
    """Places of texts of similar length among all, their ids padded on the right, and 1 where there is a token."""

    rows: list[int]
    ids: Int64[np.ndarray, "B T"]
    mask: Int64[np.ndarray, "B T"]


Run = Callable[[Iterable[Batch]], Iterable[tuple[list[int], Float32[np.ndarray, "B D"]]]]
"""Function from batches to their rows and vectors, in any order."""


Model = tuple[Run, str, bool]
"""Run of a model in a library, the library's settings, and whether it takes texts one by one."""


def _make_batches(
    tokenizer: Tokenizer, max_length: int, padding: int, texts: list[str], batch_size: int
) -> Iterator[Batch]:
    """Batches of at most `batch_size` texts, the longest first, each cut to `max_length` tokens."""
    tokens = [ids for ids, _ in tokenizer.encode_batch(texts, max_length=max_length)]
    order = sorted(range(len(texts)), key=lambda i: -len(tokens[i]))
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        ids = np.full((len(rows), len(tokens[rows[0]])), padding, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(tokens[row])] = tokens[row]
            mask[i, : len(tokens[row])] = 1
        yield Batch(rows, ids, mask)


def encode_in_batches(
    make_batches: Callable[[list[str], int], Iterator[Batch]], run: Run, batch_size: int, texts: list[str]
) -> Float32[np.ndarray, "n D"]:
    """Vectors of texts in their order, whatever the order in which batches of them are run."""
    parts = list(run(make_batches(texts, batch_size)))
    vectors = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
    for rows, part in parts:
        vectors[rows] = part
    return vectors


def _pooled_model(folder: Path, pooling: str, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """`torch.nn.Module` from token ids and mask, int64 `[B, T]` with padding on the right, to unit vectors `[B, D]`.

    It is what is run as a baseline, or exported for others, with `attention` as transformers' `attn_implementation`.
    Its `padding` is the token id after the end of a text.
    """
    torch, models = import_torch(), transformers()

    class PooledModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
            self.model: Any = models.AutoModel.from_pretrained(folder, **options)
            self.model.config.use_cache = False  # keys and values that nothing reads later
            self.padding: int = self.model.config.pad_token_id or 0

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return torch.nn.functional.normalize(pooled(hidden, attention_mask))

    def pooled(hidden: Any, mask: Any) -> Any:
        if pooling == "cls":
            return hidden[:, 0]
        if pooling == "lasttoken":
            last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last)[:, 0]
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    return PooledModel().eval()


def make_baseline(
    name: str, folder: Path, encoder: EncoderSettings, texts: list[str], settings: EmbedSettings
) -> tuple[str, Encode, str]:
    """Name, function and library's settings of a side out of `settings.against`.

    Args:
        name: a library, or a library and `-int8`.
        folder: of the checkpoint.
        encoder: pooling and length of the checkpoint's texts.
        texts: that int8 is calibrated with.
        settings: of the benchmark.
    """
    library, _, precision = name.partition("-")
    precision = precision or settings.dtype
    if library == "onnxruntime" and precision == "bfloat16":  # its kernels of a CPU have it on ARM only
        precision = "float32"
    module = import_openvino() if library == "openvino" else require_optional(library)
    # Written out, the products and the softmax are the pattern that onnxruntime's optimizer fuses.
    attention = "eager" if library == "onnxruntime" else "sdpa"
    own = {"dtype": precision} if library == "transformers" else {}
    source = _pooled_model(folder, encoder.pooling, attention=attention, **own)
    make_batches = partial(_make_batches, Tokenizer.from_folder(folder), encoder.max_length, source.padding)
    start = {"transformers": _torch_runs, "onnxruntime": _onnxruntime_runs, "openvino": _openvino_runs}[library]
    calibration = make_batches(texts[:CALIBRATION_TEXTS], 1)
    run, setting, one_by_one = start(module, source, precision, settings.latency, calibration)
    size = 1 if settings.latency or one_by_one else settings.batch_size
    setting = ", ".join(filter(None, (setting, f"batches of {size}" if size > 1 else "one text a call")))
    side = library if library == "transformers" else f"{library} {precision}"
    return side, partial(encode_in_batches, make_batches, run, size), setting


INPUTS, OUTPUT = ("input_ids", "attention_mask"), "vectors"

OPSET = 17
"""Version of ONNX's operators: the first with LayerNormalization. onnxruntime's fusions know what it exports to."""


def _torch_runs(library: Any, source: Any, precision: str, latency: bool, calibration: Iterable[Batch]) -> Model:
    """Model as it is, on the CPU or its GPU: what `SentenceTransformer.encode` does without its library."""
    torch = import_torch()
    device = torch_device(torch)
    model = source.to(device)

    def run(batches: Iterable[Batch]) -> Iterator[tuple[list[int], np.ndarray]]:
        with torch.inference_mode():
            for batch in batches:
                inputs = (torch.from_numpy(x).to(device) for x in (batch.ids, batch.mask))
                yield batch.rows, model(*inputs).float().cpu().numpy()

    return run, "", False


def _onnxruntime_runs(runtime: Any, source: Any, precision: str, latency: bool, calibration: Iterable[Batch]) -> Model:
    """Model exported by torch, fused by onnxruntime's optimizer of transformers; a call on each core at once.

    int8 is onnxruntime's dynamic quantisation: weights by column, activations by tensor as they come.
    """
    require_optional("onnx")
    cores, options = num_cores(), runtime.SessionOptions()
    threads, at_once = (cores, 1) if latency else (1, cores)
    options.intra_op_num_threads = threads
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        path = _exported(source, Path(name), quantized=precision == "int8")
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def call(batch: Batch) -> tuple[list[int], np.ndarray]:
        return batch.rows, session.run([OUTPUT], dict(zip(INPUTS, (batch.ids, batch.mask), strict=True)))[0]

    def run(batches: Iterable[Batch]) -> list[tuple[list[int], np.ndarray]]:
        if at_once == 1:
            return [call(batch) for batch in batches]
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(call, batches))

    return run, f"intra_op_num_threads={threads}" + f", {at_once} calls at once" * (at_once > 1), True


def _exported(source: Any, folder: Path, *, quantized: bool) -> Path:
    """ONNX file of a model in a folder: fused attention, GELU and normalisation; weights in int8 if `quantized`."""
    torch = import_torch()
    ids = torch.ones((2, 3), dtype=torch.long)
    path, fused = folder / "model.onnx", folder / "fused.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer, and that it is the older exporter
        torch.onnx.export(
            source,
            (ids, ids),
            path,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes={**{name: {0: "B", 1: "T"} for name in INPUTS}, OUTPUT: {0: "B"}},
            opset_version=OPSET,
            dynamo=False,  # the newer exporter's graphs are not recognised: no attention is fused
        )
    model = importlib.import_module("onnxruntime.transformers.optimizer").optimize_model(
        str(path),
        model_type="bert",
        num_heads=source.model.config.num_attention_heads,
        hidden_size=source.model.config.hidden_size,
        opt_level=0,  # onnxruntime's own fusions come with the session
    )
    model.save_model_to_file(str(fused), use_external_data_format=True)
    if not quantized:
        return fused
    onnx, quantization = require_optional("onnx"), importlib.import_module("onnxruntime.quantization")
    logging.disable(logging.WARNING)  # that shapes should be inferred first, which fused operators do not have
    try:
        quantization.quantize_dynamic(
            fused,
            folder / "quantized.onnx",
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    finally:
        logging.disable(logging.NOTSET)
    return folder / "quantized.onnx"


CALIBRATION_TEXTS = 128
"""Most texts from which int8 takes the ranges of activations; NNCF's own default is 300."""

HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
"""INFERENCE_PRECISION_HINT by precision: of an int8 model, of the operations that stay in floating point."""


def _openvino_runs(openvino: Any, source: Any, precision: str, latency: bool, calibration: Iterable[Batch]) -> Model:
    """Model converted by `openvino.convert_model`: a batch on all cores in bfloat16, else one on each core.

    int8 is NNCF's post-training quantisation of weights and activations (W8A8, SmoothQuant).
    """
    torch = import_torch()
    nncf = require_optional("nncf") if precision == "int8" else None
    ids = torch.ones((2, 3), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        model = openvino.convert_model(source, example_input=dict.fromkeys(INPUTS, ids))
    if nncf is not None:
        model = _quantized_by_nncf(nncf, model, calibration)
    in_streams = precision != "bfloat16" and not latency
    hint = "THROUGHPUT" if in_streams else "LATENCY"
    compiled = compile_openvino(openvino, model, hint, precision)
    if in_streams:
        run: Run = partial(_in_streams, openvino.AsyncInferQueue(compiled))
    else:
        run = partial(_one_at_a_time, compiled.create_infer_request())
    return run, f"PERFORMANCE_HINT={hint}", precision == "float32"


def compile_openvino(openvino: Any, model: Any, hint: str, precision: str) -> Any:
    """The model compiled for all cores of the CPU, with a performance hint, `LATENCY` or `THROUGHPUT`."""
    options = {
        "PERFORMANCE_HINT": hint,
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "INFERENCE_NUM_THREADS": num_cores(),
    }
    return openvino.Core().compile_model(model, "CPU", options)


def import_openvino() -> Any:
    """Import OpenVINO, which sends nothing."""
    # It would send usage statistics, from forks of this process. OpenVINO and NNCF do without it.
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]
    return require_optional("openvino")


def _quantized_by_nncf(nncf: Any, model: Any, batches: Iterable[Batch]) -> Any:
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
