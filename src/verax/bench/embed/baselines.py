"""transformers, onnxruntime and OpenVINO as sides of `verax bench embed`, on the same weights.

What is exported can be run in several ways: batches or single texts, under settings of the library. The fastest one
counts.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from verax._optional import require_optional
from verax.bench.harness import import_torch, time_sides, torch_versions
from verax.bench.settings import EmbedSettings
from verax.compare.outputs import compare_vectors
from verax.embed.settings import EncoderSettings
from verax.machine import num_cores
from verax.text.tokens.tokenizer import Tokenizer

__all__ = [
    "Batches",
    "Encode",
    "compile_openvino",
    "fastest_way",
    "find_ways",
    "import_openvino",
    "one_by_one",
    "transformers_encode",
]

TRIAL_TEXTS, TRIAL_RUNS = 128, 3
"""Most texts that each way of a side runs in a trial, and its rounds, after one that does not count."""

MOST_APART = 0.03
"""Cosine distance from the vectors of a side's first way, beyond which another way is wrong: some times int8's error.

OpenVINO 2026.4 in int8 returns vectors of another meaning for some texts that are alone in a call, as far as 0.12.
"""

Encode = Callable[[list[str]], Float32[np.ndarray, "n D"]]
"""Function from texts to their vectors, in order."""

Ways = dict[str, Encode]
"""Ways to run a model that a library took over, by name: batches of a size under a setting of the library."""


class Batch(NamedTuple):
    """Places of texts of similar length among all, their ids padded on the right, and 1 where there is a token."""

    rows: list[int]
    ids: Int64[np.ndarray, "B T"]
    mask: Int64[np.ndarray, "B T"]


Run = Callable[[Iterable[Batch]], Iterable[tuple[list[int], Float32[np.ndarray, "B D"]]]]
"""Function from batches to their rows and vectors, in any order."""


@dataclass(frozen=True)
class Batches:
    """Batches of a checkpoint's texts, as exported models take them.

    Attributes:
        tokenizer: the checkpoint's.
        max_length: length in tokens that texts are cut to.
        padding: token id after the end of a text.
    """

    tokenizer: Tokenizer
    max_length: int
    padding: int

    def __call__(self, texts: list[str], batch_size: int) -> Iterator[Batch]:
        """Batches of at most the given number of texts, the longest first."""
        tokens = [ids for ids, _ in self.tokenizer.encode_batch(texts, max_length=self.max_length)]
        order = sorted(range(len(texts)), key=lambda i: -len(tokens[i]))
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            ids = np.full((len(rows), len(tokens[rows[0]])), self.padding, np.int64)
            mask = np.zeros_like(ids)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = tokens[row]
                mask[i, : len(tokens[row])] = 1
            yield Batch(rows, ids, mask)

    def ways(self, setting: str, run: Run, *sizes: int) -> Ways:
        """Functions that encode texts in batches of each size, by their names."""

        def encode(texts: list[str], size: int) -> Float32[np.ndarray, "n D"]:
            parts = list(run(self(texts, size)))
            vectors = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
            for rows, part in parts:
                vectors[rows] = part
            return vectors

        words = lambda size: f"batches of {size}" if size > 1 else "one text a call"
        return {f"{setting}, {words(size)}": partial(encode, size=size) for size in sizes}


def fastest_way(ways: Mapping[str, Encode], texts: list[str]) -> tuple[Encode, dict[str, Any]]:
    """Time all ways in turn, and take the one of the smallest median, of those whose vectors are the first one's.

    Args:
        ways: of one model.
        texts: what the benchmark encodes, of which the first are tried.

    Returns:
        The function, and the name of its way, sentences/s of each way in the trial, and the wrong ways' distances.
    """
    sample = texts[:TRIAL_TEXTS]
    chosen, rates, wrong = next(iter(ways)), {}, {}
    if len(ways) > 1:
        first = ways[chosen](sample)
        apart = {name: 1 - compare_vectors(first, encode(sample)).min_cosine for name, encode in ways.items()}
        wrong = {name: distance for name, distance in apart.items() if distance > MOST_APART}
        trials = time_sides({name: partial(encode, sample) for name, encode in ways.items()}, runs=TRIAL_RUNS)
        rates = {name: len(sample) / side.median for name, side in trials.items()}
        chosen = max((name for name in ways if name not in wrong), key=lambda name: rates[name])
    return ways[chosen], {"way": chosen, "trials": rates, "wrong": wrong}


def one_by_one(encode: Encode, texts: list[str]) -> Float32[np.ndarray, "n D"]:
    """Vectors of texts, each encoded by a call of its own."""
    return np.concatenate([encode([text]) for text in texts])


def _pooled_model(folder: Path, pooling: str, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """`torch.nn.Module` from token ids and mask, int64 `[B, T]` with padding on the right, to unit vectors `[B, D]`.

    It is what is run as a baseline, or exported for others, with `attention` as transformers' `attn_implementation`.
    Its `padding` is the token id after the end of a text.
    """
    torch, transformers = import_torch("transformers")

    class PooledModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
            self.model: Any = transformers.AutoModel.from_pretrained(folder, **options)
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


def transformers_encode(folder: Path, dtype: str, settings: EncoderSettings, batch_size: int) -> tuple[Encode, dict]:
    """`SentenceTransformer.encode` without its library, which sorts, pads, runs, pools and normalises; versions."""
    torch, transformers = import_torch("transformers")
    versions = torch_versions(torch, transformers)
    device = versions["torch_device"]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    model = _pooled_model(folder, settings.pooling, dtype=dtype).to(device)
    tokenize = partial(tokenizer, padding=True, truncation=True, max_length=settings.max_length, return_tensors="pt")

    def encode(texts: list[str]) -> Float32[np.ndarray, "n D"]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = []
        with torch.inference_mode():
            for begin in range(0, len(order), batch_size):
                inputs = tokenize([texts[i] for i in order[begin : begin + batch_size]])
                vectors.append(model(*(inputs[name].to(device) for name in INPUTS)).float().cpu())
        return torch.cat(vectors).numpy()[np.argsort(order)]

    return encode, versions


def find_ways(
    library: str, folder: Path, precision: str, encoder: EncoderSettings, texts: list[str], settings: EmbedSettings
) -> tuple[str, Ways, dict[str, Any]]:
    """Name of a side that exports the model, the ways to run it, and its versions.

    Args:
        library: `openvino` or `onnxruntime`.
        folder: of the checkpoint.
        precision: `float32`, `bfloat16` or `int8`.
        encoder: pooling and length of the checkpoint's texts.
        texts: that int8 is calibrated with.
        settings: of the benchmark.
    """
    is_openvino = library == "openvino"
    module = import_openvino() if is_openvino else require_optional(library)
    # Written out, the products and the softmax are the pattern that onnxruntime's optimizer fuses.
    source = _pooled_model(folder, encoder.pooling, attention="sdpa" if is_openvino else "eager")
    batches = Batches(Tokenizer.from_folder(folder), encoder.max_length, source.padding)
    if not is_openvino and precision == "bfloat16":  # onnxruntime's kernels of a CPU have it on ARM only
        precision = "float32"
    export = _openvino_runs if is_openvino else _onnxruntime_runs
    runs, versions = export(module, source, precision, batches(texts[:CALIBRATION_TEXTS], 1))
    first, *sizes = [1] if settings.latency else sorted({settings.batch_size, 1}, reverse=True)
    ways: Ways = {}
    for setting, run in islice(runs, 1 if settings.latency else None):
        ways |= batches.ways(setting, run, first, *(sizes if ways else ()))
    versions |= {library: module.__version__.partition("-")[0], f"{library}_threads": num_cores()}
    return f"{library} {precision}", ways, versions


INPUTS, OUTPUT = ("input_ids", "attention_mask"), "vectors"

OPSET = 17
"""Version of ONNX's operators: the first with LayerNormalization. onnxruntime's fusions know what it exports to."""

Runs = tuple[Iterator[tuple[str, Run]], dict[str, Any]]
"""Functions that run a model by the setting of its library, the best of one call at a time first; and versions."""


def _onnxruntime_runs(runtime: Any, source: Any, precision: str, calibration: Iterable[Batch]) -> Runs:
    """Model exported by torch, fused by onnxruntime's optimizer of transformers.

    int8 is onnxruntime's dynamic quantisation: weights by column, activations by tensor as they come.
    """
    require_optional("onnx")
    cores = num_cores()
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        path = _exported(source, Path(name), quantized=precision == "int8")
        sessions = []
        for threads in (cores, 1):
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
            sessions.append(runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
    settings = f"intra_op_num_threads={cores}", f"intra_op_num_threads=1, {cores} calls at once"
    runs = [partial(_calls, session, at_once) for session, at_once in zip(sessions, (1, cores), strict=True)]
    return zip(settings, runs, strict=True), {}


def _exported(source: Any, folder: Path, *, quantized: bool) -> Path:
    """ONNX file of a model in a folder: fused attention, GELU and normalisation; weights in int8 if `quantized`."""
    (torch,) = import_torch()
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


def _calls(session: Any, at_once: int, batches: Iterable[Batch]) -> list[tuple[list[int], np.ndarray]]:
    def call(batch: Batch) -> tuple[list[int], np.ndarray]:
        return batch.rows, session.run([OUTPUT], dict(zip(INPUTS, (batch.ids, batch.mask), strict=True)))[0]

    if at_once == 1:
        return [call(batch) for batch in batches]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(call, batches))


CALIBRATION_TEXTS = 128
"""Most texts from which int8 takes the ranges of activations; NNCF's own default is 300."""

HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
"""INFERENCE_PRECISION_HINT by precision: of an int8 model, of the operations that stay in floating point."""


def _openvino_runs(openvino: Any, source: Any, precision: str, calibration: Iterable[Batch]) -> Runs:
    """Model converted by `openvino.convert_model`.

    int8 is NNCF's post-training quantisation of weights and activations (W8A8, SmoothQuant).
    """
    (torch,) = import_torch()
    nncf = require_optional("nncf") if precision == "int8" else None
    ids = torch.ones((2, 3), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        model = openvino.convert_model(source, example_input=dict.fromkeys(INPUTS, ids))
    if nncf is not None:
        model = _quantized_by_nncf(nncf, model, calibration)

    def runs() -> Iterator[tuple[str, Run]]:
        request = compile_openvino(openvino, model, "LATENCY", precision).create_infer_request()
        yield "PERFORMANCE_HINT=LATENCY", partial(_one_at_a_time, request)
        streams = compile_openvino(openvino, model, "THROUGHPUT", precision)
        setting = f"PERFORMANCE_HINT=THROUGHPUT ({streams.get_property('NUM_STREAMS')} streams)"
        yield setting, partial(_in_streams, openvino.AsyncInferQueue(streams))

    return runs(), {} if nncf is None else {"nncf": nncf.__version__}


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
