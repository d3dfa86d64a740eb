"""SmolLM2-135M-Instruct as published, a GGUF file of Q4_1 with a chat template, against transformers on its weights."""

import numpy as np
import pytest

from tests.cli.conftest import few_programs as few_programs
from tests.cli.conftest import run as run
from tests.real.texts import PAGE
from tests.support.published import smollm2_file
from verax import LLM, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TURNS = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "Name three of its museums."},
]


@pytest.fixture(scope="module")
def path():
    return smollm2_file()


@pytest.fixture(scope="module")
def llm(path):
    sizes = dict(max_num_seqs=1, max_model_len=256, max_num_batched_tokens=64)
    return LLM(path, dtype="float32", quantization="dequantize", use_tqdm=False, **sizes)


@pytest.fixture(scope="module")
def theirs(path):
    names = dict(gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **names).eval()
    return transformers.AutoTokenizer.from_pretrained(path.parent, **names), model


def logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().numpy()


@pytest.mark.parametrize("messages", [TURNS[:1], TURNS, [{"role": "system", "content": "Be brief."}, *TURNS[:1]]])
def test_a_conversation_in_float32_is_the_one_of_transformers(llm, theirs, messages):
    tokenizer, model = theirs
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
    output = llm.chat(messages, params, use_tqdm=False)[0]
    assert output.prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    assert prompt == tokenizer(output.prompt, add_special_tokens=False).input_ids
    scores = logits(model, prompt + answer)[len(prompt) - 1 : -1]
    rows = np.arange(len(answer))
    assert (scores.max(-1) - scores[rows, answer]).max() < 1e-3
    normalised = scores - np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True))
    normalised -= scores.max(-1, keepdims=True)
    ours = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)]
    np.testing.assert_allclose(ours, normalised[rows, answer], atol=1e-3)


@pytest.mark.parametrize("batch", [32, 1024])
def test_stored_blocks_answer_as_float32_does(path, theirs, batch):
    # By the kernels for few rows and for many. Products with inputs in 8 bits are off by 0.08, and the answer is wrong.
    llm = LLM(path, max_num_seqs=4, max_model_len=1024, max_num_batched_tokens=batch, use_tqdm=False)
    answer = llm.chat(TURNS[:1], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0]
    assert answer.text == "The capital of France is Paris."
    page = llm.generate([PAGE], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    ids = list(page.prompt_token_ids)
    ours = [page.prompt_logprobs[at][ids[at]].logprob for at in range(1, len(ids))]
    scores = torch.log_softmax(torch.from_numpy(logits(theirs[1], ids)), -1).numpy()
    expected = scores[np.arange(len(ids) - 1), ids[1:]]
    assert np.sqrt(np.mean((ours - expected) ** 2)) <= 0.022


def test_chat_begins_with_a_temperature_and_ends_its_answer_by_itself(run, few_programs, path):
    done = run("chat", "--model", path, "--message", TURNS[0]["content"], "--max-model-len", 256, "--seed", 0)
    assert done.status == 0
    assert "recommends no sampling: temperature 0.7, top_p 0.95" in done.err
    assert done.out.strip()
    assert "<|im_end|>" not in done.out
