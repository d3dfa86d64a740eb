"""Options that are wrong, or do not go together, are refused in one line before any work."""

import pytest

URL = ("--url", "http://127.0.0.1:1/v1")

REFUSED = [
    ("text", ("--against", "vllm"), "against: expected transformers, llama.cpp, verax"),
    ("text", ("--dtype", "int8"), "dtype: expected one of bfloat16, float32, got 'int8'"),
    ("text", ("--shapes", "llama"), "shapes: expected one of qwen3, qwen3-8b, hybrid, moe, got 'llama'"),
    ("text", ("--against", "verax"), "against: verax is our side unquantised; give quantization"),
    ("text", ("--workload", "mlperf"), "workload: expected one of short-prompts"),
    ("text", ("--runs", "0"), "--runs"),
    ("text", ("--requests", "0"), "--requests"),
    ("text", ("--scale", "0"), "scale: expected a number of more than 0"),
    ("text", ("--prompt-tokens", "9"), "prompt_tokens: only workload prompt reads it"),
    ("text", ("--scale", "1"), "scale: only workload nano-vllm reads it"),
    ("text", ("--workload", "prompt", "--max-tokens", "9"), "max_tokens: only workload short-prompts"),
    ("video", ("--steps", "4"), "steps: only stage clip reads it"),
    ("video", ("--thresholds", "1"), "thresholds: only stage clip reads it"),
    ("video", ("--prompts", "one"), "prompts: only stage clip reads it"),
    ("serve", (*URL, "--vocab-size", "9", "-q", "int8"), "quantization: the server of url has a model of its own"),
    ("quality", ("--variants", "int3"), "variants: expected float32; "),
    ("quality", ("--variants", "as stored"), "'as stored' is for a quantised checkpoint"),
    ("quality", ("--text", "nowhere.txt"), "text: nowhere.txt cannot be read"),
    ("quality", ("--text", "one"), "text: it has fewer than two tokens"),
    ("embed", ("--against", "tvm"), "against: expected transformers, openvino"),
    ("text", ("--shapes", "moe", "--model", "somewhere"), "shapes: random weights stand for a model"),
    ("embed", ("--shapes", "qwen3", "--model", "somewhere"), "shapes: random weights stand for a model"),
    ("embed", ("--shapes", "gpt"), "shapes: expected one of minilm, modernbert, qwen3, got 'gpt'"),
    ("video", ("--size", "2b"), "size: expected one of 1.3b"),
    ("video", ("--stage", "unet"), "stage: expected transformer, vae, clip, got 'unet'"),
    ("video", ("--frames", "8"), "expected 4n + 1 frames"),
    ("video", ("--size", "tiny", "--height", "20", "--width", "32"), "divisible by 16, got 9, 20 x 32"),
    ("video", ("--against", "onnx"), "against: expected diffusers, torch.compile, openvino"),
    ("video", ("--thresholds", "0"), "thresholds: expected numbers above 0, such as 0.5,2, got '0'"),
    ("video", ("--model", "folder"), "measured with the stage clip"),
    ("video", ("--stage", "clip", "--prompts", "one"), "prompts: one has none"),
    ("ops", ("--weights", "int3"), "weights: expected float32"),
    ("ops", ("--against", "tensorflow"), "against: expected torch"),
    ("ops", ("--rows", "0"), "rows: expected whole numbers above 0"),
    ("delta", ("--only", "conv"), "only: expected rule"),
    ("delta", ("--configs", "Huge"), "configs: expected Small, Medium, Large, got 'Huge'"),
    ("serve", (*URL, "--against", "offline", "--vocab-size", "9"), "model: with a url"),
    ("serve", URL, "vocab_size: with a url"),
    ("serve", ("--shapes", "qwen3", "--model", "somewhere"), "shapes: random weights stand for a model"),
    ("serve", ("--concurrency", "1", "--request-rate", "1"), "give one of them"),
    ("serve", ("--concurrency", "0"), "concurrency: expected whole numbers above 0"),
    ("serve", ("--request-rate", "-1"), "request_rate: expected numbers above 0"),
    ("serve", ("--concurrency", "1.5"), "expected whole numbers above 0, such as 1,8, got '1.5'"),
    ("serve", ("--duration", "0"), "duration: expected a number of more than 0"),
    ("serve", ("--disconnect", "20"), "'--disconnect': Input should be less than or equal to 1"),
    ("serve", ("--against", "llama.cpp", "--llama-server", "/nowhere/llama-server"), "build it with make llama-server"),
    ("serve", (*URL, "--vocab-size", "500"), "http://127.0.0.1:1/v1/models: "),
    ("accelerator", ("--only", "vidoe"), "only: expected tests, operations"),
    ("accelerator", ("--seconds", "0"), "seconds: expected a number of more than 0"),
    ("reports", ("--only", "three"), "only: expected video, text, delta-rule, got 'three'"),
]


@pytest.mark.parametrize(("subject", "arguments", "message"), REFUSED)
def test_nonsense_is_refused_in_one_line(bench, monkeypatch, tmp_path, subject, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").write_text("")
    status, _, error = bench(subject, *arguments)
    assert status in (1, 2)
    assert error.count("\n") == 1
    assert message in error
