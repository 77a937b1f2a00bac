"""`/pooling`, `/classify`, and chats as inputs of `/v1/embeddings`.

Shapes and values as vLLM's users expect them.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch

from tests import embedding_reference as reference
from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.live import Fleet, fleet
from tests.payloads import saved

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}answer : {% endif %}{% if ending is defined %}{{ ending }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "how many ships"},
    {"role": "assistant", "content": "the harbour counts"},
]
WRITTEN = "user : how many ships assistant : the harbour counts "


@pytest.fixture(scope="module")
def bert() -> Iterator[Fleet]:
    with fleet(tiny_embedding("bert")) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(bert: Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    return bert.serve(chat_template=str(template(tmp_path_factory)))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with fleet(tiny_embedding("qwen3")) as running:
        yield running.serve(
            chat_template=str(template(tmp_path_factory)), enable_prompt_embeds=True
        )


@pytest.fixture(scope="module")
def classifier() -> Iterator[str]:
    with fleet(tiny_scoring("distilbert", 3)) as running:
        yield running.serve()


def template(factory: pytest.TempPathFactory) -> Path:
    path = factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=180)


def answered(url: str, path: str, **body: Any) -> dict[str, Any]:
    response = post(url, path, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(response: httpx.Response, param: str, *phrases: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    for phrase in phrases:
        assert phrase in error["message"]


def vectors(body: dict[str, Any], key: str = "embedding") -> npt.NDArray[np.float32]:
    return np.array([item[key] for item in body["data"]], np.float32)


def unit(path: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    vector = reference.vector(path, ids)
    return vector / np.float32(np.linalg.norm(vector))


def ids_of(path: Path, text: str, *, special: bool = True) -> list[int]:
    found: list[int] = reference.tokenizer_of(path)(text, add_special_tokens=special)["input_ids"]
    return found


def test_an_answer_has_every_field_of_vllms(embedder: str) -> None:
    body = answered(embedder, "/v1/embeddings", input="cold wind", request_id="mine")
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    assert (body["id"], body["object"]) == ("embd-mine", "list")
    assert list(body["data"][0])[:3] == ["index", "object", "embedding"]
    tokens = len(ids_of(tiny_embedding("bert"), "cold wind"))
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert answered(embedder, "/pooling", input="a", request_id="mine")["id"] == "pooling-mine"
    refused(post(embedder, "/pooling", input="a", request_id="a b"), "request_id", "visible ASCII")


@pytest.mark.thorough
def test_the_openai_client_decodes_and_vllms_encodings_hold_the_same_numbers(embedder: str) -> None:
    texts = ["cold wind", "the capital of the island"]
    plain = vectors(answered(embedder, "/v1/embeddings", input=texts))
    with openai.OpenAI(base_url=embedder + "/v1", api_key="none", max_retries=0) as client:
        decoded = client.embeddings.create(model="tiny", input=texts)
        assert (np.array([item.embedding for item in decoded.data], np.float32) == plain).all()
    for dtype, width in (
        ("float16", 2),
        ("bfloat16", 2),
        ("fp8_e4m3", 1),
        ("fp8_e5m2", 1),
        ("float32", 4),
    ):
        for order in ("big", "little", "native"):
            options = {"embed_dtype": dtype, "endianness": order}
            body = answered(
                embedder, "/v1/embeddings", input=texts, encoding_format="base64", **options
            )
            encoded = b"".join(base64.b64decode(item["embedding"]) for item in body["data"])
            assert len(encoded) == plain.size * width
            raw = post(embedder, "/v1/embeddings", input=texts, encoding_format="bytes", **options)
            assert raw.headers["content-type"] == "application/octet-stream"
            assert '"end": ' in raw.headers["metadata"]
            only = post(
                embedder, "/v1/embeddings", input=texts, encoding_format="bytes_only", **options
            )
            assert "metadata" not in only.headers
            assert raw.content == only.content == encoded
    assert (np.frombuffer(only.content, np.float32) == plain.ravel()).all()


def test_a_chat_is_embedded_as_its_template_writes_it(embedder: str) -> None:
    path = tiny_embedding("bert")
    wanted = unit(path, ids_of(path, WRITTEN, special=False))
    other = unit(path, ids_of(path, "assistant : x y answer : north", special=False))
    for body in (
        {"messages": CHAT},
        {"input": CHAT},
        {"messages": [CHAT]},
        {"input": [CHAT, CHAT]},
    ):
        found = vectors(answered(embedder, "/v1/embeddings", **body))
        assert np.allclose(found, wanted, atol=1e-5)
    options = {"add_generation_prompt": True, "chat_template_kwargs": {"ending": "north"}}
    asked = [CHAT, [{"role": "assistant", "content": [{"type": "text", "text": "x y"}]}]]
    found = vectors(answered(embedder, "/v1/embeddings", messages=asked, **options))
    assert np.allclose(found[1], other, atol=1e-5)
    cut = answered(embedder, "/v1/embeddings", messages=CHAT, truncate_prompt_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 4
    kept = unit(path, ids_of(path, WRITTEN, special=False)[:4])
    assert np.allclose(vectors(cut)[0], kept, atol=1e-5)
    continued = answered(
        embedder, "/v1/embeddings", messages=CHAT, continue_final_message=True, use_activation=False
    )
    assert continued["usage"]["prompt_tokens"] == len(ids_of(path, WRITTEN.strip(), special=False))


def test_a_chat_gets_the_tokenizers_special_tokens_if_it_asks_for_them(
    embedder: str, qwen3: str
) -> None:
    prefilled = [*CHAT[:1], {"role": "assistant", "content": [{"type": "text", "text": ""}]}]
    for url, name, counts in ((embedder, "bert", 2), (qwen3, "qwen3", 1)):
        path = tiny_embedding(name)
        for messages, written, options in (
            (CHAT, WRITTEN, {}),
            (CHAT, WRITTEN + "answer : ", {"add_generation_prompt": True}),
            (prefilled, "user : how many ships assistant : ", {"continue_final_message": True}),
        ):
            bare = answered(url, "/v1/embeddings", messages=messages, **options)
            asked = {"messages": messages, "add_special_tokens": True, **options}
            found = answered(url, "/v1/embeddings", **asked)
            ids = ids_of(path, written)
            assert found["usage"]["prompt_tokens"] == len(ids)
            assert bare["usage"]["prompt_tokens"] == len(ids) - counts
            assert np.allclose(vectors(found)[0], unit(path, ids), atol=1e-5)
            assert not np.allclose(vectors(bare), vectors(found), atol=1e-3)
            # Both ends of what is cut have them.
            plain = ids_of(path, written, special=False)
            before = ids[: len(ids) - len(plain) - (ids[-1] != plain[-1])]
            after = ids[len(before) + len(plain) :]
            room = 6 - counts
            for side, kept in (("right", plain[:room]), ("left", plain[-room:])):
                cut = {"truncate_prompt_tokens": 6, "truncation_side": side}
                found = answered(url, "/v1/embeddings", **asked, **cut)
                assert found["usage"]["prompt_tokens"] == 6
                assert np.allclose(
                    vectors(found)[0], unit(path, [*before, *kept, *after]), atol=1e-5
                )


def test_embeddings_may_stand_in_a_chat_that_a_decoder_embeds(qwen3: str) -> None:
    path = tiny_embedding("qwen3")
    rows = reference.embedded(path, ids_of(path, "how many ships", special=False))
    part = {"type": "prompt_embeds", "data": saved(torch.from_numpy(rows))}
    mixed = [{"role": "user", "content": [part]}, CHAT[1]]
    text = answered(qwen3, "/v1/embeddings", messages=CHAT)
    found = answered(qwen3, "/v1/embeddings", messages=mixed)
    assert np.allclose(vectors(found), vectors(text), atol=1e-5)
    assert found["usage"] == text["usage"]
    text = answered(qwen3, "/v1/embeddings", messages=CHAT, add_special_tokens=True)
    found = answered(qwen3, "/v1/embeddings", messages=mixed, add_special_tokens=True)
    assert np.allclose(vectors(found), vectors(text), atol=1e-5)
    assert found["usage"] == text["usage"]


@pytest.mark.parametrize(
    ("body", "param", "phrase"),
    [
        ({"messages": []}, "messages", "none of them empty"),
        ({"messages": [CHAT, []]}, "messages", "none of them empty"),
        ({"messages": [CHAT, CHAT[0]]}, "messages", "none of them empty"),
        ({"input": [CHAT, [5]]}, "input", "list of several"),
        ({"messages": CHAT, "input": "x"}, "input", "either input or messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "must be a string"),
        (
            {"messages": CHAT, "add_special_tokens": True, "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
            "the special tokens of add_special_tokens take 2",
        ),
        ({"messages": CHAT, "prompt_name": "query"}, "prompt_name", "as they are"),
        ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "the model's own"),
        ({"messages": CHAT, "media_io_kwargs": {"a": 1}}, "media_io_kwargs", "decoded in one way"),
        (
            {"messages": CHAT, "mm_processor_kwargs": {"a": 1}},
            "mm_processor_kwargs",
            "--mm-processor-kwargs",
        ),
        ({"messages": [CHAT] * 2049}, "messages", "at most 2048"),
        (
            {"messages": [{"role": "user", "content": "the hill " * 40}]},
            "messages",
            "maximum context length",
        ),
        (
            {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "exclude each other",
        ),
        ({"input": "x", "add_generation_prompt": True}, "add_generation_prompt", "of chats"),
        ({"input": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "of chats"),
        ({"input": "x", "padding": "max_length"}, "padding", "without padding"),
        ({"input": "x", "endianness": "big"}, "endianness", "encoding_format is float"),
        (
            {"input": ["x"] * 401, "encoding_format": "bytes"},
            "encoding_format",
            "bytes_only takes more",
        ),
        ({"input": "x", "cache_salt": "s" * 1025}, "cache_salt", "1024"),
    ],
)
def test_what_is_no_chat_or_is_not_served_is_refused_by_name(
    embedder: str, body: dict[str, Any], param: str, phrase: str
) -> None:
    refused(post(embedder, "/v1/embeddings", **body), param, phrase)


def test_pooling_gives_what_the_model_does(embedder: str, classifier: str) -> None:
    path = tiny_embedding("bert")
    ids = ids_of(path, "cold wind")
    body = answered(embedder, "/pooling", input=["cold wind", ids][:1])
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    assert list(body["data"][0])[:3] == ["index", "object", "data"]
    assert (body["data"][0]["object"], body["id"][:8]) == ("pooling", "pooling-")
    assert np.allclose(vectors(body, "data")[0], unit(path, ids), atol=1e-5)
    raw = answered(embedder, "/pooling", input=[ids], use_activation=False, task="embed")
    assert np.allclose(vectors(raw, "data")[0], reference.vector(path, ids), atol=1e-4)
    encoded = post(
        embedder, "/pooling", input=[ids], encoding_format="bytes_only", embed_dtype="float16"
    )
    assert np.allclose(np.frombuffer(encoded.content, np.float16), unit(path, ids), atol=1e-3)
    classes = answered(classifier, "/pooling", input="cold wind", task="classify")
    assert vectors(classes, "data").sum() == pytest.approx(1)
    refused(
        post(embedder, "/pooling", input="x", task="token_classify"),
        "task",
        "token_classify",
        "it does embed and token_embed",
    )
    refused(post(classifier, "/pooling", input="x", task="embed"), "task", "it does classify")
    refused(
        post(embedder, "/pooling", input="x", dimensions=8), "dimensions", "/v1/embeddings shortens"
    )
    refused(post(embedder, "/pooling", data={"a": 1}), "data", "no IO processor")


def test_classes_are_the_softmax_of_the_logits_by_the_models_names(classifier: str) -> None:
    path = tiny_scoring("distilbert", 3)
    body = answered(classifier, "/classify", input=["cold wind", "hello world"])
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    for item, text in zip(body["data"], ("cold wind", "hello world"), strict=True):
        logits = reference.logits(path, text)
        wanted = torch.from_numpy(logits).softmax(0).numpy()
        assert item["probs"] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert list(item) == ["index", "label", "probs", "num_classes"]
        assert (item["label"], item["num_classes"]) == (f"LABEL_{wanted.argmax()}", 3)
    plain = answered(classifier, "/classify", input=ids_of(path, "cold wind"), use_activation=False)
    assert plain["data"][0]["probs"] == pytest.approx(
        reference.logits(path, "cold wind").tolist(), abs=1e-4
    )
    refused(post(classifier, "/score", text_1="a", text_2="b"), "model", "3 labels", "/classify")


@pytest.mark.thorough
def test_a_wrong_route_names_the_right_ones(embedder: str, classifier: str, plain_url: str) -> None:
    message = [{"role": "user", "content": "x"}]
    generating: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": message},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
    }
    for path, body in generating.items():
        refused(
            post(embedder, path, model="tiny", **body),
            "model",
            "makes embeddings",
            "/v1/embeddings",
        )
        refused(
            post(classifier, path, model="tiny", **body), "model", "--task generate", "/classify"
        )
    refused(
        post(embedder, "/classify", input="x"), "model", "no classification head", "/v1/embeddings"
    )
    for path in ("/v1/embeddings", "/pooling", "/classify", "/v1/rerank"):
        asked: dict[str, Any] = (
            {"query": "x", "documents": ["y"]} if "rerank" in path else {"input": "x"}
        )
        refused(post(plain_url, path, **asked), "model", "generates text", "/v1/chat/completions")
