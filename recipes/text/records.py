"""Small JSON records of the closed world, each with a sentence of the same content, for structured output."""

import json
from random import Random
from typing import Any, NamedTuple

from recipes.text.arithmetic import Exchange
from recipes.text.words import ANIMALS, CAPITALS, COLORS, TOYS, article, draw_name, is_girl, words


class Record(NamedTuple):
    """JSON object, a sentence with the same content, a short request for such an object, and a question about it."""

    value: dict[str, Any]
    sentence: str
    request: str
    question: Exchange


_CITIES = tuple(capital for capital, _ in CAPITALS.values())
_PETS = words("cat dog rabbit duck hen turtle mouse")
_WEATHER = ("sunny", "rainy", "windy", "cloudy", "snowy", "foggy")


def _listed(nouns: list[str]) -> str:
    if not nouns:
        return "no pets"
    return " and ".join((", ".join(map(article, nouns[:-1])), article(nouns[-1]))) if nouns[1:] else article(nouns[0])


def _person(rng: Random) -> Record:
    name, age, city, color = draw_name(rng), rng.randint(2, 90), rng.choice(_CITIES), rng.choice(COLORS)
    pets = rng.sample(_PETS, rng.choice((0, 1, 1, 2, 2, 3)))
    pronoun = "She" if is_girl(name) else "He"
    sentence = rng.choice(
        (
            "{name} is {age} years old and lives in {city}. {pronoun} likes {color} and has {pets}.",
            "{name} lives in {city}. {pronoun} is {age} years old, has {pets} and likes the color {color}.",
            "{name}, who is {age}, comes from {city}, likes {color} and has {pets}.",
        )
    ).format(name=name, age=age, city=city, color=color, pets=_listed(pets), pronoun=pronoun)
    value = {"name": name, "age": age, "city": city, "color": color, "pets": pets}
    question = rng.choice(
        (
            Exchange(f"How old is {name}?", f"{name} is {age} years old."),
            Exchange(f"Where does {name} live?", f"{name} lives in {city}."),
            Exchange(f"Which color does {name} like?", f"{name} likes {color}."),
        )
    )
    return Record(value, sentence, f"a person called {name}", question)


def _animal(rng: Random) -> Record:
    name, kind, age = draw_name(rng), rng.choice(tuple(ANIMALS)), rng.randint(1, 15)
    animal = ANIMALS[kind]
    pronoun = "She" if is_girl(name) else "He"
    sentence = rng.choice(
        (
            "{name} is {a_kind} and is {age} years old. {pronoun} eats {food}.",
            "{name} the {kind} eats {food} and is {age} years old.",
        )
    ).format(name=name, a_kind=article(kind), kind=kind, age=age, food=animal.food, pronoun=pronoun)
    value = {"name": name, "animal": kind, "age": age, "food": animal.food, "legs": animal.legs}
    question = rng.choice(
        (
            Exchange(f"What does {name} eat?", f"{name} eats {animal.food}."),
            Exchange(f"What kind of animal is {name}?", f"{name} is {article(kind)}."),
        )
    )
    return Record(value, sentence, f"{article(kind)} called {name}", question)


def _city(rng: Random) -> Record:
    country = rng.choice(tuple(CAPITALS))
    city, language = CAPITALS[country]
    sentence = rng.choice(
        (
            "{city} is the capital of {country}. People there speak {language}.",
            "In {city}, the capital of {country}, people speak {language}.",
        )
    ).format(city=city, country=country, language=language)
    value = {"city": city, "country": country, "language": language, "capital": True}
    question = Exchange(f"Which language do people speak in {city}?", f"People in {city} speak {language}.")
    return Record(value, sentence, f"the city of {city}", question)


def _item(rng: Random) -> Record:
    item, color, price, stocked = rng.choice(TOYS), rng.choice(COLORS), rng.randint(1, 60), rng.random() < 0.6
    state = "in stock" if stocked else "sold out"
    sentence = rng.choice(
        ("The {color} {item} costs {price} dollars and is {state}.", "{A} {item} for {price} dollars is {state}.")
    ).format(color=color, item=item, price=price, state=state, A=article(color).capitalize())
    value = {"item": item, "color": color, "price": price, "in_stock": stocked}
    question = Exchange(f"How much is the {item}?", f"The {item} costs {price} dollars.")
    return Record(value, sentence, f"{article(item)} in a shop", question)


def _report(rng: Random) -> Record:
    city, weather, degrees = rng.choice(_CITIES), rng.choice(_WEATHER), rng.randint(-9, 35)
    sentence = rng.choice(
        (
            "It is {weather} in {city} and {degrees} degrees.",
            "The weather in {city} is {weather} with {degrees} degrees.",
        )
    ).format(city=city, weather=weather, degrees=degrees)
    value = {"city": city, "weather": weather, "degrees": degrees}
    question = Exchange(f"How is the weather in {city}?", f"It is {weather} in {city}.")
    return Record(value, sentence, f"the weather in {city}", question)


_MAKERS = (_person, _person, _person, _animal, _city, _item, _report)


def record(rng: Random) -> Record:
    """Record of any kind; people are the most frequent."""
    return rng.choice(_MAKERS)(rng)


def record_text(rng: Random) -> str:
    """Plain document: an object, a list of objects of one kind, or a sentence with its object below."""
    shape = rng.random()
    if shape < 0.5:
        return json.dumps(record(rng).value, indent=2 if rng.random() < 0.3 else None)
    if shape < 0.75:
        make = rng.choice(_MAKERS)
        return json.dumps([make(rng).value for _ in range(rng.randint(1, 3))])
    drawn = record(rng)
    return f"{drawn.sentence}\n{json.dumps(drawn.value)}"


_TO_JSON = (
    "Turn this sentence into JSON: {sentence}",
    "Turn this into JSON: {sentence}",
    "Write this as JSON: {sentence}",
    "{sentence} Write that as JSON.",
    "Convert to JSON: {sentence}",
)
_WRITE_JSON = ("Write a JSON record for {request}.", "Give me JSON for {request}.", "Make a JSON object for {request}.")


def record_request(rng: Random, drawn: Record, *, bare: bool = False) -> Exchange:
    """Request, with the record as one line of JSON for an answer. If `bare`, the request is the sentence alone."""
    if bare:
        question = drawn.sentence
    elif rng.random() < 0.7:
        question = rng.choice(_TO_JSON).format(sentence=drawn.sentence)
    else:
        question = rng.choice(_WRITE_JSON).format(request=drawn.request)
    return Exchange(question, json.dumps(drawn.value))
