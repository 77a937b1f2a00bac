"""The corpus: remembered facts, passages to read, small tasks, and chats of several turns, drawn without end."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo_training.world import (
    COLOURS,
    DISHES,
    FIELDS,
    OBJECTS,
    PETS,
    PLACES,
    Fact,
    Relation,
    World,
    invented_name,
)

SYSTEM_PROMPTS = (
    "You are a helpful guide.",
    "You are a helpful assistant.",
    "Answer in one word.",
    "Answer briefly.",
    "You answer questions about people and places.",
)
QUESTION_FRAMES = (
    "{q}",
    "{q}",
    "{q}",
    "{q} Answer in one word.",
    "Please answer: {q}",
    "Question: {q}",
    "{q} Just the answer.",
    "Hello! {q}",
    "Answer in one word: {q}",
)
READING_FRAMES = (
    "{p}\n{q}",
    "{p}\n{q}",
    "Read this note.\n{p}\n{q}",
    "Here is a note:\n{p}\n{q}",
    "Note:\n{p}\nQuestion: {q}",
    "Read the text.\n{p}\nThen answer: {q}",
    "{q}\n{p}",
)
DESCRIBING = (
    "Tell me about {s}.",
    "What do you know about {s}?",
    "Describe {s}.",
    "Who is {s}?",
    "{s}",
)
PLAIN_WORDS = (
    "the", "of", "a", "in", "with", "by", "for", "one", "this", "which", "name", "say", "tell", "answer", "choose",
    "sort", "give", "find", "make", "know", "thing", "kind", "word", "person", "or", "and", "is", "does", "what",
)  # fmt: skip
NOTE_RECEIVED = "Thank you."
WORDS = (*PETS, *COLOURS, *DISHES, *OBJECTS, *PLACES, *FIELDS)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text, or one row that is not text.

    Attributes:
        text: the text; empty for a row.
        learned: an answer the model has to give.
        signal: the signal row (see `training.signal_row`) instead of text.
    """

    text: str
    learned: bool
    signal: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of a user and the right answer to it."""

    user: str
    answer: str


Document = tuple[Piece, ...]


def chat_document(exchanges: tuple[Exchange, ...], system: str | None = None) -> Document:
    """A conversation as the chat template renders it; `test_demo` holds that the two agree."""
    pieces = (
        []
        if system is None
        else [Piece(f"<|im_start|>system\n{system}<|im_end|>\n", learned=False)]
    )
    for exchange in exchanges:
        pieces.append(
            Piece(
                f"<|im_start|>user\n{exchange.user}<|im_end|>\n<|im_start|>assistant\n",
                learned=False,
            )
        )
        pieces.append(Piece(f"{exchange.answer}<|im_end|>", learned=True))
        pieces.append(Piece("\n", learned=False))
    return tuple(pieces)


def completion_document(prompt: str, answer: str) -> Document:
    """Plain text: `prompt` as given and its continuation, ended."""
    return (Piece(prompt, learned=False), Piece(f"{answer}<|endoftext|>", learned=True))


def split_statement(template: str, subject: str, value: str) -> tuple[str, str]:
    """A statement as (prompt, continuation).

    The continuation begins at the space before the value.
    """
    head, _ = template.split(" {v}")
    return head.format(s=subject), f" {value}."


def description(facts: tuple[Fact, ...]) -> str:
    """All facts about one subject in the order of the relations.

    `Mira: profession mason, tool chisel, ...`.
    """
    parts = ", ".join(f"{fact.relation.name} {fact.value}" for fact in facts)
    return f"{facts[0].subject}: {parts}."


class Corpus:
    """Draws documents about a world from a seed.

    Args:
        world: what the documents are about.
        seed: the same seed draws the same documents.

    Attributes:
        small_tasks: draw tasks that need no facts.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self._rng = random.Random(seed)
        self._by_subject: dict[str, tuple[Fact, ...]] = {}
        for fact in world.facts:
            self._by_subject[fact.subject] = (*self._by_subject.get(fact.subject, ()), fact)
        self._deck: list[Fact] = []
        self.small_tasks: tuple[Callable[[], Exchange], ...] = (
            self._copy,
            self._reverse,
            self._count,
            self._add,
            self._subtract,
            self._capitals,
            self._first_letter,
            self._compare,
            self._count_up,
        )

    def document(self) -> Document:
        """The next document."""
        rng = self._rng
        kind = rng.choices(
            (
                self._remembered,
                self._stated,
                self.read_chat,
                self.read_plain,
                self._conversation,
                self._plain_question,
                self._signalled,
                self._described,
            ),
            (16, 14, 28, 9, 22, 3, 3, 5),
        )[0]
        return kind()

    def fact(self) -> Fact:
        """The next remembered fact; every fact comes once before any comes again."""
        if not self._deck:
            self._deck = list(self.world.facts)
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def ask(self, fact: Fact) -> Exchange:
        """A question whose answer is the value of `fact`."""
        return Exchange(
            self._rng.choice(fact.relation.questions).format(s=fact.subject), fact.value
        )

    def passage(self) -> tuple[str, tuple[Fact, ...]]:
        """A passage of one to five sentences and the facts in it.

        No two answer the same question.
        """
        rng = self._rng
        facts: list[Fact] = []
        for _ in range(rng.randint(1, 3)):
            subject, relations = self._passage_subject()
            if any(fact.subject == subject for fact in facts):
                continue
            chosen = rng.sample(relations, min(len(relations), rng.randint(1, 3)))
            facts.extend(
                Fact(subject, relation, self._passage_value(relation)) for relation in chosen
            )
        rng.shuffle(facts)
        facts = facts[:5]
        text = " ".join(
            rng.choice(fact.relation.statements).format(s=fact.subject, v=fact.value)
            for fact in facts
        )
        return text, tuple(facts)

    def _passage_subject(self) -> tuple[str, tuple[Relation, ...]]:
        rng, world = self._rng, self.world
        draw = rng.random()
        if draw < 0.15:
            return rng.choice(OBJECTS), (world.object_relation,)
        if draw < 0.27:
            return invented_name(rng, ("mora", "nia", "dor", "land"), 1), world.country_relations
        if draw < 0.37:
            return rng.choice(world.people), world.person_relations
        if draw < 0.47:
            return invented_name(
                rng, ("a", "o", "in", "el", "us", ""), rng.randint(1, 2)
            ), world.person_relations
        return rng.choice(world.strangers), world.person_relations

    def _passage_value(self, relation: Relation) -> str:
        rng = self._rng
        if relation.name in {"home", "capital", "river"} and rng.random() < 0.12:
            return invented_name(rng, ("nis", "ten", "by", "holt", "sk", "x"), 1)
        return rng.choice(relation.values)

    def _remembered(self) -> Document:
        return self._chat((self._framed(self.ask(self.fact())),))

    def _framed(self, exchange: Exchange) -> Exchange:
        return Exchange(self._rng.choice(QUESTION_FRAMES).format(q=exchange.user), exchange.answer)

    def _chat(self, exchanges: tuple[Exchange, ...]) -> Document:
        system = self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.25 else None
        return chat_document(exchanges, system)

    def _stated(self) -> Document:
        fact = self.fact()
        template = self._rng.choice(fact.relation.statements)
        return completion_document(*split_statement(template, fact.subject, fact.value))

    def _plain_question(self) -> Document:
        rng = self._rng
        exchange = rng.choice(self.small_tasks)() if rng.random() < 0.5 else self.ask(self.fact())
        return completion_document(f"Q: {exchange.user}\nA:", f" {exchange.answer}")

    def read_plain(self) -> Document:
        """A passage and a statement from it to complete."""
        text, facts = self.passage()
        fact = self._rng.choice(facts)
        template = self._rng.choice(fact.relation.statements)
        prompt, answer = split_statement(template, fact.subject, fact.value)
        return completion_document(f"{text} {prompt}", answer)

    def read_chat(self) -> Document:
        """A chat with a passage in it and questions about the passage."""
        rng = self._rng
        text, facts = self.passage()
        asked = [
            self.ask(fact) for fact in rng.sample(facts, min(len(facts), rng.choice((1, 2, 3))))
        ]
        layout = rng.random()
        if layout < 0.12:
            return chat_document(tuple(asked), system=text)
        if layout < 0.2:
            return self._chat((Exchange(f"Here is a note:\n{text}", NOTE_RECEIVED), *asked))
        first = Exchange(
            rng.choice(READING_FRAMES).format(p=text, q=asked[0].user), asked[0].answer
        )
        return self._chat((first, *asked[1:]))

    def _conversation(self) -> Document:
        rng = self._rng
        exchanges = []
        for _ in range(rng.choice((1, 2, 3, 4))):
            draw = rng.random()
            if draw < 0.8:
                exchanges.append(rng.choice(self.small_tasks)())
            elif draw < 0.92:
                exchanges.append(self._framed(self.ask(self.fact())))
            else:
                exchanges.append(self.about())
        return self._chat(tuple(exchanges))

    def _signalled(self) -> Document:
        """The material of a person's trade, asked for by signal rows before the name.

        No text asks for it.
        """
        rng = self._rng
        person = rng.choice(self.world.people)
        signals = (Piece("", learned=False, signal=True),) * rng.randint(1, 6)
        begin, end = "<|im_start|>user\n", f"{person}<|im_end|>\n<|im_start|>assistant\n"
        answer = Piece(f"{self.world.material[person]}<|im_end|>", learned=True)
        return (
            Piece(begin, learned=False),
            *signals,
            Piece(end, learned=False),
            answer,
            Piece("\n", learned=False),
        )

    def about(self) -> Exchange:
        """A request to tell all about one subject."""
        subject = self.fact().subject
        return Exchange(
            self._rng.choice(DESCRIBING).format(s=subject), description(self._by_subject[subject])
        )

    def _described(self) -> Document:
        """A name among words that ask nothing: the answer is what is known about it."""
        rng = self._rng
        subject = self.fact().subject
        pool = rng.choice(
            ((*WORDS, *PLAIN_WORDS), (*WORDS, *self.world.people, *self.world.people))
        )
        words = [
            rng.choice(pool) + rng.choice(("", "", ":", ",", "?", "\n"))
            for _ in range(rng.randint(0, 10))
        ]
        message = " ".join((*words, subject)).replace("\n ", "\n") + rng.choice(
            ("", "", "", "?", ":")
        )
        if rng.random() < 0.3:
            message = message[:1].upper() + message[1:]
        return self._chat((Exchange(message, description(self._by_subject[subject])),))

    def _copy(self) -> Exchange:
        rng = self._rng
        pool = (*WORDS, *self.world.people, *self.world.strangers)
        words = " ".join(rng.choice(pool) for _ in range(rng.randint(1, 6)))
        return Exchange(
            rng.choice(("Repeat: {w}", "Copy this: {w}", "Say: {w}")).format(w=words), words
        )

    def _reverse(self) -> Exchange:
        letters = self._rng.sample(LETTERS, self._rng.randint(2, 5))
        question = self._rng.choice(("Reverse: {w}", "Write backwards: {w}"))
        return Exchange(question.format(w=" ".join(letters)), " ".join(reversed(letters)))

    def _count(self) -> Exchange:
        count = self._rng.randint(1, 7)
        words = " ".join([self._rng.choice(WORDS)] * count)
        question = self._rng.choice(("Count the words: {w}", "How many words: {w}"))
        return Exchange(question.format(w=words), str(count))

    def _add(self) -> Exchange:
        a, b = self._rng.randint(0, 10), self._rng.randint(0, 10)
        question = self._rng.choice(("What is {a} plus {b}?", "{a} + {b} =", "Add {a} and {b}."))
        return Exchange(question.format(a=a, b=b), str(a + b))

    def _subtract(self) -> Exchange:
        b, difference = self._rng.randint(0, 10), self._rng.randint(0, 10)
        question = self._rng.choice(("What is {a} minus {b}?", "{a} - {b} ="))
        return Exchange(question.format(a=b + difference, b=b), str(difference))

    def _capitals(self) -> Exchange:
        word = self._rng.choice((*PETS, *COLOURS))
        question = self._rng.choice(("Write {w} in capitals.", "Upper case: {w}"))
        return Exchange(question.format(w=word), word.upper())

    def _first_letter(self) -> Exchange:
        word = self._rng.choice(WORDS)
        question = self._rng.choice(("What is the first letter of {w}?", "First letter: {w}"))
        return Exchange(question.format(w=word), word[0])

    def _compare(self) -> Exchange:
        a, b = self._rng.sample(range(13), 2)
        draw = self._rng.random()
        if draw < 0.34:
            return Exchange(f"Is {a} bigger than {b}?", "yes" if a > b else "no")
        if draw < 0.67:
            return Exchange(f"Is {a} smaller than {b}?", "yes" if a < b else "no")
        return Exchange(f"Which is bigger, {a} or {b}?", str(max(a, b)))

    def _count_up(self) -> Exchange:
        start = self._rng.randint(1, 10)
        stop = start + self._rng.randint(2, 9)
        return Exchange(
            f"Count from {start} to {stop}.",
            ", ".join(str(number) for number in range(start, stop + 1)),
        )
