"""Files of texts: one a line, or a JSON object a line with names and the right answer."""

import msgspec
import numpy as np

from inlay.audit.prompts import Text
from inlay.errors import InvalidRequestError

MAX_CHARACTERS = 16_384
"""Of a text."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    names: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None
    answer: str | None = None


def read_texts(data: bytes, name: str) -> list[Text]:
    """The texts of a file; empty lines are left out.

    A file whose first line begins with a brace is one JSON object a line: `text`, and where known
    `names` and `others`, entities that stand in it, and `answer`.

    Raises:
        InvalidRequestError: not UTF-8, a line that is no such object, a text that is too long.
    """
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8 text: {error.reason}") from error
    objects = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = _of_object(line) if objects else Text(line)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(
                f"{name}, line {number}: {error}; a line is "
                '{"text": ..., "names": [...], "others": [...], "answer": ...}, all but the text '
                "optional"
            ) from error
        if len(text.text) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"{name}, line {number} has {len(text.text)} characters; allowed: at most "
                f"{MAX_CHARACTERS}. Cut it into pieces"
            )
        found.append(text)
    return found


def split(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of a random third, to be read, and of the rest, for attackers to learn from."""
    order = np.random.default_rng([seed, 0]).permutation(count).tolist()
    return sorted(order[: count // 3]), sorted(order[count // 3 :])


def _of_object(line: str) -> Text:
    read = msgspec.json.decode(line, type=_Line)
    return Text(read.text, read.names, read.others, read.answer)
