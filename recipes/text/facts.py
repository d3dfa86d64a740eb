"""Questions about the closed world, each with one right answer; small talk; and questions outside the closed world."""

from random import Random

from recipes.text.arithmetic import PAIRS, Exchange
from recipes.text.words import (
    ANIMALS,
    CAPITALS,
    DAYS,
    FOUND_IN,
    GROUPS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITE_PAIRS,
    PLURALS,
    THING_COLORS,
    USES,
    article,
    draw_name,
)

Topic = list[tuple[tuple[str, ...], str]]
"""Facts of one kind: phrasings of a question, and its answer."""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _colors() -> Topic:
    return [
        (
            (f"What color is {thing}?", f"What colour is {thing}?", f"Which color is {thing}?"),
            _sentence(f"{thing} is {color}."),
        )
        for thing, color in THING_COLORS.items()
    ]


def _animals() -> Topic:
    facts: Topic = []
    for name, animal in ANIMALS.items():
        one = article(name)
        facts += [
            ((f"What sound does {one} make?", f"What does {one} say?"), _sentence(f"{one} {animal.sound}.")),
            ((f"Where does {one} live?", f"What is the home of {one}?"), f"{_sentence(one)} lives in a {animal.home}."),
            ((f"What is a baby {name} called?",), f"A baby {name} is called {article(animal.baby)}."),
            ((f"What does {one} eat?", f"What do you feed {one}?"), f"{_sentence(one)} eats {animal.food}."),
            ((f"How many legs does {one} have?",), f"{_sentence(one)} has {NUMBER_WORDS[animal.legs]} legs."),
        ]
    return facts


def _sounds_reversed() -> Topic:
    sounds = [animal.sound for animal in ANIMALS.values()]
    return [
        (
            (f"Which animal {animal.sound}?", f"What animal {animal.sound}?"),
            f"{_sentence(article(name))} {animal.sound}.",
        )
        for name, animal in ANIMALS.items()
        if sounds.count(animal.sound) == 1
    ]


def _cycle(names: tuple[str, ...], unit: str) -> Topic:
    facts: Topic = []
    for i, name in enumerate(names):
        after, before = names[(i + 1) % len(names)], names[i - 1]
        facts += [
            (
                (f"What {unit} comes after {name}?", f"Which {unit} comes after {name}?", f"What comes after {name}?"),
                f"{after} comes after {name}.",
            ),
            (
                (f"What {unit} comes before {name}?", f"Which {unit} comes before {name}?"),
                f"{before} comes before {name}.",
            ),
        ]
    return facts


def _opposites() -> Topic:
    return [
        (
            (f"What is the opposite of {a}?", f"Tell me the opposite of {a}.", f"Opposite of {a}?"),
            f"The opposite of {a} is {b}.",
        )
        for first, second in OPPOSITE_PAIRS
        for a, b in ((first, second), (second, first))
    ]


def _plurals() -> Topic:
    return [
        ((f"What is the plural of {one}?", f"Plural of {one}?"), f"The plural of {one} is {many}.")
        for one, many in PLURALS.items()
    ]


def _found_in() -> Topic:
    return [
        ((f"Where do you find {thing}?", f"Where can I find {thing}?"), f"You can find {thing} {place}.")
        for thing, place in FOUND_IN.items()
    ]


def _capitals() -> Topic:
    facts: Topic = []
    for country, (capital, language) in CAPITALS.items():
        facts += [
            (
                (f"What is the capital of {country}?", f"Which city is the capital of {country}?"),
                f"The capital of {country} is {capital}.",
            ),
            ((f"Where is {capital}?", f"Which country is {capital} in?"), f"{capital} is in {country}."),
            ((f"What language do people speak in {country}?",), f"People in {country} speak {language}."),
        ]
    return facts


def _uses() -> Topic:
    facts: Topic = []
    for thing, use in USES.items():
        be = "are" if thing == "scissors" else "is"
        facts.append(
            ((f"What {be} {thing} used for?", f"What do you do with {thing}?"), f"{_sentence(thing)} {be} used {use}.")
        )
        facts.append(((f"Why do people need {thing}?",), f"People need {thing} {use}."))
    return facts


def _groups() -> Topic:
    facts: Topic = []
    groups = list(GROUPS.items())
    for i, (group, members) in enumerate(groups):
        other = groups[(i + 1) % len(groups)][0]
        for member in members:
            one = member if group == "a color" else article(member)
            facts += [
                ((f"Is {one} {group}?",), f"Yes, {one} is {group}."),
                ((f"Is {one} {other}?",), f"No, {one} is {group}."),
                ((f"What is {one}?",), f"{_sentence(one)} is {group}."),
            ]
    return facts


def _numbers() -> Topic:
    facts: Topic = []
    for n, word in enumerate(NUMBER_WORDS):
        facts.append(((f"Write {n} as a word.", f"How do you write {n} in words?"), f"{n} is written {word}."))
        facts.append(((f"Write {word} as a number.",), f"{_sentence(word)} is {n}."))
    return facts


def _calendar() -> Topic:
    return [
        (("How many days are in a week?",), "There are seven days in a week."),
        (("How many months are in a year?",), "There are twelve months in a year."),
        (("How many hours are in a day?",), "There are 24 hours in a day."),
        (("How many minutes are in an hour?",), "There are 60 minutes in an hour."),
        (("What are the days of the week?", "Name the days of the week."), ", ".join(DAYS) + "."),
        (("What are the months of the year?", "Name the months."), ", ".join(MONTHS) + "."),
        (("What is the first day of the week?",), "The first day of the week is Monday."),
        (("What is the last month of the year?",), "The last month of the year is December."),
    ]


TOPICS: dict[str, Topic] = {
    "colors": _colors(),
    "animals": _animals(),
    "sounds": _sounds_reversed(),
    "days": _cycle(DAYS, "day"),
    "months": _cycle(MONTHS, "month"),
    "opposites": _opposites(),
    "plurals": _plurals(),
    "places": _found_in(),
    "capitals": _capitals(),
    "uses": _uses(),
    "groups": _groups(),
    "numbers": _numbers(),
    "calendar": _calendar(),
}
"""Facts of the closed world by topic. No question has two answers."""

_TOPIC_LISTS = tuple(TOPICS.values())
_TOPIC_WEIGHTS = tuple(len(topic) ** 0.75 for topic in _TOPIC_LISTS)
"""Weights of topics. Equal weights would repeat small topics too often; equal facts would let large ones dominate."""


def _draw_list(rng: Random) -> Exchange:
    group, members = rng.choice(tuple(GROUPS.items())[:7])
    noun = group.split(" ", 1)[1]
    first, second, third = rng.sample(members, 3)
    return Exchange(f"Name three {PLURALS.get(noun, noun + 's')}.", f"{_sentence(first)}, {second} and {third}.")


def _draw_counting(rng: Random) -> Exchange:
    start = rng.randint(0, 40)
    stop = start + rng.randint(3, 8)
    return Exchange(f"Count from {start} to {stop}.", ", ".join(map(str, range(start, stop + 1))) + ".")


def fact(rng: Random) -> Exchange:
    """Question with its answer; sometimes for a list or a count."""
    draw = rng.random()
    if draw < 0.03:
        return _draw_list(rng)
    if draw < 0.08:
        return _draw_counting(rng)
    (topic,) = rng.choices(_TOPIC_LISTS, _TOPIC_WEIGHTS)
    questions, answer = rng.choice(topic)
    return Exchange(rng.choice(questions), answer)


def fact_text(rng: Random) -> str:
    """Plain document of a few questions with answers, or of answers alone."""
    drawn = [fact(rng) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.6:
        return "\n".join(f"Q: {question}\nA: {answer}" for question, answer in drawn)
    return "\n".join(answer for _, answer in drawn)


ABOUT = "I am verax's small built-in model."

_IDENTITY = (
    (("Who are you?", "What are you?", "Who am I talking to?", "Introduce yourself."), ABOUT),
    (("What is your name?", "Do you have a name?"), "I am verax's small built-in model. You can call me verax."),
    (("Are you a person?", "Are you human?", "Are you real?"), "No, I am verax's small built-in model."),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help"),
        "I can tell short stories, add small numbers, answer simple questions and write JSON.",
    ),
    (("How big are you?", "Are you a large model?"), "I am very small. I have about three million parameters."),
    (("Who made you?", "Who trained you?", "Where do you come from?"), "I was trained by the verax project."),
    (("What is verax?", "Tell me about verax."), "verax runs generative models in JAX."),
)
GREETINGS = (
    (("Hello!", "Hello", "Hello there!"), "Hello! How can I help you?"),
    (("Hi!", "Hi", "hi", "Hey!"), "Hi! What can I do for you?"),
    (("Good morning!", "Good morning."), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening."), "Good evening! How can I help you?"),
)
THANKS = (
    (("Thank you!", "Thanks!", "Thank you.", "Thanks a lot!"), "You are welcome!"),
    (("That was nice.", "I like it!", "Great!", "Very good!"), "I am glad that you like it."),
    (("Bye!", "Goodbye!", "See you!"), "Goodbye! Have a nice day."),
)
_SMALL_TALK = (
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you. How are you?"),
    (("Do you like stories?",), "Yes, I like stories very much. Shall I tell you one?"),
    (("Do you like animals?",), "Yes, I like animals. My favorite animal is the fox."),
    (("What is your favorite color?", "What is your favourite colour?"), "My favorite color is blue."),
    (("Are you happy?",), "Yes, I am happy to talk with you."),
    (("I am sad.", "I feel sad today."), "I am sorry to hear that. Shall I tell you a story?"),
    (("I am happy.", "I feel good today."), "I am glad to hear that!"),
    (("I am bored.",), "Shall I tell you a story?"),
    (("Tell me a joke.",), "Why did the hen cross the road? To get to the other side!"),
    (("Can you help me?", "I need help."), "Yes, of course. What do you need?"),
)

UNKNOWN = "I do not know that."
_UNKNOWN_FORMS = (
    "Who won the {event} in {year}?",
    "Who is the president of {country}?",
    "How many people live in {country}?",
    "What happened in {year}?",
    "What is the {science}?",
    "Explain the {science}.",
    "Can you explain {science} to me?",
    "How does the {science} work?",
    "Write a {code} program.",
    "Write some {code} code for me.",
    "How do I fix this {code} error?",
    "Translate this into {language}.",
    "Say hello in {language}.",
    "What is the weather today?",
    "What time is it?",
    "What is the date today?",
    "What is the latest news?",
    "What is the meaning of life?",
    "What is the price of gold?",
    "Who wrote {work}?",
    "What do you think about {work}?",
    "Who is {person}?",
    "When was {person} born?",
    "What did {person} do?",
)
_UNKNOWN_SLOTS = {
    "event": ("World Cup", "election", "Nobel Prize", "race", "war", "Olympic Games"),
    "country": (*CAPITALS, "Brazil", "India", "Canada", "Kenya", "the United States"),
    "science": (
        *("theory of relativity", "law of gravity", "stock market", "internet", "nervous system", "quantum computer"),
        *("second law of thermodynamics", "transformer", "immune system", "derivative", "attention mechanism"),
    ),
    "code": ("Python", "C++", "Rust", "JavaScript", "SQL", "Java"),
    "language": ("French", "German", "Spanish", "Latin", "Chinese", "Russian"),
    "work": ("Hamlet", "Faust", "the Bible", "Harry Potter", "War and Peace", "the Odyssey"),
    "person": ("Albert Einstein", "Napoleon", "Isaac Newton", "Mozart", "Marie Curie", "Julius Caesar", "Shakespeare"),
}


def draw_reply(rng: Random, table: tuple[tuple[tuple[str, ...], str], ...]) -> Exchange:
    """Exchange from a table such as GREETINGS."""
    questions, answer = rng.choice(table)
    return Exchange(rng.choice(questions), answer)


def identity(rng: Random) -> Exchange:
    """Question about the model itself."""
    return draw_reply(rng, _IDENTITY)


def small_talk(rng: Random) -> Exchange:
    """Exchange of small talk, or an introduction by name."""
    if rng.random() < 0.3:
        name = draw_name(rng)
        line = rng.choice(("My name is {0}.", "I am {0}.", "Hello, I am {0}.", "Hi, my name is {0}.")).format(name)
        return Exchange(line, f"Nice to meet you, {name}!")
    return draw_reply(rng, _SMALL_TALK)


def unknown(rng: Random) -> Exchange:
    """Question outside the closed world, or arithmetic beyond two digits."""
    draw = rng.random()
    if draw < 0.1:
        a, b = rng.randint(100, 9999), rng.randint(100, 9999)
        return Exchange(f"What is {a} + {b}?", "I can only add numbers below 100.")
    if draw < 0.2:
        a, b = rng.choice(PAIRS["train"])
        question = rng.choice(("What is {0} * {1}?", "What is {0} times {1}?", "What is {0} divided by {1}?"))
        return Exchange(question.format(a, b), "I can only add and subtract.")
    slots = {key: rng.choice(values) for key, values in _UNKNOWN_SLOTS.items()}
    return Exchange(rng.choice(_UNKNOWN_FORMS).format(year=rng.randint(1500, 2030), **slots), UNKNOWN)
