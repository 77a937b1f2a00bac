"""Decisions: OpenAI's route, vLLM's tests of it, and the probabilities themselves."""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from inlay.render import Renderer, labels
from inlay.render.labels import labels_behind
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.payloads import embeds_of, error, post, saved

STATE = "count the lanterns of the harbour"
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is it damaged?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "name": "team",
    "instructions": "Which team?",
    "choices": [{"value": True}, {"value": "true"}, {"value": False, "description": "none"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "How upset?",
    "levels": [{"label": "low"}, {"label": "medium"}, {"label": "high"}],
}


def ask(url: str, **body: Any) -> dict[str, Any]:
    response = post(url, "/v1/decisions", {"input": STATE, "questions": [PREDICATE], **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(url: str, **body: Any) -> dict[str, Any]:
    response = post(url, "/v1/decisions", {"input": STATE, "questions": [PREDICATE], **body})
    assert response.status_code == 400, response.text
    return error(response)


def choices(count: int) -> list[dict[str, Any]]:
    return [{**CHOICE, "choices": [{"value": str(index)} for index in range(count)]}]


def prompt_of(path: Any, state: str, lines: list[str]) -> str:
    renderer = Renderer.load(path)
    text = "\n".join([*lines, "Answer with the letter of one option only."])
    ids = renderer.chat([{"role": "user", "content": f"{state}\n\n{text}"}]).token_ids()
    return renderer.decode(ids)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_errors_name_the_fields_of_a_decision(url: str) -> None:
    found = refused(url, input="lantern " * 5000)
    assert (found["param"], "maximum context length" in found["message"]) == ("input", True)


def test_the_openai_client_parses_the_three_kinds_of_answers(client: openai.OpenAI) -> None:
    questions: Any = [PREDICATE, CHOICE, SCORE]
    found = client.decisions.create(model="tiny", input=STATE, questions=questions)
    first, second, third = found.answers
    assert first.type == "predicate"
    assert first.name is None
    assert 0 < first.probability < 1
    assert second.type == "choice"
    assert second.name == "team"
    assert [one.value for one in second.probabilities] == [True, "true", False]
    assert sum(one.probability for one in second.probabilities) == pytest.approx(1)
    assert third.type == "score"
    assert third.score == pytest.approx(
        sum(one.value * one.probability for one in third.probabilities)
    )
    assert found.usage.output_tokens == 3
    assert found.usage.total_tokens == found.usage.input_tokens + 3


def test_probabilities_are_those_of_the_models_own_logits(llama: Fleet, url: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama.path, dtype=torch.float32)
    lines = ["Question: Is it damaged?", "A: false", "B: true"]
    text = prompt_of(llama.path, STATE, lines)
    ids = Tokenizer.from_file(str(llama.path / "tokenizer.json"))
    prompt = ids.encode(text, add_special_tokens=False).ids
    labels = [ids.encode(text + label, add_special_tokens=False).ids[-1] for label in "AB"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    shares = logits[labels].softmax(0)
    (answer,) = ask(url)["answers"]
    assert answer["probability"] == pytest.approx(float(shares[1]), abs=1e-5)
    mass = float(logits.softmax(0)[labels].sum())
    assert answer["label_mass"] == pytest.approx(mass, rel=1e-4)


def test_a_state_is_the_same_as_text_as_rows_and_by_reference(llama: Fleet, url: str) -> None:
    data = saved(embeds_of(llama, STATE))
    ref = post(url, "/v1/prompt_embeds", {"data": data}).json()["id"]
    text = ask(url, questions=[PREDICATE, CHOICE])
    for part in ({"data": data}, {"ref": ref}):
        content = [{"type": "prompt_embeds", **part}]
        rows = ask(url, questions=[PREDICATE, CHOICE], input=[{"role": "user", "content": content}])
        assert rows["usage"]["input_tokens"] == text["usage"]["input_tokens"]
        assert rows["answers"][0]["probability"] == pytest.approx(
            text["answers"][0]["probability"], abs=1e-5
        )
        assert rows["answers"][1]["confidence"] == pytest.approx(
            text["answers"][1]["confidence"], rel=1e-4
        )


def test_order_and_neighbours_of_questions_change_no_answer(url: str) -> None:
    questions = [PREDICATE, CHOICE, SCORE]
    alone = {one["type"]: ask(url, questions=[one])["answers"][0] for one in questions}
    for order in itertools.permutations(questions):
        for question, answer in zip(order, ask(url, questions=order)["answers"], strict=True):
            assert answer["label_mass"] == pytest.approx(
                alone[question["type"]]["label_mass"], rel=1e-4
            )


def test_the_second_question_finds_the_state_in_the_cache(url: str) -> None:
    state = "a state that nobody has sent before " * 8
    usage = ask(url, input=state, questions=[PREDICATE, SCORE])["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 32


def test_two_orders_are_the_mean_of_both(url: str) -> None:
    def shares(values: list[str], **more: Any) -> dict[str, float]:
        question = {**CHOICE, "choices": [{"value": value} for value in values]}
        (answer,) = ask(url, questions=[question], **more)["answers"]
        return {one["value"]: one["probability"] for one in answer["probabilities"]}

    one, other = shares(["a", "b", "c"]), shares(["c", "b", "a"])
    both = shares(["a", "b", "c"], orders=2)
    assert both == pytest.approx({value: (one[value] + other[value]) / 2 for value in one})
    assert ask(url, orders=2)["usage"]["output_tokens"] == 2


# vLLM's tests of the route, of 0.33.


def test_text_messages_keep_their_order(url: str) -> None:
    items = [
        {"role": "user", "content": "first"},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "second"},
                {"type": "input_text", "text": "third"},
            ],
        },
    ]
    said, text = ask(url, input=items), ask(url, input="first\n\nsecond\nthird")
    assert said["usage"]["input_tokens"] == text["usage"]["input_tokens"]
    assert said["answers"][0]["probability"] == pytest.approx(text["answers"][0]["probability"])


@pytest.mark.parametrize("state", ["", [], [{"role": "user", "content": []}]])
def test_an_empty_state_is_allowed(url: str, state: Any) -> None:
    assert len(ask(url, input=state)["answers"]) == 1


def test_levels_with_the_same_label_keep_their_places(url: str) -> None:
    levels = [{"label": "damage", "description": "cosmetic"}, {"label": "damage"}]
    (answer,) = ask(url, questions=[{**SCORE, "levels": levels}])["answers"]
    assert [one["value"] for one in answer["probabilities"]] == [0, 1]


@pytest.mark.parametrize(
    "body",
    [
        {"input": {"text": "x"}},
        {"questions": []},
        {"questions": [{**PREDICATE, "name": None}]},
        {"questions": [{**PREDICATE, "instructions": 1}]},
        {"questions": [{**PREDICATE, "criteria": {}}]},
        {"questions": [PREDICATE] * 401},
        {"safety_identifier": "x" * 129},
        {"stream": True},
        {"questions": [{**CHOICE, "choices": [{"value": True}, {"value": True}]}]},
        {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
        {"questions": [{**CHOICE, "choices": [{"value": 1}, {"value": "a"}]}]},
        {"questions": [{**CHOICE, "choices": [{"value": None}, {"value": "a"}]}]},
        {"questions": choices(1)},
        {"questions": choices(256)},
        {"questions": [{**SCORE, "levels": [{"label": "a"}]}]},
        {"questions": [{**SCORE, "levels": [{"label": str(index)} for index in range(11)]}]},
        {"orders": 3},
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_what_vllm_refuses_is_refused(url: str, body: dict[str, Any]) -> None:
    assert refused(url, **body)["message"]


def test_more_options_than_labels_of_one_token_are_refused_with_their_number(
    llama: Fleet, url: str
) -> None:
    renderer = Renderer.load(llama.path)
    ids = renderer.chat([{"role": "user", "content": ""}]).token_ids()
    most = next(
        count for count in range(26, 300) if count == 255 or not _has(renderer, ids, count + 1)
    )
    if most < 255:
        assert str(most) in refused(url, questions=choices(most + 1))["message"]
    (answer,) = ask(url, questions=choices(most))["answers"]
    assert sum(one["probability"] for one in answer["probabilities"]) == pytest.approx(1)


def _has(renderer: Renderer, ids: Any, count: int) -> bool:
    from inlay.base.errors import InvalidRequestError

    try:
        return len(labels_behind(renderer, ids, count)) == count
    except InvalidRequestError:
        return False


def test_ends_of_prompts_that_clients_choose_take_no_memory_for_good(llama: Fleet) -> None:
    renderer = Renderer.load(llama.path)
    for number in range(200):
        assert labels_behind(renderer, renderer.encode(f"{number}"), 1)
    assert len(labels._found[renderer]) == labels._MOST_ENDS


def test_all_kinds_of_items_are_read(url: str) -> None:
    items = [
        {"role": "system", "content": "be fair"},
        {"role": "user", "content": [{"type": "input_json", "data": {"price": 3}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "5"},
    ]
    question = {**PREDICATE, "instructions": [{"type": "input_text", "text": "Is it?"}]}
    assert ask(url, input=items, questions=[question])["answers"]
    lost = refused(url, input=items[:1] + items[4:5])
    assert lost["param"] == "input[1].call_id"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": []}, "input[0].type"),
        ({"type": {}, "call_id": "1"}, "input[0].type"),
        (
            {"type": "function_call", "call_id": [], "name": "f", "arguments": ""},
            "input[0].call_id",
        ),
        ({"type": "custom_tool_call", "name": "f", "input": ""}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": {}, "output": "4"}, "input[0].call_id"),
        ({"type": "custom_tool_call_output", "output": "4"}, "input[0].call_id"),
        ({"role": "user", "content": [{"type": [], "text": "x"}]}, "input[0].content"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_type_or_a_call_id_that_is_no_string_is_named(
    url: str, item: dict[str, Any], param: str
) -> None:
    assert refused(url, input=[item])["param"].startswith(param)


def test_a_messages_call_id_means_nothing(url: str) -> None:
    item = {"type": "message", "role": "user", "content": "x", "call_id": []}
    assert ask(url, input=[item])["answers"]


@pytest.mark.parametrize(
    "part",
    [{"type": [], "text": "x"}, {"type": "input_text"}, {"type": "input_json", "data": 1}, {}],
    ids=str,
)
def test_nothing_is_computed_where_the_last_question_is_wrong(
    url: str, part: dict[str, Any]
) -> None:
    state = f"{len(str(part))} lanterns of a harbour that nobody has counted before " * 4
    questions = [PREDICATE] * 40 + [{**PREDICATE, "instructions": [part]}]
    assert refused(url, input=state, questions=questions)["param"].startswith(
        "questions[40].instructions[0]"
    )
    usage = ask(url, input=state)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] < 32 < usage["input_tokens"]


def test_an_image_for_a_model_of_texts_is_a_400(url: str) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    assert "image" in refused(url, input=[{"role": "user", "content": [image]}])["message"]


def test_a_decision_whose_time_is_up_leaves_nothing_running(llama: Fleet, url: str) -> None:
    asked = {"model": "tiny", "input": STATE, "questions": [PREDICATE] * 400}
    response = httpx.post(
        f"{url}/v1/decisions", json=asked, headers={"X-Request-Timeout": "0.05"}, timeout=90
    )
    assert response.status_code == 504
    assert llama.idle_within(60)


def test_four_hundred_questions_are_answered(llama: Fleet, url: str) -> None:
    found = ask(url, questions=[PREDICATE] * 400)
    assert len(found["answers"]) == 400
    first = found["answers"][0]["probability"]
    assert all(one["probability"] == pytest.approx(first) for one in found["answers"])
    assert llama.idle_within(5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_odds_of_a_model_in_bfloat16_are_finer_than_its_logits(family: str) -> None:
    with fleet(tiny(family, "bfloat16")) as running:
        url = running.serve()
        found = [ask(url, input=f"state {number}")["answers"][0] for number in range(6)]
    odds = [math.log(one["probability"] / (1 - one["probability"])) for one in found]
    # Logits of less than 8 in bfloat16 are multiples of 2 ** -8 at most, where they pass 1.
    steps = [value * 2**9 for value in odds]
    assert sum(abs(step - round(step)) > 0.02 for step in steps) >= 3
