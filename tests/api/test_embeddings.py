"""`/v1/embeddings` as OpenAI's clients use it, and as vLLM's and TEI's users expect it."""

import base64
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch

from inlay.api.openai.embeddings.roles import part_of
from inlay.api.openai.embeddings.route import VectorForm
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.base.errors import InvalidRequestError
from inlay.messages.card import EmbeddingCard
from tests import embedding_reference as reference
from tests.embedding_models import MAX_LENGTH, VOCAB_SIZE, WORDS, tiny_embedding
from tests.live import Fleet, fleet
from tests.payloads import saved

TEXTS = [
    "the harbour town counts its lanterns",
    "hello world",
    "what is the capital of the island",
    "cold wind",
]


@pytest.fixture(scope="module")
def bert() -> Iterator[Fleet]:
    with fleet(tiny_embedding("bert", is_matryoshka=True), task="embed") as running:
        yield running


@pytest.fixture(scope="module")
def url(bert: Fleet) -> str:
    return bert.serve()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def e5() -> Iterator[str]:
    with fleet(tiny_embedding("e5"), task="embed", matryoshka_dimensions=[16]) as running:
        yield running.serve()


@pytest.fixture(scope="module")
def qwen3() -> Iterator[str]:
    with fleet(tiny_embedding("qwen3"), task="embed") as running:
        yield running.serve(enable_prompt_embeds=True)


def different(count: int) -> list[str]:
    """Long texts of which no two are the same to the model."""
    return [
        f"{WORDS[n % 40]} {WORDS[n // 40 % 40]} {WORDS[n // 1600]} {'the hill ' * 29}"
        for n in range(count)
    ]


def ids_of(text: str) -> list[int]:
    found: list[int] = reference.tokenizer_of(tiny_embedding("bert"))(text)["input_ids"]
    return found


def expected(text: str | list[int]) -> npt.NDArray[np.float32]:
    vector = reference.vector(
        tiny_embedding("bert"), ids_of(text) if isinstance(text, str) else text
    )
    return vector / np.float32(np.linalg.norm(vector))


def post(url: str, path: str = "/v1/embeddings", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=180)


def vectors(response: httpx.Response) -> npt.NDArray[np.float32]:
    assert response.status_code == 200, response.text
    body = response.json()
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return np.array([item["embedding"] for item in body["data"]], np.float32)


def refused(response: httpx.Response, param: str | None, *phrases: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for phrase in phrases:
        assert phrase in error["message"]


def test_the_openai_client_gets_the_vectors_of_transformers(client: openai.OpenAI) -> None:
    for encoding in ("float", "base64", None):
        options: dict[str, Any] = {} if encoding is None else {"encoding_format": encoding}
        answer = client.embeddings.create(model="tiny", input=TEXTS, **options)
        assert (answer.object, answer.model) == ("list", "tiny")
        assert (
            answer.usage.prompt_tokens
            == answer.usage.total_tokens
            == sum(len(ids_of(text)) for text in TEXTS)
        )
        for item, text in zip(answer.data, TEXTS, strict=True):
            found: Any = item.embedding
            if encoding == "base64":
                found = np.frombuffer(base64.b64decode(found), "<f4")
            assert reference.cosine(np.array(found, np.float32), expected(text)) > 0.99999


def test_every_form_of_input_gives_the_same_vectors(url: str) -> None:
    ids = [ids_of(text) for text in TEXTS]
    together = vectors(post(url, input=TEXTS))
    assert np.allclose(vectors(post(url, input=ids)), together, atol=1e-6)
    assert np.allclose(vectors(post(url, input=TEXTS[0])), together[:1], atol=1e-5)
    assert np.allclose(vectors(post(url, input=ids[0])), together[:1], atol=1e-5)


def test_base64_is_little_endian_float32(url: str) -> None:
    shown = post(url, input="hello world", encoding_format="base64").json()["data"][0]["embedding"]
    plain = post(url, input="hello world").json()["data"][0]["embedding"]
    assert list(struct.unpack("<48f", base64.b64decode(shown))) == [
        np.float32(value) for value in plain
    ]


def test_shortened_vectors_have_length_one_again(url: str, client: openai.OpenAI) -> None:
    whole = vectors(post(url, input=TEXTS))
    for dimensions in (1, 12, 48):
        found = vectors(post(url, input=TEXTS, dimensions=dimensions))
        assert found.shape == (4, dimensions)
        assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-6)
        cut = whole[:, :dimensions] / np.linalg.norm(whole[:, :dimensions], axis=1, keepdims=True)
        assert np.allclose(found, cut, atol=1e-6)
    assert (
        len(client.embeddings.create(model="tiny", input="cold", dimensions=8).data[0].embedding)
        == 8
    )


def test_dimensions_are_those_the_model_was_trained_for(url: str, e5: str) -> None:
    refused(post(url, input="cold", dimensions=49), "dimensions", "1 to 48", "got 49")
    refused(post(url, input="cold", dimensions=0), "dimensions", "1 to 48")
    refused(post(e5, input="cold", dimensions=17), "dimensions", "16 or 48")
    assert vectors(post(e5, input="cold", dimensions=16)).shape == (1, 16)


def test_vectors_can_be_had_as_long_as_they_are(url: str) -> None:
    raw = reference.vector(tiny_embedding("bert"), ids_of("hello world"))
    for field in ("normalize", "use_activation"):
        options: dict[str, Any] = {field: False}
        (found,) = vectors(post(url, input="hello world", **options))
        assert np.allclose(found, raw, atol=1e-4)
    refused(
        post(url, input="x", normalize=True, use_activation=False), "normalize", "different things"
    )


def test_a_prompt_of_the_model_is_put_before_texts(e5: str) -> None:
    path = tiny_embedding("e5")
    for options, prefix in (({}, "passage : "), ({"prompt_name": "query"}, "query : ")):
        (found,) = vectors(post(e5, input="cold wind", **options))
        ids = reference.tokenizer_of(path)(prefix + "cold wind")["input_ids"]
        assert reference.cosine(found, reference.vector(path, ids)) > 0.99999
    refused(
        post(e5, input="x", prompt_name="other"),
        "prompt_name",
        "no prompt 'other'",
        "passage, query",
    )
    refused(post(e5, input=[[5, 6]], prompt_name="query"), "prompt_name", "before texts")


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("query", "query : "),
        ("search_query", "query : "),
        ("retrieval.query", "query : "),
        ("document", "passage : "),
        ("passage", "passage : "),
        ("search_document", "passage : "),
    ],
)
def test_a_role_chooses_the_prompt_under_the_names_that_clients_send(
    e5: str, name: str, prefix: str
) -> None:
    wanted = vectors(post(e5, input="cold wind", prompt_name=prefix.split()[0]))
    for field in ("role", "input_type"):
        options: dict[str, Any] = {field: name}
        assert np.array_equal(vectors(post(e5, input="cold wind", **options)), wanted)
    refused(
        post(e5, input="x", prompt_name="query", role="document"), "prompt_name", "different roles"
    )


def test_a_role_without_a_prompt_takes_the_default_and_an_empty_prompt_does_not() -> None:
    prompts = {"other": "o: ", "document": ""}
    card = EmbeddingCard(size=1, prompts=prompts, default_prompt="other")
    assert part_of({"role": "query"}, card, "m") == ("query", "o: ")
    assert part_of({"role": "document"}, card, "m") == ("document", "")
    assert part_of({"role": None}, card, "m") == (None, "o: ")
    assert part_of({"role": "other"}, card, "m") == (None, "o: ")


def test_long_texts_are_refused_or_cut_as_asked(url: str) -> None:
    long = " ".join(["the hill"] * MAX_LENGTH)
    refused(
        post(url, input=["x", long]), "input[1]", f"maximum context length is {MAX_LENGTH}", "130"
    )
    refused(post(url, input=[[5] * 65]), "input[0]", "has 65")
    whole = ids_of(long)
    for options, ids in (
        ({"truncate_prompt_tokens": -1}, [*whole[:63], whole[-1]]),
        ({"auto_truncate": True}, [*whole[:63], whole[-1]]),
        ({"auto_truncate": True, "truncate_prompt_tokens": 9}, [*whole[:8], whole[-1]]),
        ({"truncate_prompt_tokens": 9}, [*whole[:8], whole[-1]]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "left"}, [whole[0], *whole[-9:]]),
    ):
        response = post(url, input=long, **options)
        assert response.json()["usage"]["prompt_tokens"] == len(ids)
        assert reference.cosine(vectors(response)[0], expected(ids)) > 0.99999
    (cut,) = vectors(post(url, input=[list(range(5, 40)) * 2], truncate_prompt_tokens=20))
    assert reference.cosine(cut, expected(list(range(5, 25)))) > 0.99999
    refused(post(url, input="x", truncate_prompt_tokens=65), "truncate_prompt_tokens", "1 to 64")


@pytest.mark.parametrize(("setting", "kept"), [(-1, 64), (9, 9), (500, 64)])
def test_a_server_may_cut_long_texts_of_requests_that_do_not_say(
    bert: Fleet, setting: int, kept: int
) -> None:
    url = bert.serve(truncate_prompt_tokens=setting)
    long = " ".join(["the hill"] * MAX_LENGTH)
    whole = ids_of(long)
    response = post(url, input=[long, "x"])
    assert response.json()["usage"]["prompt_tokens"] == kept + len(ids_of("x"))
    wanted = expected([*whole[: kept - 1], whole[-1]])
    assert reference.cosine(vectors(response)[0], wanted) > 0.99999
    own = post(url, input=long, truncate_prompt_tokens=5)
    assert own.json()["usage"]["prompt_tokens"] == 5
    refused(post(url, input=["x", long], auto_truncate=False), "input[1]", "context length is 64")


@pytest.mark.parametrize(
    ("body", "param", "phrase"),
    [
        ({}, "input", "must be given"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "empty string"),
        ({"input": [[5], []]}, "input[1]", "empty"),
        ({"input": ["a", 5]}, "input", "list of several"),
        ({"input": ["a", [5]]}, "input", "list of several"),
        ({"input": [5, [5]]}, "input", "list of several"),
        ({"input": [5, True]}, "input[1]", "bool"),
        ({"input": [[5, False]]}, "input[0][1]", "bool"),
        ({"input": [5.5]}, "input[0]", "float"),
        ({"input": {"text": "a"}}, "input", "object"),
        ({"input": [VOCAB_SIZE]}, "input", f"token id {VOCAB_SIZE} is out of vocabulary"),
        ({"input": [[5], [-1]]}, "input[1]", "out of vocabulary"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "x", "messages": []}, "input", "either input or messages"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype", "encoding_format is float"),
        ({"input": "x", "embed_dtype": "int4"}, "embed_dtype", "int4"),
        ({"input": "x", "input_type": "questions"}, "input_type", "search_query"),
        ({"input": "x", "role": "query", "input_type": "passage"}, "role", "different roles"),
        ({"input": [5], "role": "query"}, "role", "as they are"),
        ({"input": "x", "priority": 1}, "priority", "--scheduling-policy"),
        ({"input": "x", "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"input": "\ud800"}, None, "not valid JSON"),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": "x", "prompt_embeds": "AAAA"}, "prompt_embeds", "--enable-prompt-embeds"),
    ],
)
def test_what_is_no_input_is_refused_by_name(
    url: str, body: dict[str, Any], param: str | None, phrase: str
) -> None:
    response = httpx.post(
        url + "/v1/embeddings",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert phrase in error["message"]
    if param is not None:
        assert error["param"] == param


def test_an_unknown_model_is_not_served(url: str) -> None:
    response = post(url, input="x", model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_that_embeds_generates_nothing_and_the_other_way_round(
    url: str, plain_url: str
) -> None:
    refused(
        post(url, "/v1/completions", prompt="x", max_tokens=1), "model", "does not generate text"
    )
    answer = post(plain_url, input="x")
    refused(answer, "model", "generates text, and makes no embeddings: use POST /v1/completions")
    assert "--task embed" in answer.json()["error"]["message"]
    assert "was started with" not in answer.json()["error"]["message"]


def test_many_texts_come_in_order_through_many_batches(url: str) -> None:
    texts = [f"{'the hill ' * (number % 27)}{TEXTS[number % 4]}" for number in range(600)]
    found = vectors(post(url, input=texts))
    assert found.shape == (600, 48)
    for number in (0, 1, 77, 333, 599):
        assert reference.cosine(found[number], expected(texts[number])) > 0.99999


def test_rows_for_a_decoder_are_embedded_as_the_tokens_they_stand_for(qwen3: str) -> None:
    path = tiny_embedding("qwen3")
    ids = reference.tokenizer_of(path)("the harbour town")["input_ids"]
    rows = reference.embedded(path, ids)
    tensor = saved(torch.from_numpy(rows))
    text = post(qwen3, input="the harbour town")
    embedded = post(qwen3, prompt_embeds=[tensor, tensor])
    assert np.allclose(vectors(embedded), np.repeat(vectors(text), 2, axis=0), atol=1e-5)
    assert embedded.json()["usage"]["prompt_tokens"] == 2 * len(ids)
    refused(post(qwen3, prompt_embeds=tensor, input="x"), "input", "either")
    refused(
        post(qwen3, prompt_embeds=saved(torch.from_numpy(rows[:, :24].copy()))),
        "prompt_embeds",
        "size of tensor must match",
    )


def test_a_chat_has_the_special_tokens_of_a_text_where_they_are_asked_for(tmp_path: Path) -> None:
    """As those models want whose vector is the state of an end token."""
    path = shutil.copytree(tiny_embedding("qwen3"), tmp_path / "with-chats")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": TEXTS[0]}]
    with fleet(path, task="embed") as running:
        url = running.serve()
        asked, text = (
            post(url, messages=messages, add_special_tokens=True),
            post(url, input=TEXTS[0]),
        )
        bare = post(url, messages=messages)
    assert (vectors(asked) == vectors(text)).all()
    assert bare.json()["usage"]["prompt_tokens"] < text.json()["usage"]["prompt_tokens"]


def test_equal_texts_are_computed_once(bert: Fleet) -> None:
    url = bert.serve(embedding_cache_bytes=1 << 20)
    texts = ["cold wind", "cold wind", "hot wind south"]
    first, second = vectors(post(url, input=texts)), vectors(post(url, input=texts[::-1]))
    assert (first == second[::-1]).all()
    assert vectors(post(url, input=texts[0], dimensions=8, cache_salt=None)).shape == (1, 8)
    metrics = httpx.get(url + "/metrics").text
    assert "inlay:embedding_cache_misses_total 2.0" in metrics
    assert "inlay:embedding_cache_hits_total 3.0" in metrics
    assert 'inlay:embedded_texts_total{model_name="tiny"} 7.0' in metrics
    vectors(post(url, input=texts[0], cache_salt="another"))
    assert "inlay:embedding_cache_misses_total 3.0" in httpx.get(url + "/metrics").text


def test_a_client_that_leaves_frees_the_engine(bert: Fleet, url: str) -> None:
    texts = different(2000)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/embeddings", json={"input": texts}, timeout=0.2)
    assert bert.idle_within(60)
    assert vectors(post(url, input="hello world")).shape == (1, 48)


def test_a_request_that_takes_too_long_ends_with_504(bert: Fleet, url: str) -> None:
    texts = different(2000)
    response = httpx.post(
        url + "/v1/embeddings",
        json={"input": texts},
        headers={"X-Request-Timeout": "0.2"},
        timeout=180,
    )
    assert response.status_code == 504
    assert bert.idle_within(60)


def test_the_list_of_models_says_what_may_be_asked(url: str, e5: str) -> None:
    (entry, *_) = httpx.get(url + "/v1/models").json()["data"]
    assert entry["capabilities"] == ["embeddings"]
    assert entry["embedding"]["dimensions"] == "any"
    (entry, *_) = httpx.get(e5 + "/v1/models").json()["data"]
    assert entry["embedding"] == {
        "size": 48,
        "normalize": True,
        "dimensions": [16, 48],
        "prompts": {"query": "query : ", "passage": "passage : "},
        "default_prompt": "passage",
        "outputs": [{"name": "dense", "size": 48}, {"name": "tokens", "size": 48}],
    }


@pytest.mark.thorough
def test_a_length_that_the_engine_does_not_leave_vectors_is_refused() -> None:
    card = EmbeddingCard(size=4, unit=True)
    for asked in (None, True):
        assert VectorForm.of(
            EmbeddingRequest(model="m", input="x", normalize=asked), card, "m"
        ).normalize
    for name in ("normalize", "use_activation"):
        refused = EmbeddingRequest(model="m", input="x")
        setattr(refused, name, False)
        with pytest.raises(InvalidRequestError, match=f"{name} may only be true"):
            VectorForm.of(refused, card, "m")
