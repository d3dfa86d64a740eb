"""The plots of the small stories: beats, sentences and the words that fill them.

Slots: N name of the hero, n S she/he, o her/him, p P her/his; F the friend, fn FS fo the friend's pronouns, fk the
friend's kind; a_ with the indefinite article; at the place.
"""

from typing import NamedTuple

from recipes.text.words import words


class Beat(NamedTuple):
    """One step of a plot: a choice of sentences, and how often the step occurs at all."""

    choices: tuple[str, ...]
    share: float = 1.0


ADJECTIVES = words("little small young kind brave shy happy clever curious gentle funny busy")
MOODS = ("very sad", "sad and quiet", "so sad that {n} cried", "upset", "worried")
HOBBIES = words(
    "sing songs,run and jump,climb trees,swim,play in the rain,count the stars,dance,pick flowers,read stories,"
    "watch the clouds,help others,chase butterflies,bake cakes,paint pictures,play outside,look for adventures",
    ",",
)
SPOTS = words(
    "under a bush,behind a big rock,in the tall grass,inside an old box,under the bed,next to a log,"
    "in a pile of leaves,by the gate,under the table,behind the door,at the top of the stairs,near the old well",
    ",",
)
HIGH = ("in a tall tree", "on the roof", "on a high branch", "on top of a wall")
WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "snowy", "bright", "foggy")
FEARS = ("the dark", "thunder", "deep water", "loud noises", "tall trees", "being alone")

OPENINGS = (
    "Once upon a time, {a_kind} called {N} lived {at}.",
    "Once upon a time, there was {a_kind} called {N} who lived {at}.",
    "{N} was {a_kind} who lived {at}.",
    "There once was {a_kind} named {N} who lived {at}.",
    "Long ago, {a_kind} named {N} lived {at}.",
    "A long time ago, there lived {a_kind} called {N}. {P} home was {at}.",
    "Once upon a time, there was {a_kind} named {N}. {S} lived {at}.",
    "Once there was {a_kind}. {P} name was {N}, and {n} lived {at}.",
    "{N} lived {at}. {S} was {a_kind}.",
)
TRAITS = Beat(
    (
        "{S} loved to {hobby}.",
        "Every day, {n} would {hobby}.",
        "{N} liked to {hobby} and to {hobby2}.",
        "Most of all, {N} loved to {hobby}.",
        "When the day was {weather}, {n} liked to {hobby}.",
    ),
    0.35,
)
_MEET = Beat(
    (
        "Then {N} met {fa_kind} called {F}.",
        "Just then, {fa_kind} named {F} came by.",
        "{Fa_kind} called {F} heard {o}.",
        "Soon {fa_kind} called {F} saw that {N} needed help.",
        "Luckily, {p} friend {F} the {fk} was near.",
    )
)
_ASK = Beat(
    (
        '"What is wrong?" asked {F}.',
        '"Why are you sad, {N}?" asked {F}.',
        '"Can I help you?" said {F}.',
        '{F} said, "Do not worry, {N}. I will help you."',
        '"Do not cry," said {F}. "We can do it together."',
    ),
    0.4,
)
_THANKS = Beat(
    (
        '"Thank you, {F}!" said {N}.',
        "{N} thanked {F} and gave {fo} a big hug.",
        '"You are a good friend, {F}," said {N}.',
        "{N} smiled and hugged {F}.",
        "{N} was so happy that {n} danced.",
    ),
    0.5,
)
_ENDINGS = Beat(
    (
        "From that day on, {N} and {F} were best friends.",
        "{N} and {F} played with the {thing} until the sun went down.",
        "After that, {N} and {F} did everything together.",
        "That night, {N} fell asleep with the {thing} beside {o}.",
        "And they all lived happily {at}.",
        "{N} and {F} went home with a smile.",
        "Every time {N} saw the {thing}, {n} thought of {F}.",
        "{N} never forgot how {F} helped {o}.",
    )
)


def _moral(*lessons: str) -> Beat:
    lead = ("{N} learned that {0}.", "{N} and {F} learned that {0}.", "Now {N} knew that {0}.")
    return Beat(tuple(form.replace("{0}", lesson) for form in lead for lesson in lessons), 0.3)


_LOST = (
    Beat(("{N} had {a_thing}.", "{P} favorite thing was {a_thing}.", "{N} took {a_thing} everywhere.")),
    Beat(
        (
            "One {weather} day, {N} could not find the {thing}.",
            "But one morning, the {thing} was gone.",
            "One day, {n} lost the {thing} {at}.",
            "Then, on a {weather} day, {N} lost the {thing}.",
        )
    ),
    Beat(("{N} was {mood}.", "{S} looked {spot}, but it was not there.", "{S} looked everywhere."), 0.7),
    _MEET,
    _ASK,
    Beat(
        (
            "They looked {spot}, and then they looked {spot2}. There was the {thing}!",
            "{F} helped {N} look. At last, they found the {thing} {spot}.",
            "Together they searched all day. The {thing} was {spot}!",
            "{F} looked {spot} and found the {thing}.",
        )
    ),
    _THANKS,
    _moral("friends help each other", "it is good to ask for help", "two can find more than one"),
    _ENDINGS,
)
_WISH = (
    Beat(
        (
            "{N} wanted {a_thing} more than anything.",
            "One day, {n} saw {a_thing} in a shop and wished for it.",
            "{N} dreamed of having {a_thing}.",
        )
    ),
    Beat(("But {n} had no money.", "But {N} did not know how to get one.", "But it cost too much."), 0.8),
    _MEET,
    Beat(
        (
            '"I wish I had {a_thing}," said {N}.',
            "{N} told {F} about the {thing}.",
            '"What do you wish for?" asked {F}. "I wish for {a_thing}," said {N}.',
        )
    ),
    Beat(
        (
            "{F} had a good idea. They worked together and made {a_thing}.",
            '"Let us make one!" said {F}. They worked until the {thing} was ready.',
            "They helped a farmer all day, and the farmer gave them {a_thing}.",
            "The next day, {F} came back with {a_thing} for {N}.",
        )
    ),
    _THANKS,
    _moral("wishes can come true", "hard work is fun with a friend", "a friend is the best gift"),
    _ENDINGS,
)
_BROKEN = (
    Beat(("{N} was very proud of {p} {thing}.", "One day, {N} got {a_thing}.", "{N} played with {a_thing} every day.")),
    Beat(
        (
            "One {weather} day, the {thing} fell down and broke.",
            "But {N} tripped, and the {thing} broke.",
            "Oh no! The {thing} broke in two.",
        )
    ),
    Beat(("{N} was {mood}.", "{N} tried to fix it, but {n} could not.", '"Oh no!" cried {N}.')),
    _MEET,
    _ASK,
    Beat(
        (
            "{F} knew how to fix the {thing}. Soon it was as good as new.",
            "{F} got some glue, and they fixed the {thing} together.",
            "They worked slowly and carefully. At last, the {thing} was whole again.",
        )
    ),
    _THANKS,
    _moral("broken things can be fixed", "it helps to be patient", "friends help each other"),
    _ENDINGS,
)
_STUCK = (
    Beat(("One {weather} day, {N} was playing with {a_thing}.", "{N} went out to play with {a_thing}.")),
    Beat(
        (
            "The wind took the {thing}, and it got stuck {high}.",
            "Suddenly, the {thing} flew away and got stuck {high}.",
            "{S} threw the {thing} too far, and it landed {high}.",
        )
    ),
    Beat(("{N} jumped and jumped, but {n} could not reach it.", "It was too high for {N}.", "{N} was {mood}.")),
    _MEET,
    _ASK,
    Beat(
        (
            "{F} stood very tall and {N} climbed up. Now {n} could reach the {thing}.",
            "{F} climbed up and got the {thing} for {N}.",
            "{F} found a long stick and pushed the {thing} down.",
            "They shook it together until the {thing} fell down.",
        )
    ),
    _THANKS,
    _moral("it is good to work together", "every problem has an answer", "it is good to ask for help"),
    _ENDINGS,
)
_SHARE = (
    Beat(("One day, {N} found {a_thing}.", "{N} had a new {thing}.", "{N} got {a_thing} for {p} birthday.")),
    Beat(
        (
            "{Fa_kind} called {F} wanted to play with it too.",
            "{P} friend {F} the {fk} came to play.",
            'Then {fa_kind} called {F} asked, "May I play too?"',
        )
    ),
    Beat(("But {N} did not want to share.", '"No! It is mine!" said {N}.', "But {N} hid the {thing} {spot}.")),
    Beat(("{F} was sad and went away.", "So {F} walked home alone.", "{F} did not say a word and left.")),
    Beat(("Soon {N} felt lonely.", "It was no fun to play alone.", "{N} looked at the {thing} and felt bad."), 0.9),
    Beat(
        (
            '{N} ran to {F} and said, "I am sorry. Let us share the {thing}."',
            "{N} went to find {F} and gave {fo} the {thing}.",
            'So {N} called, "{F}, come back! We can play with the {thing} together."',
        )
    ),
    Beat(("{F} smiled, and they played all day.", "{F} was happy again.", '"Thank you, {N}!" said {F}.')),
    _moral("sharing is fun", "it is better to share", "a friend is worth more than a {toy}"),
    Beat(_ENDINGS.choices[:3], 0.6),
)
_RETURN = (
    Beat(("One {weather} day, {N} found {a_thing} {spot}.", "On a walk, {N} saw {a_thing} {spot}.")),
    Beat(('"Whose {thing} is this?" said {N}.', "{N} wanted to keep it.", "It was very pretty."), 0.8),
    Beat(
        (
            "Then {n} saw {fa_kind} called {F} who was crying.",
            "Not far away sat {fa_kind} called {F}. {FS} looked sad.",
            "Just then, {fa_kind} named {F} came by and looked for something.",
        )
    ),
    Beat(('"I lost my {thing}," said {F}.', '"Have you seen my {thing}?" asked {F}.', "{F} had lost the {thing}.")),
    Beat(
        (
            "{N} gave the {thing} back to {F}.",
            '"Here it is!" said {N}, and gave {F} the {thing}.',
            "{N} thought for a moment. Then {n} gave {F} the {thing}.",
        )
    ),
    Beat(("{F} jumped for joy.", '"Thank you, {N}! You are very kind," said {F}.', "{F} hugged {N} and smiled again.")),
    _moral("it feels good to be honest", "being kind makes friends"),
    Beat(_ENDINGS.choices[:3], 0.7),
)
_GIFT = (
    Beat(
        (
            "One day, it was the birthday of {p} friend {F} the {fk}.",
            "{P} best friend was {fa_kind} called {F}. Soon it was {F}'s birthday.",
        )
    ),
    Beat(
        (
            "{N} wanted to give {F} {a_thing}.",
            '"I will give {F} {a_thing}," said {N}.',
            "{N} knew that {F} wished for {a_thing}.",
        )
    ),
    Beat(
        (
            "{N} looked {spot} and {spot2}, but could not find one.",
            "But the shop was closed.",
            "But it was a {weather} day, and the way to the shop was long.",
        )
    ),
    Beat(
        (
            "So {N} made {a_thing} all by {o}self.",
            "So {N} worked all night and made {a_thing}.",
            "{N} did not give up, and at last {n} found {a_thing}.",
        )
    ),
    Beat(
        (
            "When {F} saw the {thing}, {fn} laughed and clapped.",
            '"What a lovely {thing}!" said {F}.',
            "{F} opened the box and saw the {thing}. {FS} was very happy.",
        )
    ),
    _moral("the best gifts come from the heart", "giving is a joy"),
    Beat((*_ENDINGS.choices[:3], "They ate cake and sang songs."), 0.8),
)
_BRAVE = (
    Beat(("But {N} was afraid of {fear}.", "There was one problem. {N} was scared of {fear}.")),
    Beat(("{S} wanted to be brave.", "At night, {n} could not sleep.", "The others laughed at {o}."), 0.6),
    Beat(
        (
            "One {weather} day, {fa_kind} called {F} gave {o} {a_thing}.",
            "One day, {n} told {p} friend {F} the {fk} about it. {F} gave {o} {a_thing}.",
        )
    ),
    Beat(
        (
            '"When you are scared, hold the {thing}," said {F}.',
            '"This {thing} will make you brave," said {F}.',
            '{F} said, "Keep the {thing} close, and you will not be alone."',
        )
    ),
    Beat(
        (
            "That evening, {N} held the {thing} and was not afraid.",
            "{N} held the {thing} and took a deep breath. {S} felt brave.",
            "{N} took the {thing} along and was not afraid of {fear} any more.",
        )
    ),
    _THANKS,
    _moral("being brave can be learned", "everyone is scared sometimes"),
    _ENDINGS,
)
PLOTS = (_LOST, _WISH, _BROKEN, _STUCK, _SHARE, _RETURN, _GIFT, _BRAVE)
