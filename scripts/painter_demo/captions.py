"""Captions of pictures of digits, and questions whose answer is a caption."""

import random

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
THINGS = {
    "red": ("blood", "a tomato", "a fire engine", "a strawberry"),
    "green": ("grass", "a leaf", "a frog", "a cucumber"),
    "blue": ("the sea", "the sky", "a sapphire", "a whale"),
    "orange": ("a carrot", "a pumpkin", "a fox", "an apricot"),
    "purple": ("a plum", "an aubergine", "lavender", "an amethyst"),
    "black": ("coal", "the night", "a raven", "ink"),
}
"""Things of each colour."""

_CAPTIONS = ("a {colour} {digit}", "{colour} {digit}", "{digit} in {colour}")
_QUESTIONS = (
    "What is {sum}, in the colour of {thing}?",
    "Draw {sum} in the colour of {thing}.",
    "Paint {sum}, please, as {thing} is coloured.",
)


def answer(digit: int, colour: str) -> str:
    """The caption that the writer answers with."""
    return f"{colour} {WORDS[digit]}"


def caption(digit: int, colour: str, rng: random.Random) -> str:
    """One of the captions of a picture."""
    word = rng.choice((WORDS[digit], str(digit)))
    return rng.choice(_CAPTIONS).format(colour=colour, digit=word)


def question(digit: int, colour: str, rng: random.Random) -> str:
    """A question that `answer(digit, colour)` is the answer to."""
    kind, first = rng.randrange(3), rng.randint(0, digit)
    if kind == 0:
        words = f"{WORDS[first]} plus {WORDS[digit - first]}"
    elif kind == 1:
        first = rng.randint(digit, 9)
        words = f"{WORDS[first]} minus {WORDS[first - digit]}"
    else:
        words = f"the digit {WORDS[digit]}"
    return rng.choice(_QUESTIONS).format(sum=words, thing=rng.choice(THINGS[colour]))
