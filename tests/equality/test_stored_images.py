"""Images that are stored once: by reference they are what they are in place."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.engine.torch.vision_reference import Picture, generated
from tests.equality.test_images_over_http import (
    FLAGS,
    TOKENS,
    chat,
    counters,
    data_url,
    directory,
    embeds,
    expected,
    ids_of,
    text,
)
from tests.models import tiny
from tests.payloads import error
from tests.serving import Served, serving
from tests.vision_models import vision

ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)
PNG = {"content-type": "image/png"}
MAX_BYTES = 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(
        directory("llava"), *FLAGS, "--max-media-bytes", MAX_BYTES, "--api-key", "one", "two"
    ) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="one", max_retries=0) as client:
        yield client


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def send(
    server: Served, method: str, path: str = "", *, tenant: str = "one", **more: Any
) -> httpx.Response:
    headers = {**key(tenant), **more.pop("headers", {})}
    return httpx.request(
        method,
        f"{server.v1}/prompt_embeds{path}",
        headers=headers,
        timeout=180,
        trust_env=False,
        **more,
    )


def stored(server: Served, picture: Picture, path: str = "", **more: Any) -> dict[str, Any]:
    answer = send(server, "POST", path, content=picture.data, headers=PNG, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def by_ref(id_: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "ref": id_, **more}


def test_an_image_is_described_and_has_one_id_however_it_is_sent(server: Served) -> None:
    first = stored(server, ONE, "?model=m")
    assert first == {
        "object": "image",
        "id": first["id"],
        "format": "PNG",
        "width": 60,
        "height": 50,
        "num_tokens": first["num_tokens"],
        "bytes": len(ONE.data),
        "expires_at": first["expires_at"],
        "pinned": False,
    }
    again = send(server, "POST", json={"data": data_url(ONE.data)}).json()
    assert again["id"] == first["id"]
    assert again["num_tokens"] is None
    assert send(server, "GET", "/" + first["id"]).json()["object"] == "image"
    assert stored(server, ONE, tenant="two")["id"] != first["id"]
    large = Picture(5, 200, 160)
    assert len(large.data) > 64 * 1024  # base64 of it is decoded as it arrives
    sent = send(server, "POST", json={"data": data_url(large.data)}).json()
    assert sent["id"] == stored(server, large)["id"]


def test_the_model_says_that_it_takes_images(server: Served) -> None:
    (model,) = httpx.get(
        server.v1 + "/models", headers=key("one"), timeout=180, trust_env=False
    ).json()["data"]
    assert {"chat", "images", "encode", "prompt_embeds"} <= set(model["capabilities"])
    encoder_id = model["media"].pop("encoder_id")
    assert len(encoder_id) == 32
    assert model["media"] == {
        "max_items": {"image": 3},
        "max_pixels": 40_000_000,
        "max_bytes": MAX_BYTES,
        "embeds": True,
    }


def test_a_reference_is_the_image_wherever_one_may_stand(
    server: Served, client: openai.OpenAI
) -> None:
    one, two = stored(server, ONE)["id"], stored(server, TWO)["id"]
    words = "the harbour town"
    there = ids_of(chat(client, by_ref(one), text(words), by_ref(two, detail="high")))
    assert there == expected("llava", ONE, words, TWO)
    mixed = chat(client, embeds("llava", words), by_ref(two), text(" and "), by_ref(two))
    assert ids_of(mixed) == expected("llava", words, TWO, " and ", TWO)

    given = {"type": "token_ids", "token_ids": [5, 6, 7]}
    parts: Any = [given, by_ref(one), given]
    made: Any = client.completions.create(
        model="m",
        prompt=parts,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert ids_of(made) == generated("llava", [[5, 6, 7], ONE, [5, 6, 7]], TOKENS).ids

    asked: Any = {"type": "input_image", "file_id": one, "detail": "auto"}
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": [asked, {"type": "input_text", "text": words}]}],
        max_output_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    in_place = client.responses.create(
        model="m",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(ONE.data), "detail": "auto"},
                    {"type": "input_text", "text": words},
                ],
            }
        ],
        max_output_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert response.output_text == in_place.output_text


def test_its_rows_are_made_once_for_all_routes(server: Served, client: openai.OpenAI) -> None:
    picture = Picture(21, 48, 44)
    id_ = stored(server, picture)["id"]
    misses = "inlay:image_cache_misses_total"
    before = counters(server)[misses]
    encoded = httpx.post(
        server.v1 + "/encode",
        json={"input": [by_ref(id_), data_url(picture.data)]},
        headers=key("one"),
        timeout=180,
        trust_env=False,
    ).json()["data"]
    assert encoded[0]["image_embeds"] == encoded[1]["image_embeds"]
    for words in ("first", "second"):
        chat(client, text(words), by_ref(id_))
    assert counters(server)[misses] == before + 1


def test_it_is_its_owners_and_gone_when_it_is_deleted(
    server: Served, client: openai.OpenAI
) -> None:
    id_ = stored(server, TWO)["id"]
    with openai.OpenAI(base_url=server.v1, api_key="two", max_retries=0) as other:
        with pytest.raises(openai.NotFoundError, match="not found") as refused:
            chat(other, text("x"), by_ref(id_))
        assert refused.value.param == "messages[0].content[1]"
    assert send(server, "GET", "/" + id_, tenant="two").status_code == 404
    pinned = send(server, "POST", f"/{id_}/pin").json()
    assert (pinned["object"], pinned["pinned"], pinned["expires_at"]) == ("image", True, None)
    assert send(server, "DELETE", "/" + id_).json()["deleted"]
    with pytest.raises(openai.NotFoundError, match="not found"):
        chat(client, by_ref(id_))


def test_a_reference_to_the_other_kind_is_named(server: Served, client: openai.OpenAI) -> None:
    image = stored(server, ONE)["id"]
    rows = base64.b64decode(embeds("llava", "the hill")["data"])
    tensor = send(server, "POST", json={"data": base64.b64encode(rows).decode()}).json()
    assert tensor["object"] == "prompt_embeds"
    with pytest.raises(openai.BadRequestError, match="holds embeddings, not an image") as refused:
        chat(client, by_ref(tensor["id"]))
    assert refused.value.param == "messages[0].content[0]"
    with pytest.raises(openai.BadRequestError, match="is an image") as refused:
        chat(client, {"type": "prompt_embeds", "ref": image})
    assert refused.value.param == "messages[0].content[0]"
    with pytest.raises(openai.BadRequestError, match="without an image_url"):
        chat(client, {**by_ref(image), "image_url": data_url(ONE.data)})


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"", "image/png", 400, "an image is empty"),
        (b"GIF89a", "image/gif", 400, "data: "),
        (b"%!PS-Adobe EPSF", "image/png", 400, "formats that are read"),
        (bytes(MAX_BYTES + 1), "image/png", 400, f"allowed: {MAX_BYTES}"),
        (ONE.data, "application/octet-stream", 400, "must be a torch.Tensor"),
        (ONE.data, "text/plain", 415, "image/*"),
        (b'{"data": "data:image/png,x"}', "application/json", 400, "base64"),
        (b'{"data": "data:image/png;base64,AAA%"}', "application/json", 400, "base64"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_not_stored(
    server: Served, content: bytes, kind: str, status: int, message: str
) -> None:
    answer = send(server, "POST", content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert message in error(answer)["message"]


@pytest.mark.thorough
def test_images_are_stored_without_prompt_embeds_where_a_model_takes_images() -> None:
    with serving(vision("llava"), "--served-model-name", "m") as served:
        id_ = stored(served, ONE)["id"]
        with openai.OpenAI(base_url=served.v1, api_key="one", max_retries=0) as client:
            parts: Any = [{"type": "token_ids", "token_ids": [5]}, by_ref(id_)]
            made = client.completions.create(model="m", prompt=parts, max_tokens=1)
            assert made.usage is not None
            assert made.usage.prompt_tokens > 1
        refused = send(served, "POST", json={"data": "AAAA"})
        assert "You must set --enable-prompt-embeds" in error(refused)["message"]
    with serving(tiny("llama"), "--enable-prompt-embeds") as served:
        refused = send(served, "POST", content=ONE.data, headers=PNG)
        assert refused.status_code == 400
        assert "no model of this server takes images" in error(refused)["message"]
