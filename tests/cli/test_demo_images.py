"""`inlay demo --images`: answers about pictures over HTTP, and snippets that work when pasted."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import BadRequestError, OpenAI
from safetensors.numpy import load_file, save
from scripts.vision_demo.faults import GUESS, ROWS

from inlay.cli.demo_images import asked, compared
from inlay.demo import vision_examples
from tests.cli.test_demo import Shown, demonstrated
from tests.commands import run

pytestmark = pytest.mark.extensions

EXAMPLES = vision_examples()


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    with demonstrated("--images") as shown:
        yield shown


def test_it_shows_pictures_rows_pairs_and_embeddings(shown: Shown) -> None:
    picture, rows, pair, swapped, beside = re.findall(r"^   < (.*)$", shown.text, re.M)
    assert picture == rows == beside == asked().answer
    assert [pair, swapped] == [each.answer for each in compared()]
    assert {pair, swapped} == {"first", "second"}


def test_every_example_is_answered_over_http_as_openai_asks_it(shown: Shown) -> None:
    with OpenAI(base_url=f"{shown.url}/v1", api_key="unused") as client:
        for each in EXAMPLES.examples:
            content: list[Any] = [
                {
                    "type": "image_url",
                    "image_url": {
                        "url": "data:image/png;base64,"
                        + base64.b64encode(EXAMPLES.picture(name).path.read_bytes()).decode()
                    },
                }
                for name in each.pictures
            ]
            answer = client.chat.completions.create(
                model="inlay-demo",
                temperature=0,
                max_tokens=8,
                messages=[
                    {"role": "user", "content": [*content, {"type": "text", "text": each.question}]}
                ],
            )
            assert answer.choices[0].message.content == each.answer, each


def test_rows_that_did_not_all_arrive_show_in_the_answer(shown: Shown) -> None:
    """As in `scripts/vision_demo/faults.py`: the guess is told in place of the picture's digit."""
    picture, question = EXAMPLES.pictures[0], asked().question
    rows = load_file(picture.rows_path)["embeddings"]

    def answer(kind: str, sent: NDArray[np.float32]) -> str | None:
        value = base64.b64encode(save({"embeddings": sent})).decode()
        part = {"type": kind, {"prompt_embeds": "data"}.get(kind, kind): value}
        content: list[Any] = [part, {"type": "text", "text": question}]
        made = client.chat.completions.create(
            model="inlay-demo",
            temperature=0,
            max_tokens=8,
            messages=[{"role": "user", "content": content}],
        )
        return made.choices[0].message.content

    with OpenAI(base_url=f"{shown.url}/v1", api_key="unused") as client:
        for kind in ("image_embeds", "prompt_embeds"):
            assert answer(kind, rows) == str(picture.digit)
            swapped = rows[[0, 1, 2, 12, *range(4, 12), 3, *range(13, ROWS)]]
            assert answer(kind, swapped) == str(GUESS)
        assert answer("prompt_embeds", rows[:-1].copy()) == str(GUESS)
        with pytest.raises(BadRequestError, match="15 rows"):
            answer("image_embeds", rows[:-1].copy())


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["printf", "python"])
def test_the_snippets_answer_when_pasted(begin: str, shown: Shown) -> None:
    printed = shown.text[shown.text.index("Try it:\n\n") + len("Try it:\n\n") :]
    curl, python = printed.split("\n\n", 1)
    assert curl.startswith("printf")
    snippet = curl if begin == "printf" else python
    told: Any = run("bash", "-c", snippet)
    if begin == "printf":
        told = json.loads(told)["choices"][0]["message"]["content"]
    assert told.strip() == asked().answer
