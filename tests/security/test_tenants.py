"""The prefix cache does not reveal one tenant's prompts to another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inlay.messages.card import Stats
from inlay.messages.commands import ReadStats
from tests.equality.reference import rows_of, tokenizer_of
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.payloads import saved
from tests.security.company import settings

KEYS = ["key-of-a", "key-of-b"]
A, B = ({"authorization": f"Bearer {key}"} for key in KEYS)
PAGE = 16
LENGTH = 4 * PAGE


@pytest.fixture(scope="module")
def path() -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Fleet]:
    with fleet(path) as running:
        yield running


@pytest.fixture(scope="module")
def apart(served: Fleet) -> str:
    return served.serve(api_key=KEYS, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def shared(served: Fleet) -> str:
    return served.serve(api_key=KEYS, enable_prompt_embeds=True, share_prefix_cache=True)


def secrets(path: Path, number: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """A prompt of four pages and a bit that nobody sent before, in every form, beside its first two pages and a bit."""
    ids = tokenizer_of(path).encode("the harbour town counts its lanterns every night ") * 8
    ids = [number + 10, *ids][: LENGTH + 1]
    rows, short = rows_of(path, ids), 2 * PAGE + 1
    begun = {"type": "token_ids", "token_ids": ids[:20]}
    return {
        "ids": ({"prompt": ids}, {"prompt": ids[:short]}),
        "rows": ({"prompt_embeds": saved(rows)}, {"prompt_embeds": saved(rows[:short])}),
        "both": (
            {"prompt": [begun, {"type": "prompt_embeds", "data": saved(rows[20:])}]},
            {"prompt": [begun, {"type": "prompt_embeds", "data": saved(rows[20:short])}]},
        ),
    }


def cached(url: str, key: dict[str, str], form: dict[str, Any], **more: Any) -> int:
    """Return the cached tokens of a prompt, as the response reports them."""
    body = {**form, **settings(1), **more}
    response = httpx.post(url + "/v1/completions", json=body, headers=key, timeout=180)
    assert response.status_code == 200, response.text
    number: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def engine_hits(served: Fleet) -> int:
    """Positions the engine has taken from its cache so far, whoever asked."""

    async def read() -> int:
        (worker,) = served.plane.workers()
        stats: Stats = await worker.call(ReadStats())
        return stats.cached_tokens

    return served.run(read())


FORMS = ["ids", "rows", "both"]


@pytest.mark.parametrize("form", FORMS)
def test_what_one_tenant_asked_is_not_cached_for_another(
    served: Fleet, apart: str, path: Path, form: str
) -> None:
    whole, beginning = secrets(path, FORMS.index(form))[form]
    assert cached(apart, A, whole) == 0
    assert cached(apart, A, whole) == LENGTH
    before = engine_hits(served)
    # Guesses of the whole and of a part: none is told, and none is computed any faster, as nothing
    # is reused.
    assert cached(apart, B, beginning) == 0
    assert cached(apart, B, whole, cache_salt="another") == 0
    assert engine_hits(served) == before
    # Its own guesses are B's own prompts from then on.
    assert cached(apart, B, beginning) == 2 * PAGE
    assert cached(apart, A, whole) == LENGTH


@pytest.mark.parametrize("form", FORMS)
def test_a_salt_separates_prompts_of_one_tenant_and_never_reaches_another_s(
    served: Fleet, apart: str, path: Path, form: str
) -> None:
    whole, _ = secrets(path, 10 + FORMS.index(form))[form]
    assert cached(apart, A, whole, cache_salt="x") == 0
    assert cached(apart, A, whole, cache_salt="x") == LENGTH
    assert cached(apart, A, whole, cache_salt="y") == 0
    assert cached(apart, A, whole) == 0
    before = engine_hits(served)
    for salt in ("x", "/x", "y", A["authorization"], " "):
        assert cached(apart, B, whole, cache_salt=salt) == 0
    assert engine_hits(served) == before


@pytest.mark.parametrize("form", FORMS)
def test_tenants_share_when_the_operator_says_so_and_a_salt_still_separates(
    shared: str, path: Path, form: str
) -> None:
    whole, _ = secrets(path, 20 + FORMS.index(form))[form]
    assert cached(shared, A, whole) == 0
    assert cached(shared, B, whole) == LENGTH
    assert cached(shared, B, whole, cache_salt="x") == 0
    assert cached(shared, A, whole, cache_salt="x") == LENGTH


def test_one_key_alone_is_one_tenant(served: Fleet, path: Path) -> None:
    url = served.serve(api_key=KEYS[:1], enable_prompt_embeds=True)
    whole, _ = secrets(path, 30)["rows"]
    assert cached(url, A, whole) == 0
    assert cached(url, A, whole) == LENGTH


def test_the_numbers_everyone_may_read_name_no_tenant_and_no_prompt(apart: str, path: Path) -> None:
    whole, _ = secrets(path, 40)["ids"]
    cached(apart, A, whole, user="someone", cache_salt="a-salt")
    exposed = httpx.get(apart + "/metrics").text + httpx.get(apart + "/openapi.json").text
    for private in (*KEYS, "someone", "a-salt", "lanterns"):
        assert private not in exposed
