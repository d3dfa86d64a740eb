"""Grammars of llama.cpp (GBNF) in llguidance's notation, character by character.

GBNF (https://github.com/ggml-org/llama.cpp/tree/master/grammars) has rules over characters. llguidance puts a lexer
before its parser, which takes the longest match of a terminal: after `[a-z]+` as a terminal no `"x"` could follow. Here
a terminal is one character, so that the lexer decides nothing, and everything else is rules of its Earley parser.

Two changes keep that fast, and change no text that a grammar allows. A rule that ends in itself, as in
`list ::= item list | item`, would leave the parser one open rule more with each character: it becomes a loop. And a
repeated set of characters is one terminal where the longest match is the only one: `_Runs` proves that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

MAX_DEPTH = 64
"""Deepest nesting of parentheses: the converter recurses."""

MAX_REPEATS = 10**6

MAX_RANGES = 100
"""Ranges of a set that is written in place of the rules that are such a set: without a limit they multiply."""

MAX_PLACES, MAX_COPIES, MAX_WORK = 2000, 8, 300_000
"""Places of an automaton, copies of a repeated item in it, and pairs of edges that are compared."""

_NAME = r"[A-Za-z0-9_-]+"
_SPACE = re.compile(r"\A(?:[ \t\r\n]|#[^\r\n]*)*")
_TOKEN = re.compile(
    rf"""(?:[ \t\r\n]|\#[^\r\n]*)*(?:
      (?P<rule>{_NAME})[ \t]*::=
    | (?P<name>{_NAME})
    | "(?P<literal>(?:\\.|[^"\\])*)"
    | \[(?P<class>(?:\\.|[^\]\\])*)\]
    | (?P<repeat>[*+?]|\{{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\}})
    | (?P<mark>[|().])
    | (?P<token>!?<[^>\n]*>)
    | (?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([trn\\"\[\]-]))|([^\\])', re.DOTALL)
_KNOWN_ESCAPES = r"\xHH \uHHHH \UHHHHHHHH \t \r \n \\ \" \[ \] \-"
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}

Ranges = tuple[tuple[int, int], ...]
"""First and last code point of each range of a set of characters."""

_ANY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""All characters; the code points between are halves of characters in UTF-16."""


class Item(NamedTuple):
    """Part of a sequence, which occurs `low` to `high` times, or any number of times from `low` on."""

    value: Any
    """Name of a rule, a set of characters (`Ranges`), or alternatives in parentheses (`Alternatives`)."""
    low: int = 1
    high: int | None = 1


Sequence = tuple[Item, ...]
Alternatives = list[Sequence]


def is_gbnf(grammar: str) -> bool:
    """True if a grammar is written in GBNF and not in Lark's notation."""
    return re.search(rf"^\s*{_NAME}[ \t]*::=", grammar, re.MULTILINE) is not None


def lark_of_gbnf(grammar: str) -> str:
    """The grammar in llguidance's notation.

    Raises:
        ValueError: naming the line that is not GBNF, or the rule that is missing, defined twice, or without an end.
    """
    rules = _Parser(grammar).rules()
    rules = {name: rules[name] for name in _reached(rules)}
    sets = _sets(rules)
    rules = {name: _loops(name, alternatives, sets) for name, alternatives in rules.items()}
    runs = _Runs(rules).terminals()
    names = {name: f"r{i}" for i, name in enumerate(rules)}
    terminals: dict[str, str] = {}
    lines = [f"{names[name]}: {_body(alternatives, names, terminals, runs)}" for name, alternatives in rules.items()]
    return "\n".join(["start: r0", *lines, *(f"{name}: {regex}" for regex, name in terminals.items()), ""])


class _Parser:
    """Parser of a grammar's text."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._token = self._next()

    def rules(self) -> dict[str, Alternatives]:
        """Alternatives of each rule by its name."""
        rules: dict[str, Alternatives] = {}
        while self._token.lastgroup == "rule":
            name = self._take()
            if name in rules:
                raise ValueError(f"rule {name!r} is defined twice")
            rules[name] = self._alternatives(0)
        if self._token.lastgroup != "end":
            raise self._error("a rule such as `root ::= ...`" if not rules else "the next rule, or an item")
        return rules

    def _next(self) -> re.Match[str]:
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            raise self._error('a name, "text", [characters], a group, or a repetition')
        return token

    def _take(self) -> str:
        """Text of the next token, which is read."""
        token = self._token
        self._at = token.end()
        self._token = self._next()
        return token[token.lastgroup or 0]

    def _is_mark(self, mark: str) -> bool:
        return self._token["mark"] == mark

    def _error(self, expected: str) -> ValueError:
        at = len(self._text) - len(_SPACE.sub("", self._text[self._at :], count=1))
        line = self._text.count("\n", 0, at) + 1
        return ValueError(f"line {line}: expected {expected}, got {self._text[at : at + 30] or 'the end'!r}")

    def _alternatives(self, depth: int) -> Alternatives:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} parentheses")
        alternatives = [self._sequence(depth)]
        while self._is_mark("|"):
            self._take()
            alternatives.append(self._sequence(depth))
        return alternatives

    def _sequence(self, depth: int) -> Sequence:
        items: list[Item] = []
        while True:
            value: Any
            if self._token.lastgroup == "name":
                value = self._take()
            elif self._token.lastgroup == "literal":
                chars = [Item(((code, code),)) for code, _ in self._codes(self._take())]
                value = chars[0].value if len(chars) == 1 else [tuple(chars)]
            elif self._token.lastgroup == "class":
                value = self._class(self._take())
            elif self._is_mark("."):
                self._take()
                value = _ANY
            elif self._is_mark("("):
                self._take()
                value = self._alternatives(depth + 1)
                if not self._is_mark(")"):
                    raise self._error("`)`")
                self._take()
            elif self._token.lastgroup == "token":
                raise ValueError(f"{self._token['token']}: tokens by name or id are not supported, only characters")
            elif self._token.lastgroup == "repeat":
                raise self._error("an item before the repetition")
            else:
                return tuple(items)
            items.append(self._repeated(value))

    def _repeated(self, value: Any) -> Item:
        """The item with the repetitions after it."""
        item = Item(value)
        for count in itertools.count():
            if self._token.lastgroup != "repeat":
                break
            if count > MAX_DEPTH:
                raise ValueError(f"it has more than {MAX_DEPTH} repetitions of one item")
            text = self._take()
            least, comma, most = text.strip("{}").partition(",")
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            low, high = bounds.get(text) or (int(least), int(most) if most.strip() else None if comma else int(least))
            if low > MAX_REPEATS or (high or 0) > MAX_REPEATS or (high is not None and high < low):
                raise ValueError(f"{text}: expected numbers of 0 to {MAX_REPEATS}, the smaller one first")
            item = Item(item.value if item[1:] == (1, 1) else [(item,)], low, high)
        return item

    def _codes(self, text: str) -> Iterator[tuple[int, bool]]:
        """Code point of each character of a literal or a class, and whether it is a dash without an escape."""
        at = 0
        while at < len(text):
            char = _CHAR.match(text, at)
            if char is None:
                raise ValueError(f"{text[at : at + 10]}: expected one of the escapes {_KNOWN_ESCAPES}")
            code = char[1] or char[2] or char[3]
            number = int(code, 16) if code else ord(_ESCAPES.get(char[4], char[4]) if char[4] else char[5])
            if not any(low <= number <= high for low, high in _ANY):
                raise ValueError(f"{char[0]}: it is not a character")
            yield number, char[5] == "-"
            at = char.end()

    def _class(self, text: str) -> Ranges:
        codes = list(self._codes(text.removeprefix("^")))
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(codes):
            size = 3 if at + 2 < len(codes) and codes[at + 1][1] else 1
            ranges.append((codes[at][0], codes[at + size - 1][0]))
            at += size
        if any(high < low for low, high in ranges):
            raise ValueError(f"[{text}]: a range ends before it begins")
        ranges = _complement(ranges) if text.startswith("^") else _complement(_complement(ranges))
        if not ranges:
            raise ValueError(f"[{text}]: no character is in it")
        return tuple(ranges)


def _complement(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Characters that are in none of some ranges, in order."""
    rest: list[tuple[int, int]] = []
    begin = 0
    for low, high in (*sorted([*ranges, (0xD800, 0xDFFF)]), (0x110000, 0x110000)):
        if begin < low:
            rest.append((begin, low - 1))
        begin = max(begin, high + 1)
    return rest


def _names(alternatives: Alternatives) -> Iterator[str]:
    """Rules that alternatives refer to."""
    for sequence in alternatives:
        for item in sequence:
            if isinstance(item.value, str):
                yield item.value
            elif isinstance(item.value, list):
                yield from _names(item.value)


def _reached(rules: dict[str, Alternatives]) -> list[str]:
    """Rules that the root leads to, the root first."""
    if "root" not in rules:
        raise ValueError("there is no rule `root`, with which an answer begins")
    users: dict[str, list[str]] = {name: [] for name in rules}
    for user, alternatives in rules.items():
        for name in dict.fromkeys(_names(alternatives)):
            if name not in rules:
                raise ValueError(f"rule {user!r} needs a rule {name!r}, which is not defined")
            users[name].append(user)
    ending: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ending and _ends(rules[name], ending):
            ending.add(name)
            waiting += users[name]
    reached: dict[str, None] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in ending:
            raise ValueError(f"rule {name!r} has no end: all of its alternatives lead back to it")
        if name not in reached:
            reached[name] = None
            waiting += dict.fromkeys(_names(rules[name]))
    return list(reached)


def _ends(alternatives: Alternatives, ending: set[str]) -> bool:
    """True if one of the alternatives can be written to its end, given the rules that can."""

    def ends(item: Item) -> bool:
        if isinstance(item.value, str):
            return item.low == 0 or item.value in ending
        return item.low == 0 or not isinstance(item.value, list) or _ends(item.value, ending)

    return any(all(map(ends, sequence)) for sequence in alternatives)


def _loops(name: str, alternatives: Alternatives, sets: Mapping[str, Ranges]) -> Alternatives:
    """A rule's alternatives with a loop in place of the rule itself at their ends: `x ::= a x | b` is `a* b`."""
    again, last = _split(name, alternatives)
    again = [sequence for sequence in again if sequence]
    alternatives = [(Item(again, 0, None), Item(last))] if again else alternatives
    return [tuple(_apart(item, sets) for item in sequence) for sequence in alternatives]


def _split(name: str, alternatives: Alternatives) -> tuple[Alternatives, Alternatives]:
    """Alternatives that end in the rule `name`, without it, and the others."""
    again: Alternatives = []
    last: Alternatives = []
    for sequence in alternatives:
        value, low, high = sequence[-1] if sequence else Item("")
        inner = [(Item(value),)] if (low, high) == (0, 1) else value
        if value == name and (low, high) == (1, 1):
            again.append(sequence[:-1])
            continue
        ends = _split(name, inner if isinstance(inner, list) else []) if high == 1 else ([], [])
        if not ends[0]:
            last.append(sequence)
            continue
        again += [sequence[:-1] + end for end in ends[0]]
        last += [sequence[:-1] + end for end in [*ends[1], *([()] if low == 0 else [])]]
    return again, last


def _sets(rules: Mapping[str, Alternatives]) -> dict[str, Ranges]:
    """Rules that are one character of a set, through a few other such rules at most."""
    sets: dict[str, Ranges] = {}
    for _ in range(4):
        for name, alternatives in rules.items():
            parts = [_apart(part, sets) for sequence in alternatives if len(sequence) == 1 for part in sequence]
            if len(parts) == len(alternatives) and all(_is_set(part, repeated=False) for part in parts):
                union = _union(part.value for part in parts)
                sets |= {name: union} if len(union) <= MAX_RANGES else {}
    return sets


def _apart(item: Item, sets: Mapping[str, Ranges]) -> Item:
    """An item with its repeated sets of characters apart from what else is repeated: `(c | x)*` is `c* (x c*)*`."""
    value, low, high = item
    if not isinstance(value, list):
        return item._replace(value=sets.get(value, value)) if isinstance(value, str) else item
    repeated = low <= 1 and high is None
    inner = [tuple(_apart(part, sets) for part in sequence) for sequence in value]
    alone = [len(sequence) == 1 and _is_set(sequence[0], repeated) for sequence in inner]
    if not any(alone) or not (repeated or all(alone)):
        return Item(inner, low, high)
    union = _union(sequence[0].value for sequence, is_set in zip(inner, alone, strict=True) if is_set)
    if all(alone):
        return Item(union, low, high)
    run = Item(union, 0, None)
    others = [(*sequence, run) for sequence, is_set in zip(inner, alone, strict=True) if not is_set]
    first = run if low == 0 else Item([(Item(union, 1, None),), *others])
    return Item([(first, Item(others, 0, None))])


def _is_set(item: Item, repeated: bool) -> bool:
    """True for a set of characters that comes once, or more often where that is `repeated` anyway."""
    return isinstance(item.value, tuple) and item.low == 1 and item.high in (1, None if repeated else 1)


def _union(sets: Iterable[Ranges]) -> Ranges:
    return tuple(_complement(_complement(itertools.chain.from_iterable(sets))))


def _is_run(item: Item) -> bool:
    return isinstance(item.value, tuple) and item.low <= 1 and item.high is None


class _Runs:
    """Automaton of a grammar, which shows what runs, repeated sets of characters such as `[a-z]*`, can be terminals.

    The terminal of a run takes every character of the set that comes. That is right if, whatever a text begins with,
    the next character of the set can only be a run's first one, or only a further one, and never anything else. So all
    pairs of places are tried that the same text leads to. The automaton allows more than the grammar: a rule may return
    to any place that uses it, and long repetitions have no end. What is right for it is right for the grammar.
    """

    def __init__(self, rules: Mapping[str, Alternatives]):
        self._empty: list[list[int]] = []
        """Places that follow each place without a character."""
        self._edges: list[list[tuple[int, str, int]]] = []
        """Set that follows each place, by its number, "first" or "further" of a run or "", and the place after it."""
        self._sets: dict[Ranges, int] = {}
        self._ends = {name: (self._place(), self._place()) for name in rules}
        for name, alternatives in rules.items():
            self._alternatives(alternatives, *self._ends[name])

    def terminals(self) -> set[Ranges]:
        """Sets whose runs are terminals; none in grammars that would take too much work."""
        sets = list(self._sets)
        runs = {number for edges in self._edges for number, kind, _ in edges if kind}
        meet = cache(lambda one, other: _meet(sets[one], sets[other]))
        following = cache(self._following)
        pairs, known, work = [(0, 0)], {(0, 0)}, 0
        while pairs and len(self._edges) <= MAX_PLACES and work <= MAX_WORK:
            first, second = (following(place) for place in pairs.pop())
            work += len(first) * len(second)
            for (one, kind, after), (other, other_kind, other_after) in itertools.product(first, second):
                if not meet(one, other):
                    continue
                if (kind or other_kind) and (one, kind) != (other, other_kind):
                    runs -= {one, other}
                pair = (min(after, other_after), max(after, other_after))
                if pair not in known:
                    known.add(pair)
                    pairs.append(pair)
        return set() if pairs else {sets[number] for number in runs}

    def _following(self, place: int) -> list[tuple[int, str, int]]:
        """Edges that follow a place."""
        reached = {place: None}
        for at in (waiting := [place]):
            new = dict.fromkeys(after for after in self._empty[at] if after not in reached)
            reached |= new
            waiting += new
        return list(dict.fromkeys(edge for at in reached for edge in self._edges[at]))

    def _edge(self, at: int, ranges: Ranges, kind: str, after: int) -> None:
        self._edges[at].append((self._sets.setdefault(ranges, len(self._sets)), kind, after))

    def _place(self) -> int:
        self._empty.append([])
        self._edges.append([])
        return len(self._edges) - 1

    def _alternatives(self, alternatives: Alternatives, begin: int, end: int) -> None:
        for sequence in alternatives:
            at = begin
            for item in sequence:
                at = self._item(item, at)
            self._empty[at].append(end)

    def _item(self, item: Item, at: int) -> int:
        """Add an item after a place; the place after it."""
        if len(self._edges) > MAX_PLACES:
            return at
        if _is_run(item):
            within, end = self._place(), self._place()
            self._edge(at, item.value, "first", within)
            self._edge(within, item.value, "further", within)
            self._empty[within].append(end)
            self._empty[at] += [end] * (item.low == 0)
            return end
        for _ in range(min(item.low, MAX_COPIES)):
            at = self._once(item, at)
        if item.high is None or item.high > MAX_COPIES:
            loop = self._place()
            self._empty[at].append(loop)
            self._empty[self._once(item, loop)].append(loop)
            return loop
        for _ in range(item.high - item.low):
            end = self._once(item, at)
            self._empty[at].append(end)
            at = end
        return at

    def _once(self, item: Item, at: int) -> int:
        end = self._place()
        if isinstance(item.value, str):
            begin, back = self._ends[item.value]
            self._empty[at].append(begin)
            self._empty[back].append(end)
        elif isinstance(item.value, list):
            self._alternatives(item.value, at, end)
        else:
            self._edge(at, item.value, "", end)
        return end


def _meet(one: Ranges, other: Ranges) -> bool:
    """True if two sets have a character in common."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False


def _body(alternatives: Alternatives, names: Mapping[str, str], terminals: dict[str, str], runs: set[Ranges]) -> str:
    sequences = (" ".join(_written(item, names, terminals, runs) for item in sequence) for sequence in alternatives)
    return " | ".join(sequences)


def _written(item: Item, names: Mapping[str, str], terminals: dict[str, str], runs: set[Ranges]) -> str:
    if item.high == 0:
        return ""
    value, low, high = item
    if isinstance(value, str):
        text = names[value]
    elif isinstance(value, list):
        text = f"({_body(value, names, terminals, runs)})"
    else:
        regex = "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in value)
        is_run = _is_run(item) and value in runs
        text = terminals.setdefault(f"/[{regex}]{'+' * is_run}/", f"C{len(terminals)}")
        high = 1 if is_run else high
    return text if (low, high) == (1, 1) else f"{text}{{{low},{'' if high is None else high}}}"
