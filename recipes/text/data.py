"""Training text of the built-in model: an endless, seeded stream of small documents about a closed world.

A document is plain text that ends with `<|endoftext|>`, or a conversation in ChatML. The additions and the heroes of
stories in the held-out split do not occur in the training split.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from recipes.text.arithmetic import Exchange, Split, addition, arithmetic, arithmetic_text
from recipes.text.facts import GREETINGS, THANKS, draw_reply, fact, fact_text, identity, small_talk, unknown
from recipes.text.records import record, record_request, record_text
from recipes.text.stories import story, story_question, story_request
from recipes.text.words import draw_name

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Jinja template of ChatML without a default system message; `render_chat` is the same in Python."""


@dataclass(frozen=True)
class Document:
    """Piece of training text with its special tokens, including the final `<|endoftext|>`."""

    kind: str
    text: str


def render_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """Text of a whole conversation, exactly as CHAT_TEMPLATE renders it."""
    return "".join(f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages)


_SYSTEM_SHARE = 0.15
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are verax's small built-in model.",
    "You are a friendly assistant. Answer in simple words.",
    "You are a kind teacher for children.",
)
_ONLY_NUMBER = ("Answer only with the number.", "Reply with the number only.")
_ONLY_JSON = ("Turn every sentence into JSON.", "Answer only with JSON.", "You turn sentences into JSON.")


def _story_turns(rng: Random, split: Split) -> list[Exchange]:
    told = story(rng, split)
    turns = [story_request(rng, told)]
    while rng.random() < 0.3 and len(turns) < 3:
        turns.append(story_question(rng, told))
    return turns


def _record_turns(rng: Random, split: Split) -> list[Exchange]:
    drawn = record(rng)
    turns = [record_request(rng, drawn)]
    if rng.random() < 0.3 and drawn.sentence in turns[0].question:
        turns.append(drawn.question)
    elif rng.random() < 0.2:
        turns[0] = Exchange(f"{drawn.sentence} {drawn.question.question}", drawn.question.answer)
    return turns


def _first_word(rng: Random) -> str:
    return fact(rng).answer.split()[0].strip(".,")


def _copy_turn(rng: Random) -> Exchange:
    words = [rng.choice((draw_name, _first_word))(rng) for _ in range(rng.randint(1, 4))]
    text = " ".join(words)
    return Exchange(rng.choice(("Repeat after me: {0}", "Say {0}", "Please repeat: {0}")).format(text), text)


def _one(draw: Callable[[Random], Exchange]) -> Callable[[Random, Split], list[Exchange]]:
    return lambda rng, split: [draw(rng)]


_TURNS: tuple[tuple[float, Callable[[Random, Split], list[Exchange]]], ...] = (
    (0.34, lambda rng, split: [arithmetic(rng, split)]),
    (0.20, _one(fact)),
    (0.16, _story_turns),
    (0.11, _record_turns),
    (0.05, _one(identity)),
    (0.05, _one(unknown)),
    (0.05, _one(small_talk)),
    (0.04, _one(_copy_turn)),
)
_TURN_WEIGHTS = tuple(weight for weight, _ in _TURNS)
_TURN_MAKERS = tuple(make for _, make in _TURNS)
_LONGEST_CHAT = 3


def _instructed_chat(rng: Random, split: Split) -> tuple[str, list[Exchange]]:
    """Conversation whose system message changes the form of the answers."""
    kind, count = rng.random(), rng.randint(1, _LONGEST_CHAT)
    if kind < 0.5:
        sums = [addition(rng, split) for _ in range(count)]
        numbers = [Exchange(question, answer.split("= ")[1].rstrip(".")) for question, answer in sums]
        return rng.choice(_ONLY_NUMBER), numbers
    if kind < 0.8:
        return rng.choice(_ONLY_JSON), [record_request(rng, record(rng), bare=True) for _ in range(count)]
    name = draw_name(rng)
    turns = [Exchange(rng.choice(("Who are you?", "What is your name?")), f"I am {name}.")]
    return f"Your name is {name}.", turns


def conversation(rng: Random, split: Split) -> list[dict[str, str]]:
    """Messages of a conversation of one to three exchanges, sometimes with a system message before them."""
    system, turns = "", []
    kind = rng.random()
    if kind < 0.08:
        system, turns = _instructed_chat(rng, split)
    else:
        if kind < 0.08 + _SYSTEM_SHARE:
            system = rng.choice(_SYSTEM)
        if rng.random() < 0.12:
            turns.append(draw_reply(rng, GREETINGS))
        wanted = rng.choice((1, 1, 1, 1, 2, 2, 3))
        while len(turns) < wanted:
            turns += rng.choices(_TURN_MAKERS, _TURN_WEIGHTS)[0](rng, split)
        if len(turns) < _LONGEST_CHAT and rng.random() < 0.08:
            turns.append(draw_reply(rng, THANKS))
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns[:_LONGEST_CHAT]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


_KINDS: dict[str, tuple[float, Callable[[Random, Split], str]]] = {
    "story": (0.17, lambda rng, split: story(rng, split).text),
    "arithmetic": (0.25, arithmetic_text),
    "facts": (0.08, lambda rng, split: fact_text(rng)),
    "json": (0.07, lambda rng, split: record_text(rng)),
    "chat": (0.43, lambda rng, split: render_chat(conversation(rng, split))),
}
"""Weight and generator of each kind of document. Arithmetic, with the chats about it, is about 40% of the documents."""


def documents(seed: int | str, *, split: Split = "train") -> Iterator[Document]:
    """Endless stream of documents of a seed. Equal seeds give equal streams on every machine."""
    rng = Random(f"verax text {split} {seed}")
    kinds = tuple(_KINDS)
    weights = tuple(weight for weight, _ in _KINDS.values())
    while True:
        (kind,) = rng.choices(kinds, weights)
        yield Document(kind, _KINDS[kind][1](rng, split) + END_OF_TEXT)
