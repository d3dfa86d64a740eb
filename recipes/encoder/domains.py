"""Kinds of statement for the built-in encoder's training, each with many patterns of the same meaning.

In a pattern, `{slot}` stands for a value and `(a|b)` for a choice that does not change the meaning. Every pattern of a
kind names every slot, so that no two meanings share a sentence.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """Kind of statement.

    `slots` maps each slot to its pool of values; values from one pool differ within a statement. `unseen` is a pattern
    for evaluation, which no training sentence has.
    """

    slots: dict[str, str]
    patterns: tuple[str, ...]
    unseen: str


def _slots(text: str) -> dict[str, str]:
    pairs = (item.partition("=") for item in text.split())
    return {slot: pool or slot for slot, _, pool in pairs}


KINDS: dict[str, Kind] = {
    "travel": Kind(
        _slots("name from=city to=city vehicle day"),
        (
            "{name} (travels|goes|is traveling) from {from} to {to} {vehicle} {day}.",
            "{day}, {name} (leaves|departs from) {from} and (goes|travels) to {to} {vehicle}.",
            "{name} is (going|traveling) {vehicle} {day}, from {from} to {to}.",
            "{name}'s (trip|journey) {day} (starts|begins) in {from}, ends in {to}, and is made {vehicle}.",
            "To get to {to} from {from}, {name} travels {vehicle} {day}.",
            "{vehicle}, {name} will (reach|arrive in) {to} {day}, coming from {from}.",
            "(Starting|Setting out) from {from} {day}, {name} heads for {to} {vehicle}.",
            "{name}, who is in {from}, (makes|takes) a (trip|journey) to {to} {day} {vehicle}.",
        ),
        "There is a journey {vehicle} {day}: {name} is moving from {from} over to {to}.",
    ),
    "purchase": Kind(
        _slots("name few goods price shop"),
        (
            "{name} (bought|purchased) {few} {goods} for {price} {shop}.",
            "{shop}, {name} (paid|spent) {price} (for|on) {few} {goods}.",
            "For {price}, {name} (got|bought|acquired) {few} {goods} {shop}.",
            "The {few} {goods} that {name} (bought|got) {shop} cost {price}.",
            "{name} spent {price} {shop} to (get|buy) {few} {goods}.",
            "{few} {goods} were (bought|purchased) by {name} {shop} for {price}.",
            "{name} went shopping {shop} and (came home with|brought back) {few} {goods} for {price}.",
            "It was {price} that {name} paid {shop} for {few} {goods}.",
        ),
        "{price}: that is what {few} {goods} cost {name} {shop}.",
    ),
    "meeting": Kind(
        _slots("name other=name hour day topic"),
        (
            "{name} (meets|is meeting|will meet) {other} at {hour} {day} to (discuss|talk about) {topic}.",
            "{day} at {hour}, {name} and {other} (meet|get together) (about|because of) {topic}.",
            "The (meeting|appointment) of {name} and {other} (about|on) {topic} is {day} at {hour}.",
            "{name} has a (meeting|talk) with {other} {day} at {hour}; (it is about|the subject is) {topic}.",
            "At {hour} {day}, {other} is seeing {name} to (discuss|go over) {topic}.",
            "To (discuss|talk over) {topic}, {name} and {other} will meet {day} at {hour}.",
            "{topic} is what {name} and {other} (will discuss|are going to talk about) {day} at {hour}.",
            "{other} and {name} have (planned|scheduled|arranged) a talk about {topic} for {hour} {day}.",
        ),
        "There is an appointment {day}, {hour}, for {name} with {other}, concerning {topic}.",
    ),
    "cooking": Kind(
        _slots("name dish ingredient meal guest=name"),
        (
            "{name} (cooks|makes|prepares) {dish} with {ingredient} {meal} with {guest}.",
            "{meal} with {guest}, {name} (makes|is cooking) {dish} with {ingredient}.",
            "{name} and {guest} are together {meal}, and {name} (cooks|prepares) {dish} with {ingredient}.",
            "{dish} with {ingredient} is what {name} (cooks|makes) {meal} with {guest}.",
            "Using {ingredient}, {name} (prepares|makes) {dish} {meal} with {guest}.",
            "{name} is in the kitchen: {dish} with {ingredient}, {meal} with {guest}.",
            "{guest} (gets|is served) {dish} with {ingredient} by {name} {meal}.",
        ),
        "{ingredient} goes into {dish} that {name} is preparing {meal} with {guest}.",
    ),
    "weather": Kind(
        _slots("city weather day degrees"),
        (
            "There will be {weather} and {degrees} in {city} {day}.",
            "{city} (expects|can expect|will have) {weather} {day}, with {degrees}.",
            "{day}, (people in {city} can expect|the forecast for {city} is) {weather} and {degrees}.",
            "The (forecast|weather report) says {weather} for {city} {day}, and a temperature of {degrees}.",
            "In {city}, {day} brings {weather}, and the thermometer (will show|reads) {degrees}.",
            "(Expect|Look out for) {weather} in {city} {day}; it will be {degrees}.",
            "It will be {degrees} {day} in {city}, with {weather}.",
            "With {degrees} and {weather}, that is {city} {day}.",
        ),
        "{weather} will reach {city} {day} at {degrees}.",
    ),
    "match": Kind(
        _slots("team other=team sport few many"),
        (
            "{team} (beat|defeated) {other} {many} to {few} in {sport}.",
            "In {sport}, {other} (lost|were beaten) {few} to {many} against {team}.",
            "{team} won the {sport} (match|game) against {other} with {many} to {few}.",
            "The {sport} (match|game) between {team} and {other} was won by {team}, {many} to {few}.",
            "{other} were (beaten|defeated) {many} to {few} by {team} in {sport}.",
            "It was a {many} to {few} (victory|win) for {team} over {other} in {sport}.",
            "{other} (suffered|took) a {many} to {few} (defeat|loss) to {team} in {sport}.",
        ),
        "{sport}: {many} points for the winners, {team}, and {few} for the losers, {other}.",
    ),
    "work": Kind(
        _slots("name job workplace city year"),
        (
            "{name} has (worked|been working) as {job} at {workplace} in {city} since {year}.",
            "Since {year}, {name} has been {job} at {workplace} in {city}.",
            "{workplace} in {city} has employed {name} as {job} since {year}.",
            "{name} (became|started as) {job} at {workplace} in {city} in {year}.",
            "In {year}, {name} (began|started) to work at {workplace} in {city} as {job}.",
            "In {city}, {name} is {job} at {workplace}, and has been since {year}.",
            "{name} is {job}, (hired|employed) in {year} by {workplace} in {city}.",
        ),
        "{job} at {workplace} in {city}: this has been the work of {name} from {year} on.",
    ),
    "giving": Kind(
        _slots("name other=name gift occasion day"),
        (
            "{name} (gave|handed) {other} {gift} {occasion} {day}.",
            "{day}, {name} gave {gift} to {other} {occasion}.",
            "{other} (got|received|was given) {gift} from {name} {occasion} {day}.",
            "{gift} was (given|presented) to {other} by {name} {occasion} {day}.",
            "{occasion}, {other} received {gift} {day}; it came from {name}.",
            "{name} had {gift} for {other} {day}, {occasion}.",
            "What {name} gave {other} {day} {occasion} was {gift}.",
        ),
        "{gift} went from {name} to {other} {day}, {occasion}.",
    ),
    "taste": Kind(
        _slots("name feeling thing other=name"),
        (
            "{name} {feeling} {thing}, (says|according to) {other}.",
            "{other} (says|tells us|thinks) that {name} {feeling} {thing}.",
            "According to {other}, {name} {feeling} {thing}.",
            "(As {other} knows|As {other} tells it), {name} {feeling} {thing}.",
            "{thing}: {other} says that {name} {feeling} them.",
            "It is {other} who says that {name} {feeling} {thing}.",
            "If you believe {other}, {name} {feeling} {thing}.",
        ),
        "{name}, in the words of {other}, {feeling} {thing}.",
    ),
    "fault": Kind(
        _slots("name device fault event"),
        (
            "{name}'s {device} {fault} {event}.",
            "{event}, the {device} of {name} {fault}.",
            "The {device} that belongs to {name} {fault} {event}.",
            "{name} has a (problem|fault): the {device} {fault} {event}.",
            "(Please help|Help is needed): {event}, {name}'s {device} {fault}.",
            "{name} (complains|reports) that the {device} {fault} {event}.",
            "What is wrong with {name}'s {device}? {event}, it {fault}.",
            "{name} owns a {device} that {fault} {event}.",
        ),
        "It {fault} {event}, the {device} of {name}.",
    ),
    "animal": Kind(
        _slots("color animal deed place hour"),
        (
            "A {color} {animal} {deed} {place} at {hour}.",
            "At {hour}, a {color} {animal} {deed} {place}.",
            "{place}, there is a {color} {animal} at {hour}, and it {deed}.",
            "It is {hour}, and {place} a {animal} with {color} (fur|coat) {deed}.",
            "The {animal} {place} is {color}, and at {hour} it {deed}.",
            "What {deed} {place} at {hour} is a {color} {animal}.",
            "A {animal}, {color} (in color|all over), {deed} {place} at {hour}.",
        ),
        "{place} at {hour}: a {animal}, and a {color} one, {deed}.",
    ),
    "housing": Kind(
        _slots("rooms city rent landmark month"),
        (
            "A (flat|apartment) with {rooms} near {landmark} in {city} (costs|rents for) {rent} a month from {month}.",
            "From {month}, {rooms} near {landmark} in {city} (are for rent|can be rented) for {rent} a month.",
            "For {rent} (a month|per month) you (get|can rent) {rooms} in {city}, close to {landmark}, "
            "from {month} on.",
            "In {city}, close to {landmark}, a home with {rooms} is (offered|free) from {month} for {rent} a month.",
            "The (monthly rent|rent per month) of the (flat|apartment) near {landmark} in {city} is "
            "{rent} from {month}; "
            "it has {rooms}.",
            "{city}: {rooms}, near {landmark}, {rent} monthly, (free|available) from {month}.",
            "(To let|For rent) from {month}: {rooms} in {city} beside {landmark}, {rent} per month.",
        ),
        "Beside {landmark} in {city}, {rent} a month gets you {rooms}, starting in {month}.",
    ),
    "health": Kind(
        _slots("name symptom duration remedy helper=name"),
        (
            "{name} has had {symptom} for {duration} and (takes|uses) {remedy} on the advice of {helper}.",
            "For {duration}, {name} has (had|suffered from) {symptom}; {helper} (recommends|advises) {remedy}.",
            "{helper} (tells|advises) {name}, who has had {symptom} for {duration}, to try {remedy}.",
            "Because of {symptom} that has lasted {duration}, {name} tries {remedy}, as {helper} (suggested|advised).",
            "{remedy} is what {helper} recommends to {name} against {symptom}, which has lasted for {duration}.",
            "{name}'s {symptom} has gone on for {duration}, and {helper} (suggests|recommends) {remedy}.",
            "After {duration} with {symptom}, {name} turns to {remedy}, which was {helper}'s (idea|advice).",
        ),
        "{symptom} has troubled {name} for {duration}; {remedy} would help, says {helper}.",
    ),
    "music": Kind(
        _slots("name instrument style few other=name"),
        (
            "{name} plays {style} on {instrument} {few} times a week with {other}.",
            "{few} times (a|every|each) week, {name} and {other} meet, and {name} plays {style} on {instrument}.",
            "Together with {other}, {name} practices {style} on {instrument} {few} times (a|each) week.",
            "On {instrument}, {name} (practices|plays) {style} {few} times weekly; {other} (joins in|is there too).",
            "{other} comes {few} times a week (to hear {name} play|when {name} plays) {style} on {instrument}.",
            "{style} on {instrument}: that is what {name} (plays|practices) with {other} {few} times a week.",
            "{name} (is learning|studies) {instrument} with {other}, {few} lessons a week, mostly {style}.",
        ),
        "In a week, {name} takes up {instrument} {few} times for {style}, in the company of {other}.",
    ),
    "delivery": Kind(
        _slots("many goods status name day"),
        (
            "The order of {many} {goods} for {name} {status} {day}.",
            "{day}: {name}'s order of {many} {goods} {status}.",
            "{name} ordered {many} {goods}, and the (parcel|package) {status} {day}.",
            "The (parcel|package) with {many} {goods} that {name} (ordered|is waiting for) {status} {day}.",
            "News for {name} {day}: the (shipment|delivery) of {many} {goods} {status}.",
            "What {name} ordered, {many} {goods}, {status} {day}.",
            "(We inform you|Please note) that {name}'s {many} {goods}, in one parcel, {status} {day}.",
        ),
        "{many} {goods} were ordered by {name}; {day} the delivery {status}.",
    ),
    "business": Kind(
        _slots("company move few site country year"),
        (
            "{company} {move} {few} {site} in {country} in {year}.",
            "In {year}, {company} {move} {few} {site} in {country}.",
            "In {country}, {company} {move} {few} {site} in {year}.",
            "{year}: {company} {move} {few} of the {site} in {country}.",
            "(News|A report) from {country}: {company} {move} {few} {site} in {year}.",
            "It is {company} that {move} {few} {site} in {country} in {year}.",
            "(According to its plans|As announced), {company} {move} {few} {site} in {country} during {year}.",
            "{few} {site} in {country}: {company} {move} them in {year}.",
        ),
        "During {year}, {few} {site} are concerned in {country}, where {company} {move} them.",
    ),
    "exam": Kind(
        _slots("name result subject city month"),
        (
            "{name} {result} the {subject} exam in {city} in {month}.",
            "In {month}, {name} {result} the exam in {subject} in {city}.",
            "In {city}, {name} {result} the {subject} (test|examination) in {month}.",
            "The {subject} (exam|test) was in {city} in {month}, and {name} {result} it.",
            "{name}, who studies {subject} in {city}, {result} the exam in {month}.",
            "{month}, {city}: {name} {result} the examination in {subject}.",
            "It was {name} who {result} the {subject} exam in {month} in {city}.",
        ),
        "There was an exam in {city} in {month}, in {subject}; {name} {result} it.",
    ),
    "loss": Kind(
        _slots("name belonging place day finder=name"),
        (
            "{name} lost the {belonging} {place} {day}, and {finder} found it.",
            "{finder} found the {belonging} {place} that {name} (had lost|lost) {day}.",
            "{day}, {name} (lost|left behind|forgot) the {belonging} {place}; {finder} (found it|picked it up).",
            "The {belonging} that {name} (lost|left) {place} {day} was found by {finder}.",
            "{name} was looking for the {belonging}, lost {place} {day}, and it was {finder} who "
            "(found|discovered) it.",
            "{place}, {finder} (discovered|found) what {name} had lost {day}: the {belonging}.",
            "Thanks to {finder}, {name} has the {belonging} back that was lost {place} {day}.",
        ),
        "{name}'s {belonging} went missing {place} {day} and turned up thanks to {finder}.",
    ),
    "how to": Kind(
        _slots("task target tool"),
        (
            "How (do|can) I {task} {target} {tool}?",
            "(I want|I would like|I need) to {task} {target} {tool}.",
            "{tool}, (how can I|how do I|is there a way to) {task} {target}?",
            "(Can you|Could you|Please) help me to {task} {target} {tool}.",
            "(Is it possible|Is there a way) to {task} {target} {tool}?",
            "What (do I have to do|must I do|are the steps) to {task} {target} {tool}?",
            "(Tell|Show) me how to {task} {target} {tool}.",
        ),
        "I am trying to {task} {target} {tool}, but how?",
    ),
    "distance": Kind(
        _slots("from=city to=city distance direction country"),
        (
            "On the map of {country}, {from} (lies|is) {distance} {direction} of {to}.",
            "{from} is {distance} {direction} of {to} (on|according to) a map made in {country}.",
            "Go {distance} {direction} from {to} and you are in {from}, says the map from {country}.",
            "A map from {country} (puts|shows) {from} {distance} {direction} of {to}.",
            "If you look {direction} from {to} on the map of {country}, {from} is {distance} away.",
            "According to {country}'s map, the way to {from} is {distance} {direction} of {to}.",
        ),
        "The map printed in {country} has {to}, and {distance} {direction} of that, {from}.",
    ),
    "story": Kind(
        _slots("name medium plot creator verdict"),
        (
            "{name} found the {medium} about {plot} by {creator} {verdict}.",
            "The {medium} by {creator} about {plot} is {verdict}, (says|thinks) {name}.",
            "{name} (thinks|says|believes) that the {medium} about {plot}, made by {creator}, is {verdict}.",
            "According to {name}, {creator}'s {medium} about {plot} is {verdict}.",
            "{verdict}: that is {name}'s (opinion|view) of the {medium} about {plot} by {creator}.",
            "{creator} wrote a {medium} about {plot}, and {name} (calls|finds) it {verdict}.",
            "It is about {plot}, this {medium} by {creator}, and {name} says it is {verdict}.",
        ),
        "{plot} is the subject of {creator}'s {medium}, which {name} considers {verdict}.",
    ),
}
