"""Short stories for the built-in model, from a grammar of plots in the manner of TinyStories (arXiv:2305.07759).

A story has a hero, a friend, a place, a thing, and a plot: an ordered list of beats, each a choice of sentences. Names,
pronouns, animals and things are fixed before the first sentence, so that they stay the same to the last.
"""

from random import Random
from typing import NamedTuple

from recipes.text.arithmetic import Exchange, Split, held_out_hash
from recipes.text.story_outlines import ADJECTIVES, FEARS, HIGH, HOBBIES, MOODS, OPENINGS, PLOTS, SPOTS, TRAITS, WEATHER
from recipes.text.words import COLORS, PLACES, STORY_ANIMALS, TOYS, article, draw_name, is_girl


class Story(NamedTuple):
    """Story and its elements; `kind` and `friend_kind` are an animal, "girl" or "boy"."""

    text: str
    name: str
    kind: str
    friend: str
    friend_kind: str
    place: str
    thing: str


_BRISK = 0.6
"""Share of the stories that have only the necessary beats of their plot."""


def story_is_held_out(name: str, kind: str, thing: str) -> bool:
    """True if training never combines this hero with this thing."""
    return held_out_hash(f"{name}|{kind}|{thing}")


def _pick_other(rng: Random, options: tuple[str, ...], taken: str) -> str:
    while (drawn := rng.choice(options)) == taken:
        pass
    return drawn


def draw_thing(rng: Random) -> str:
    """Thing for a story; most have a colour."""
    return f"{rng.choice(COLORS)} {rng.choice(TOYS)}" if rng.random() < 0.7 else rng.choice(TOYS)


def draw_kind(rng: Random, name: str) -> str:
    """Kind of a hero: mostly an animal, otherwise "girl" or "boy" according to the name."""
    if rng.random() < 0.25:
        return "girl" if is_girl(name) else "boy"
    return rng.choice(STORY_ANIMALS)


def story(rng: Random, split: Split) -> Story:
    """Story of the split. The hero and the thing are drawn until their hash belongs to it."""
    wanted = split == "held_out"
    while True:
        name = draw_name(rng)
        kind, thing = draw_kind(rng, name), draw_thing(rng)
        if story_is_held_out(name, kind, thing) is wanted:
            break
    friend = draw_name(rng)
    while friend == name:
        friend = draw_name(rng)
    friend_kind = _pick_other(rng, STORY_ANIMALS, kind)
    place = rng.choice(tuple(PLACES))
    described = f"{rng.choice(ADJECTIVES)} {kind}"
    friend_described = f"{rng.choice(ADJECTIVES)} {friend_kind}" if rng.random() < 0.4 else friend_kind
    girl, friend_girl = is_girl(name), is_girl(friend)
    pronoun = "she" if girl else "he"
    spot, hobby = rng.choice(SPOTS), rng.choice(HOBBIES)
    slots = {
        "N": name,
        "n": pronoun,
        "S": pronoun.capitalize(),
        "o": "her" if girl else "him",
        "p": "her" if girl else "his",
        "P": "Her" if girl else "His",
        "a_kind": article(described),
        "F": friend,
        "fn": "she" if friend_girl else "he",
        "FS": "She" if friend_girl else "He",
        "fo": "her" if friend_girl else "him",
        "fk": friend_kind,
        "fa_kind": article(friend_described),
        "Fa_kind": article(friend_described).capitalize(),
        "at": PLACES[place],
        "thing": thing,
        "a_thing": article(thing),
        "toy": thing.split()[-1],
        "weather": rng.choice(WEATHER),
        "mood": rng.choice(MOODS).format(n=pronoun),
        "fear": rng.choice(FEARS),
        "hobby": hobby,
        "hobby2": _pick_other(rng, HOBBIES, hobby),
        "spot": spot,
        "spot2": _pick_other(rng, SPOTS, spot),
        "high": rng.choice(HIGH),
    }
    brisk = rng.random() < _BRISK
    sentences = [rng.choice(OPENINGS)]
    for beat in (TRAITS, *rng.choice(PLOTS)):
        if beat.share == 1.0 or (not brisk and rng.random() < beat.share):
            sentences.append(rng.choice(beat.choices))
    text = " ".join(sentences).format_map(slots)
    return Story(text, name, kind, friend, friend_kind, place, thing)


_REQUESTS = (
    "Tell me a story about {a_kind} called {name}.",
    "Tell me a story about {a_kind} called {name}.",
    "Tell me a story about {a_kind} named {name}.",
    "Please tell me a story about {a_kind} called {name}.",
    "Can you tell a story about {name} the {kind}?",
    "Write a short story about {a_kind} called {name}.",
    "Write a story about {name} the {kind} and {a_thing}.",
    "Tell me a story about {a_kind} called {name} and {a_thing}.",
    "I would like a story about {a_kind} and {a_thing}.",
    "Tell me a story about {a_kind}.",
    "Tell me a story about {a_thing}.",
    "Tell me a story with {name} and {friend}.",
    "Tell me a story.",
    "Can you tell me a story?",
)


def story_request(rng: Random, told: Story) -> Exchange:
    """Request for a story, with this one as the answer."""
    slots = told._asdict() | {"a_kind": article(told.kind), "a_thing": article(told.thing)}
    return Exchange(rng.choice(_REQUESTS).format_map(slots), told.text)


def story_question(rng: Random, told: Story) -> Exchange:
    """Question about a story, with its answer."""
    questions = (
        (f"Where did {told.name} live?", f"{told.name} lived {PLACES[told.place]}."),
        ("What was the story about?", f"It was about {told.name} and the {told.thing}."),
        (f"Who was {told.friend}?", f"{told.friend} was {article(told.friend_kind)}."),
        (f"Who was {told.name}?", f"{told.name} was {article(told.kind)}."),
    )
    return Exchange(*rng.choice(questions))
