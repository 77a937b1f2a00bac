"""Fields that vLLM's users send: refused with their name and a reason, or served."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.embedding_models import tiny_scoring
from tests.live import fleet
from tests.payloads import error, post

COMPLETION = {"prompt": "count", "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 3, "temperature": 0}
RESPONSE = {"input": "count", "max_output_tokens": 3, "temperature": 0}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/responses": RESPONSE}

GENERATION = ("/v1/completions", "/v1/chat/completions")
EVERYWHERE = (*GENERATION, "/v1/responses")
REFUSED: list[tuple[tuple[str, ...], str, object, tuple[object, ...]]] = [
    (GENERATION, "repetition_detection", {"max_pattern_size": 4, "min_count": 3}, ()),
    (GENERATION, "length_penalty", 0.8, (1, 1.0)),
    (EVERYWHERE, "vllm_xargs", {"a": 1}, ({},)),
    (EVERYWHERE, "kv_transfer_params", {"do_remote_decode": True}, ({},)),
    (EVERYWHERE, "ec_transfer_params", {"a": 1}, ({},)),
    (GENERATION, "stream_interval", 8, (1,)),
    (GENERATION, "return_prompt_text", True, (False,)),
    (EVERYWHERE, "media_io_kwargs", {"video": {"num_frames": 40}}, ({},)),
    (EVERYWHERE, "mm_processor_kwargs", {"size": 4}, ({},)),
    (EVERYWHERE, "mm_payload", "none", ("tensors",)),
    (EVERYWHERE, "watermarking", True, (False,)),
    (GENERATION, "regex", "[0-9]+", ()),
    (GENERATION, "use_beam_search", True, (False,)),
    (("/v1/responses",), "enable_response_messages", True, (False,)),
    (("/v1/responses",), "previous_input_messages", [{"role": "user", "content": "a"}], ([],)),
]
"""Routes, a field, a value that asks for something, and those that ask for nothing."""


@pytest.mark.parametrize(
    ("paths", "name", "value", "absent"), REFUSED, ids=[row[1] for row in REFUSED]
)
def test_a_field_that_is_not_served_is_a_400_unless_it_asks_for_nothing(
    url: str, paths: tuple[str, ...], name: str, value: object, absent: tuple[object, ...]
) -> None:
    for path in paths:
        response = post(url, path, {**BODIES[path], name: value})
        found = error(response)
        assert (response.status_code, found["param"]) == (400, name), found
        assert found["message"].startswith(f"{name} is not supported: ")
        for nothing in (None, *absent):
            assert post(url, path, {**BODIES[path], name: nothing}).status_code == 200


@pytest.fixture(scope="module")
def scoring_url() -> Iterator[str]:
    with fleet(tiny_scoring("bert"), task="score") as running:
        yield running.serve()


@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [
        ("padding", "max_length", "do_not_pad"),
        ("instruction", "rank", None),
        ("chat_template_kwargs", {"a": 1}, {}),
    ],
)
def test_a_rank_or_score_refuses_what_would_change_it(
    scoring_url: str, name: str, value: object, nothing: object
) -> None:
    for path, body in (
        ("/v1/rerank", {"query": "ships", "documents": ["wind"]}),
        ("/v1/score", {"text_1": "ships", "text_2": "wind"}),
    ):
        found = error(post(scoring_url, path, {**body, name: value}))
        assert found["param"] == name
        assert post(scoring_url, path, {**body, name: nothing}).status_code == 200


def test_tokenizing_a_chat_takes_no_template_of_the_clients_own(url: str) -> None:
    asked = {"messages": CHAT["messages"]}
    found = error(post(url, "/tokenize", {**asked, "chat_template": "{{ 1 }}"}))
    assert found["param"] == "chat_template"
    assert post(url, "/tokenize", {**asked, "chat_template": None}).status_code == 200


def test_an_answer_has_the_id_its_request_names(url: str) -> None:
    prefixes = {
        "/v1/completions": "cmpl-",
        "/v1/chat/completions": "chatcmpl-",
        "/v1/responses": "",
    }
    for path, prefix in prefixes.items():
        answer = post(url, path, {**BODIES[path], "request_id": "mine:1"}).json()
        assert answer["id"] == prefix + "mine:1"
        for bad in ("", "a b", "x" * 129, "\u00e9"):
            found = error(post(url, path, {**BODIES[path], "request_id": bad}))
            assert found["param"] == "request_id"


def test_two_requests_of_one_name_do_not_meet(url: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(prompt: str) -> Any:
        body = {
            **COMPLETION,
            "prompt": prompt,
            "max_tokens": 24,
            "ignore_eos": True,
            "request_id": "same",
        }
        return post(url, "/v1/completions", body).json()["choices"][0]["text"]

    prompts = ["count the lanterns", "the town on the hill"]
    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, prompts * 2)) == alone * 2


@pytest.mark.parametrize("path", EVERYWHERE)
def test_a_session_may_be_named_as_vllm_names_it(url: str, path: str) -> None:
    assert post(url, path, {**BODIES[path], "session_id": "s"}).status_code == 200
    found = error(post(url, path, {**BODIES[path], "session_id": "", "prompt_cache_key": "s"}))
    assert found["param"] == "session_id"


@pytest.mark.extensions("stages")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/encode", "/v1/images/generations"])
def test_a_priority_of_more_than_32_bits_is_refused_by_name(url: str, path: str) -> None:
    body = {"input": "a", "prompt": "a", "priority": 2**31}
    assert error(post(url, path, body))["param"] == "priority"


@pytest.mark.parametrize("path", [*EVERYWHERE, "/v1/messages"])
def test_a_seed_of_minus_one_is_none_and_others_below_zero_are_seeds(url: str, path: str) -> None:
    body = {**BODIES.get(path, CHAT), "temperature": 1, "ignore_eos": True, "top_k": 200}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 16

    def drawn(seed: int | None) -> str:
        answer = post(url, path, {**body, "seed": seed}).json()
        found = answer.get("choices") or answer.get("output") or answer["content"]
        return str([{**one, "id": None} for one in found])

    assert drawn(-2) == drawn(-2)
    assert len({drawn(-1) for _ in range(4)}) > 1
    assert len({drawn(None) for _ in range(4)}) > 1
