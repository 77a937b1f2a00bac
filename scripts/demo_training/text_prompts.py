"""Two hundred text prompts for the soft prompt's task.

The serious attempts it is measured against.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.demo_training.world import FIELDS

TURN = "<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\n"
PROMPT_COUNT = 200


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The user's message with `{s}` where the input stands."""

    template: str

    def fill(self, name: str) -> str:
        """The message for the input `name`."""
        return self.template.replace("{s}", name)


def _questions() -> list[str]:
    subjects = (
        "What material does {s} work with?",
        "Which material does {s} use?",
        "What is the material of {s}?",
        "What is {s}'s material?",
        "Tell me the material of {s}.",
        "{s} works with which material?",
        "Which material belongs to the profession of {s}?",
        "What material belongs to the trade of {s}?",
        "What does {s} work with?",
        "What does {s} make things of?",
        "What is the trade of {s}?",
        "Which material does the tool of {s} work?",
        "Which material do you find at the workplace of {s}?",
        "What kind of things does {s} make?",
    )
    options = ", ".join(list(FIELDS)[:-1]) + " or " + list(FIELDS)[-1]
    frames = (
        "{q}",
        "{q} Answer in one word.",
        "Answer in one word: {q}",
        "Question: {q}",
        "{q} Just the answer.",
        "{q} " + options.capitalize() + "?",
        "Choose one of these: " + options + ". {q}",
    )
    return [frame.format(q=question) for question, frame in itertools.product(subjects, frames)]


def _instructions() -> list[str]:
    options = " ".join(FIELDS)
    return [
        "Name the material: {s}",
        "Material: {s}",
        "Stone, wood, cloth, metal or bread: {s}",
        f"One of {options}: {{s}}",
        "Sort {s} by trade.",
        "Which of these: " + options + "? {s}",
        "The material of {s} is",
        "{s} works with",
        "{s} makes things of",
        "A person with the trade of {s} works with",
        "The profession of {s} is a trade of",
        (
            "If {s} is a mason, say stone. If {s} is a carpenter, say wood. If {s} is a weaver, say cloth. "
            "If {s} is a smith, say metal. If {s} is a baker, say bread."
        ),
        (
            "A mason works with stone. A carpenter works with wood. A weaver works with cloth. A smith works with "
            "metal. A baker works with bread.\nWhat does {s} work with?"
        ),
        (
            "A mason uses stone. A joiner uses wood. A tailor uses cloth. A smith uses metal. A cook uses bread.\n"
            "{s} uses"
        ),
        "What is the profession of {s}? Name the material of it.",
        "Where does {s} work? Name the material.",
        "What tool does {s} use? Name the material.",
    ]


def _examples(tuning: Sequence[tuple[str, str]], rng: random.Random) -> list[str]:
    layouts = (
        ("{s}: {a}\n", "{s}:"),
        ("{s} {a}\n", "{s}"),
        ("{s} works with {a}. ", "{s} works with"),
        ("The material of {s} is {a}. ", "What is the material of {s}?"),
        (
            "Q: What material does {s} work with?\nA: {a}\n",
            "Q: What material does {s} work with?\nA:",
        ),
        (
            "What material does {s} work with?" + TURN.replace("{answer}", "{a}"),
            "What material does {s} work with?",
        ),
        ("{s}" + TURN.replace("{answer}", "{a}"), "{s}"),
    )
    prompts = []
    for count in (1, 3, 5, 10) * 4:
        for shown, asked in layouts:
            chosen = rng.sample(list(tuning), count)
            prompts.append(
                "".join(shown.format(s=name, a=answer) for name, answer in chosen) + asked
            )
    return prompts


def text_prompts(tuning: Sequence[tuple[str, str]], seed: int) -> tuple[TextPrompt, ...]:
    """Instructions in the model's own style, statements to complete, and examples as lists and as turns.

    Args:
        tuning: (input, answer) pairs the examples are taken from; the same the soft prompt was
            tuned on.
        seed: for the choice of examples.

    Returns:
        `PROMPT_COUNT` different prompts.
    """
    rng = random.Random(seed)
    texts = [*_questions(), *_instructions()]
    examples = list(dict.fromkeys(_examples(tuning, rng)))
    texts.extend(examples[: PROMPT_COUNT - len(texts)])
    return tuple(TextPrompt(text) for text in texts)
