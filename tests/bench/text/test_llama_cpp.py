"""llama.cpp as a baseline: our weights in its file, our steps, and our tokens where it is installed."""

import ctypes
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.settings import TextSettings
from verax.bench.text import cases, engines
from verax.bench.text.cases import Workload, bench_text
from verax.bench.text.gguf_export import write_gguf
from verax.checkpoint import Checkpoint
from verax.errors import (
    CheckpointError,
    InvalidParameterError,
    MissingDependencyError,
    UnsupportedModelError,
)
from verax.models import causal_lm

FAMILIES = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"attention_bias": True},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WORKLOAD = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5), tuple(range(3, 40))), (16, 1, 12), 0.0)


def tiny(folder, family="qwen3", **changes):
    return tiny_checkpoint(folder, family=family, **{**FAMILIES[family], **changes})


def bench(model, workload, against, **options):
    settings = TextSettings(model=str(model), against=against, runs=1, warmup=0, **options)
    return bench_text(settings, workload)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_has_the_folders_weights_and_sizes(family, tmp_path):
    opened = Checkpoint.open(tiny(tmp_path / "folder", family))
    written = Checkpoint.open(write_gguf(opened, tmp_path / "a.gguf", "F32"))
    assert sorted(written.names()) == sorted(opened.names())
    for name in opened.names():
        np.testing.assert_array_equal(written.read(name), opened.read(name), err_msg=name)
    ours, theirs = (causal_lm(checkpoint.config)[1] for checkpoint in (written, opened))
    np.testing.assert_allclose(ours.rotary.frequencies(16)[0], theirs.rotary.frequencies(16)[0], rtol=1e-6)
    assert (ours.rms_norm_eps, ours.head_dim) == (pytest.approx(theirs.rms_norm_eps), theirs.head_dim)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_files_have_ggmls_own_rounding(kind, tmp_path):
    opened = Checkpoint.open(tiny(tmp_path / "folder"))
    written = Checkpoint.open(write_gguf(opened, tmp_path / "a.gguf", kind))
    known = gguf.GGMLQuantizationType[kind]
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        expected = gguf.dequantize(gguf.quantize(np.asarray(opened.read(name)), known), known)
        np.testing.assert_array_equal(written.read(name).dequantize(), expected)


def test_what_cannot_be_written_is_refused_by_name(tmp_path):
    opened = Checkpoint.open(tiny(tmp_path / "a", intermediate_size=40))
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight of shape \[64, 40\] cannot be Q8_0"):
        write_gguf(opened, tmp_path / "a.gguf", "Q8_0")
    written = write_gguf(Checkpoint.open(tiny(tmp_path / "b")), tmp_path / "b.gguf", "Q8_0")
    with pytest.raises(CheckpointError, match="it is quantised; to become a GGUF file it must not be"):
        write_gguf(Checkpoint.open(written), tmp_path / "c.gguf", "Q8_0")
    with pytest.raises(InvalidParameterError, match=r"against: .*b\.gguf is a GGUF file"):
        bench(written, WORKLOAD, "transformers")
    with pytest.raises(UnsupportedModelError, match="rope_type 'yarn' cannot be written"):
        write_gguf(Checkpoint.open(tiny(tmp_path / "e", rope_scaling=YARN)), tmp_path / "e.gguf", "Q8_0")
    gemma = Checkpoint.open(tiny_checkpoint(tmp_path / "d", family="gemma2"))
    with pytest.raises(UnsupportedModelError, match="a gemma2 cannot be written to a GGUF file; qwen3, qwen2, llama"):
        write_gguf(gemma, tmp_path / "d.gguf", "Q8_0")


def test_without_llama_cpp_the_error_names_what_to_install_before_any_work(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "gguf_file", lambda *arguments: pytest.fail("a file was written"))
    blocked = tmp_path / "packages"
    blocked.mkdir()
    (blocked / "llama_cpp.py").write_text("raise ModuleNotFoundError(name='llama_cpp')")
    monkeypatch.setenv("PYTHONPATH", str(blocked), prepend=":")
    with pytest.raises(MissingDependencyError, match=r"has no llama_cpp; pip install 'verax\[llama-cpp\]'"):
        bench(tiny(tmp_path / "folder"), WORKLOAD, "llama.cpp")


class Recorder:
    """Stands for the C library: keeps calls of llama_decode; after position p of sequence s comes token 100 s + p."""

    def __init__(self, name):
        self.__name__, self.__version__, self.calls = name, "0.0", []
        self.llama_print_system_info = lambda: b"AVX = 1 | AVX512 = 0 | "

    def __getattr__(self, name):
        return lambda *arguments: SimpleNamespace()

    def llama_vocab_n_tokens(self, vocab):
        return 1000

    def llama_batch_init(self, size, embedding, sequences):
        self.size = size
        rows = {name: [None] * size for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(size)], **rows)

    def llama_decode(self, context, batch):
        n = batch.n_tokens
        self.calls.append([(batch.seq_id[i][0], batch.token[i], batch.pos[i], batch.logits[i]) for i in range(n)])
        return 0

    def llama_get_logits_ith(self, context, row):
        sequence, _, position, wanted = self.calls[-1][row]
        assert wanted
        logits = np.zeros(1000, np.float32)
        logits[100 * sequence + position] = 1000
        return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["llama_cpp", "ik_llama_cpp"])
def test_all_sequences_take_one_token_a_step_and_leave_when_they_are_done(monkeypatch, name, temperature):
    library = Recorder(name)
    library._lib = library
    monkeypatch.setitem(sys.modules, "ik_llama_cpp._ctypes_api", library)
    monkeypatch.setattr(engines, "BATCH_TOKENS", 4)
    run, versions = engines.llama_cpp(library, "a.gguf", "float32", None, 2, 5)
    assert run([[5, 6, 7], [9, 8]], [3, 2], temperature) == [[2, 3, 4], [101, 102]]
    assert library.calls == [
        [(0, 5, 0, False), (0, 6, 1, False), (0, 7, 2, True), (1, 9, 0, False)],
        [(1, 8, 1, True)],
        [(0, 2, 3, True), (1, 101, 2, True)],
        [(0, 3, 4, True)],
    ]
    assert (versions[f"{name}_python"], versions[f"{name}_build"]) == ("0.0", "AVX")
    with pytest.raises(ValueError, match="at most 2 sequences at once, not 3"):
        run([[1]] * 3, [1] * 3, 0.0)


@pytest.fixture
def _installed():
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled for minutes: pip install 'verax[llama-cpp]'")


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_generates_our_tokens(family, tmp_path):
    result = bench(tiny(tmp_path, family), WORKLOAD, "llama.cpp", dtype="float32")
    assert [side["same_tokens"] for side in result["cases"][0]["sides"].values()] == [WORKLOAD.new_tokens] * 2


@pytest.mark.usefixtures("_installed")
def test_it_is_in_one_interleaved_result_with_us_or_its_words_are_an_error(tmp_path):
    workload = Workload("short-prompts", ((5, 6, 7),), (3,), 0.7)
    result = bench(tiny(tmp_path), workload, "llama.cpp", quantization="int8")
    assert set(result["cases"][0]["sides"]) == {"llama.cpp Q8_0", "verax"}
    (tmp_path / "folder").mkdir()
    path = write_gguf(Checkpoint.open(tmp_path), tmp_path / "folder" / "a.gguf", "Q4_0")
    ours = bench(path, workload, "llama.cpp")
    assert set(ours["cases"][0]["sides"]) == {"llama.cpp as stored", "verax"}
    assert result["machine"]["llama_cpp_threads"] >= 1
