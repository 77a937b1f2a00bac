"""Hidden states come back over HTTP as transformers has them, to who may read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from inlay.base.errors import InvalidRequestError
from inlay.client import hidden_states
from inlay.engine.settings import EngineSettings
from tests import lifelike
from tests.equality.reference import greedy, model_of, rows_of, tokenizer_of
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.payloads import HIDDEN, TEXT, error, post

TOLERANCE = 2e-4
TOKENS = 5
LAYERS = 2
SETTINGS: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def open_url(llama: Fleet) -> str:
    """A frontend that gives hidden states to everybody."""
    return llama.serve(enable_prompt_embeds=True, enable_hidden_states=True)


@pytest.fixture(scope="module")
def client(open_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=open_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(fleet: Fleet, text: str = TEXT) -> list[int]:
    ids: list[int] = tokenizer_of(fleet.path)(text)["input_ids"]
    return ids


def expected(fleet: Fleet, ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """[positions, 48] by layer."""
    with torch.no_grad():
        states = model_of(fleet.path)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [state[0].numpy() for state in states]


def close(found: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    same = found.shape == right.shape
    return same and bool(np.abs(found - right).max() < TOLERANCE * max(1, np.abs(right).max()))


def span(part: str, prompt: int) -> slice:
    """The positions of `part` in prompt and output."""
    starts = {"prompt": 0, "all": 0, "last": prompt - 1, "output": prompt - 1}
    stops = {"prompt": prompt, "last": prompt}
    return slice(starts[part], stops.get(part, prompt - 1 + TOKENS))


@pytest.mark.parametrize("part", ["prompt", "output", "all", "last"])
@pytest.mark.parametrize("format", ["base64", "float", "safetensors"])
def test_a_completion_has_them_as_transformers_does(
    client: openai.OpenAI, llama: Fleet, part: str, format: str
) -> None:
    asked = {"layers": [0, 1, -1], "of": part, "format": format}
    answer = client.completions.create(
        model="tiny",
        prompt=TEXT,
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"hidden_states": asked, "ignore_eos": True, "return_token_ids": True},
    )
    (choice,) = answer.choices
    prompt = ids_of(llama)
    right = expected(llama, prompt + choice.to_dict()["token_ids"])  # type: ignore[operator]
    found = hidden_states(choice)
    assert [one.layer for one in found] == [0, 1, LAYERS]
    for one in found:
        assert close(one.rows, right[one.layer][span(part, len(prompt))])


def test_a_prompt_is_read_without_any_output(open_url: str, llama: Fleet) -> None:
    body = {**SETTINGS, "max_tokens": 0, "hidden_states": {"of": "last"}}
    completion = post(open_url, "/v1/completions", {**body, "prompt": TEXT}).json()
    (found,) = hidden_states(completion["choices"][0])
    assert close(found.rows, expected(llama, ids_of(llama))[-1][-1:])
    assert completion["usage"]["completion_tokens"] == 0
    chat = post(open_url, "/v1/chat/completions", {**body, "messages": CHAT}).json()
    assert hidden_states(chat["choices"][0])[0].shape == (1, HIDDEN)
    for path, prompt in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", CHAT)):
        fields = prompt if isinstance(prompt, dict) else {"messages": prompt}
        output = {**SETTINGS, **fields, "max_tokens": 0, "hidden_states": {"of": "output"}}
        assert "max_tokens must be at least 1" in error(post(open_url, path, output))["message"]


def test_chats_and_responses_have_them_whole_and_in_streams(open_url: str) -> None:
    asked = {"of": "all", "format": "float"}
    limit = {"max_tokens": TOKENS, "hidden_states": asked}
    whole = post(open_url, "/v1/chat/completions", {**SETTINGS, **limit, "messages": CHAT}).json()
    (right,) = hidden_states(whole["choices"][0])
    assert right.shape == (whole["usage"]["prompt_tokens"] + TOKENS - 1, HIDDEN)
    events = streamed(open_url, "/v1/chat/completions", **limit, messages=CHAT)
    with_states = [
        place
        for place, event in enumerate(events)
        if any("hidden_states" in choice["delta"] for choice in event["choices"])
    ]
    ended = next(
        place for place, event in enumerate(events) if event["choices"][0]["finish_reason"]
    )
    assert with_states == [ended + 1]
    (told,) = hidden_states(events[ended + 1]["choices"][0]["delta"])
    np.testing.assert_allclose(told.rows, right.rows, atol=TOLERANCE)
    limit = {"max_output_tokens": TOKENS, "hidden_states": asked, "input": TEXT}
    response = post(open_url, "/v1/responses", {**SETTINGS, **limit}).json()
    (found,) = hidden_states(response)
    np.testing.assert_allclose(found.rows, right.rows, atol=TOLERANCE)
    last = streamed(open_url, "/v1/responses", **limit)[-1]
    (found,) = hidden_states(last["response"])
    np.testing.assert_allclose(found.rows, right.rows, atol=TOLERANCE)


def streamed(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = post(url, path, {**SETTINGS, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_sglangs_clients_get_the_last_state_as_numbers(open_url: str, llama: Fleet) -> None:
    body = {**SETTINGS, "max_tokens": TOKENS, "prompt": TEXT, "return_token_ids": True}
    for asked in (True, "last"):
        answer = post(open_url, "/v1/completions", {**body, "return_hidden_states": asked}).json()
        (choice,) = answer["choices"]
        right = expected(llama, ids_of(llama) + choice["token_ids"][:-1])[-1][-1]
        assert close(np.array(choice["hidden_states"]), right)
    (event,) = [
        event
        for event in streamed(
            open_url,
            "/v1/chat/completions",
            messages=CHAT,
            max_tokens=TOKENS,
            return_hidden_states=True,
        )
        if "hidden_states" in event["choices"][0]["delta"]
    ]
    assert len(event["choices"][0]["delta"]["hidden_states"]) == HIDDEN
    plain = post(open_url, "/v1/completions", {**body, "return_hidden_states": False}).json()
    assert "hidden_states" not in plain["choices"][0]


def test_a_stop_string_ends_them_with_the_tokens_that_are_shown(
    open_url: str, llama: Fleet
) -> None:
    prompt = ids_of(llama)
    tokens = greedy(llama.path, rows_of(llama.path, prompt), 12)
    stop = tokenizer_of(llama.path).decode(tokens[:6])[-3:]
    body = {**SETTINGS, "prompt": TEXT, "max_tokens": 12, "stop": stop, "return_token_ids": True}
    answer = post(open_url, "/v1/completions", {**body, "hidden_states": {"of": "output"}}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    count = answer["usage"]["completion_tokens"]
    assert count < 12
    (found,) = hidden_states(choice)
    right = expected(llama, prompt + choice["token_ids"])[-1]
    assert close(found.rows, right[len(prompt) - 1 : len(prompt) - 1 + count])


def test_each_choice_has_its_own_and_the_first_those_of_the_prompt(
    open_url: str, llama: Fleet
) -> None:
    body = {
        **SETTINGS, "prompt": [TEXT, "a lantern"], "n": 2, "temperature": 1, "seed": 7,
        "max_tokens": TOKENS, "return_token_ids": True,
    }  # fmt: skip
    both = post(open_url, "/v1/completions", {**body, "hidden_states": {"of": "output"}}).json()
    for choice, text in zip(both["choices"], [TEXT, TEXT, "a lantern", "a lantern"], strict=True):
        ids = ids_of(llama, text)
        right = expected(llama, ids + choice["token_ids"])[-1]
        assert close(hidden_states(choice)[0].rows, right[span("output", len(ids))])
    prompts = post(open_url, "/v1/completions", {**body, "hidden_states": {}}).json()
    shapes = [
        [found["shape"] for found in choice.get("hidden_states", ())]
        for choice in prompts["choices"]
    ]
    lengths = [len(ids_of(llama, text)) for text in (TEXT, "a lantern")]
    assert shapes == [[[lengths[0], HIDDEN]], [], [[lengths[1], HIDDEN]], []]


def test_positions_that_are_cached_are_computed_again(open_url: str, llama: Fleet) -> None:
    text = " ".join(["count the lanterns of the harbour"] * 12)
    body = {**SETTINGS, "prompt": text, "max_tokens": TOKENS}
    first = post(open_url, "/v1/completions", body).json()
    again = post(open_url, "/v1/completions", body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    told = post(open_url, "/v1/completions", {**body, "hidden_states": {}}).json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert told["choices"][0]["text"] == first["choices"][0]["text"]
    assert close(
        hidden_states(told["choices"][0])[0].rows, expected(llama, ids_of(llama, text))[-1]
    )
    # Those of the end alone need its last page only.
    last = post(open_url, "/v1/completions", {**body, "hidden_states": {"of": "last"}}).json()
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    right = expected(llama, ids_of(llama, text))[-1][-1:]
    assert close(hidden_states(last["choices"][0])[0].rows, right)


def test_stored_ones_are_the_prompt_of_another_request_at_once(
    client: openai.OpenAI, llama: Fleet
) -> None:
    """Layer 0 is what the first layer reads, so its states are the prompt once more."""
    settings = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS}
    text = client.completions.create(prompt=TEXT, **settings).choices[0].text  # type: ignore[call-overload]
    for format in ("ref", "safetensors", "float", "base64"):
        answer = client.completions.create(
            prompt=TEXT,
            extra_body={"hidden_states": {"layers": [0, 1], "format": format}},
            **settings,
        )  # type: ignore[call-overload]
        first, second = hidden_states(answer.choices[0])
        assert (first.shape, second.layer) == ((len(ids_of(llama)), HIDDEN), 1)
        again = client.completions.create(**first.completion_args(), **settings)  # type: ignore[call-overload]
        assert again.choices[0].text == text
        other = client.completions.create(**second.completion_args(), **settings)  # type: ignore[call-overload]
        assert other.usage.prompt_tokens == first.shape[0]
        if format == "ref":
            assert str(first.ref).startswith("pe-")
            with pytest.raises(InvalidRequestError, match="are stored as 'pe-"):
                first.rows  # noqa: B018
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [first.chat_part()]}],
        max_tokens=1,
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens > first.shape[0]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layers": [3]}, "hidden_states.layers is [3]; allowed: -3 to 2, at least one, and each once"),
    ({"layers": [-4]}, "hidden_states.layers is [-4]"),
    ({"layers": []}, "hidden_states.layers is []"),
    ({"layers": [2, -1]}, "each once"),
    ({"project": True}, "the workers of `tiny` have no projector (--hidden-projector)"),
    ({"of": "middle"}, "hidden_states.of"),
    ({"format": "npy"}, "hidden_states.format"),
]


@pytest.mark.parametrize(("asked", "says"), WRONG, ids=str)
def test_what_cannot_be_is_refused_with_what_is_allowed(
    open_url: str, asked: dict[str, Any], says: str
) -> None:
    body = {**SETTINGS, "prompt": TEXT, "max_tokens": 1, "hidden_states": asked}
    answer = post(open_url, "/v1/completions", body)
    assert answer.status_code == 400
    assert says in error(answer)["message"].replace("$.", "")


def test_fields_that_contradict_each_other_are_refused(open_url: str) -> None:
    body = {**SETTINGS, "prompt": TEXT, "max_tokens": 1, "hidden_states": {}}
    both = post(open_url, "/v1/completions", {**body, "return_hidden_states": True})
    assert "two forms of one field" in error(both)["message"]
    best = post(open_url, "/v1/completions", {**body, "best_of": 2})
    assert "best_of (2) above n" in error(best)["message"]


def test_an_answer_has_a_bound_that_is_checked_before_anything_is_computed(llama: Fleet) -> None:
    length = len(ids_of(llama))
    size = length * HIDDEN * 4
    url = llama.serve(enable_hidden_states=True, max_hidden_states_bytes=size)
    body = {**SETTINGS, "prompt": TEXT, "max_tokens": 1, "hidden_states": {}}
    assert post(url, "/v1/completions", body).status_code == 200
    answer = post(url, "/v1/completions", {**body, "hidden_states": {"layers": [0, 1]}})
    assert answer.status_code == 400
    assert (
        f"{length} positions and 2 layers may take {2 * size} bytes; allowed: {size}"
        in error(answer)["message"]
    )
    answer = post(url, "/v1/completions", {**body, "n": 2, "hidden_states": {"of": "all"}})
    assert f"{2 * length} positions" in error(answer)["message"]


def test_numbers_in_json_have_a_bound_that_names_the_other_formats(
    open_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.api.generation.hidden_states.MOST_NUMBERS", HIDDEN)
    body = {**SETTINGS, "prompt": TEXT, "max_tokens": TOKENS}
    last = {**body, "hidden_states": {"of": "last", "format": "float"}}
    assert post(open_url, "/v1/completions", last).status_code == 200
    alias = {**body, "return_hidden_states": True}
    assert post(open_url, "/v1/completions", alias).status_code == 200
    answer = post(open_url, "/v1/completions", {**body, "hidden_states": {"format": "float"}})
    assert answer.status_code == 400
    assert "format base64, safetensors or ref takes more" in error(answer)["message"]


def keyed(url: str, key: str, **body: Any) -> httpx.Response:
    return post(
        url, "/v1/completions", {**SETTINGS, "max_tokens": 1, **body}, Authorization=f"Bearer {key}"
    )


def test_only_keys_with_the_right_read_them(llama: Fleet, tmp_path: Path) -> None:
    entries = [
        {"name": "reader", "key": "sk-r", "hidden_states": True},
        {"name": "plain", "key": "sk-p"},
        {"name": "denied", "key": "sk-d", "hidden_states": False},
        {"name": "admin", "key": "sk-a", "admin": True},
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    asked = {"prompt": TEXT, "hidden_states": {}}
    shut, wide = (
        llama.serve(api_key_file=path, enable_hidden_states=flag) for flag in (False, True)
    )
    statuses = [
        [keyed(url, key, **asked).status_code for key in ("sk-r", "sk-p", "sk-d", "sk-a")]
        for url in (shut, wide)
    ]
    assert statuses == [[200, 403, 403, 403], [200, 200, 403, 200]]
    refused = error(keyed(shut, "sk-p", prompt=TEXT, return_hidden_states=True))
    assert "--enable-hidden-states" in refused["message"]
    assert keyed(shut, "sk-p", prompt=TEXT, return_hidden_states=False).status_code == 200
    shown = [
        httpx.get(f"{shut}/v1/models/tiny", headers={"Authorization": f"Bearer {key}"}).json()
        for key in ("sk-r", "sk-p")
    ]
    assert ["hidden_states" in one["capabilities"] for one in shown] == [True, False]


def test_nobody_reads_what_another_tenant_has_stored_or_computed(
    llama: Fleet, tmp_path: Path
) -> None:
    entries = [
        {"name": name, "key": f"sk-{name}", "hidden_states": True} for name in ("one", "two")
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    text = " ".join(["the harbour town counts its lanterns"] * 12)
    for shared in (False, True):
        url = llama.serve(
            api_key_file=path,
            enable_prompt_embeds=True,
            enable_hidden_states=True,
            share_prefix_cache=shared,
        )
        stored = keyed(url, "sk-one", prompt=text, hidden_states={"format": "ref"}).json()
        (one,) = hidden_states(stored["choices"][0])
        told = keyed(url, "sk-two", prompt=text, hidden_states={"of": "prompt"}).json()
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        own = keyed(url, "sk-one", prompt_embeds={"ref": one.ref})
        other = keyed(url, "sk-two", prompt_embeds={"ref": one.ref})
        assert (own.status_code, other.status_code) == (200, 404)


def test_a_projector_makes_them_a_prompt_of_a_model_of_another_width(tmp_path: Path) -> None:
    writer, width = lifelike.text("qwen2"), 192
    projector = torch.nn.Linear(HIDDEN, width)
    file = tmp_path / "projector.safetensors"
    save_file(projector.state_dict(), file)
    other = EngineSettings.of(model=str(writer), served_model_name=["writer"], dtype="float32")
    with fleet(tiny("llama"), hidden_projector=str(file), others=[other]) as running:
        url = running.serve(enable_prompt_embeds=True, enable_hidden_states=True)
        body = {**SETTINGS, "prompt": TEXT, "max_tokens": 0}
        asked = {"project": True, "format": "ref"}
        answer = post(url, "/v1/completions", {**body, "hidden_states": asked}).json()
        (found,) = hidden_states(answer["choices"][0])
        plain = post(url, "/v1/completions", {**body, "hidden_states": {}}).json()
        right = expected(running, ids_of(running))[-1]
        assert close(hidden_states(plain["choices"][0])[0].rows, right)
        assert found.shape == (len(right), width)
        again = post(
            url,
            "/v1/completions",
            {
                **SETTINGS, "model": "writer", "max_tokens": TOKENS, "return_token_ids": True,
                "prompt_embeds": {"ref": found.ref},
            },
        ).json()  # fmt: skip
    with torch.no_grad():
        rows = projector(torch.tensor(right))
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    model = model_of(writer)
    model.generation_config = config
    with torch.no_grad():
        tokens = model.generate(inputs_embeds=rows[None], eos_token_id=None)[0].tolist()
    assert again["choices"][0]["token_ids"] == tokens


def test_a_server_without_a_store_or_embeddings_says_so(llama: Fleet) -> None:
    url = llama.serve(enable_hidden_states=True)
    body = {**SETTINGS, "prompt": TEXT, "max_tokens": 1, "hidden_states": {"format": "ref"}}
    assert (
        "You must set --enable-prompt-embeds"
        in error(post(url, "/v1/completions", body))["message"]
    )
