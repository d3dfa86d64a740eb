"""The quality benchmark on the built-in model: distances are those of the precision, refusals are clear."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support import gguf as files
from tests.support.tiny import tiny_checkpoint
from verax import cli
from verax.bench.results import markdown
from verax.bench.text.quality import bench_quality, held_out_sums, held_out_texts
from verax.errors import InvalidParameterError


@pytest.fixture(scope="module")
def result():
    variants = ["float32", "int8", "bfloat16, int8 cache", "int4-64", "int4-128"]
    return bench_quality(variants=variants, tokens=1500, additions=0)


def test_fewer_bits_are_further_from_float32(result):
    rows = result["variants"]
    assert rows["float32"]["kl_divergence"] == 0
    assert rows["float32"]["top1_agreement"] == 1
    assert 1.3 < rows["float32"]["perplexity"] < 2
    assert 0 < rows["bfloat16, int8 cache"]["kl_divergence"] < rows["int4-64"]["kl_divergence"]
    assert rows["int8"]["kl_divergence"] < rows["int4-64"]["kl_divergence"] < 0.1
    assert rows["int8"]["weights_mb"] > rows["int4-64"]["weights_mb"]
    # 6 layers, 2 heads of 32, keys and values: a byte each, and a scale
    assert rows["bfloat16, int8 cache"]["cache_bytes_per_token"] == 2 * 6 * 2 * (32 + 4)


def test_groups_that_do_not_divide_a_layer_are_left_out_with_the_reason(result):
    assert "128 does not divide" in result["variants"]["int4-128"]["left_out"]
    assert "| int4-128 | left out: " in markdown(result)
    assert (result["subject"], result["name"]) == ("text", "quality-built-in")


def test_the_built_in_model_is_measured_on_sums_and_texts_that_it_never_saw():
    sums, texts = held_out_sums(), held_out_texts()
    assert 0.08 < len(sums) / 100**2 < 0.12
    assert all((b, a) in set(sums) for a, b in sums)
    assert len(texts) > 50
    assert all(text.endswith("<|endoftext|>") and text.count("<|endoftext|>") == 1 for text in texts)


def test_any_model_and_text_can_be_measured(tmp_path):
    folder = str(tiny_checkpoint(tmp_path / "tiny"))
    result = bench_quality(
        folder, text="once upon a time there was a small fox " * 20, variants=["bfloat16"], additions=3
    )
    row = result["variants"]["bfloat16"]
    assert np.isfinite(row["perplexity"])
    assert row["additions_exact"] == 0


class Indifferent:
    """Stands for llama.cpp's C library: to it, any token is as good as any other."""

    def __init__(self, vocab_size):
        self.logits = (ctypes.c_float * vocab_size)()
        self.decoded = []

    def __getattr__(self, name):
        return lambda *arguments: SimpleNamespace()

    def llama_log_callback(self, function):
        return function

    def llama_batch_init(self, size, embedding, sequences):
        rows = {name: [None] * size for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(size)], **rows)

    def llama_decode(self, context, batch):
        self.decoded.append([(batch.pos[i], batch.token[i]) for i in range(batch.n_tokens)])
        return 0

    def llama_vocab_n_tokens(self, vocabulary):
        return len(self.logits)

    def llama_get_logits_ith(self, context, row):
        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))


def test_a_quantised_file_is_measured_dequantised_as_it_is_stored_and_in_llama_cpp(tmp_path, monkeypatch):
    library = Indifferent(vocab_size=320)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    folder = tiny_checkpoint(tmp_path / "tiny")
    begin = [("tokenizer.ggml.bos_token_id", "add_uint32", 5), ("tokenizer.ggml.add_bos_token", "add_bool", True)]
    files.write(folder, tmp_path / "a.gguf", "Q8_0", metadata=begin)
    text = "once upon a time there was a small fox " * 20
    result = bench_quality(
        str(tmp_path / "a.gguf"),
        text=text,
        variants=["float32", "as stored"],
        window=100,
        additions=0,
        against=["llama.cpp"],
    )
    rows = result["variants"]
    assert rows["float32"]["kl_divergence"] == 0 < rows["as stored"]["kl_divergence"] < 0.05
    assert rows["as stored"]["weights_mb"] < rows["float32"]["weights_mb"]
    assert rows["llama.cpp"]["perplexity"] == pytest.approx(320)
    # Every window begins with the beginning token, and its last token is predicted only.
    begins = [call[0] for call in library.decoded if call[0][0] == 0]
    assert len(begins) > 1
    assert set(begins) == {(0, 5)}
    assert sum(map(len, library.decoded)) == result["settings"]["scored_tokens"]
    assert "| llama.cpp | 320.0000 |  |  |  | " in markdown(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": ["as stored"]}, "'as stored' is for a quantised checkpoint"),
        ({"against": ["llama.cpp"]}, r"against: llama\.cpp reads a GGUF file"),
        ({"against": ["torch"]}, r"against: expected llama\.cpp, got 'torch'"),
    ],
)
def test_a_folder_has_no_stored_blocks_to_measure(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        bench_quality(additions=0, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "int3"], "variants: expected float32; "),
        (["--text", "nowhere.txt"], "text: nowhere.txt cannot be read"),
        (["--text", "one"], "text: it has fewer than two tokens"),
    ],
)
def test_nonsense_is_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").write_text("")
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "quality", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
