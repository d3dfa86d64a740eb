"""`verax compare`: wrong arguments are refused before anything runs."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text", "--against", "diffusers"], "the reference of text is transformers"),
        (["--dtype", "float16", "text"], "bfloat16, float32"),
        (["text", "--part", "vae"], "only video models have it"),
        (["embed", "--num-frames", "9"], "--num-frames: only video models"),
        (["video", "--random", "--part", "vae", "--prompt", "a dog"], "--part vae takes arrays"),
        (["video", "--size", "1.3b"], "it goes with --random"),
        (["video", "--random", "--size", "1.3b", "--part", "text_encoder"], "made for transformer, vae"),
        (["text", "--inputs", "no/such.txt"], "--inputs: no/such.txt cannot be read"),
        (["text", "--inputs", "a.txt", "--prompt", "b"], "give one of the two"),
        (["own", "no/such.py"], "no such file"),
        (["video", "--random", "--tokens", "7"], "--tokens"),
        (["no/such/folder"], "no/such/folder"),
    ],
)
def test_wrong_arguments_end_with_status_2(run, arguments, message):
    result = run("compare", *arguments)
    assert result.status == 2
    assert message in result.err


def test_a_given_model_has_weights_of_its_own(run, folder):
    result = run("compare", folder, "--random")
    assert result.status == 2
    assert "has weights" in result.err
