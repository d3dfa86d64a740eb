"""The one harness of every benchmark: sides that take turns, the machine's noise and limits, and work that is counted.

Every side runs once in turn, again and again, so that a drifting machine drifts for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx

from verax import checkpoint, machine, ops, progress
from verax._optional import require_optional
from verax.bench.results import BASELINES, date, noise_line, slug
from verax.checkpoint.load import random_weights
from verax.models import causal_lm
from verax.ops.cpu import library

T = TypeVar("T")

READ = "streaming read"
"""Side that shows the memory's bandwidth while the others run."""

MOST_WARMUP = 5
"""Rounds after which counting begins, steady or not."""

STEADY = 0.9
"""A side is still warming up while a round takes less than this share of the round before."""

SHORTEST, MOST_CALLS = 0.02, 50
"""Least seconds, and most calls, of a turn of a side with short calls."""

UNTIMED = 1
"""Calls at the beginning of a turn that do not count, where calls are short: the first one after another side may take
twice as long, while threads of that side still spin and the system finds memory for the results again."""

BUSY, LISTEN = 0.15, 0.3
"""Share of the processor that others use, above which the machine is called busy: a quiet one has a few percent; and
seconds without work of this process, in which all use of the processor is by others."""

LIBRARIES = ("torch", "transformers", "diffusers", "openvino", "nncf", "onnxruntime")
"""Modules of baselines that run in the process of the benchmark."""

PATHS = ("trace", "peer_python", "prompts")
"""Settings that results leave out: they name folders and files of one machine."""

TURN = "VERAX_BENCH_TURN"
"""Variable with a file whose lock a process holds while it measures. So several benchmarks can compile side by side on
one device, and none measures while another does."""

_log = logging.getLogger("verax.bench")


@dataclass(frozen=True)
class Side:
    """One implementation of a piece of work: verax, or a baseline.

    Attributes:
        call: runs it once; its outputs are `launched` when it returns.
        flops: operations of its products, by formula; masked products do not count.
        dtypes: dtypes of the outputs: the last one is the dtype of all further outputs, the first one of the products.
        compile_s: seconds of compiling; None where nothing is compiled.
    """

    call: Callable[[], Any]
    flops: int = 0
    dtypes: Sequence[str] = ("float32",)
    compile_s: float | None = None


@dataclass(frozen=True)
class Case:
    """One piece of work and all sides that do it.

    Attributes:
        group: operation or section that the case belongs to.
        bytes_moved: bytes that have to be read and written, each once.
        chosen: side that the others are compared with: the one that runs without a choice.
        expected: outputs in float64, where sides are checked against them.
        tolerance: largest error of a checked side, relative to the expected outputs.
        skipped: reason for each side that is missing, by name.
    """

    group: str
    name: str
    bytes_moved: int
    chosen: str
    sides: Mapping[str, Side]
    sizes: Mapping[str, int] = field(default_factory=dict)
    expected: Sequence[np.ndarray] = ()
    tolerance: float = 0.0
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """Seconds of each counted run of one side, in the order of the rounds, and of its warm-up runs."""

    seconds: tuple[float, ...]
    warmup: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return float(np.median(self.seconds))

    def ratio_to(self, other: Samples) -> float:
        """Factor by which this side is faster than `other`: the median over rounds of the ratio within a round."""
        return float(np.median(np.asarray(other.seconds) / np.asarray(self.seconds)))

    def to_dict(self, work: float) -> dict[str, object]:
        """Numbers for a result, with a rate in units of `work` per second."""
        p10, p90 = np.percentile(self.seconds, (10, 90)).tolist()
        times = {"median_s": self.median, "p10_s": p10, "p90_s": p90, "rate": work / self.median}
        return {**times, "seconds": list(self.seconds), "warmup_seconds": list(self.warmup)}


def time_sides(
    sides: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    warmup: int = 1,
    title: str = "measuring",
    short: bool = False,
    trace: Path | None = None,
) -> dict[str, Samples]:
    """Time each side in turn, with a progress bar, until each has `runs` counted rounds.

    A round in which some side is 10% faster than in the round before is warm-up too, up to `MOST_WARMUP` rounds;
    without any `warmup`, counting begins at once.

    Args:
        sides: calls by name. A side returns finished host data, or what it has `launched`.
        runs: counted rounds.
        warmup: least number of rounds before them.
        title: of the bar.
        short: calls are short, and have been made before so that nothing compiles: a turn is a loop of calls, its time
            is a call's mean, and `UNTIMED` calls before it do not count.
        trace: folder for one more call of each side that is not a baseline, under JAX's profiler.
    """
    with _turn(), progress.bar(title) as report:
        calls_in_turn = lambda run: max(1, min(MOST_CALLS, math.ceil(SHORTEST / _seconds(run, 1))))
        loops = {name: calls_in_turn(run) if short else 1 for name, run in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        first, last = warmup, 0  # the round that counts, the round that is next
        while last < first + runs:
            for done, (name, run) in enumerate(sides.items(), start=1):
                _seconds(run, UNTIMED * short)
                times[name].append(_seconds(run, loops[name]) / loops[name])
                report(last * len(sides) + done, (first + runs) * len(sides), f"{name} {times[name][-1]:.2f} s")
            last += 1
            faster = last > 1 and any(taken[-1] < STEADY * taken[-2] for taken in times.values())
            if 0 < first == last - 1 and last <= MOST_WARMUP and faster:
                first = last
        if trace is not None:
            for name in (name for name in sides if not name.startswith((READ, *BASELINES))):
                with jax.profiler.trace(trace / slug(title, name), create_perfetto_trace=True):
                    _seconds(sides[name], 1)
    return {name: Samples(tuple(taken[first:]), tuple(taken[:first])) for name, taken in times.items()}


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Hold the lock of `TURN`, if there is one."""
    if TURN not in os.environ:
        yield
        return
    import fcntl  # not on Windows

    with Path(os.environ[TURN]).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _seconds(run: Callable[[], object], times: int) -> float:
    """Seconds of calls of a side, until the last one has finished, and with it all before."""
    begin, outputs = time.perf_counter(), None
    for _ in range(times):
        outputs = run()
    jax.block_until_ready(outputs)
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Result of a call that has finished when it returns, and its seconds."""
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def launched(outputs: T) -> T:
    """Outputs of a side's compiled call: finished on a CPU, still to be computed on a device.

    A device finishes calls in their order, and a turn of short calls waits for its last one. So its calls overlap with
    their launches, which take longer than many kernels, as kernels do within a program.
    """
    return jax.block_until_ready(outputs) if jax.default_backend() == "cpu" else outputs


def case_result(name: str, chosen: str, samples: Mapping[str, Samples], work: float, **rest: Any) -> dict[str, Any]:
    """Record of a case: the sides' times, with rates in `work` a second, the ratios to `chosen`, and the rest."""
    return {
        "case": name,
        "chosen": chosen,
        **rest,
        "sides": {side: one.to_dict(work) for side, one in samples.items()},
        "ratios": {side: samples[chosen].ratio_to(one) for side, one in samples.items() if side != chosen},
    }


class Benchmark:
    """One benchmark from its beginning to its result: created before any work, `result` called after it.

    A machine that is busy at the beginning is reported in the log and in the result.
    """

    def __init__(self, subject: str):
        self._subject = subject
        self._noise = measure_noise()
        if self._noise["busy"]:
            _log.warning("%s", noise_line(self._noise))

    @cached_property
    def limits(self) -> dict[str, float]:
        """Limits of the machine, measured on first use."""
        with _turn():
            return machine.measure_machine()

    def against_limit(
        self, seconds: float, *, bytes_moved: float, flops: float, dtype: str, bandwidth: float | None = None
    ) -> dict[str, float]:
        """Work of a run, and its shortest time at the machine's limits: its bytes, or its products if they take longer.

        Args:
            seconds: of the run.
            bytes_moved: what has to be read and written, each once.
            flops: operations of the products.
            dtype: of the products, `float32` or `bfloat16`.
            bandwidth: in bytes per second, in place of the machine's where it was measured in turn with the run.
        """
        bandwidth = bandwidth or 1e9 * self.limits["memory_bandwidth_gb_per_s"]
        limit = max(bytes_moved / bandwidth, flops / (1e9 * self.limits[f"matmul_{dtype}_gflop_per_s"]))
        return {
            "bytes_moved": bytes_moved,
            "flops": flops,
            "gb_per_s": bytes_moved / seconds / 1e9,
            "gflop_per_s": flops / seconds / 1e9,
            "limit_s": limit,
            "fraction_of_limit": limit / seconds,
        }

    def measure(self, case: Case, *, read: Callable[[], object] | None = None, **rounds: Any) -> dict[str, Any]:
        """Time the short calls of all sides in turn; one of a result's cases, with the work of the chosen side.

        Args:
            case: its sides have been called before, so that nothing compiles.
            read: `machine.streaming_read`, which takes its turn with the sides and is the limit of their bytes.
            rounds: `runs`, `warmup` and `trace` as in `time_sides`.
        """
        calls = {name: side.call for name, side in case.sides.items()} | ({} if read is None else {READ: read})
        title = f"{case.group}, {case.name}"
        samples = time_sides(calls, title=title, short=True, **rounds)
        bandwidth = None if read is None else machine.READ_BYTES / samples.pop(READ).median
        against = partial(self.against_limit, bytes_moved=case.bytes_moved, bandwidth=bandwidth)
        result = {"group": case.group, **case_result(case.name, case.chosen, samples, case.bytes_moved)}
        for name, side in case.sides.items():
            work = against(samples[name].median, flops=side.flops, dtype=side.dtypes[0])
            result["sides"][name] |= {**work, "dtype": side.dtypes[0], "compile_s": side.compile_s}
            result |= work if name == case.chosen else {}
        return result if bandwidth is None else result | {"bandwidth_gb_per_s": bandwidth / 1e9}

    def result(
        self, name: str, *, settings: Mapping[str, Any], versions: Mapping[str, Any] | None = None, **rest: Any
    ) -> dict[str, Any]:
        """Result in the format of `verax.bench.results`; `rest` has its page and what was measured.

        `machine` has the versions of the baselines that this process has imported, and `versions` of those in others.
        """
        imported = {name: sys.modules[name] for name in LIBRARIES if sys.modules.get(name) is not None}
        facts = machine.fingerprint() | {"cpu_kernels": library.level() or "none"}
        facts |= {name: module.__version__.partition("-")[0] for name, module in imported.items()}  # without a build
        if torch := imported.get("torch"):
            facts |= {"torch_threads": torch.get_num_threads(), "torch_device": torch_device(torch)}
        peaks = {"host_peak_gb": machine.peak_memory(), "device_peak_gb": machine.peak_device_memory()}
        return {
            "subject": self._subject,
            "name": name,
            "date": date(),
            "settings": {key: value for key, value in settings.items() if key not in PATHS},
            "machine": facts | dict(versions or {}),
            "measured": self.limits,
            "noise": self._noise,
            "memory": {key: None if peak is None else peak / 1e9 for key, peak in peaks.items()},
            "notes": [],
            **rest,
        }


def measure_noise() -> dict[str, Any]:
    """Share of this process's cores that `others` used in a moment without work of ours, and whether that is `busy`."""
    cores = machine.num_cores()
    others = min(1.0, psutil.cpu_percent(LISTEN) / 100 * (psutil.cpu_count() or cores) / cores)
    return {"others": round(others, 3), "busy": others > BUSY}


def error_ratio(outputs: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over the root mean square of what is expected."""
    return float(np.sqrt(np.mean((outputs - expected) ** 2) / np.mean(expected**2)))


def import_torch() -> Any:
    """torch, set to all cores.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    torch = require_optional("torch")
    torch.set_num_threads(machine.num_cores())
    return torch


def torch_device(torch: Any) -> str:
    """torch's name of the device that its sides run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def checkpoint_folder(
    model: str | None,
    config: dict[str, Any],
    build: Callable[[dict[str, Any]], Any] = causal_lm,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> Iterator[Path]:
    """Folder of a checkpoint; of random weights of a realistic spread, gone afterwards, if there is no model.

    Args:
        model: a checkpoint, or None.
        config: config.json of the random weights.
        build: function from it to the architecture and its sizes.
        dtype: of the random weights.
        options: of `checkpoint.save`.
    """
    if model is not None:
        yield checkpoint.resolve(model)
        return
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as name:
        architecture, sizes = build(config)
        weights = random_weights(nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0))), dtype)
        yield checkpoint.save(weights, name, config=config, **options)


def count_products(function: Callable[..., Any], *arguments: Any, **implementations: str) -> int:
    """Floating-point operations of a function's products, loops counted turn by turn.

    The function is traced with the reference implementations of all operations, whose products can be seen, and nothing
    runs.

    Args:
        function: of `arguments`, trees of arrays or of their shapes and dtypes.
        implementations: other implementations than the reference, by operation.
    """
    with ops.use_implementations(**(dict.fromkeys(ops.operations(), "reference") | implementations)):
        return _products(jax.make_jaxpr(lambda *leaves: function(*leaves))(*arguments).jaxpr)


def _products(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        kind, parameters = equation.primitive.name, equation.params
        if kind == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * summed
        elif kind == "conv_general_dilated":
            kernel, out = equation.invars[1].aval.shape, parameters["dimension_numbers"].rhs_spec[0]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[out]
        else:
            values = [one for value in parameters.values() for one in (value if isinstance(value, tuple) else (value,))]
            bodies = [getattr(value, "jaxpr", value) for value in values]
            inner = [_products(body) for body in bodies if hasattr(body, "eqns")]
            turns = parameters["length"] if kind == "scan" else 1
            total += turns * (max(inner, default=0) if kind == "cond" else sum(inner))
    return total
