"""Answers with a form: every one has it, whatever happens around it, and free answers in its batch do not change."""

import dataclasses
import json
import re
import sys
import threading
import time

import numpy as np
import pytest
import tokenizers

from tests.support import gguf as gguf_files
from tests.support.invariants import check_engine
from tests.support.tiny import tiny_config
from tests.text.conftest import make_llm
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError, MissingDependencyError, QueueFullError, StructuredOutputError
from verax.models import causal_lm
from verax.text.engine.sampling_params import SamplingParams, StructuredOutputs
from verax.text.features import grammar
from verax.text.features.grammar import GrammarCompiler, mask_width
from verax.text.step.sizes import block_bytes
from verax.text.tokens.tokenizer import Tokenizer

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 50, 7, 40, 12)]

NAME = {"type": "string", "maxLength": 5}
SCHEMAS = {
    "object": (
        {
            "type": "object",
            "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        lambda x: set(x) == {"name", "age"} and len(x["name"]) <= 5 and 0 <= x["age"] <= 120,
    ),
    "optional": (
        {"type": "object", "properties": {"a": NAME, "b": {"type": "boolean"}}, "additionalProperties": False},
        lambda x: set(x) <= {"a", "b"} and isinstance(x.get("b", True), bool),
    ),
    "array": (
        {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "minItems": 2, "maxItems": 3},
        lambda x: 2 <= len(x) <= 3 and all(1 <= item <= 99 for item in x),
    ),
    "reference": (
        {"$defs": {"n": NAME}, "type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1, "maxItems": 2},
        lambda x: 1 <= len(x) <= 2 and all(len(item) <= 5 for item in x),
    ),
}


@pytest.fixture(scope="module")
def formed(tiny_folder):
    """An engine with structured output and 31 blocks of 4 tokens: long sequences preempt each other."""
    _, config = causal_lm(tiny_config())
    memory = 32 * block_bytes(config, 4, "float32")
    return make_llm(tiny_folder, kv_cache_memory=memory, max_num_seqs=4, structured_outputs=True)


FORM = {field.name for field in dataclasses.fields(StructuredOutputs)}


def ask(llm, prompt="abc", **fields):
    """The first answer, given fields of its form and sampling parameters."""
    form = {name: fields.pop(name) for name in FORM & fields.keys()}
    params = SamplingParams(**{"seed": 1, "max_tokens": 60, **fields}, structured_outputs=form)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_fits_its_schema(formed, name):
    schema, fits = SCHEMAS[name]
    params = [SamplingParams(seed=seed, max_tokens=90, structured_outputs={"json": schema}) for seed in range(6)]
    for output in formed.generate(["abc"] * 6, params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop"
        assert fits(json.loads(output.outputs[0].text)), output.outputs[0].text


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"regex": r"(é|🦊){2}"}, r"(é|🦊){2}"),
        ({"choice": ["yes", "no", 'so "so"\n', "🦊"]}, 'yes|no|so "so"\n|🦊'),
        ({"grammar": 'start: "a" inner "b" | "c"\ninner: "a" "b" | "c"'}, "c|acb|aabb"),
        ({"grammar": 'root ::= "x" d d "y"\nd ::= [0-9]\n'}, "x[0-9]{2}y"),
        ({"grammar": 'start: "<" %json {"type": "boolean"} ">"'}, "<(true|false)>"),
    ],
)
def test_every_answer_fits_its_form(formed, form, pattern):
    for seed in range(4):
        answer = ask(formed, seed=seed, **form)
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text), answer.text


def test_any_json_object_is_whole_or_cut_by_max_tokens(formed):
    for seed in range(4):
        answer = ask(formed, seed=seed, json_object=True)
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        else:
            assert answer.finish_reason == "length"


def test_a_grammar_may_have_thousands_of_words_that_begin_alike(formed, monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 60.0)
    words = " | ".join(f'"a{chr(0x4E00 + i)}"' for i in range(2100))
    assert re.fullmatch("a[\u4e00-\u9fff]", ask(formed, seed=0, grammar=f"root ::= {words}").text)


def test_the_end_comes_where_the_grammar_accepts_and_nowhere_else(formed):
    eager = dict.fromkeys(formed.tokenizer.eos_token_ids, 100.0)
    for regex, length in (("[a-z]{4}", 4), ("[a-z]*", 0)):
        answer = ask(formed, regex=regex, logit_bias=eager)
        assert (len(answer.text), answer.finish_reason) == (length, "stop")


def test_min_tokens_holds_the_end_back_as_long_as_the_grammar_can_continue(formed):
    assert len(ask(formed, regex="[a-z]*", min_tokens=12).token_ids) >= 12
    answer = ask(formed, regex="a", min_tokens=12)
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_the_form_begins_after_a_text(formed):
    for seed in range(4):
        answer = ask(formed, seed=seed, after="e", regex="42!", max_tokens=90)
        assert re.fullmatch(".*?e[^e]*42!", answer.text, re.DOTALL) or (
            answer.finish_reason == "length" or "e" not in answer.text
        )
    whole = [ask(formed, seed=seed, after="e", regex="42!", max_tokens=90).text for seed in range(12)]
    assert any(text.endswith("42!") for text in whole)


def test_stop_strings_end_a_form_early(formed):
    answer = ask(formed, regex="aaabbb", stop="b")
    assert (answer.text, answer.stop_reason) == ("aaa", "b")


FREE = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=7, max_tokens=24, top_k=40, top_p=0.95, ignore_eos=True),
    SamplingParams(seed=8, max_tokens=20, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias={9: 3.0}),
    SamplingParams(seed=9, max_tokens=20, min_tokens=15, logprobs=4, prompt_logprobs=2, n=2),
]


def same(ours, theirs):
    """Assert that outputs have the same tokens, and log-probabilities up to the rounding of another batch size."""
    for a, b in zip(ours, theirs, strict=True):
        for ours_one, theirs_one in zip(a.outputs, b.outputs, strict=True):
            assert ours_one.token_ids == theirs_one.token_ids
            close(ours_one.logprobs or [], theirs_one.logprobs or [])
        close((a.prompt_logprobs or [])[1:], (b.prompt_logprobs or [])[1:])


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert {token: entry.logprob for token, entry in a.items()} == pytest.approx(
            {token: entry.logprob for token, entry in b.items()}, abs=1e-3
        )


def test_free_answers_next_to_formed_ones_do_not_change(llm, formed):
    expected = llm.generate(PROMPTS[:4], FREE, use_tqdm=False)
    form = SamplingParams(seed=1, max_tokens=40, structured_outputs={"regex": "[a-z]{12,}"})
    crowd = [p for prompt in PROMPTS[:4] for p in (prompt, PROMPTS[5])]
    params = [p for free in FREE for p in (free, form)]
    outputs = formed.generate(crowd, params, use_tqdm=False)
    same(outputs[::2], expected)
    assert all(re.fullmatch("[a-z]{12,}", output.outputs[0].text) for output in outputs[1::2])
    check_engine(formed.engine)


def formed_batch(llm, which=tuple(range(8))):
    """Answers with forms and without to prompts of one chunk and of several."""
    form = {"json": SCHEMAS["object"][0]}
    params = [
        SamplingParams(seed=i, max_tokens=40, structured_outputs=form if i % 3 else None, ignore_eos=not i % 3)
        for i in which
    ]
    outputs = [o.outputs[0] for o in llm.generate([PROMPTS[i] for i in which], params, use_tqdm=False)]
    for i, output in zip(which, outputs, strict=True):
        assert not i % 3 or output.finish_reason == "length" or SCHEMAS["object"][1](json.loads(output.text))
    return [output.token_ids for output in outputs]


def test_preemption_changes_no_formed_answer(formed):
    alone = [formed_batch(formed, [i])[0] for i in range(len(PROMPTS))]
    formed.engine.scheduler.blocks.reset_prefix_cache()
    before = formed.engine.scheduler.num_preemptions
    assert formed_batch(formed) == alone
    assert formed.engine.scheduler.num_preemptions > before
    check_engine(formed.engine)


def test_logprobs_come_from_the_free_model(formed):
    params = dict(temperature=0, max_tokens=1, logprobs=3)
    free = formed.generate([PROMPTS[1]], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    held = ask(formed, PROMPTS[1], regex="[0-9]", **params)
    assert held.token_ids != free.token_ids
    close([{token: held.logprobs[0][token] for token in free.logprobs[0]}], free.logprobs)
    assert held.logprobs[0][held.token_ids[0]].rank > 1


class Panic(BaseException):
    """As PyO3's PanicException, which is not an Exception."""


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("fill", StructuredOutputError("structured_outputs: too complex")),
        ("append", Panic("out of bounds")),
        ("detokenizer", Panic("out of bounds")),
    ],
)
def test_an_error_in_the_host_work_of_a_request_ends_it_alone(formed, monkeypatch, where, error):
    def fail(*_, **__):
        raise error

    params = SamplingParams(seed=1, max_tokens=20, n=2, stop=["!?"], structured_outputs={"regex": "[a-z]{9}"})
    expected = formed.generate([PROMPTS[2]], params, use_tqdm=False)[0].outputs
    bad, good = (formed.add_request(prompt, params) for prompt in PROMPTS[1:3])
    sequence = formed.engine._requests[bad].sequences[1]
    victim, method = (sequence.detokenizer, "append") if where == "detokenizer" else (sequence.matcher, where)
    done = {}
    while formed.has_unfinished_requests:
        done |= {output.request_id: output for output in formed.step() if output.finished}
        monkeypatch.setattr(victim, method, fail)
    assert done[good].outputs == expected
    assert [sample.finish_reason for sample in done[bad].outputs] == ["error", "error"]
    assert str(error) in done[bad].error
    check_engine(formed.engine)


def test_an_ambiguous_grammar_ends_by_its_amount_of_work(formed, monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "step_max_items", 100)
    compiler = GrammarCompiler(formed.tokenizer, vocab_size=320, eos_token_ids=formed.tokenizer.eos_token_ids)
    matcher = compiler.compile(StructuredOutputs(grammar='start: s\ns: s s | "a" | "ab"')).matcher()
    (token,) = formed.tokenizer.encode("a")
    matcher.append([token] * 10)

    def advance():
        for _ in range(100):
            matcher.fill(np.zeros((1, 10), np.int32))
            matcher.append([token])

    with pytest.raises(StructuredOutputError, match="too ambiguous"):
        advance()


def test_generate_gives_the_error_of_a_grammar_that_fails_in_its_place_and_a_stream_raises_it(formed, monkeypatch):
    def fail(*_):
        raise StructuredOutputError("structured_outputs: too complex")

    params, free = (
        SamplingParams(max_tokens=20, structured_outputs={"regex": "a"}),
        SamplingParams(seed=1, max_tokens=9),
    )
    expected = formed.generate([PROMPTS[2]], free, use_tqdm=False)[0].outputs
    monkeypatch.setattr(grammar.GrammarMatcher, "fill", fail)
    first, second, third = formed.generate([PROMPTS[1], PROMPTS[2], PROMPTS[3]], [params, free, params], use_tqdm=False)
    assert (second.error, second.outputs) == (None, expected)
    for output in (first, third):
        assert output.error == "structured_outputs: too complex"
        assert [sample.finish_reason for sample in output.outputs] == ["error"]
    with pytest.raises(StructuredOutputError, match="too complex"):
        list(formed.stream("abc", params))
    assert not formed.has_unfinished_requests
    check_engine(formed.engine)


def rules(count, depth):
    body = "\n".join(f"r{i}: {'(' * depth}r{i + 1} 'a'{')' * depth}" for i in range(count)).replace("'", '"')
    return f'start: r0\n{body}\nr{count}: "a"'


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, "regex: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "root ::= ("}, "grammar: "),
        ({"grammar": "root ::= " + "(" * 900 + '"a"' + ")" * 900}, "grammar: "),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"if": {}, "then": {}}}, "Unimplemented keys"),
        ({"json": {"$ref": "https://example.org/schema.json"}}, "not present in a registry"),
        ({"json": {"$ref": "#"}}, "no answer matches it"),
        ({"json": {"type": "string", "enum": [1]}}, "Unsatisfiable"),
    ],
)
def test_an_invalid_form_is_one_error_and_the_engine_continues(formed, form, says):
    with pytest.raises(InvalidParameterError, match=r"^structured_outputs: ") as refused:
        ask(formed, **form)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert ask(formed, choice=["yes"]).text == "yes"


def test_deep_rules_overflow_no_stack(formed):
    assert ask(formed, grammar=rules(900, 20), max_tokens=5).finish_reason == "length"


def test_compilation_has_a_time_limit(formed, monkeypatch):
    began, release = threading.Event(), threading.Event()

    def slow(*_):
        began.set()
        release.wait(20)

    monkeypatch.setattr(grammar, "_compile", slow)
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.02)
    for said in ("more than 0.02 s", "more than 0.02 s", "other forms are being compiled"):
        error = QueueFullError if said.startswith("other") else InvalidParameterError
        with pytest.raises(error, match=f"structured_outputs: .*{said}"):
            ask(formed, regex="never compiled")
    release.set()
    monkeypatch.undo()
    deadline = time.monotonic() + 20
    while True:  # until the threads that were given up have ended
        try:
            assert ask(formed, regex="a").text == "a"
            return
        except (InvalidParameterError, QueueFullError):
            assert time.monotonic() < deadline


def test_an_engine_without_structured_output_says_how_to_get_it(llm, formed, monkeypatch):
    with pytest.raises(InvalidParameterError, match=r"structured_outputs: .*structured_outputs=True"):
        ask(llm, regex="a")
    monkeypatch.setattr(formed.engine, "_compiler", None)  # as with skip_tokenizer_init
    with pytest.raises(InvalidParameterError, match="structured_outputs: this engine has no tokenizer"):
        ask(formed, prompt=[5, 6], regex="a")


def test_without_the_library_the_start_says_what_to_install(tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'verax\[server\]'"):
        make_llm(tiny_folder, structured_outputs=True)


def test_the_tokenizer_of_a_gguf_file_works_too(tiny_folder, tmp_path):
    gguf_files.write(tiny_folder, tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.from_checkpoint(Checkpoint.open(tmp_path / "tiny.gguf"))
    compiler = GrammarCompiler(tokenizer, vocab_size=320, eos_token_ids=tokenizer.eos_token_ids)
    compiler.compile(StructuredOutputs(choice=["abc"])).matcher().append(tokenizer.encode("abc"))


@pytest.fixture(scope="module")
def tagged(tiny_folder):
    """A tokenizer with tokens in angle brackets that are not special, as Qwen3's, and a compiler of its grammars."""
    backend = tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(name, special=False) for name in ("<think>", "</think>")])
    tokenizer = Tokenizer(backend)
    return tokenizer, GrammarCompiler(tokenizer, vocab_size=330, eos_token_ids=[1])


def allowed(matcher):
    """Tokens that may come next."""
    mask = np.zeros((1, mask_width(330)), np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:330]).tolist()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"regex": "<think>[a-z ]*</think>[0-9]"}, "<think>a fox</think>7"),
        ({"choice": ["<think>", "b"]}, "<think>"),
        ({"json": {"const": "a <think>"}}, '"a <think>"'),
        ({"json": {"type": "string"}}, '"a <think> b"'),
        ({"grammar": 'root ::= "<think>" [a-z]+ "</think>"'}, "<think>a</think>"),
        ({"grammar": 'start: <think> WORD "</think>" // <think>\nWORD: /<think>|a/'}, "<think>a</think>"),
    ],
    ids=str,
)
def test_tokens_in_angle_brackets_are_text(tagged, form, text):
    tokenizer, compiler = tagged
    matcher = compiler.compile(StructuredOutputs(**form)).matcher()
    for token in tokenizer.encode(text):
        assert token in allowed(matcher)
        matcher.append([token])
    assert allowed(matcher) == [1]


@pytest.mark.parametrize("text", ["<|im_start|>", "a<|im_start|>b"])
def test_the_name_of_a_special_token_is_spelled_out(tagged, text):
    tokenizer, compiler = tagged
    matcher, tokens = compiler.compile(StructuredOutputs(choice=[text])).matcher(), []
    while (token := allowed(matcher)[-1]) != 1:
        matcher.append([token])
        tokens.append(token)
    assert tokenizer.decode(tokens) == text


def test_a_model_without_an_end_has_no_forms(formed):
    compiler = GrammarCompiler(formed.tokenizer, vocab_size=320, eos_token_ids=())
    with pytest.raises(InvalidParameterError, match="structured_outputs: this model has no end of text"):
        compiler.compile(StructuredOutputs(regex="a"))
