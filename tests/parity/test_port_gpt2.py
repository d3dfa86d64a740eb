"""A model that the package does not know, registered from outside: GPT-2 of examples/port_gpt2 in the text engine."""

import runpy
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verax
from tests.support.invariants import check_engine
from tests.support.tiny import tiny_tokenizer
from verax import models
from verax.cli import info
from verax.compare import compare_case
from verax.compare.cases.text import text_case
from verax.errors import InvalidParameterError, UnsupportedModelError

EXAMPLE = Path(__file__).parents[2] / "examples" / "port_gpt2"
VOCAB, POSITIONS = 301, 96
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, VOCAB, n).tolist() for n in (1, 5, 17, 40, 2, 33)]
NEW_TOKENS = 24
GREEDY = verax.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def check():
    """The example's own proof, on a model with room for the tokens of a tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        import check

        patch.setattr(check, "SIZES", {**check.SIZES, "vocab_size": VOCAB, "n_positions": POSITIONS})
        yield check


@pytest.fixture
def registered(check, monkeypatch):
    monkeypatch.setattr(models, "_CAUSAL_LM", dict(models._CAUSAL_LM))
    verax.register_causal_lm("gpt2", check.gpt2.GPT2LMHeadModel, check.gpt2.GPT2Config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpt2")


@pytest.fixture(scope="module", autouse=True)
def reference(check, folder):
    """The proof's reference, which is saved to the folder."""
    return check.reference(folder)


@pytest.fixture(scope="module")
def expected(reference):
    """transformers' greedy tokens, prompt by prompt."""
    answers = []
    for prompt in PROMPTS:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            eos_token_id=-1,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


def serve(folder, **options):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, **options}
    return verax.LLM(folder, dtype="float32", skip_tokenizer_init=True, use_tqdm=False, **sizes)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_of_a_batch_match_transformers(registered, folder, expected):
    # Six prompts of different lengths for four slots; the longest is computed in two chunks, together with decodes.
    llm = serve(folder)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    compiled = llm.engine.runner.num_compiled()
    assert tokens(llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)) == expected[:3]
    assert llm.engine.runner.num_compiled() == compiled
    check_engine(llm.engine)


def test_no_sequence_is_longer_than_the_learned_positions(registered, folder):
    llm = serve(folder, max_num_seqs=1)
    assert llm.max_model_len == 96
    endless = verax.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate([PROMPTS[3]], endless, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (96 - 40, "length")
    with pytest.raises(InvalidParameterError, match="max_model_len: 97 is more than the model's 96 positions"):
        serve(folder, max_model_len=97)


def test_quantisation_that_would_change_nothing_is_refused(registered, folder):
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel has no .*Linear to quantise"):
        serve(folder, quantization="int8")


def test_the_script_completes_prompts(monkeypatch, reference, capsys, tmp_path):
    monkeypatch.setattr(models, "_CAUSAL_LM", dict(models._CAUSAL_LM))
    reference.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path, vocab_size=VOCAB)
    runpy.run_path(str(EXAMPLE / "serve.py"))["main"](str(tmp_path), "abc", "once upon")
    assert capsys.readouterr().out.startswith("abc|")
    assert info._describe(str(tmp_path))["layers"] == 3


def test_its_layers_are_compared_without_rotary_positions(registered, folder, tmp_path):
    compared = compare_case(text_case(folder, tmp_path, tokens=20), repeat=False)
    assert compared.passed
    assert {"transformer.h.2.attn", "(output)"} <= {row.name for row in compared.rows}
