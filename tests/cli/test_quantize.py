"""`verax quantize`: a smaller checkpoint that answers as the same model quantised while loading."""

import json

from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(model, **options):
    llm = LLM(
        model, dtype="float32", max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, use_tqdm=False, **options
    )
    return llm.generate([[5, 6, 7, 8]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_the_written_checkpoint_is_the_model_quantised_while_loading(run, folder, tmp_path):
    for bits in (8, 4):
        output = tmp_path / str(bits)
        done = run("quantize", output, "--model", folder, "--bits", bits, "--dtype", "float32")
        assert done.status == 0
        assert "MB" in done.out
        assert answer(output) == answer(folder, quantization=f"int{bits}")
        again = json.loads(
            run("generate", "-m", output, "--json", "--max-tokens", "3", "--max-model-len", "32", "abc").out
        )
        assert again["outputs"][0]["token_ids"]


def test_the_checkpoint_itself_is_not_overwritten(run, folder):
    done = run("quantize", folder, "--model", folder)
    assert done.status == 2
    assert "the checkpoint itself" in done.err


def test_nonsense_is_refused_in_one_line(run, folder, tmp_path):
    for options in (["--bits", "3"], ["--bits", "4", "--group-size", "48"], ["--dtype", "int8"]):
        done = run("quantize", tmp_path / "x", "--model", folder, *options)
        assert done.status == 1
        assert done.err.count("\n") == 1
    assert not (tmp_path / "x").exists()
    done = run("generate", "-m", folder, "-q", "int3", "abc")
    assert done.status == 1
    assert "quantization: expected one of int8, int4" in done.err
