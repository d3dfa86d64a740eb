"""A Ray of three CPUs by its own count, which two are enough for: `make test-ray`."""

import os

import psutil
import pytest

# Before Ray, whose processes and actors inherit it.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 128, "dtype": "float32"}
"""Options of an engine of few programs."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Ray at 127.0.0.1; its actors share their compiled programs."""
    ray = pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray installs it")
    pytest.importorskip("ray.serve", reason="needs the extra `ray`: make test-ray installs it")
    from verax.ray import start_ray

    os.environ["VERAX_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    start_ray(num_cpus=3)  # two actors share one; a reader and the filter of the checkpoint have one each
    yield ray
    ray.shutdown()


@pytest.fixture
def actors(cluster):
    """Finds the processes of this Ray's actors by a part of their class's name, the oldest first."""

    def find(name):
        found = [process for process in psutil.process_iter(["cmdline", "create_time"]) if process.info["cmdline"]]
        ours = [process for process in found if process.info["cmdline"][0].startswith("ray::")]
        named = [process for process in ours if name in process.info["cmdline"][0]]
        return sorted(named, key=lambda process: process.info["create_time"])

    return find
