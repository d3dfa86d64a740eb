"""Pools of values for the slots of the built-in encoder's sentences, each value with its phrasings.

Everything here is data. Values are separated by commas, the phrasings of a value by slashes.
"""

from __future__ import annotations

from recipes.text.words import BOYS, GIRLS, NUMBER_WORDS, words

Value = tuple[str, ...]
"""Phrases of the same meaning."""


def _values(text: str) -> tuple[Value, ...]:
    return tuple(tuple(way.strip() for way in value.split("/")) for value in text.split(","))


_TENS = words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")


def _spelled(number: int) -> str:
    """Number below 1,000 in words."""
    if number >= 100:
        rest = number % 100
        return f"{NUMBER_WORDS[number // 100]} hundred" + (f" and {_spelled(rest)}" if rest else "")
    if number < 20:
        return NUMBER_WORDS[number]
    return _TENS[number // 10] + (f"-{NUMBER_WORDS[number % 10]}" if number % 10 else "")


def _clock(hour: int) -> Value:
    twelve = hour if hour <= 12 else hour - 12
    half = "am" if hour < 12 else "pm"
    part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    return (f"{twelve} {half}", f"{twelve} o'clock {part}", f"{hour}:00", f"{NUMBER_WORDS[twelve]} {part}")


POOLS: dict[str, tuple[Value, ...]] = {
    "name": tuple((name,) for name in (*GIRLS, *BOYS)),
    "city": _values(
        "Paris,London,Berlin,Madrid,Rome,Vienna,Oslo,Lisbon,Prague,Dublin,Athens,Warsaw,Cairo,Tokyo,Seoul,Delhi,"
        "Sydney,Toronto,Boston,Chicago,New York/New York City/NYC,Los Angeles/LA,Lima,Nairobi,Istanbul,Zurich,Geneva,"
        "Munich,Naples,Porto,Hanoi,Bangkok,Singapore,Dubai,Havana,Bogota"
    ),
    "country": _values(
        "France,Germany,Spain,Italy,Austria,Norway,Portugal,Ireland,Greece,Poland,Egypt,Japan,India,Australia,Canada,"
        "Mexico,Brazil,Peru,Kenya,Turkey,the United States/the US/America,the United Kingdom/the UK/Britain,China,"
        "the Netherlands/Holland,Sweden,Denmark,Chile,Vietnam"
    ),
    "day": _values("on Monday,on Tuesday,on Wednesday,on Thursday,on Friday,on Saturday,on Sunday"),
    "month": _values("January,February,March,April,May,June,July,August,September,October,November,December"),
    "year": tuple((str(year),) for year in range(1985, 2025)),
    "hour": tuple(_clock(hour) for hour in range(7, 22)),
    "few": tuple((str(n), NUMBER_WORDS[n]) for n in range(2, 13)),
    "many": tuple((str(n), _spelled(n)) for n in (*range(13, 30), *range(30, 100, 5), *range(100, 1000, 50))),
    "price": tuple(
        (f"${n}", f"{n} dollars", f"{_spelled(n)} dollars") for n in (*range(2, 30), *range(30, 100, 5), 120, 150, 200)
    ),
    "degrees": tuple((f"{n} degrees", f"{_spelled(n)} degrees", f"{n}°C") for n in range(1, 40)),
    "vehicle": _values(
        "by train/on the train/by rail,by car/in a car/by automobile,by bus/on the bus/by coach,"
        "by plane/on a plane/by air,by bicycle/by bike/on a bicycle,by boat/on a ship/by ship,on foot/walking,"
        "by motorcycle/on a motorbike,by taxi/in a cab"
    ),
    "goods": _values(
        "apples,oranges,bananas,eggs,notebooks,pencils,candles,shirts,socks,shoes,chairs,lamps,plates,cups/mugs,"
        "books,roses,tomatoes,potatoes,onions,lemons,pillows,blankets,spoons,tickets,batteries,towels,hats,umbrellas,"
        "toys,sofas/couches,bags,bottles of wine,loaves of bread,boxes of tea"
    ),
    "shop": _values(
        "at the market,at the supermarket/at the grocery store,at the corner shop,online/on the internet,"
        "at the department store,at the flea market,at the mall/at the shopping center,at the station kiosk,"
        "at the museum shop,at the airport"
    ),
    "topic": _values(
        "the budget/the finances,the new website,the contract/the agreement,the holiday plans/the vacation plans,"
        "the school play,the wedding,the research project/the study,the garden,the broken heating,the job offer,"
        "the annual report/the yearly report,the marketing campaign,the exam results,the house sale,the road works,"
        "the security problem,the birthday party,the football club/the soccer club,the new product,"
        "the insurance claim"
    ),
    "dish": _values(
        "a soup,a salad,a curry,a stew,an omelette,a pie,a pizza,a cake,pancakes,a sandwich,a risotto,a casserole,"
        "dumplings,noodles/pasta,a roast,tacos,a quiche,fried rice"
    ),
    "ingredient": _values(
        "mushrooms,chicken,spinach,pumpkin,beef,lentils,salmon,tofu,cheese,potatoes,tomatoes,shrimp/prawns,beans,"
        "eggplant/aubergine,zucchini/courgette,lamb,peppers,carrots,corn,leeks"
    ),
    "meal": _values("for breakfast,for lunch,for dinner/for supper,for the party,for a picnic,for the neighbors"),
    "weather": _values(
        "rain/rainy weather/wet weather,snow/snowy weather/snowfall,sunshine/sunny weather/clear skies,"
        "fog/foggy weather/mist,strong wind/windy weather/gales,thunderstorms/thunder and lightning,"
        "clouds/cloudy weather/overcast skies,hail/hailstones"
    ),
    "team": _values(
        "the Tigers,the Lions,the Eagles,the Bears,the Sharks,the Wolves,the Hawks,the Bulls,the Giants,the Rangers,"
        "the Pirates,the Rockets,the Comets,the Dragons,the Foxes,the Knights"
    ),
    "sport": _values(
        "football/soccer,basketball,hockey,volleyball,handball,rugby,baseball,water polo,table tennis/ping-pong"
    ),
    "job": _values(
        "a doctor/a physician,a teacher/a schoolteacher,a lawyer/an attorney,a nurse,an engineer,a cook/a chef,"
        "a baker,a pilot,a programmer/a software developer,a painter,a carpenter,a journalist/a reporter,a gardener,"
        "a librarian,an accountant,a mechanic,a plumber,an electrician,a hairdresser,a scientist/a researcher,"
        "a police officer,a firefighter,a translator,a photographer,a waiter,a driver/a chauffeur,a dentist,a tailor"
    ),
    "workplace": _values(
        "a hospital,a bank,a hotel,a school,a factory,a museum,a bakery,a university/a college,a newspaper,"
        "a start-up,a theater,an airline,a law firm,a zoo,a laboratory/a lab,a restaurant,a shipyard,"
        "a publishing house"
    ),
    "gift": _values(
        "a watch,a book,a scarf,a bicycle/a bike,a necklace,a camera,a guitar,a plant,a puzzle,a painting,a kite,"
        "a bottle of perfume,a teapot,a telescope,a sweater/a pullover,a wallet,a ring,a cookbook,"
        "a backpack/a rucksack,a box of chocolates,a lamp,a hat,a drum,a basket"
    ),
    "occasion": _values(
        "for a birthday/as a birthday present,for Christmas/as a Christmas present,"
        "for a wedding/as a wedding present,as a thank-you/to say thank you,as an apology/to say sorry,"
        "for graduation/to celebrate a graduation,as a farewell present/to say goodbye"
    ),
    "feeling": _values(
        "loves/adores/is crazy about,hates/detests/cannot stand,is afraid of/is scared of/fears,"
        "is bored by/finds no interest in,misses/longs for,is proud of/takes pride in,is allergic to/cannot tolerate,"
        "is curious about/wants to know more about,knows a lot about/is an expert on"
    ),
    "thing": _values(
        "cats,dogs,spiders,horror films/horror movies,jazz,opera,spicy food,long flights,the sea/the ocean,mountains,"
        "big cities,old cars,modern art,chess,winter,summer,roller coasters,coffee,strawberries,snakes,poetry,crowds,"
        "thunder,gardens,football/soccer,science,chocolate,trains,cheese,history"
    ),
    "device": _values(
        "phone/smartphone,laptop/notebook computer,printer,television/TV,washing machine/washer,camera,"
        "refrigerator/fridge,car/automobile,headphones/headset,dishwasher,router,tablet,keyboard,vacuum cleaner,"
        "coffee machine/coffee maker,microwave,radio,watch"
    ),
    "fault": _values(
        "does not turn on/will not start/refuses to start,makes a strange noise/sounds odd,gets too hot/overheats,"
        "keeps switching itself off/turns off by itself,is very slow/has become sluggish,leaks water/drips water,"
        "smells of smoke/smells burnt,shows an error message/displays an error,"
        "does not connect/cannot find the network,has a cracked cover/has a crack in its case,vibrates/shakes"
    ),
    "event": _values(
        "after the update/since it was updated,after it fell/since I dropped it,"
        "after the storm/since the thunderstorm,after the move/since we moved house,"
        "after the repair/since it was repaired,after a power cut/since the blackout,"
        "after I cleaned it/since I cleaned it,after my holiday/since my vacation"
    ),
    "animal": _values(
        "cat,dog,horse,rabbit/bunny,fox,bear,mouse,owl,frog,goat,donkey,squirrel,duck,hen/chicken,pig,cow,lizard,"
        "parrot,monkey,turtle,snake,goose,sheep,wolf"
    ),
    "color": _values("red,blue,green,yellow,orange,purple/violet,pink,white,black,brown,gray/grey,golden"),
    "deed": _values(
        "is sleeping/is asleep/is taking a nap,is eating/is having a meal,is running around/is racing about,"
        "is hiding/is keeping out of sight,is playing with a ball/is chasing a ball,"
        "is drinking water/is having a drink,is climbing up a wall/is scaling a wall,"
        "is making a lot of noise/is being very loud,is looking at a bird/is watching a bird,"
        "is digging a hole/is making a hole,is waiting for food"
    ),
    "place": _values(
        "in the garden/in the yard,in the kitchen,under the table,on the roof/on top of the house,behind the barn,"
        "by the river/on the riverbank,in the forest/in the woods,near the station,in front of the church,"
        "on the beach/by the sea,in the park,at the bus stop,in the cellar/in the basement,on the bridge,"
        "next to the school/beside the school,in the street/on the road,at the hotel,in the library"
    ),
    "symptom": _values(
        "a headache/a sore head,a cough,a fever/a high temperature,a sore throat/a painful throat,"
        "a stomach ache/an upset stomach,a toothache/a painful tooth,a backache/a sore back,a rash,a runny nose,"
        "a sprained ankle/a twisted ankle,an earache/a painful ear,itchy eyes"
    ),
    "duration": _values(
        "two days/2 days,three days/3 days,four days/4 days,five days/5 days,a week/seven days,two weeks/a fortnight,"
        "a month,two months/2 months,half a year/six months,a year/twelve months"
    ),
    "remedy": _values(
        "tea,honey,tablets/pills,an ointment/a cream,vitamins,drops,a hot bath,bed rest/lots of rest,antibiotics,"
        "breathing exercises,a cold pack/ice"
    ),
    "instrument": _values(
        "the piano,the violin/the fiddle,the guitar,the flute,the drums,the trumpet,the cello,the harp,the saxophone,"
        "the clarinet,the accordion,the ukulele"
    ),
    "style": _values(
        "jazz,classical music,folk songs,rock,film music/movie music,hymns/church music,dance music,blues"
    ),
    "status": _values(
        "has been delivered/has arrived,has been delayed/is late,has been cancelled/was called off,"
        "is on its way/is in transit/has been shipped,is ready for pickup/can be collected,"
        "has been lost/has gone missing,was damaged/got broken,has been refunded/was paid back"
    ),
    "company": _values(
        "a bank,a supermarket chain/a chain of supermarkets,a car maker/an automobile manufacturer,a fashion brand,"
        "a bookseller/a chain of bookshops,an airline,a hotel group,a coffee chain/a chain of coffee shops,"
        "a furniture company,a toy maker/a toy manufacturer,a phone company/a telephone company,a bakery chain,"
        "a film studio/a movie studio,a steel producer,a drug company/a pharmaceutical company,a shoe brand"
    ),
    "move": _values(
        "opens/is opening,closes/is closing/shuts,sells/is selling,renovates/is renovating/modernizes,"
        "buys/is buying/acquires"
    ),
    "site": _values(
        "shops/stores,factories/plants,offices,warehouses/storage depots,training centers,restaurants,"
        "laboratories/labs,parking lots/car parks,service centers"
    ),
    "subject": _values(
        "biology,chemistry,physics,history,law,medicine,mathematics/maths/math,music,philosophy,economics,geography,"
        "computer science/informatics,art,psychology,literature,architecture,astronomy,engineering"
    ),
    "result": _values(
        "passed/succeeded in,failed/did not pass,missed/did not show up for,postponed/put off,"
        "got the best grade in/came first in,cheated in/was caught cheating in"
    ),
    "belonging": _values(
        "keys,wallet/purse,phone/mobile phone,umbrella,glasses/spectacles,passport,gloves,suitcase,laptop,ring,hat,"
        "backpack/rucksack,camera,scarf,notebook,train ticket,watch,library card"
    ),
    "task": _values(
        "reset/restore,change,delete/remove,find/look up,share with a friend/pass on to a friend,"
        "print/get a paper copy of,cancel/call off,pay for,renew/extend,download/save to my computer,translate,"
        "check/verify"
    ),
    "target": _values(
        "my password,my account,my order/my purchase,my subscription/my membership,my address/my home address,"
        "my invoice/my bill,my reservation/my booking,my profile picture/my profile photo,my email address,my ticket,"
        "my phone number/my telephone number,my insurance,my tax form,my travel plan/my itinerary,"
        "my photos/my pictures,my recipe,my calendar/my schedule,my warranty/my guarantee"
    ),
    "tool": _values(
        "in the app,on the website,on my phone/on my mobile,without a credit card,in English,"
        "over the telephone/by phone,at the counter/at the front desk,from abroad/from another country,"
        "without logging in/without signing in"
    ),
    "direction": _values("north/to the north,south/to the south,east/to the east,west/to the west"),
    "distance": tuple((f"{n} kilometers", f"{n} km", f"{_spelled(n)} kilometers") for n in range(20, 1000, 20)),
    "rooms": tuple((f"{n} rooms", f"{NUMBER_WORDS[n]} rooms") for n in range(2, 9)),
    "rent": tuple((f"${n}", f"{n} dollars") for n in range(400, 3000, 50)),
    "landmark": _values(
        "the station,the park,the university/the college,the harbor/the port,the cathedral,the market,the river,"
        "the zoo,the hospital,the airport,the castle,the lake,the stadium,the old town"
    ),
    "creator": _values(
        "an unknown author/an anonymous writer,a retired judge,a young poet,a Swedish novelist,a former sailor,"
        "a famous actor,a Nobel laureate/a winner of the Nobel Prize,a school class,two brothers,a monk,a detective"
    ),
    "plot": _values(
        "a stolen painting,a journey to the moon/a trip to the moon,a lonely lighthouse,a war between two kingdoms,"
        "a haunted house,a family of bakers,a lost dog,a bank robbery,a secret garden,a shipwreck,a talking tree,"
        "a forbidden love,a chess champion,life on a farm/farm life,a flood"
    ),
    "medium": _values(
        "book/novel,film/movie,play,comic,radio drama/radio play,television series/TV series,poem,musical"
    ),
    "verdict": _values(
        "wonderful/marvelous/superb,boring/dull/tedious,too long/overlong,funny/amusing/hilarious,sad/heartbreaking,"
        "frightening/scary,confusing/hard to follow,moving/touching"
    ),
}
