"""The cases of vLLM's own tests of its server, sent to `inlay serve` and to vLLM's server.

The answers are compared field by field.

What may differ stands in `DIFFERENCES`, under the first words of a row of the page's table
"Differences from vLLM". A difference that is found nowhere any more is to go from there.
"""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.engines.vllm import cases
from tests.engines.vllm.beside import ask, differences
from tests.engines.vllm.cases import Case
from tests.engines.vllm.serving import speaking_model, vllm_server
from tests.equality.reference import rows_of, tokenizer_of
from tests.models import THINK
from tests.serving import serving

PAGE = Path(__file__).resolve().parents[3] / "docs" / "from-vllm.md"

DIFFERENCES: dict[str, tuple[str, ...]] = {
    "errors": ("* | error.type: value", "* | error.code: type", "* | error.param: *"),
    "`n` above 1 without sampling": ("* of several choices* | status: 400 and 200",),
    "`tools: []`": ("chat no tools | status: 400 and 200",),
    "`max_tokens` beyond the context": ("completion too long an output | status: 200 and 400",),
    "`echo` of a chat": ("chat echo | status: 200 and 400",),
    "`max_tokens: 0` with `echo`": ("completion echo alone* | *usage.*_tokens: value",),
    "`echo`: `prompt_logprobs` beside `logprobs`; `prompt_token_ids` in a stream": (
        "completion echo* | choices[[]].prompt_logprobs: type",
        "completion echo* stream | * event.choices[[]].prompt_token_ids: type",
    ),
    "`text_offset` with special tokens, parts of characters or tokens called by id": (
        "completion tokens as ids* | *text_offset*",
    ),
    "`bytes` in a chat's logprobs": ("chat tokens as ids* | *bytes*",),
    "`usage.completion_tokens_details` of chats": ("chat * | *usage.completion_tokens_details: *",),
    "`created_cache_tokens` of chats; `cache_creation_input_tokens` of `/v1/messages`": (
        "chat * | *created_cache_tokens: *",
    ),
    "role of an answer": (
        "chat without the turn of the assistant | choices[[]].message.role: value",
    ),
    "JSON that is asked for": (
        "chat held to a schema | choices[[]].message.content: value",
        "chat held to a schema | usage.*_tokens: value",
    ),
    "`prompt_embeds` beside `prompt`": (
        "completion of rows and a* | status: 400 and 200",
        "completion of rows and a text | choices: length",
        "completion of rows and a text | usage.*_tokens: value",
    ),
    "`prompt_token_ids` of a prompt with rows": (
        "completion of rows with ids shown | choices[[]].prompt_token_ids: type",
    ),
}
"""Rows of the table, and patterns of `CASE | DIFFERENCE`."""


@pytest.fixture(scope="module")
def path() -> Path:
    found = speaking_model()
    assert tokenizer_of(found).encode(THINK[0], add_special_tokens=False) == [cases.THINK]
    return found


@pytest.fixture(scope="module")
def theirs(path: Path) -> Iterator[str]:
    """The URL of vLLM's own server."""
    tags = {"reasoning_start_str": THINK[0], "reasoning_end_str": THINK[1]}
    with vllm_server(
        path,
        "--enable-prompt-embeds",
        "--enable-prompt-tokens-details",
        *("--reasoning-config", json.dumps(tags), "--kv-cache-memory-bytes", 8 << 20),
    ) as served:
        yield served.url


@pytest.fixture(scope="module")
def ours(path: Path) -> Iterator[str]:
    """The URL of `inlay serve`, with its own engine."""
    with serving(path, "--served-model-name", "m", "--enable-prompt-embeds") as served:
        yield served.url


def asked(path: Path) -> list[Case]:
    rows = rows_of(path, [40, 41, 42, 43, 44, 45, 46])
    return [
        *cases.completions(),
        *cases.chats(),
        *cases.tokens(),
        *cases.embeds(rows, rows.shape[1]),
    ]


def test_answers_are_vllms_but_for_what_the_page_says(path: Path, theirs: str, ours: str) -> None:
    found = [
        f"{case.id} | {difference}"
        for case in asked(path)
        for difference in differences(
            ask(theirs, case.path, case.body), ask(ours, case.path, case.body)
        )
    ]
    patterns = [pattern for row in DIFFERENCES.values() for pattern in row]
    assert [
        one for one in found if not any(fnmatchcase(one, pattern) for pattern in patterns)
    ] == []
    assert [
        pattern for pattern in patterns if not any(fnmatchcase(one, pattern) for one in found)
    ] == []


def test_cases_have_names_of_their_own(path: Path) -> None:
    names = [case.id for case in asked(path)]
    assert len(names) == len(set(names)) > 150


def test_every_difference_that_is_tolerated_stands_in_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## Differences from vLLM")[1].split("\n## ")[0]
    rows = {
        line.split(" | ")[0].removeprefix("| ")
        for line in table.splitlines()
        if line.startswith("| ")
    }
    assert set(DIFFERENCES) <= rows
