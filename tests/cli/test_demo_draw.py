"""`inlay demo --draw`: the pipeline's pictures, and a command that works when pasted."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from inlay import demo
from inlay.cli.demo_draw import SHOWN, blocks
from tests.cli.test_demo import Shown, demonstrated
from tests.commands import run

pytestmark = pytest.mark.extensions("stages")

EXAMPLES = demo.drawn_examples().examples


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    with demonstrated("--draw") as shown:
        yield shown


def test_it_shows_captions_and_writes_pictures(shown: Shown) -> None:
    assert re.findall(r"^   < ([a-z ]+)$", shown.text, re.M) == [
        one.answer for one in EXAMPLES[:SHOWN]
    ]
    paths = [Path(path) for path in re.findall(r"^   < \[(.*)\]$", shown.text, re.M)]
    assert len(paths) == SHOWN
    for path in paths:
        assert size(path) == (16, 16)
    # No colours where nobody looks.
    assert "\x1b" not in shown.text


@pytest.mark.parametrize("begin", ["curl", "python"])
def test_the_snippets_draw_when_pasted(begin: str, shown: Shown, tmp_path: Path) -> None:
    printed = shown.text[shown.text.index("Try it:\n\n") + len("Try it:\n\n") :]
    curl, python = printed.split("\n\n", 1)
    command = curl if begin == "curl" else python
    run("bash", "-ec", command, cwd=tmp_path)
    assert size(tmp_path / "drawn.png") == (16, 16)


def test_a_picture_in_a_terminal_has_its_colours() -> None:
    image = Image.new("RGB", (2, 4), (10, 20, 30))
    image.putpixel((0, 1), (200, 0, 0))
    file = io.BytesIO()
    image.save(file, "PNG")
    first, second = blocks(file.getvalue())
    assert first.startswith("\x1b[38;2;10;20;30m\x1b[48;2;200;0;0m\u2580")
    assert first.endswith("\x1b[0m")
    assert "200" not in second
