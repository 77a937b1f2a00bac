"""`inlay demo --images`: answers about pictures over HTTP, and snippets that work when pasted."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from inlay.cli.demo_images import asked, compared
from inlay.demo import vision_examples
from tests.cli.test_demo import Shown, demonstrated

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


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["printf", "python"])
def test_the_snippets_answer_when_pasted(begin: str, shown: Shown) -> None:
    printed = shown.text[shown.text.index("Try it:\n\n") + len("Try it:\n\n") :]
    curl, python = printed.split("\n\n", 1)
    assert curl.startswith("printf")
    snippet = curl if begin == "printf" else python
    done = subprocess.run(["bash", "-c", snippet], capture_output=True, text=True, check=True)
    told = done.stdout
    if begin == "printf":
        told = json.loads(told)["choices"][0]["message"]["content"]
    assert told.strip() == asked().answer
