"""Decisions of a published model are those of transformers in float32, but for its rounding."""

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.published.conftest import BEFORE, BEHIND, checkpoint
from tests.published.numbers import FARTHER, FLOOR, Answer, in_float32, logprobs, reference
from tests.published.prompts import GEMMA

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]

STATES = [
    "The lamp came with a broken shade, and I want my money back today.",
    "Thank you, the parcel arrived early and everything in it works.",
    "Whoever packed this forgot two of the three books I had paid for.",
]
ASKED = {
    "Is the customer content?": ["false", "true"],
    "Was something damaged?": ["false", "true"],
    "Which team should answer?": ['"billing"', '"returns"', '"praise"'],
    "How upset is the customer?": ["calm", "annoyed", "angry"],
}


@pytest.fixture(scope="module")
def name() -> str:
    return GEMMA


def question(instructions: str, options: list[str]) -> dict[str, Any]:
    if options == ["false", "true"]:
        return {"type": "predicate", "instructions": instructions}
    if options[0].startswith('"'):
        choices = [{"value": option.strip('"')} for option in options]
        return {"type": "choice", "instructions": instructions, "choices": choices}
    levels = [{"label": option} for option in options]
    return {"type": "score", "instructions": instructions, "levels": levels}


def odds_of(answer: dict[str, Any]) -> list[float]:
    """Logarithms of the probabilities, over that of the first option."""
    if answer["type"] == "predicate":
        shares = [1 - answer["probability"], answer["probability"]]
    else:
        shares = [each["probability"] for each in answer["probabilities"]]
    return [math.log(share / shares[0]) for share in shares[1:]]


def far(found: list[float], exact: list[float]) -> float:
    """Root mean square, in nats."""
    return math.sqrt(
        sum((one - other) ** 2 for one, other in zip(found, exact, strict=True)) / len(exact)
    )


def reads(path: Path) -> tuple[list[Answer], list[list[int]]]:
    """Prompts as the server makes them, and the ids of the labels behind each."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts, labels = [], []
    for state in STATES:
        for instructions, options in ASKED.items():
            lines = [f"Question: {instructions}"]
            lines += [f"{label}: {option}" for label, option in zip("ABC", options, strict=False)]
            lines += ["Answer with the letter of one option only."]
            text = BEFORE + f"{state}\n\n" + "\n".join(lines) + BEHIND
            ids = [
                tokenizer.encode(text + label, add_special_tokens=False)
                for label in "ABC"[: len(options)]
            ]
            prompts.append(Answer(ids[0][:-1], ids[0][-1:], []))
            labels.append([each[-1] for each in ids])
    return prompts, labels


def test_decisions_are_as_near_to_float32_as_those_of_transformers(http: httpx.Client) -> None:
    found: list[float] = []
    positions = 0
    questions = [question(*each) for each in ASKED.items()]
    for state in STATES:
        told = http.post("/v1/decisions", json={"input": state, "questions": questions})
        assert told.status_code == 200, told.text
        found += [odd for answer in told.json()["answers"] for odd in odds_of(answer)]
        positions += told.json()["usage"]["input_tokens"]
    prompts, labels = reads(checkpoint(GEMMA))
    assert positions == sum(len(each.prompt) for each in prompts)

    def odds(model: Any) -> list[float]:
        last = [rows[-1] for rows in logprobs(model, prompts)]
        return [
            float(row[id_] - row[first])
            for row, (first, *others) in zip(last, labels, strict=True)
            for id_ in others
        ]

    with reference(checkpoint(GEMMA)) as model:
        rounded = odds(model)
        with in_float32(model):
            exact = odds(model)
    ours, own = far(found, exact), far(rounded, exact)
    print(f"{ours:.4f} nats, transformers in bfloat16 {own:.4f}")
    assert ours <= FARTHER * own + FLOOR
