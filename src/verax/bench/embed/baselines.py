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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from verax._optional import require_optional
from verax.bench.harness import Side, import_torch, time_sides, torch_versions
from verax.embed.settings import EncoderSettings
from verax.machine import num_cores
from verax.text.tokens.tokenizer import Tokenizer

__all__ = [
    "Batches",
    "Encode",
    "Exported",
    "compile_openvino",
    "cosine_distance",
    "fastest_way",
    "import_openvino",
    "one_by_one",
    "onnxruntime_side",
    "openvino_side",
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


class Batch(NamedTuple):
    """Texts of similar length, padded on the right to the longest of them."""

    rows: list[int]
    """Places of the texts among all."""
    ids: Int64[np.ndarray, "B T"]
    mask: Int64[np.ndarray, "B T"]
    """1 for a token, 0 for padding."""


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

    @classmethod
    def of(cls, folder: Path, settings: EncoderSettings, padding: int) -> Batches:
        """Batches of a folder's tokenizer, which cuts texts to the length in the settings."""
        return cls(Tokenizer.from_folder(folder), settings.max_length, padding)

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

    def ways(self, setting: str, run: Run, *sizes: int) -> dict[str, Encode]:
        """Functions that encode texts in batches of each size, by their names."""

        def encode(texts: list[str], size: int) -> Float32[np.ndarray, "n D"]:
            parts = list(run(self(texts, size)))
            vectors = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
            for rows, part in parts:
                vectors[rows] = part
            return vectors

        words = lambda size: f"batches of {size}" if size > 1 else "one text a call"
        return {f"{setting}, {words(size)}": partial(encode, size=size) for size in sizes}


@dataclass(frozen=True)
class Exported:
    """Model that a library took over, and the ways to run it: batches of a size under a setting of the library."""

    name: str
    ways: Mapping[str, Encode]
    versions: dict[str, Any]


def fastest_way(exported: Exported, texts: list[str], *, latency: bool) -> tuple[Encode, dict[str, Any]]:
    """Time all ways in turn, and take the one of the smallest median, of those whose vectors are the first one's.

    Args:
        exported: the model.
        texts: what the benchmark encodes, of which the first are tried.
        latency: each text in a call of its own.

    Returns:
        The function, and the name of its way, sentences/s of each way in the trial, and the wrong ways' distances.
    """
    sample, ways = texts[:TRIAL_TEXTS], exported.ways
    call = partial(one_by_one, texts=sample) if latency else lambda encode: encode(sample)
    chosen, rates, wrong = next(iter(ways)), {}, {}
    if len(ways) > 1:
        first = ways[chosen](sample)
        apart = {name: cosine_distance(call(encode), first) for name, encode in ways.items()}
        wrong = {name: distance for name, distance in apart.items() if distance > MOST_APART}
        sides = {name: Side(partial(call, encode)) for name, encode in ways.items()}
        trials = time_sides(sides, runs=TRIAL_RUNS, warmup=1)
        rates = {name: len(sample) / side.median for name, side in trials.items()}
        chosen = max((name for name in ways if name not in wrong), key=lambda name: rates[name])
    return ways[chosen], {"way": chosen, "trials": rates, "wrong": wrong}


def one_by_one(encode: Encode, texts: list[str]) -> Float32[np.ndarray, "n D"]:
    """Vectors of texts, each encoded by a call of its own."""
    return np.concatenate([encode([text]) for text in texts])


def cosine_distance(vectors: Float32[np.ndarray, "n D"], reference: Float32[np.ndarray, "n D"]) -> float:
    """Largest 1 - cosine between a vector and its reference."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    return float(1 - ((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def pooled_model(folder: Path, pooling: str, *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    """`torch.nn.Module` from token ids and mask, int64 `[B, T]` with padding on the right, to unit vectors `[B, D]`.

    It is what is run as a baseline, or exported for others. Its `padding` is the token id after the end of a text.

    Args:
        folder: the checkpoint's.
        pooling: `"mean"`, `"cls"` or `"lasttoken"`.
        dtype: of weights and vectors.
        attention: `attn_implementation` of transformers.

    Raises:
        MissingDependencyError: without torch or transformers.
    """
    torch, transformers = import_torch("transformers")

    class PooledModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            model: Any = transformers.AutoModel.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation=attention
            )
            # Keys and values that nothing reads later.
            model.config.use_cache = False
            self.model = model
            self.padding: int = model.config.pad_token_id or 0

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


def transformers_encode(folder: Path, dtype: str, settings: EncoderSettings, batch_size: int) -> tuple[Any, dict]:
    """`SentenceTransformer.encode` without that library: sorted, tokenised, padded, run, pooled, normalised.

    Returns:
        Function from texts to their vectors, in order, and the versions.
    """
    torch, transformers = import_torch("transformers")
    versions = torch_versions(torch, transformers)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    model: Any = pooled_model(folder, settings.pooling, dtype=dtype).to(versions["torch_device"])

    def encode(texts: list[str]) -> Float32[np.ndarray, "n D"]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = []
        with torch.inference_mode():
            for begin in range(0, len(order), batch_size):
                batch = [texts[i] for i in order[begin : begin + batch_size]]
                inputs = tokenizer(
                    batch, padding=True, truncation=True, max_length=settings.max_length, return_tensors="pt"
                )
                ids, mask = (inputs[name].to(versions["torch_device"]) for name in ("input_ids", "attention_mask"))
                vectors.append(model(ids, mask).float().cpu())
        return torch.cat(vectors).numpy()[np.argsort(order)]

    return encode, versions


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
        path = _exported(source, Path(name), quantized=precision == "int8")

        def session(threads: int) -> Any:
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
            return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        batches, cores = Batches.of(folder, settings, source.padding), num_cores()
        together = partial(_calls, session(cores), 1)
        ways = batches.ways(f"intra_op_num_threads={cores}", together, 1 if latency else batch_size)
        if not latency:
            single, setting = partial(_calls, session(1), cores), f"intra_op_num_threads=1, {cores} calls at once"
            ways |= batches.ways(setting, single, *sorted({batch_size, 1}, reverse=True))
    versions = {"onnxruntime": runtime.__version__, "onnxruntime_threads": num_cores()}
    return Exported(f"onnxruntime {precision}", ways, versions)


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
    batches = Batches.of(folder, settings, source.padding)
    ids = torch.ones((2, 3), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's tracer
        model = openvino.convert_model(source, example_input={"input_ids": ids, "attention_mask": ids})
    if nncf is not None:
        model = _quantized_by_nncf(nncf, model, batches(texts[:CALIBRATION_TEXTS], 1))
    first = partial(_one_at_a_time, compile_openvino(openvino, model, "LATENCY", precision).create_infer_request())
    ways = batches.ways("PERFORMANCE_HINT=LATENCY", first, 1 if latency else batch_size)
    if not latency:
        streams = compile_openvino(openvino, model, "THROUGHPUT", precision)
        setting = f"PERFORMANCE_HINT=THROUGHPUT ({streams.get_property('NUM_STREAMS')} streams)"
        run = partial(_in_streams, openvino.AsyncInferQueue(streams))
        ways |= batches.ways(setting, run, *sorted({batch_size, 1}, reverse=True))
    versions = {"openvino": openvino.__version__.partition("-")[0], "openvino_threads": num_cores()}
    if nncf is not None:
        versions["nncf"] = nncf.__version__
    return Exported(f"openvino {precision}", ways, versions)


def compile_openvino(openvino: Any, model: Any, hint: str, precision: str) -> Any:
    """The model compiled for all cores of the CPU, with a performance hint, `LATENCY` or `THROUGHPUT`."""
    options = {
        "PERFORMANCE_HINT": hint,
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        "INFERENCE_NUM_THREADS": num_cores(),
    }
    return openvino.Core().compile_model(model, "CPU", options)


def import_openvino() -> Any:
    """Import OpenVINO, which sends nothing.

    Raises:
        MissingDependencyError: if it is not installed.
    """
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
