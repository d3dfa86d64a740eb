"""The built-in model is an ordinary Hugging Face folder: transformers reads it and says the same."""

import pytest

from verax import LLM, SamplingParams, builtin

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MESSAGES = [{"role": "user", "content": "What is 47 + 38?"}]


def test_transformers_answers_the_same():
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin.text_model())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(builtin.text_model(), dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = theirs.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    ours = LLM(dtype="float32", max_num_seqs=1, max_model_len=64, use_tqdm=False)
    output = ours.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0]
    assert tuple(prompt["input_ids"][0].tolist()) == output.prompt_token_ids
    assert tuple(tokens.tolist()) == output.outputs[0].token_ids
    assert output.outputs[0].text == "47 + 38 = 85."
    assert output.outputs[0].finish_reason == "stop"
