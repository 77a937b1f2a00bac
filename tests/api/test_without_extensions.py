"""The core alone, as with `--extensions ''`: text, and one line for all that is not."""

import pytest

from inlay.api.app import routes
from inlay.api.generation.chat import kind_of
from inlay.api.schema.chat import ChatRequest
from inlay.base.errors import InvalidRequestError
from inlay.extension import VARIABLE
from tests.router.standing import CARD


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def chat(**fields: object) -> ChatRequest:
    return ChatRequest(messages=[], model="m", **fields)  # type: ignore[arg-type]


def test_there_are_no_routes_of_images_speech_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {operation.path for operation, _ in routes()}
    monkeypatch.delenv(VARIABLE)
    more = {operation.path for operation, _ in routes()}
    files = {f"/v1/files{rest}" for rest in ("", "/{id}", "/{id}/content")}
    batches = {f"/v1/batches{rest}" for rest in ("", "/{id}", "/{id}/cancel")}
    made = {"/v1/images/generations", "/v1/audio/speech"}
    kept = {f"/v1/responses/{{id}}{rest}" for rest in ("", "/cancel", "/input_items")}
    items = ("", "/{id}", "/{id}/items", "/{id}/items/{item}")
    kept |= {f"/v1/conversations{rest}" for rest in items}
    assert more - paths == made | files | batches | kept


def test_a_chat_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(chat(), CARD) is None
    assert kind_of(chat(modalities=["text"]), CARD) is None
    monkeypatch.delenv(VARIABLE)
    assert kind_of(chat(), CARD) is None
    assert kind_of(chat(modalities=["text"]), CARD) is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"modalities": ["text", "image"]}, r'modalities is .*; allowed: \["text"\]'),
        ({"modalities": ["text"], "size": "64x64"}, "size: this server makes text alone"),
        ({"guidance_scale": 2.0}, "guidance_scale: this server makes text alone"),
    ],
)
def test_what_is_no_text_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        kind_of(chat(**fields), CARD)
    assert refused.value.param == next(reversed(fields))
