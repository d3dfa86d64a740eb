"""Engines of `verax bench embed` in processes of their own, see `bench.worker`.

Each function has the name of the package that it takes, before the fields of `Work`. Each engine runs with the settings
that were its fastest ones on four processors, of those that its documentation proposes: threads for a call or for calls
at once, batches or single texts. What onnxruntime and OpenVINO run is exported by another process, whose memory is not
theirs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

# OpenVINO would send usage statistics, from forks of its process. It and NNCF do without this module.
sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Work(NamedTuple):
    """Texts to encode with a checkpoint, each in a call of its own if `latency`.

    `tokenizer` is the path of a tokenizer.json that cuts texts, and `padding` the token id after the end of a text.
    """

    folder: str
    tokenizer: str
    padding: int
    pooling: str
    texts: list[str]
    batch_size: int
    latency: bool
    dtype: str
    quantization: str | None

    @property
    def precision(self) -> str:
        """Quantisation or dtype of the weights."""
        return self.quantization or self.dtype


Encode = Callable[[list[str]], np.ndarray]
"""Function from texts to their vectors, float32 `[n, D]`, in order."""

Engine = tuple[Callable[[str | None], str], dict[str, Any]]
"""Function that encodes all texts, saves their vectors if it is given a path, and returns the library's settings; and
the versions of the packages."""


def _engine(work: Work, encode: Encode, versions: dict[str, Any], setting: str = "") -> Engine:
    calls = [[text] for text in work.texts] if work.latency else [work.texts]

    def run(path: str | None) -> str:
        vectors = np.concatenate([encode(texts) for texts in calls])
        if path is not None:
            np.save(path, vectors)
        return setting

    return run, versions


def verax(package: Any, **fields: Any) -> Engine:
    """`Encoder` of verax."""
    work = Work(**fields)
    encoder = package.Encoder(work.folder, dtype=work.dtype, quantization=work.quantization, show_progress=False)
    return _engine(work, partial(encoder.encode, batch_size=work.batch_size, show_progress=False), {})


class Batch(NamedTuple):
    """Places of texts of similar length among all, their ids padded on the right, and 1 where there is a token.

    Ids and mask are int64 `[B, T]`.
    """

    rows: list[int]
    ids: np.ndarray
    mask: np.ndarray


Run = Callable[[Iterable[Batch]], Iterable[tuple[list[int], np.ndarray]]]
"""Function from batches to their rows and vectors `[B, D]`, in any order."""


def make_batches(tokenizer: tokenizers.Tokenizer, padding: int, texts: list[str], batch_size: int) -> Iterator[Batch]:
    """Batches of at most `batch_size` texts, the longest first, with the id `padding` after the end of a text."""
    tokens = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    order = sorted(range(len(texts)), key=lambda i: -len(tokens[i]))
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        ids = np.full((len(rows), len(tokens[rows[0]])), padding, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(tokens[row])] = tokens[row]
            mask[i, : len(tokens[row])] = 1
        yield Batch(rows, ids, mask)


def batched_engine(
    work: Work, run: Run, versions: dict[str, Any], setting: str = "", *, one_by_one: bool = False
) -> Engine:
    """Engine of a model in a library with its setting; `one_by_one` if it takes single texts, several at once."""
    size = 1 if work.latency or one_by_one else work.batch_size
    tokenizer = tokenizers.Tokenizer.from_file(work.tokenizer)

    def encode(texts: list[str]) -> np.ndarray:
        parts = list(run(make_batches(tokenizer, work.padding, texts, size)))
        vectors = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
        for rows, part in parts:
            vectors[rows] = part
        return vectors

    setting = ", ".join(filter(None, (setting, f"batches of {size}" if size > 1 else "one text a call")))
    return _engine(work, encode, versions, setting)


def transformers(package: Any, **fields: Any) -> Engine:
    """transformers on the CPU or its GPU: what `SentenceTransformer.encode` does without its library."""
    work, versions = Work(**fields), _versions("transformers", "torch")
    torch = importlib.import_module("torch")
    torch.set_num_threads(CORES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _pooled_model(work, dtype=work.dtype).to(device)

    def run(batches: Iterable[Batch]) -> Iterator[tuple[list[int], np.ndarray]]:
        with torch.inference_mode():
            for batch in batches:
                inputs = (torch.from_numpy(x).to(device) for x in (batch.ids, batch.mask))
                yield batch.rows, model(*inputs).float().cpu().numpy()

    return batched_engine(work, run, versions | {"torch_threads": torch.get_num_threads(), "torch_device": device})


def _versions(*packages: str) -> dict[str, Any]:
    """Versions without builds; `PackageNotFoundError`, which names the package, if one is not installed."""
    return {name: version(name).partition("-")[0] for name in packages}


def _pooled_model(work: Work, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """`torch.nn.Module` from token ids and mask, int64 `[B, T]` with padding on the right, to unit vectors `[B, D]`.

    It is what is run as a baseline, or exported for others, with `attention` as transformers' `attn_implementation`.
    """
    torch, models = importlib.import_module("torch"), importlib.import_module("transformers")

    class PooledModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
            self.model: Any = models.AutoModel.from_pretrained(work.folder, **options)
            self.model.config.use_cache = False  # keys and values that nothing reads later

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return torch.nn.functional.normalize(pooled(hidden, attention_mask))

    def pooled(hidden: Any, mask: Any) -> Any:
        if work.pooling == "cls":
            return hidden[:, 0]
        if work.pooling == "lasttoken":
            last = (mask.sum(1) - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last)[:, 0]
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    return PooledModel().eval()


@contextlib.contextmanager
def _exported(export: Callable[[Work, Path], None], work: Work) -> Iterator[Path]:
    """Folder with what a function of this file writes in another process, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="verax-bench-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-P", __file__, export.__name__, folder]
        subprocess.run(command, input=json.dumps(work), text=True, check=True, stdout=sys.stderr)
        yield Path(folder)


INPUTS, OUTPUT = ("input_ids", "attention_mask"), "vectors"

OPSET = 17
"""Version of ONNX's operators: the first with LayerNormalization. onnxruntime's fusions know what it exports to."""


def onnxruntime(package: Any, **fields: Any) -> Engine:
    """Model exported by torch, fused by onnxruntime's optimizer of transformers; a call on each core at once."""
    work, versions = Work(**fields), _versions("onnx", "transformers", "torch")
    options = package.SessionOptions()
    threads, at_once = (CORES, 1) if work.latency else (1, CORES)
    options.intra_op_num_threads = threads
    options.graph_optimization_level = package.GraphOptimizationLevel.ORT_ENABLE_ALL
    with _exported(export_onnx, work) as folder:
        session = package.InferenceSession(
            folder / f"{work.precision}.onnx", options, providers=["CPUExecutionProvider"]
        )

    def call(batch: Batch) -> tuple[list[int], np.ndarray]:
        return batch.rows, session.run([OUTPUT], dict(zip(INPUTS, (batch.ids, batch.mask), strict=True)))[0]

    def run(batches: Iterable[Batch]) -> list[tuple[list[int], np.ndarray]]:
        if at_once == 1:
            return [call(batch) for batch in batches]
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(call, batches))

    setting = f"intra_op_num_threads={threads}" + f", {at_once} calls at once" * (at_once > 1)
    return batched_engine(work, run, versions | {"onnxruntime": package.__version__}, setting, one_by_one=True)


def export_onnx(work: Work, folder: Path) -> None:
    """Write float32.onnx with fused attention, GELU and normalisation, and int8.onnx if that is asked for.

    int8 is onnxruntime's dynamic quantisation: weights by column, activations by tensor as they come.
    """
    torch = importlib.import_module("torch")
    # Written out, the products and the softmax are the pattern that onnxruntime's optimizer fuses.
    source, ids = _pooled_model(work, attention="eager"), torch.ones((2, 3), dtype=torch.long)
    traced, fused = folder / "traced.onnx", folder / "float32.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer, and that it is the older exporter
        torch.onnx.export(
            source,
            (ids, ids),
            traced,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes={**{name: {0: "B", 1: "T"} for name in INPUTS}, OUTPUT: {0: "B"}},
            opset_version=OPSET,
            dynamo=False,  # the newer exporter's graphs are not recognised: no attention is fused
        )
    model = importlib.import_module("onnxruntime.transformers.optimizer").optimize_model(
        str(traced),
        model_type="bert",
        num_heads=source.model.config.num_attention_heads,
        hidden_size=source.model.config.hidden_size,
        opt_level=0,  # onnxruntime's own fusions come with the session
    )
    model.save_model_to_file(str(fused), use_external_data_format=True)
    if work.precision == "int8":
        onnx, quantization = importlib.import_module("onnx"), importlib.import_module("onnxruntime.quantization")
        logging.disable(logging.WARNING)  # that shapes should be inferred first, which fused operators do not have
        quantization.quantize_dynamic(
            fused,
            folder / "int8.onnx",
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )


CALIBRATION_TEXTS = 128
"""Most texts from which int8 takes the ranges of activations; NNCF's own default is 300."""

HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
"""INFERENCE_PRECISION_HINT by precision: of an int8 model, of the operations that stay in floating point."""


def openvino(package: Any, **fields: Any) -> Engine:
    """Model converted by `openvino.convert_model`: a batch on all cores in bfloat16, else one on each core."""
    work = Work(**fields)
    precision = work.precision
    versions = _versions("transformers", "torch", *(["nncf"] if precision == "int8" else []))
    in_streams = precision != "bfloat16" and not work.latency
    hint = "THROUGHPUT" if in_streams else "LATENCY"
    with _exported(export_openvino, work) as folder:
        compiled = compile_openvino(package, folder / "model.xml", hint, precision)
    if in_streams:
        run: Run = partial(_in_streams, package.AsyncInferQueue(compiled))
    else:
        run = partial(_one_at_a_time, compiled.create_infer_request())
    versions["openvino"] = package.__version__.partition("-")[0]
    return batched_engine(work, run, versions, f"PERFORMANCE_HINT={hint}", one_by_one=precision == "float32")


def compile_openvino(openvino: Any, model: Any, hint: str, precision: str) -> Any:
    """The model, or its file, compiled for all cores of the CPU, with a performance hint, `LATENCY` or `THROUGHPUT`."""
    options = {
        "PERFORMANCE_HINT": hint,
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "INFERENCE_NUM_THREADS": CORES,
    }
    return openvino.Core().compile_model(model, "CPU", options)


def export_openvino(work: Work, folder: Path) -> None:
    """Write OpenVINO's model.xml; int8 is NNCF's quantisation of weights and activations (W8A8, SmoothQuant)."""
    openvino, torch = importlib.import_module("openvino"), importlib.import_module("torch")
    ids = torch.ones((2, 3), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        model = openvino.convert_model(_pooled_model(work), example_input=dict.fromkeys(INPUTS, ids))
    if work.precision == "int8":
        nncf = importlib.import_module("nncf")
        tokenizer = tokenizers.Tokenizer.from_file(work.tokenizer)
        batches = make_batches(tokenizer, work.padding, work.texts[:CALIBRATION_TEXTS], 1)
        inputs = [dict(zip(INPUTS, (batch.ids, batch.mask), strict=True)) for batch in batches]
        nncf.set_log_level(logging.ERROR)
        model = nncf.quantize(
            model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs)
        )
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)


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


if __name__ == "__main__":
    globals()[sys.argv[1]](Work(*json.load(sys.stdin)), Path(sys.argv[2]))
