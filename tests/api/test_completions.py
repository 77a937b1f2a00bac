"""`/v1/completions` through the real client, against what `transformers` says."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from inlay.api.generation.sampling import check_together
from inlay.base.errors import InvalidRequestError
from inlay.messages.request import Sampling
from tests.equality.reference import greedy, tokenizer_of
from tests.live import Fleet
from tests.payloads import TEXT, embeds_of, error, post, saved


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(llama: Fleet) -> list[int]:
    return greedy(llama.path, embeds_of(llama), 12)


def ids(fleet: Fleet, text: str = TEXT) -> list[int]:
    found: list[int] = tokenizer_of(fleet.path)(text)["input_ids"]
    return found


GREEDY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "return_token_ids": True,
}


def answers(response: httpx.Response) -> list[list[int]]:
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def test_every_form_of_a_prompt_gives_the_same_tokens(
    llama: Fleet, url: str, expected: list[int]
) -> None:
    rows, tokens = embeds_of(llama), ids(llama)
    half = len(tokens) // 2
    data = saved(rows)
    forms: list[dict[str, Any]] = [
        {"prompt": TEXT},
        {"prompt": tokens},
        {"prompt": [{"type": "text", "text": TEXT}]},
        {"prompt": [{"type": "token_ids", "token_ids": tokens[:half]}, {"type": "prompt_embeds", "data": saved(rows[half:])}]},
        {"prompt": [{"type": "prompt_embeds", "data": saved(rows[:half])}, {"type": "token_ids", "token_ids": tokens[half:]}]},
        {"prompt_embeds": data},
        {"prompt_embeds": data, "prompt": ""},
        {"prompt_embeds": data, "prompt": None},
        {"prompt_embeds": data, "prompt": "it is ignored"},
        {"prompt_embeds": saved(rows[None])},
    ]  # fmt: skip
    for form in forms:
        response = post(url, "/v1/completions", {**GREEDY, **form})
        assert answers(response) == [expected], form.keys()
        assert response.json()["usage"]["prompt_tokens"] == len(tokens)
    lists: list[dict[str, Any]] = [
        {"prompt": [TEXT, TEXT]},
        {"prompt": [tokens, tokens]},
        {"prompt": [[{"type": "prompt_embeds", "data": data}], [{"type": "text", "text": TEXT}]]},
        {"prompt_embeds": [data, data]},
        {"prompt_embeds": saved(torch.stack([rows, rows]))},
    ]
    for form in lists:
        response = post(url, "/v1/completions", {**GREEDY, **form})
        assert answers(response) == [expected, expected]
        assert response.json()["usage"]["prompt_tokens"] == 2 * len(tokens)
        assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]


def test_a_large_tensor_takes_the_fast_way_to_the_same_answer(llama: Fleet, url: str) -> None:
    rows = embeds_of(llama, (TEXT + " ") * 26)
    assert len(saved(rows)) > 64 * 1024
    text = post(url, "/v1/completions", {**GREEDY, "prompt": (TEXT + " ") * 26})
    embeds = post(url, "/v1/completions", {**GREEDY, "prompt_embeds": saved(rows)})
    assert answers(text) == answers(embeds)
    escaped = json.dumps({**GREEDY, "prompt_embeds": saved(rows)}).replace("/", "\\/").encode()
    raw = httpx.post(
        url + "/v1/completions", content=escaped, headers={"content-type": "application/json"}
    )
    assert answers(raw) == answers(text)


def test_the_openai_client_reads_a_completion(
    client: openai.OpenAI, llama: Fleet, expected: list[int]
) -> None:
    answer = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=12, temperature=0, logprobs=3
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == len(ids(llama)) + 12
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs or []) == 12
    for chosen, top in zip(
        choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert chosen == pytest.approx(max(top.values()), abs=1e-6)
    embeds = {"prompt_embeds": saved(embeds_of(llama))}
    again = client.completions.create(
        model="tiny", prompt="", max_tokens=12, temperature=0, extra_body=embeds
    )
    assert again.choices[0].text == choice.text


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt=[TEXT, "It is"], n=2, max_tokens=9, seed=5, logprobs=1
    )
    stream = client.completions.create(
        model="tiny", prompt=[TEXT, "It is"], n=2, max_tokens=9, seed=5, logprobs=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, tokens, reasons = ["", "", "", ""], [[], [], [], []], {}  # type: ignore[var-annotated]
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert reasons == dict(enumerate(choice.finish_reason for choice in whole.choices))
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_choices_of_one_seed_differ_and_repeat(url: str) -> None:
    body = {**GREEDY, "temperature": 1.5, "prompt": TEXT, "n": 3, "seed": 7}
    first, second = (
        answers(post(url, "/v1/completions", body)),
        answers(post(url, "/v1/completions", body)),
    )
    assert first == second
    assert len({tuple(choice) for choice in first}) == 3
    shifted = answers(post(url, "/v1/completions", {**body, "n": 1, "seed": 9}))
    assert shifted == first[2:]
    unseeded = {**body, "n": 1, "seed": None, "max_tokens": 40}
    assert answers(post(url, "/v1/completions", unseeded)) != answers(
        post(url, "/v1/completions", unseeded)
    )


def test_a_stop_string_ends_the_text_before_it_and_the_request_at_once(
    url: str, llama: Fleet
) -> None:
    whole = post(
        url, "/v1/completions", {**GREEDY, "prompt": TEXT, "max_tokens": 60, "ignore_eos": True}
    ).json()
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 3 : len(text) // 3 + 2]
    body = {
        **GREEDY,
        "prompt": TEXT,
        "max_tokens": 450,
        "ignore_eos": True,
        "stop": [stop, "not in there"],
    }
    answer = post(url, "/v1/completions", body).json()
    choice = answer["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) < 60
    assert choice["token_ids"] == whole["choices"][0]["token_ids"][: len(choice["token_ids"])]
    assert llama.idle_within(60)
    included = post(url, "/v1/completions", {**body, "include_stop_str_in_output": True}).json()
    assert included["choices"][0]["text"] == text[: text.index(stop) + len(stop)]
    streamed = httpx.post(url + "/v1/completions", json={**body, "stream": True})
    events = [
        json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_stop_token_ends_the_output_and_is_named(url: str, expected: list[int]) -> None:
    body = {**GREEDY, "prompt": TEXT, "stop_token_ids": [expected[4]]}
    answer = post(url, "/v1/completions", body).json()
    choice = answer["choices"][0]
    cut = expected.index(expected[4]) + 1
    assert choice["token_ids"] == expected[:cut]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected[4])
    assert answer["usage"]["completion_tokens"] == cut


def test_echo_gives_the_prompt_first(url: str) -> None:
    plain = post(url, "/v1/completions", {**GREEDY, "prompt": TEXT}).json()["choices"][0]["text"]
    body = {**GREEDY, "prompt": TEXT, "echo": True}
    assert post(url, "/v1/completions", body).json()["choices"][0]["text"] == TEXT + plain


def test_the_default_is_all_that_fits(url: str) -> None:
    body = {"model": "tiny", "prompt": [5] * 500, "temperature": 0, "ignore_eos": True}
    assert post(url, "/v1/completions", body).json()["usage"]["completion_tokens"] == 12


def test_cached_tokens_are_told_and_tenants_do_not_see_each_others(llama: Fleet) -> None:
    url = llama.serve(api_key=["one", "two"])
    body = {"prompt": [7, 9] * 60, "max_tokens": 1, "temperature": 0}

    def cached(key: str, **more: Any) -> int:
        answer = post(
            url, "/v1/completions", {**body, **more}, authorization=f"Bearer {key}"
        ).json()
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("one") == 0
    assert cached("one") >= 96
    assert cached("two") == 0
    assert cached("one", cache_salt="mine") == 0
    assert cached("one", cache_salt="mine") >= 96
    shared = llama.serve(api_key=["one", "two"], share_prefix_cache=True)
    body["prompt"] = [8, 9] * 60
    url = shared
    assert (cached("one"), cached("two") >= 96) == (0, True)


def test_usage_in_every_event_when_asked(url: str) -> None:
    body = {**GREEDY, "prompt": TEXT, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    text = post(url, "/v1/completions", body).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert events[0]["choices"][0]["prompt_token_ids"]


def test_a_model_may_be_left_out_and_have_other_names(url: str) -> None:
    assert post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 1}).json()["model"] == "tiny"
    assert (
        post(
            url, "/v1/completions", {"model": "org/tiny", "prompt": TEXT, "max_tokens": 1}
        ).status_code
        == 200
    )


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": True}, "max_tokens", "got `bool`"),
    ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
    ({"max_tokens": "5"}, "max_tokens", "got `str`"),
    ({"n": 0}, "n", "at least 1, got 0"),
    ({"seed": 2**63}, "seed", "from -9223372036854775808 to 9223372036854775807, got 9223372036854775808"),
    ({"n": 10**9}, "n", "at most 128"),
    ({"n": 3, "best_of": 2}, "best_of", "at least n (3)"),
    ({"n": 2, "best_of": 3, "stream": True}, "best_of", "not possible when stream"),
    ({"best_of": 129}, "best_of", "at most 128"),
    ({"cache_salt": ""}, "cache_salt", "non-empty string"),
    ({"cache_salt": 5}, "cache_salt", "got `int`"),
    ({"temperature": -0.1}, "temperature", "at least 0, got -0.1"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1, got 0"),
    ({"top_p": 1.01}, "top_p", "got 1.01"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    ({"seed": 2**64}, "seed", "got 18446744073709551616"),
    ({"min_tokens": 20, "max_tokens": 5}, "min_tokens", "at most max_tokens (5), got 20"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20, got 21"),
    ({"logprobs": True}, "logprobs", "got `bool`"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a"] * 65}, "stop", "at most 64"),
    ({"stop_token_ids": [384]}, "stop_token_ids", "id 384 is out of vocabulary"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
    ({"logit_bias": {"384": 1}}, "logit_bias", "out of vocabulary"),
    ({"logit_bias": {"3": 101}}, "logit_bias", "from -100 to 100"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream"),
    ({"response_format": {"type": "xml"}}, "response_format", "must be an object of type"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag is not supported"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one string"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must be true"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is not JSON"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs", "at most 262144"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "both"),
    ({"allowed_token_ids": [5] * 385}, "allowed_token_ids", "has 385 ids; the model has 384"),
    ({"guided_json": {}}, "guided_json", "say structured_outputs.json instead"),
    ({"bad_words": [""]}, "bad_words", "empty word"),
    ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
    ({"bad_words": ["a" * 2049] * 2}, "bad_words", "at most 4096"),
    ({"bad_words": ["a" * 600]}, "bad_words", "at most 1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"allowed_token_ids": [384]}, "allowed_token_ids", "out of vocabulary"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or from 1 to 512, got 0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1, got -2"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "-1 or from 1 to 512, got 513"),
    ({"truncate_prompt_tokens": 4, "truncation_side": "middle"}, "truncation_side", "middle"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20, got -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20, got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available when stream"),
    ({"prompt": [384]}, "prompt", "id 384 is out of vocabulary"),
    ({"prompt": [-1]}, "prompt", "id -1 is out of vocabulary"),
    ({"prompt": [True]}, "prompt[0]", "got `bool`"),
    ({"prompt": [1, "a"]}, "prompt", "begins with a token id and has a string too"),
    ({"prompt": [[1], [2, {"type": "text", "text": "x"}]]}, "prompt[1]", "token ids and parts"),
    ({"prompt": [[]]}, "prompt[0]", "is empty"),
    ({"prompt": ["x"] * 129}, "prompt", "at most 128"),
    ({"prompt": [{"type": "video"}]}, "prompt[0].type", "'video'"),
    ({"prompt": [{"type": "video_url"}]}, "prompt[0].video_url", "must be a string"),
    ({"prompt": [{"type": "input_audio"}]}, "prompt[0].input_audio", "an object with data"),
    ({"prompt": [{"type": "audio_url", "audio_url": "x"}]}, "prompt[0]", "takes no audio"),
    ({"prompt": [{"type": "image_url", "image_url": "x"}]}, "prompt[0]", "takes no images"),
    ({"prompt": [{"type": "text", "txt": "x"}]}, "prompt[0]", "unknown field `txt`: a part is an object with type 'text'"),
    ({"prompt": [{"type": "token_ids"}]}, "prompt[0]", "required field `token_ids`: a part is"),
    ({"prompt_embeds": {"rf": "x"}}, "prompt_embeds", "unknown field `rf`: send base64"),
    ({"prompt": 5}, "prompt", "got `int`"),
    ({"prompt_embeds": 5}, "prompt_embeds", "got `int`"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "phrase"), BAD_FIELDS)
def test_a_field_out_of_range_is_named_with_what_it_was_and_may_be(
    url: str, fields: dict[str, Any], param: str, phrase: str
) -> None:
    response = post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 5, **fields})
    found = error(response)
    assert response.status_code == 400, found
    assert phrase in found["message"]
    assert (found["param"] or "") == param


def test_null_and_unknown_fields_are_as_good_as_absent(url: str, expected: list[int]) -> None:
    names = (
        "n",
        "best_of",
        "stop",
        "logprobs",
        "seed",
        "top_p",
        "top_k",
        "logit_bias",
        "suffix",
        "echo",
        "user",
        "stream",
    )
    body = {
        **GREEDY,
        "prompt": TEXT,
        **dict.fromkeys(names),
        "unknown": {"deep": [1, {}]},
        "top_a": 0.5,
    }
    assert answers(post(url, "/v1/completions", body)) == [expected]


def test_allowed_ids_are_bounded_with_each_choice_counted() -> None:
    sampling = Sampling(max_tokens=1, allowed_token_ids=tuple(range(100_000)))
    check_together(sampling, 10)
    with pytest.raises(
        InvalidRequestError, match="1100000 ids in all, with each of 11 choices; at most 1048576"
    ):
        check_together(sampling, 11)
