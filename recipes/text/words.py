"""Small closed world of the built-in model's training text: names, animals, things, places, facts.

Everything here is data. The tables are consistent, so that a fact has one answer wherever it occurs.
"""

from random import Random
from typing import NamedTuple


def words(text: str, separator: str | None = None) -> tuple[str, ...]:
    """Parts of a text, split at a separator (whitespace if None): keeps long tables of words readable."""
    return tuple(text.split(separator))


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in map(words, words(text, ",")))


class Animal(NamedTuple):
    """Facts about an animal: its sound, home, young, food and number of legs."""

    sound: str
    home: str
    baby: str
    food: str
    legs: int


ANIMALS = {
    "cat": Animal("meows", "house", "kitten", "fish", 4),
    "dog": Animal("barks", "kennel", "puppy", "meat", 4),
    "cow": Animal("moos", "barn", "calf", "grass", 4),
    "horse": Animal("neighs", "stable", "foal", "hay", 4),
    "sheep": Animal("bleats", "field", "lamb", "grass", 4),
    "pig": Animal("oinks", "sty", "piglet", "corn", 4),
    "duck": Animal("quacks", "pond", "duckling", "weeds", 2),
    "hen": Animal("clucks", "coop", "chick", "seeds", 2),
    "lion": Animal("roars", "savanna", "cub", "meat", 4),
    "wolf": Animal("howls", "forest", "pup", "meat", 4),
    "fox": Animal("yelps", "den", "kit", "berries", 4),
    "bear": Animal("growls", "cave", "cub", "honey", 4),
    "mouse": Animal("squeaks", "hole", "pup", "cheese", 4),
    "owl": Animal("hoots", "tree", "owlet", "mice", 2),
    "frog": Animal("croaks", "pond", "tadpole", "flies", 4),
    "bee": Animal("buzzes", "hive", "larva", "nectar", 6),
    "snake": Animal("hisses", "hole", "snakelet", "mice", 0),
    "goat": Animal("bleats", "farm", "kid", "leaves", 4),
    "donkey": Animal("brays", "stable", "foal", "hay", 4),
    "elephant": Animal("trumpets", "savanna", "calf", "leaves", 4),
    "rabbit": Animal("squeaks", "burrow", "kit", "carrots", 4),
    "monkey": Animal("chatters", "jungle", "infant", "bananas", 4),
    "turtle": Animal("hisses", "pond", "hatchling", "leaves", 4),
    "squirrel": Animal("chatters", "tree", "kit", "nuts", 4),
}

STORY_ANIMALS = (*ANIMALS, "hedgehog", "penguin", "otter", "deer", "kitten", "puppy", "dragon", "robot")
"""Animals of stories: the ones of the fact tables and a few more."""

GIRLS = words(
    "Mia Anna Lily Emma Lucy Sara Nora Ella Zoe Ruby Rosa Ivy Molly Daisy Clara Alice Grace Nina Tina Luna Maya Hana "
    "Amy Eva Ida Lena Poppy Sofia Bella Kate Jane Olga"
)
BOYS = words(
    "Tom Ben Max Sam Leo Tim Jack Finn Oscar Hugo Noah Adam Omar Paul Peter Luke Otto Felix Ravi Ali Ken Dan Bob Fred "
    "Theo Milo Jon Carl Rex Eric Ivan George"
)

COLORS = words("red blue green yellow orange purple pink white black brown gray golden silver")

TOYS = words(
    "ball kite boat drum bell hat scarf book lamp cup basket blanket pillow flute whistle balloon box key ribbon shell "
    "stone feather spoon bucket teapot wagon puppet doll lantern umbrella coat map flag ring mitten"
)
"""Things of stories: small enough to carry, lose, mend and share."""

PLACES = {
    "forest": "in the forest",
    "farm": "on a farm",
    "river": "near a river",
    "hill": "on a green hill",
    "garden": "in a big garden",
    "village": "in a small village",
    "beach": "by the beach",
    "meadow": "in a sunny meadow",
    "lake": "beside a lake",
    "park": "next to the park",
    "mountain": "on a tall mountain",
    "city": "in a busy city",
    "valley": "in a quiet valley",
    "island": "on a tiny island",
}

THING_COLORS = {
    "the sky": "blue",
    "grass": "green",
    "the sun": "yellow",
    "snow": "white",
    "coal": "black",
    "a banana": "yellow",
    "a strawberry": "red",
    "a carrot": "orange",
    "a leaf": "green",
    "milk": "white",
    "a lemon": "yellow",
    "a tomato": "red",
    "chocolate": "brown",
    "a flamingo": "pink",
    "the sea": "blue",
    "an elephant": "gray",
    "a crow": "black",
    "a frog": "green",
    "a plum": "purple",
    "a fire engine": "red",
    "a pumpkin": "orange",
    "a polar bear": "white",
    "a cucumber": "green",
    "blood": "red",
}

_OPPOSITES = (
    "hot cold,big small,up down,fast slow,happy sad,day night,open closed,old new,light dark,full empty,hard soft,"
    "high low,wet dry,rich poor,early late,loud quiet,strong weak,good bad,left right,in out,near far,long short,"
    "clean dirty,first last,thick thin,true false,start stop,yes no,push pull,win lose,buy sell,give take,"
    "laugh cry,love hate,black white,sweet sour,front back,top bottom,inside outside,over under,"
    "brave scared,asleep awake,above below,always never,question answer"
)
OPPOSITE_PAIRS = _pairs(_OPPOSITES)

_PLURALS = (
    "cat cats,dog dogs,box boxes,fox foxes,mouse mice,child children,man men,woman women,foot feet,tooth teeth,"
    "goose geese,sheep sheep,fish fish,leaf leaves,wolf wolves,knife knives,baby babies,city cities,story stories,"
    "bus buses,dish dishes,tree trees,book books,star stars,cherry cherries,berry berries,hat hats,bird birds,"
    "house houses,key keys,day days,toy toys,boy boys,girl girls,watch watches,glass glasses,shelf shelves,"
    "person people,deer deer,potato potatoes,apple apples,egg eggs,ball balls,flower flowers"
)
PLURALS = dict(_pairs(_PLURALS))

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = words("January February March April May June July August September October November December")

FOUND_IN = {
    "bread": "in a bakery",
    "books": "in a library",
    "fish": "in the sea",
    "stars": "in the sky",
    "sand": "on a beach",
    "trees": "in a forest",
    "a bed": "in a bedroom",
    "a stove": "in a kitchen",
    "a teacher": "in a school",
    "a doctor": "in a hospital",
    "a train": "at a station",
    "an airplane": "at an airport",
    "milk": "in a fridge",
    "flowers": "in a garden",
    "a tractor": "on a farm",
    "camels": "in the desert",
    "apples": "on a tree",
    "money": "in a bank",
    "letters": "in a mailbox",
    "penguins": "on the ice",
}

CAPITALS = {
    "France": ("Paris", "French"),
    "Germany": ("Berlin", "German"),
    "Italy": ("Rome", "Italian"),
    "Spain": ("Madrid", "Spanish"),
    "Norway": ("Oslo", "Norwegian"),
    "Sweden": ("Stockholm", "Swedish"),
    "Japan": ("Tokyo", "Japanese"),
    "China": ("Beijing", "Chinese"),
    "Greece": ("Athens", "Greek"),
    "Poland": ("Warsaw", "Polish"),
    "Portugal": ("Lisbon", "Portuguese"),
    "Turkey": ("Ankara", "Turkish"),
    "Egypt": ("Cairo", "Arabic"),
    "Russia": ("Moscow", "Russian"),
    "Hungary": ("Budapest", "Hungarian"),
    "Denmark": ("Copenhagen", "Danish"),
    "Austria": ("Vienna", "German"),
    "England": ("London", "English"),
    "Cuba": ("Havana", "Spanish"),
    "Peru": ("Lima", "Spanish"),
    "Thailand": ("Bangkok", "Thai"),
    "Vietnam": ("Hanoi", "Vietnamese"),
}

USES = {
    "scissors": "to cut",
    "a pen": "to write",
    "a key": "to open a door",
    "an umbrella": "to stay dry",
    "a bed": "to sleep",
    "a spoon": "to eat soup",
    "a lamp": "to make light",
    "a clock": "to tell the time",
    "soap": "to wash",
    "a boat": "to cross the water",
    "a broom": "to sweep",
    "a phone": "to call someone",
    "an oven": "to bake",
    "a ladder": "to climb",
    "a cup": "to drink",
    "a coat": "to keep warm",
}

GROUPS = {
    "a fruit": words("apple banana pear plum cherry peach lemon grape"),
    "a vegetable": words("carrot onion potato cabbage pea turnip"),
    "a color": COLORS[:10],
    "an animal": words("cat dog cow horse fox bear lion rabbit"),
    "a bird": words("owl duck hen crow penguin goose"),
    "a tool": words("hammer saw spade rake drill"),
    "a vehicle": words("car bus train bicycle truck"),
    "a piece of clothing": words("hat coat scarf shirt sock"),
}

NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)

_SYLLABLES = words(
    "ba be bo da di do fa fi ga ka ki ko la li lo ma mi mo na ni no pa pe po ra ri ro sa si so ta ti to va vi zu lu mu "
    "ju ze bu pi tu wo"
)
_MADE_UP = 0.15
"""Share of invented names, which teach the model to copy unseen names."""


def article(noun: str) -> str:
    """Noun phrase with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def is_girl(name: str) -> bool:
    """True if the stories use "she" for this name. An invented name that ends in a or i is a girl's."""
    return name in GIRLS or (name not in BOYS and name[-1] in "ai")


def draw_name(rng: Random) -> str:
    """Name, mostly from the lists, sometimes invented from syllables."""
    if rng.random() < _MADE_UP:
        return "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()
    return rng.choice(GIRLS if rng.random() < 0.5 else BOYS)
