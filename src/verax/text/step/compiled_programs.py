"""Compiled programs of an engine as files: a later start on the same kind of device loads them, and traces nothing.

What is kept is the executable (`jax.experimental.serialize_executable`), not StableHLO (`jax.export`). Loading it takes
a sixth of the time of tracing, lowering and a warm compilation cache, exported StableHLO a third. And StableHLO is
compiled on a new machine. So a folder belongs to one kind of device, one jaxlib and one configuration.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

from verax import ops
from verax._compat import JAXLIB
from verax.errors import InvalidParameterError
from verax.files import atomic_path, write_json
from verax.machine import cpu_name
from verax.ops.cpu import library
from verax.text.engine.blocks import CacheGroup
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.program import ADMIT, AbstractModel, Programs, sampling_name, step_name
from verax.text.step.sizes import RunnerConfig

__all__ = ["CompiledPrograms", "check_supported", "write_programs"]

MANIFEST = "programs.json"

CHOSEN_BY_MEMORY = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
"""Sizes that an engine chooses by itself where no option names them; the folder's are taken then."""

SOURCES = ("models", "nn", "ops", "text")
"""Folders of the package whose code decides what the programs compute."""


@dataclass(frozen=True)
class CompiledPrograms:
    """Folder of compiled programs.

    Attributes:
        folder: the folder.
        made_for: what the programs depend on in addition to the sizes.
        sizes: sizes that they were compiled for.
    """

    folder: Path
    made_for: Mapping[str, Any]
    sizes: RunnerConfig

    @classmethod
    def open(cls, folder: str | Path) -> CompiledPrograms:
        """Read what a folder was made for. No program is loaded.

        Raises:
            InvalidParameterError: if `write_programs` did not make the folder.
        """
        path = Path(folder) / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            return cls(path.parent, manifest["made_for"], _read_sizes(manifest["sizes"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidParameterError(
                f"programs: {folder} has no {MANIFEST} that can be read ({error}); verax compile -o FOLDER makes one"
            ) from error

    def check(self, model: AbstractModel) -> None:
        """Compare with a model, this machine and this version.

        Raises:
            InvalidParameterError: naming the first difference.
        """
        self._compare(_made_for(model), self.made_for)

    def sizes_for(self, planned: RunnerConfig, config: EngineConfig) -> RunnerConfig:
        """Sizes of the folder for an engine that would have chosen `planned` by its options.

        Raises:
            InvalidParameterError: for an option that names another size.
        """
        check_supported(config)
        if config.kv_cache_memory is not None and planned.groups != self.sizes.groups:
            raise InvalidParameterError(f"kv_cache_memory: the cache of {self.folder} has another size; leave it out")
        for field in fields(RunnerConfig):
            if field.name == "groups" or (field.name in CHOSEN_BY_MEMORY and getattr(config, field.name) is None):
                continue
            compiled, wanted = _plain(getattr(self.sizes, field.name)), _plain(getattr(planned, field.name))
            if field.name == "structured_outputs" and wanted and not compiled:
                raise InvalidParameterError(
                    f"structured_outputs: {self.folder} has no programs for them; compile with --structured-outputs, "
                    "or leave them out (--no-structured-outputs of verax serve and verax batch)"
                )
            if compiled != wanted and field.name != "structured_outputs":
                raise InvalidParameterError(
                    f"{field.name}: the programs of {self.folder} were compiled for {compiled}, got {wanted}"
                )
        return dataclasses.replace(self.sizes, structured_outputs=planned.structured_outputs)

    def programs(self, sizes: RunnerConfig) -> Programs:
        """The programs, ready to be called.

        Raises:
            InvalidParameterError: if a file is missing or damaged.
        """
        return Programs(
            admit=self._load(ADMIT),
            steps={shape: self._load(step_name(shape)) for shape in sizes.shapes},
            samplers={rows: self._load(sampling_name(rows)) for rows in sizes.sampling_rows},
        )

    def _load(self, name: str) -> Any:
        path = self.folder / f"{name}.bin"
        try:
            executable, arguments, results = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(
                executable, jax.tree.structure(arguments), jax.tree.structure(results)
            )
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, RuntimeError) as error:
            raise InvalidParameterError(
                f"programs: {path} cannot be loaded ({error}); compile again with verax compile"
            ) from error

    def _compare(self, here: Any, there: Any, place: str = "") -> None:
        if isinstance(here, dict) and isinstance(there, dict):
            for key in dict.fromkeys((*here, *there)):
                self._compare(here.get(key), there.get(key), f"{place}.{key}" if place else key)
        elif here != there:
            raise InvalidParameterError(
                f"programs: {self.folder} was compiled for {place} {there}, but here it is {here}; compile again with "
                "verax compile"
            )


def check_supported(config: EngineConfig) -> None:
    """Check that a folder can hold all programs of an engine.

    Raises:
        InvalidParameterError: for adapters, drafts or several devices.
    """
    for name, used in (
        ("enable_lora", config.enable_lora),
        ("speculative_config", config.speculation is not None),
        ("tensor_parallel_size", config.tensor_parallel_size > 1),
        ("data_parallel_size", config.data_parallel_size > 1),
    ):
        if used:
            raise InvalidParameterError(
                f"{name}: programs are not written to a folder with it; leave it or programs out"
            )


def write_programs(
    programs: Iterable[tuple[str, jax.stages.Compiled]], folder: Path, model: AbstractModel, sizes: RunnerConfig
) -> list[Path]:
    """Write programs into a folder, which is replaced if it is there; their files.

    Args:
        programs: programs by name.
        folder: the folder.
        model: model that they were compiled for.
        sizes: sizes that they were compiled for.
    """
    with atomic_path(folder) as partial:
        partial.mkdir(parents=True)
        names = []
        for name, compiled in programs:
            executable, arguments, results = serialize_executable.serialize(compiled)
            # Structures of trees have no form of their own in files; trees of numbers do.
            trees = [jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in (arguments, results)]
            (partial / f"{name}.bin").write_bytes(pickle.dumps((executable, *trees)))
            names.append(name)
        manifest = {"made_for": _made_for(model), "sizes": _plain(dataclasses.asdict(sizes))}
        write_json(partial / MANIFEST, manifest)
    return [folder / f"{name}.bin" for name in names]


def _made_for(model: AbstractModel) -> dict[str, Any]:
    """Everything but the sizes that the programs depend on, as JSON holds it."""
    target = ops.target()
    cpu = {"processor": cpu_name(), "kernels": library.level()} if target.platform == "cpu" else {}
    weights = [(weight.shape, weight.dtype.name) for weight in model.weights]
    if not dataclasses.is_dataclass(config := model.config):
        raise InvalidParameterError(
            f"programs: {type(config).__name__} is not a dataclass, so models cannot be compared"
        )
    return _plain(
        {
            "platform": target.platform,
            "device": target.device_kind,
            **cpu,
            "jax": jax.__version__,
            "jaxlib": JAXLIB,
            "verax": version("verax"),
            "model": {"class": type(config).__name__, **dataclasses.asdict(config)},
            "weights": hashlib.sha256(repr(weights).encode()).hexdigest()[:16],
            "implementations": {name: row["runs"] for name, row in ops.chosen_implementations().items()},
            "source": _source_digest(),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        }
    )


def _source_digest() -> str:
    """Digest of the code that the programs come from: another state of the same version may compute something else."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in SOURCES:
        for path in sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".h", ".cc")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value as JSON holds it: dtypes by their names."""

    def named(value: Any) -> Any:
        try:
            return dict(value) if isinstance(value, Mapping) else jnp.dtype(value).name
        except TypeError:
            return repr(value)

    return json.loads(json.dumps(value, default=named))


def _read_sizes(sizes: Mapping[str, Any]) -> RunnerConfig:
    groups = tuple(CacheGroup(tuple(g["layers"]), g["window"], g["num_blocks"]) for g in sizes["groups"])
    return RunnerConfig(
        **{
            **sizes,
            "groups": groups,
            "cache_dtype": jnp.dtype(sizes["cache_dtype"]),
            "verify_tokens": tuple(sizes["verify_tokens"]),
        }
    )
