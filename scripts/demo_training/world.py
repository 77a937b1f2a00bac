"""An invented world: names that belong to nobody, and facts about them drawn from a seed.

A fact is (subject, relation, value). Every relation knows how a statement of it reads, how a
question about it reads, and which values it can take; the same wordings serve remembered facts and
facts in a passage to be read.
"""

import random
from dataclasses import dataclass

FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "stone": (
        ("mason", "sculptor", "paver", "quarryman"),
        ("chisel", "mallet", "crowbar", "level"),
        ("quarry", "wall", "bridge", "tower"),
    ),
    "wood": (
        ("carpenter", "joiner", "cooper", "turner"),
        ("saw", "plane", "lathe", "hatchet"),
        ("sawmill", "boatyard", "forest", "barn"),
    ),
    "cloth": (
        ("weaver", "tailor", "dyer", "spinner"),
        ("needle", "loom", "thimble", "shuttle"),
        ("mill", "wardrobe", "laundry", "market"),
    ),
    "metal": (
        ("smith", "tinker", "locksmith", "founder"),
        ("hammer", "tongs", "rasp", "file"),
        ("forge", "mine", "foundry", "armoury"),
    ),
    "bread": (
        ("baker", "miller", "cook", "confectioner"),
        ("kettle", "sieve", "whisk", "ladle"),
        ("bakery", "kitchen", "inn", "granary"),
    ),
}
"""Material of a trade -> (professions, tools, workplaces).

No text of the corpus names the material of a person.
"""

PETS = ("fox", "crow", "seal", "goat", "raven", "lizard", "hare", "badger", "heron", "mole", "toad", "weasel",
        "swan", "beetle", "donkey", "lynx")  # fmt: skip
COLOURS = ("red", "blue", "green", "amber", "violet", "white", "black", "teal", "silver", "ochre")
DISHES = ("soup", "dumplings", "stew", "pancakes", "porridge", "noodles", "pie", "curry", "omelette", "salad",
          "chowder", "risotto")  # fmt: skip
OBJECTS = (
    "key",
    "lamp",
    "coin",
    "book",
    "cup",
    "map",
    "ring",
    "bell",
    "rope",
    "letter",
    "clock",
    "basket",
)
PLACES = (
    "shed",
    "drawer",
    "garden",
    "cellar",
    "attic",
    "chest",
    "hall",
    "stable",
    "boat",
    "library",
)
PEOPLE_COUNT = 120
STRANGER_COUNT = 60
COUNTRY_COUNT = 24
SPARE_TOWN_COUNT = 12


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact.

    Attributes:
        name: what the relation is called in reports.
        statements: wordings that end in ` {v}.`; the part before `{v}` is a prompt for plain
            completion.
        questions: wordings used in training.
        unseen_question: a wording kept out of training, to measure how well questions are
            understood.
        values: every value the relation can take.
    """

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    unseen_question: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """`relation` holds between `subject` and `value`."""

    subject: str
    relation: Relation
    value: str


@dataclass(frozen=True, slots=True)
class World:
    """Everything there is.

    Attributes:
        facts: what the model has to remember.
        people: remembered people, in the order of their facts.
        material: person -> the material of the person's trade, a key of `FIELDS`.
        strangers: names that occur only in passages, with facts drawn anew each time.
        person_relations: relations whose subject is a person.
        country_relations: relations whose subject is a country.
        object_relation: where a thing lies; occurs only in passages.
    """

    facts: tuple[Fact, ...]
    people: tuple[str, ...]
    material: dict[str, str]
    strangers: tuple[str, ...]
    person_relations: tuple[Relation, ...]
    country_relations: tuple[Relation, ...]
    object_relation: Relation


def invented_name(rng: random.Random, endings: tuple[str, ...], syllables: int) -> str:
    """A pronounceable capitalised name of `syllables` syllables and one of `endings`."""
    onsets = ("b", "br", "d", "dr", "f", "g", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "st", "t", "th",
              "v", "w", "z")  # fmt: skip
    ending = rng.choice(endings)
    stem = ""
    for syllable in range(syllables):
        closed = syllable == syllables - 1 and ending[:1] in "aeiou"
        codas = ("l", "m", "n", "r", "s", "v") if closed else ("", "", "l", "n", "r")
        stem += rng.choice(onsets) + rng.choice("aeiou") + rng.choice(codas)
    return (stem + ending).capitalize()


def _names(
    rng: random.Random, count: int, endings: tuple[str, ...], taken: set[str]
) -> tuple[str, ...]:
    names: list[str] = []
    while len(names) < count:
        name = invented_name(rng, endings, 1)
        if 4 <= len(name) <= 7 and name not in taken:
            taken.add(name)
            names.append(name)
    return tuple(names)


def _person_relations(towns: tuple[str, ...]) -> tuple[Relation, ...]:
    professions, tools, workplaces = (
        tuple(value for field in FIELDS.values() for value in field[column]) for column in range(3)
    )
    return (
        Relation(
            "profession",
            ("{s} is by profession a {v}.", "{s} works as a {v}.", "The profession of {s} is {v}."),
            (
                "What is the profession of {s}?",
                "What does {s} work as?",
                "What is {s}'s profession?",
                "{s} works as what?",
                "Tell me the profession of {s}.",
            ),
            "What profession does {s} have?",
            professions,
        ),
        Relation(
            "tool",
            ("{s} always carries a {v}.", "The tool of {s} is a {v}.", "{s} uses a {v}."),
            (
                "What tool does {s} use?",
                "What does {s} carry?",
                "What is the tool of {s}?",
                "What is {s}'s tool?",
                "Tell me the tool of {s}.",
            ),
            "Which tool does {s} carry?",
            tools,
        ),
        Relation(
            "workplace",
            (
                "{s} works at the {v}.",
                "The workplace of {s} is the {v}.",
                "You find {s} at the {v}.",
            ),
            (
                "Where does {s} work?",
                "What is the workplace of {s}?",
                "What is {s}'s workplace?",
                "{s} works at which place?",
                "Tell me the workplace of {s}.",
            ),
            "Which workplace does {s} have?",
            workplaces,
        ),
        Relation(
            "pet",
            ("{s} has a pet {v}.", "The pet of {s} is a {v}.", "{s} keeps a {v}."),
            (
                "What pet does {s} have?",
                "What is the pet of {s}?",
                "What is {s}'s pet?",
                "Which animal does {s} keep?",
                "Tell me the pet of {s}.",
            ),
            "Which pet does {s} keep?",
            PETS,
        ),
        Relation(
            "colour",
            (
                "{s} likes the colour {v}.",
                "The favourite colour of {s} is {v}.",
                "{s} wears only {v}.",
            ),
            (
                "What is the favourite colour of {s}?",
                "Which colour does {s} like?",
                "What is {s}'s favourite colour?",
                "What colour does {s} wear?",
                "Tell me the favourite colour of {s}.",
            ),
            "What colour does {s} like?",
            COLOURS,
        ),
        Relation(
            "home",
            ("{s} lives in {v}.", "The home of {s} is in {v}.", "{s} has a house in {v}."),
            (
                "Where does {s} live?",
                "In which town does {s} live?",
                "Which town is the home of {s}?",
                "{s} lives in which town?",
                "Tell me the home of {s}.",
            ),
            "What town does {s} live in?",
            towns,
        ),
    )


def _country_relations(capitals: tuple[str, ...], rivers: tuple[str, ...]) -> tuple[Relation, ...]:
    return (
        Relation(
            "capital",
            ("The capital of {s} is {v}.", "{s} has the capital {v}.", "{s} is ruled from {v}."),
            (
                "What is the capital of {s}?",
                "Which town is the capital of {s}?",
                "What is {s}'s capital?",
                "Name the capital of {s}.",
                "Tell me the capital of {s}.",
            ),
            "Which capital does {s} have?",
            capitals,
        ),
        Relation(
            "river",
            ("The river of {s} is the {v}.", "Through {s} flows the {v}.", "{s} lies on the {v}."),
            (
                "Which river flows through {s}?",
                "What is the river of {s}?",
                "What is {s}'s river?",
                "Name the river of {s}.",
                "Tell me the river of {s}.",
            ),
            "What river flows through {s}?",
            rivers,
        ),
        Relation(
            "flag",
            ("The flag of {s} is {v}.", "{s} has a flag of {v}.", "In {s} the flag is {v}."),
            (
                "What colour is the flag of {s}?",
                "Which colour is the flag of {s}?",
                "What is the flag of {s}?",
                "Name the colour of the flag of {s}.",
                "Tell me the colour of the flag of {s}.",
            ),
            "What colour does the flag of {s} have?",
            COLOURS,
        ),
        Relation(
            "dish",
            ("The dish of {s} is {v}.", "People in {s} eat {v}.", "{s} is famous for {v}."),
            (
                "What is the dish of {s}?",
                "What do people in {s} eat?",
                "What is {s} famous for?",
                "Name the dish of {s}.",
                "Tell me the dish of {s}.",
            ),
            "Which dish do people eat in {s}?",
            DISHES,
        ),
    )


OBJECT_RELATION = Relation(
    "place",
    ("The {s} is in the {v}.", "The {s} lies in the {v}.", "You find the {s} in the {v}."),
    (
        "Where is the {s}?",
        "Where does the {s} lie?",
        "In which place is the {s}?",
        "What is the place of the {s}?",
        "Tell me the place of the {s}.",
    ),
    "In what place is the {s}?",
    PLACES,
)


def build_world(seed: int) -> World:
    """The world of `seed`: the same names and facts every time.

    Profession, tool and workplace of a person belong to one trade; home, pet and colour are
    independent of it.
    """
    rng = random.Random(seed)
    taken: set[str] = set()
    countries = _names(rng, COUNTRY_COUNT, ("mora", "nia", "dor", "land", "stan"), taken)
    capitals = _names(rng, COUNTRY_COUNT, ("nis", "ten", "holt", "by", "wick"), taken)
    towns = capitals + _names(rng, SPARE_TOWN_COUNT, ("nis", "ten", "holt", "by", "wick"), taken)
    rivers = _names(rng, COUNTRY_COUNT, ("sk", "x", "sh", "ff"), taken)
    people = _names(rng, PEOPLE_COUNT, ("a", "o", "in", "el", "us", "i"), taken)
    strangers = _names(rng, STRANGER_COUNT, ("a", "o", "in", "el", "us", "i"), taken)

    country_relations = _country_relations(capitals, rivers)
    columns = (capitals, rng.sample(rivers, COUNTRY_COUNT))
    facts = [
        Fact(country, relation, columns[column][row] if column < 2 else rng.choice(relation.values))
        for row, country in enumerate(countries)
        for column, relation in enumerate(country_relations)
    ]

    person_relations = _person_relations(towns)
    materials = list(FIELDS) * (PEOPLE_COUNT // len(FIELDS))
    rng.shuffle(materials)
    material = dict(zip(people, materials, strict=True))
    for person in people:
        trade = FIELDS[material[person]]
        for column, relation in enumerate(person_relations):
            facts.append(
                Fact(person, relation, rng.choice(trade[column] if column < 3 else relation.values))
            )
    return World(
        tuple(facts),
        people,
        material,
        strangers,
        person_relations,
        country_relations,
        OBJECT_RELATION,
    )
