"""Grammars of llama.cpp: exact by a brute-force matcher on random ones, and by llama.cpp's own tests and examples."""

import ast
import itertools
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.grammar import accepts
from tests.support.grammar import matcher_of as matcher_of_lark
from tests.support.published import llama_cpp_source
from verax.text.features.gbnf import is_gbnf, lark_of_gbnf


def matcher_of(grammar):
    return matcher_of_lark(lark_of_gbnf(grammar))


LONGEST = 5
CLASSES = {"[a]": "a", "[ab]": "ab", "[^a]": "bc", ".": "abc", "[b-c]": "bc", '"c"': "c"}
RULES = ("root", "x-y", "start")


def joined(*languages):
    """Texts of at most LONGEST characters that one text of each language makes."""
    texts = {""}
    for language in languages:
        texts = {a + b for a in texts for b in language if len(a + b) <= LONGEST}
    return texts


def repeated(language, low, high):
    texts = joined(*[language] * low)
    more, times = texts, low
    while times != high:
        more = joined(more, language) - texts
        if not more:
            break
        texts, times = texts | more, times + 1
    return texts


# An expression is its text in GBNF, and the texts that it allows given each rule's texts.
LEAVES = st.one_of(
    st.sampled_from([(text, lambda _, chars=chars: set(chars)) for text, chars in CLASSES.items()]),
    st.sampled_from([(f'"{text}"', lambda _, text=text: {text}) for text in ("", "ab", "abc", "bb")]),
    st.sampled_from([(name, lambda rules, name=name: rules[name]) for name in RULES]),
)
REPEATS = {
    "*": (0, None),
    "+": (1, None),
    "?": (0, 1),
    "{2}": (2, 2),
    "{1,2}": (1, 2),
    "{2,}": (2, None),
    "{0}": (0, 0),
}


def sequence(parts):
    return " ".join(text for text, _ in parts), lambda rules: joined(*(allowed(rules) for _, allowed in parts))


def alternatives(parts):
    written = " | ".join(text for text, _ in parts)
    return f"({written})", lambda rules: set().union(*(allowed(rules) for _, allowed in parts))


def repetition(part, repeat):
    text, allowed = part
    return f"({text}){repeat}", lambda rules: repeated(allowed(rules), *REPEATS[repeat])


EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(sequence),
        st.lists(inner, min_size=2, max_size=3).map(alternatives),
        st.builds(repetition, inner, st.sampled_from(list(REPEATS))),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.tuples(*[EXPRESSIONS] * len(RULES)))
def test_random_grammars_take_the_texts_that_they_allow_and_no_other(expressions):
    grammar = "\n".join(f"{name} ::= {text}" for name, (text, _) in zip(RULES, expressions, strict=True))
    allowed, before = dict.fromkeys(RULES, frozenset()), None
    while allowed != before:
        before = allowed
        allowed = {name: frozenset(of(before)) for name, (_, of) in zip(RULES, expressions, strict=True)}
    assume(all(allowed.values()))  # a rule without an end is refused
    matcher = matcher_of(grammar)
    texts = ["".join(chars) for size in range(LONGEST + 1) for chars in itertools.product("abc", repeat=size)]
    assert {text for text in texts if accepts(matcher, text)} == set(allowed["root"]), grammar


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (ARITHMETIC, ["a=1\n", "(b_1 +2)*c=3\n\n"], ["a=1", "=1\n"]),
        ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
        (r'root ::= "\x41\u00e9\U0001F600\"\\\t\r\n\[\]"', ['Aé😀"\\\t\r\n[]'], ["A"]),
        (r"root ::= [\u0041-\x43é\U0001F600-\U0001F64F\]\\-]", ["B", "é", "😀", "]", "\\", "-"], ["D", "\\]"]),
        ("root ::= [--/&&^a\\-z]+", ["-./&^a-z"], ["b", "y"]),
        ("root ::= [^\\n] .", ["ab", "a\n", "é🦊"], ["\nb", "a"]),
        ("root ::= start foo-bar foo_bar\nstart ::= 'x'".replace("'", '"') + '\nfoo-bar ::= "-"\nfoo_bar ::= "_"',
         ["x-_"], ["x_-"]),
        ('root ::= "a"{2,3} "b"{2} "c"{1,} "d"{0,0} "e" ? #"f"\n#g', ["aabbc", "aaabbcce"], ["abbc", "aabbcd"]),
        ('root ::= (\n  "a" # one\n  | "b"\n)\n', ["a", "b"], [""]),
        ('root ::= | "a" root "b" | root root', ["", "ab", "aabbab"], ["a", "ba"]),
        ('root ::= "a"?* "b"{1,2}{2}', ["bb", "aabbbb"], ["b", "bbbbb"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ("root ::= \"::= #\" '".replace(" '", ""), ["::= #"], [""]),
    ],
)  # fmt: skip
def test_notation(grammar, right, wrong):
    matcher = matcher_of(grammar)
    assert [text for text in right if not accepts(matcher, text)] == []
    assert [text for text in wrong if accepts(matcher, text)] == []


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('x ::= "a"', "no rule `root`"),
        ("root ::= a", "rule 'root' needs a rule 'a', which is not defined"),
        ('root ::= "a"\nunused ::= b', "rule 'unused' needs a rule 'b'"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice"),
        ('root ::= x | "a"\nx ::= "b" x', "rule 'x' has no end"),
        ('root ::= "a"\n\n x y', r"line 3: expected the next rule, or an item, got 'x y'|rule 'root' needs a rule 'x'"),
        ('root ::= "a', "line 1: expected .*, got '\"a'"),
        ('root ::= ("a"', r"line 1: expected `\)`, got 'the end'"),
        ("root ::= * 'a'", "line 1: expected an item before the repetition|expected a name"),
        (r'root ::= "\q"', r"\\q: expected one of the escapes"),
        (r'root ::= "\ud800"', "not a character"),
        ("root ::= [z-a]", "a range ends before it begins"),
        ("root ::= []", "no character is in it"),
        ('root ::= "a"{3,2}', r"\{3,2\}: expected numbers of 0 to 1000000"),
        ('root ::= "a"{9999999}', "expected numbers of 0 to 1000000"),
        ("root ::= <think>", "<think>: tokens by name or id are not supported"),
        ('root ::= "a"' + "?" * 900, "more than 64 repetitions"),
        ("root ::= " + "(" * 900 + '"a"' + ")" * 900, "nested deeper than 64"),
    ],
)
def test_what_is_wrong_is_named(grammar, says):
    with pytest.raises(ValueError, match=says):
        lark_of_gbnf(grammar)


def test_gbnf_differs_from_lark_by_its_rules():
    assert is_gbnf('# x\nroot ::= "a"')
    assert not is_gbnf('start: "a ::= b"\nx: "c"')


def test_a_text_that_only_the_longest_match_would_refuse_is_taken_and_others_keep_their_speed():
    run = re.compile(r"/\[[^/]*\]\+/")
    assert not run.search(lark_of_gbnf('root ::= [a-z]* "x"'))
    assert not run.search(lark_of_gbnf('root ::= a a\na ::= [a-z]+ | "1"'))
    assert run.search(lark_of_gbnf(r'root ::= "\"" ([^"\\] | "\\" ["\\/bfnrt])* "\""'))
    assert run.search(lark_of_gbnf('root ::= line+\nline ::= "- " [^\\n]+ "\\n"'))


def cases():
    """Grammars of llama.cpp's test-grammar-integration.cpp, with texts that they take and texts that they refuse."""
    source = llama_cpp_source("tests/test-grammar-integration.cpp").read_text(encoding="utf-8")
    texts = re.compile(r'"(?:\\.|[^"\\])*"')
    for part in re.split(r"\n    test_grammar\(", source)[1:]:
        _, grammar, rest = re.split(r'R"""\(|\)"""', part.split("\n    );")[0], maxsplit=2)
        passing, _, failing = rest.partition("// Failing")
        if "<[" not in grammar:  # tokens by their ids
            yield grammar, *([ast.literal_eval(text) for text in texts.findall(half)] for half in (passing, failing))


def test_llama_cpp_s_own_cases():
    checked = 0
    for grammar, passing, failing in cases():
        matcher = matcher_of(grammar)
        assert [text for text in passing if not accepts(matcher, text)] == [], grammar
        assert [text for text in failing if accepts(matcher, text)] == [], grammar
        checked += len(passing) + len(failing)
    assert checked > 100


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("arithmetic", "(a+b)*2= 3\n", "a+=1\n"),
        ("c", "int f(int x){int y = 1;return y;}", "int f"),
        ("chess", "1. e4 e5\n2. Nf3 Nc6\n", "1. e9\n"),
        ("english", "Hello, you!", "é"),
        ("japanese", "こんにちは、世界", "hello"),
        ("json", '{"a": [1, -2.5e1, true, null, {"é\\n": "\\u00e9 \\" b"}]}', '{"a": [1,]}'),
        ("json_arr", '[\n"a",\n1]', "[1]"),
        ("list", "- one\n- two\n", "one\n"),
    ],
)
def test_llama_cpp_s_examples(name, right, wrong):
    matcher = matcher_of(llama_cpp_source(f"grammars/{name}.gbnf").read_text(encoding="utf-8"))
    assert accepts(matcher, right)
    assert not accepts(matcher, wrong)
