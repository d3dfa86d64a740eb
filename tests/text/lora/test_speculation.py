"""Requests with adapters in an engine that drafts: the same tokens as without drafts, of which some hold."""

from tests.text.conftest import make_llm
from tests.text.speculative.conftest import LOOPING, NGRAM, REPEATED, UNIQUE, assert_unchanged
from verax.text.engine.sampling_params import SamplingParams

PROMPTS = [REPEATED[0], UNIQUE[1], REPEATED[1], UNIQUE[3], REPEATED[2]]
MIXED = (0, 1, 2, 0, 1)
"""Adapter of each prompt, 0 for none."""


def test_adapters_answer_as_without_drafts(tiny_folder, adapters):
    lora = dict(enable_lora=True, max_loras=2, max_lora_rank=4)
    llm = make_llm(tiny_folder, max_num_seqs=3, speculative_config=NGRAM, **lora)
    compiled = llm.engine.runner.num_compiled()
    requests = [None, *(request for request, _ in adapters)]
    chosen = [requests[number] for number in MIXED]
    for params in (SamplingParams(**LOOPING), SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)):
        assert_unchanged(llm, PROMPTS, params, lora_request=chosen)
    assert llm.spec_decode.num_accepted_tokens > 0
    assert llm.engine.runner.num_compiled() == compiled
