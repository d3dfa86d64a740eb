"""The other side of the text benchmark does the same work on the same weights."""

import jax.numpy as jnp
import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.settings import TextSettings
from verax.bench.text.cases import bench_text
from verax.bench.text.workload import Workload
from verax.checkpoint import Checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def test_transformers_generates_what_the_engine_generates(tmp_path):
    from verax import LLM
    from verax.bench.text.cases import transformers_sides

    tiny_checkpoint(tmp_path)
    workload = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5)), (8, 8), 0.0)
    sides = transformers_sides(Checkpoint.open(tmp_path), "float32", workload)
    assert [side.call() for side in sides.values()] == [16, 16]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = LLM(tmp_path, dtype="float32", max_num_seqs=2, max_model_len=32, use_tqdm=False)
    outputs = ours.generate([list(p) for p in workload.prompts], workload.params(), use_tqdm=False)
    for prompt, output in zip(workload.prompts, outputs, strict=True):
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tuple(tokens[0, len(prompt) :].tolist()) == output.outputs[0].token_ids


def test_all_sides_are_in_one_interleaved_result(tmp_path):
    tiny_checkpoint(tmp_path, dtype=jnp.bfloat16)
    workload = Workload("short-prompts", ((5, 6, 7), (8, 9)), (3, 2), 0.7)
    result = bench_text(TextSettings(model=str(tmp_path), runs=1, against="transformers"), workload)
    assert set(result["cases"][0]["sides"]) == {"transformers naive", "transformers batched", "verax"}
    assert set(result["cases"][0]["ratios"]) == {"transformers naive", "transformers batched"}
    assert result["machine"]["torch"] == torch.__version__
