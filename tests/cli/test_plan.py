"""`verax plan`: exit statuses, JSON, the tables, options of other commands."""

import json

import pytest


def test_a_model_that_fits_ends_with_0_and_one_that_does_not_with_1(run):
    fits = run("plan", "text-builtin", "--device", "h100", "--json")
    assert (fits.status, json.loads(fits.out)["fits"]) == (0, True)
    small = run("plan", "text-builtin", "--device", "h100", "--memory", "0.001", "--json")
    assert (small.status, json.loads(small.out)["fits"]) == (1, False)


def test_the_tables_and_the_verdict(run):
    done = run("plan", "text-builtin", "--device", "v6e")
    assert done.status == 0
    for words in ("text-builtin on v6e", "feed-forward", "cache", "decode step", "Times are bounds", "tokens/s of one"):
        assert words in done.out
    assert done.out.rstrip().endswith("fits")


@pytest.mark.parametrize(
    ("model", "options", "settings"),
    [
        (
            "qwen3",
            "--dtype float32 -q int8 --kv-cache-dtype fp8 --max-model-len 512 --max-num-seqs 2 "
            "--max-num-batched-tokens 64 --tensor-parallel-size 2",
            {"quantization": "int8", "max_model_len": 512, "max_num_batched_tokens": 64, "tensor_parallel_size": 2},
        ),
        ("minilm", "--dtype float32 --batch-size 4 --max-length 32", {"batch_size": 4, "max_length": 32}),
        (
            "t2v-1.3b",
            "--resolution 540P --num-frames 17 --inference-steps 8 --guidance-parallel --sequence-parallel 2 "
            "--shard-weights",
            {"height": 544, "num_frames": 17, "num_inference_steps": 8, "sequence_parallel": 2, "shard_weights": True},
        ),
    ],
)
def test_options_have_the_names_of_the_commands_that_run_the_model(run, model, options, settings):
    done = run("plan", model, "--device", "h100", "--json", *options.split())
    assert settings.items() <= json.loads(done.out)["settings"].items()
