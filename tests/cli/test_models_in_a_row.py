"""Two language models in a row: text or hidden states of one are in the prompt of the other."""

import base64
import io
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml
from safetensors.torch import save_file

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Prompt, Tokens
from inlay.render import Renderer
from inlay_stages.pipeline import read_graph
from tests import adapters
from tests.engine import reference
from tests.equality.reference import model_of, rows_of, tokenizer_of
from tests.models import EOS_ID, add_thinking, make, tiny
from tests.scratch import scratch
from tests.serving import Served, free_port, serving

slow = pytest.mark.slow

ADMIN_PORT = free_port()
FIRST, SECOND = "llama", "qwen3"
QUESTION = "what is the capital of the island?"
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "count"},
    {"role": "user", "content": QUESTION},
]
ROWS = {"type": "prompt_embeds", "index": 0}
PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"


def documented(name: str) -> dict[str, Any]:
    """A graph of the page."""
    found = re.search(rf"^    # {name}\n((?:    .*\n)+)", PAGE.read_text(encoding="utf-8"), re.M)
    assert found is not None
    graph: dict[str, Any] = yaml.safe_load(textwrap.dedent(found[1]))
    return graph


BY_TEXT = documented("pair.yaml")
BY_IDS = documented("ids.yaml")
BY_ROWS = documented("reader.yaml")
LAYER = BY_ROWS["stages"]["reader"]["hidden"]["layer"]
DRAFT = BY_TEXT["stages"]["drafter"]["max_tokens"]
THREE = BY_ROWS | {
    "stages": BY_ROWS["stages"]
    | {
        "writer": BY_ROWS["stages"]["writer"]
        | {"max_tokens": 5, "hidden": {"positions": "output"}},
        "last": {"kind": "generate", "model": "reader"},
    },
    "edges": [*BY_ROWS["edges"], "writer.hidden -> last.hidden"],
    "outputs": {"text": "last.text"},
}
"""The graph of the page with a third model, which reads what the second has made of the first."""


@cache
def editor() -> Path:
    """The second model of `BY_TEXT`: `SECOND`, which reasons where a chat asks for it."""
    return add_thinking(make(SECOND, scratch("editor")))


def by_hidden(**hidden: object) -> dict[str, Any]:
    reader = BY_ROWS["stages"]["reader"] | {"hidden": hidden}
    return BY_ROWS | {"stages": BY_ROWS["stages"] | {"reader": reader}}


def projector() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Linear(48, 20), torch.nn.GELU(), torch.nn.Linear(20, 48, bias=False)
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("row")
    for stage, family in zip(
        ("drafter", "editor", "reader", "writer"), (FIRST, SECOND) * 2, strict=True
    ):
        (found / stage).symlink_to(editor() if stage == "editor" else tiny(family))
    save_file(projector().state_dict(), found / "projector.safetensors")
    return found


def graph_of(folder: Path, name: str, graph: dict[str, Any]) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(graph, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def by_text(folder: Path) -> Iterator[Served]:
    flags = ["--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--enable-prompt-embeds", "--enable-lora", "--admin-port", str(ADMIN_PORT)]
    flags += ["--enable-sleep-mode"]
    with serving(graph_of(folder, "text", BY_TEXT), *flags) as found:
        yield found


@pytest.fixture(scope="module")
def by_rows(folder: Path) -> Iterator[Served]:
    flags = "--dtype", "float32", "--enable-prompt-embeds", "--enable-hidden-states"
    with serving(graph_of(folder, "rows", THREE), *flags) as found:
        yield found


def client_of(served: Served) -> openai.OpenAI:
    # Stages that are not ready yet are 503s.
    return openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60)


def ask(served: Served, **more: Any) -> Any:
    fields: dict[str, Any] = {"messages": CHAT, "temperature": 0, "max_tokens": 12} | more
    extra = {"ignore_eos": True, "return_token_ids": True} | fields.pop("extra", {})
    with client_of(served) as client:
        answer = client.chat.completions.create(extra_body=extra, **{"model": "pair"} | fields)
        return list(answer) if more.get("stream") else answer


def prompt_of(family: str, messages: list[dict[str, Any]], **more: Any) -> Prompt:
    return Renderer.load(tiny(family)).chat(messages, **more)


def written(messages: list[dict[str, Any]], adapter: Path | None = None) -> str:
    """Text that the first model writes, with an adapter if there is one."""
    prompt = prompt_of(FIRST, messages)
    ids = reference.greedy(tiny(FIRST), prompt, DRAFT)
    if adapter is not None:
        ids = adapters.greedy(tiny(FIRST), adapter, prompt, DRAFT)
    ids = ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids
    detokenizer = Renderer.load(tiny(FIRST)).detokenizer()
    return detokenizer.push(ids) + detokenizer.flush()


@slow
def test_the_ids_of_one_are_read_by_the_other_as_they_were_made(folder: Path) -> None:
    names = {"drafter": FIRST, "editor": SECOND}
    stages = {
        name: stage | {"model": str(tiny(names[name]))} for name, stage in BY_IDS["stages"].items()
    }
    path = graph_of(folder, "ids", BY_IDS | {"stages": stages})
    prompt = prompt_of(FIRST, CHAT)
    ids = reference.greedy(tiny(FIRST), prompt, DRAFT)
    ids = ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids
    # Its text is other tokens.
    assert list(Renderer.load(tiny(SECOND)).encode(written(CHAT), add_special_tokens=False)) != ids
    message: dict[str, Any] = {"role": "user", "content": [ROWS]}
    second = prompt_of(SECOND, [CHAT[0], message], rows=[Tokens(tuple(ids))])
    with serving(path, "--dtype", "float32") as served:
        answer = ask(served)
        assert answer.usage.prompt_tokens == len(second)
        assert answer.choices[0].token_ids == reference.greedy(tiny(SECOND), second, 12)
        assert set(answer.usage.stages) == {"drafter", "editor"}


def test_ids_of_unequal_tokenizers_are_one_line_before_anything_loads(folder: Path) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_graph(graph_of(folder, "unlike", BY_IDS))
    path = folder / "unlike.yaml"
    said = f"{path}: drafter.tokens -> editor.tokens: the tokenizers are not equal, so that ids"
    assert error.value.message.startswith(said)
    assert "\n" not in error.value.message


@slow
def test_the_text_of_one_is_the_prompt_of_the_other(by_text: Served) -> None:
    prompt = prompt_of(SECOND, [CHAT[0], {"role": "user", "content": written(CHAT)}])
    expected = reference.greedy(tiny(SECOND), prompt, 12)
    whole = ask(by_text)
    assert whole.choices[0].token_ids == expected
    assert whole.usage.prompt_tokens == len(prompt)
    first = whole.usage.stages.pop("drafter")
    assert first["prompt_tokens"] == len(prompt_of(FIRST, CHAT))
    assert 0 < first["completion_tokens"] <= DRAFT
    assert whole.usage.stages == {"editor": {"prompt_tokens": len(prompt), "completion_tokens": 12}}
    streamed = ask(by_text, stream=True, stream_options={"include_usage": True})
    assert [bool(event.usage) for event in streamed].count(True) == 1
    assert streamed[-1].usage.stages == whole.usage.stages | {"drafter": first}
    assert len(streamed) > 2
    choices = [choice for event in streamed for choice in event.choices]
    assert [id_ for one in choices for id_ in getattr(one, "token_ids", None) or ()] == expected
    assert [one.finish_reason for one in choices if one.finish_reason] == ["length"]


@slow
@pytest.mark.parametrize("stage", ["drafter", "editor"])
def test_an_adapter_of_either_model_is_named_as_a_model(
    by_text: Served, tmp_path: Path, stage: str
) -> None:
    first = stage == "drafter"
    adapters.make_lora(tmp_path, tiny(FIRST if first else SECOND))
    draft = written(CHAT, tmp_path if first else None)
    assert (draft != written(CHAT)) == first
    prompt = prompt_of(SECOND, [CHAT[0], {"role": "user", "content": draft}])
    expected = reference.greedy(tiny(SECOND), prompt, 12)
    if not first:
        expected = adapters.greedy(tiny(SECOND), tmp_path, prompt, 12)
    order = {"lora_name": "tuned", "lora_path": str(tmp_path)}
    order["base_model_name"] = "pair/drafter" if first else "pair"
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}/v1", timeout=60) as admin:
        loaded = admin.post("load_lora_adapter", json=order)
        assert loaded.is_success, loaded.text
        try:
            answer = ask(by_text, model="tuned")
        finally:
            assert admin.post("unload_lora_adapter", json={"lora_name": "tuned"}).is_success
    assert answer.choices[0].token_ids == expected
    assert list(answer.usage.stages) == ["editor", "drafter"]


@slow
@pytest.mark.parametrize("stage", ["pair/drafter", "pair"])
def test_a_stage_sleeps_alone_and_wakes_with_the_same_answer(by_text: Served, stage: str) -> None:
    wanted = ask(by_text).choices[0].token_ids
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        assert admin.post("/sleep", params={"model": stage, "level": "2"}).is_success
        try:
            other = "pair" if stage != "pair" else "pair/drafter"
            for name in (stage, other):
                found = admin.get("/is_sleeping", params={"model": name}).json()
                assert found["is_sleeping"] == (name == stage)
            body = {"model": "pair", "messages": CHAT}
            answer = httpx.post(f"{by_text.v1}/chat/completions", json=body, timeout=60)
            assert answer.status_code == 503, answer.text
            assert f"The model `{stage}` is asleep" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
        finally:
            assert admin.post("/wake_up", params={"model": stage}).is_success
    assert ask(by_text).choices[0].token_ids == wanted


@slow
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_that_answers_thinks_is_kept_apart(by_text: Served, stream: bool) -> None:
    thinks = {"chat_template_kwargs": {"thinks": True}, "thinking_token_budget": 17}
    answer = ask(by_text, extra=thinks, stream=stream, max_tokens=30)
    if stream:
        deltas = [choice.delta for event in answer for choice in event.choices]
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        text = "".join(delta.content or "" for delta in deltas)
    else:
        message = answer.choices[0].message
        thought, text = message.reasoning, message.content
        assert answer.usage.completion_tokens_details.reasoning_tokens == 17
        assert set(answer.usage.stages) == {"drafter", "editor"}
    prompt = Renderer.load(editor()).chat(
        [CHAT[0], {"role": "user", "content": written(CHAT)}],
        template_kwargs={"thinks": True},
    )
    # The line break behind the tag counts too.
    found = reference.greedy(editor(), prompt, 16)
    detokenizer = Renderer.load(editor()).detokenizer()
    assert thought == (detokenizer.push(found) + detokenizer.flush()).strip("\n") != ""
    assert text
    assert "think>" not in thought + text


@slow
@pytest.mark.parametrize("stream", [False, True])
def test_responses_and_messages_have_the_share_of_each_model(by_text: Served, stream: bool) -> None:
    wanted = {
        name: {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
        for name, used in ask(by_text).usage.stages.items()
    }
    body: dict[str, Any] = {"model": "pair", "temperature": 0, "ignore_eos": True, "stream": stream}
    asked = [
        ("responses", {"input": CHAT, "max_output_tokens": 12}),
        ("messages", {"messages": CHAT[1:], "system": "count", "max_tokens": 12}),
    ]
    for route, fields in asked:
        answer = httpx.post(f"{by_text.v1}/{route}", json=body | fields)
        assert answer.status_code == 200, answer.text
        whole = [answer.json()] if not stream else events(answer.text)
        usages = [one["usage"] for one in whole if one.get("usage")]
        usages += [one["response"]["usage"] for one in whole if "usage" in one.get("response", {})]
        assert [one["stages"] for one in usages if one][-1] == wanted


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@slow
def test_tools_are_those_of_the_model_that_answers(by_text: Served) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "count", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "count"}}
    answer = ask(by_text, tools=[tool], tool_choice=named, max_tokens=100)
    (made,) = answer.choices[0].message.tool_calls
    assert made.function.name == "count"
    assert made.function.arguments.replace(" ", "") == '{"a":1}'


def states_of(family: str, prompt: Prompt, layer: int) -> torch.Tensor:
    embeds = reference.embedded(tiny(family), prompt)
    with torch.no_grad():
        found = model_of(tiny(family))(inputs_embeds=embeds, output_hidden_states=True)
    states: torch.Tensor = found.hidden_states[layer][0]
    return states


def beside_text(family: str, states: torch.Tensor, text: str) -> Prompt:
    parts = [ROWS, {"type": "text", "text": text}]
    messages: list[dict[str, Any]] = [CHAT[0], {"role": "user", "content": parts}]
    return prompt_of(family, messages, rows=[reference.rows_of(states)])


def last_prompt(first: Prompt, text: str) -> Prompt:
    """What the third model of `THREE` reads, where the first reads `first` and the user's text."""
    with torch.no_grad():
        rows = projector()(states_of(FIRST, first, LAYER))
    second = beside_text(SECOND, rows, text)
    ids = reference.greedy(tiny(SECOND), second, 5)
    ids = ids[: ids.index(EOS_ID) + 1] if EOS_ID in ids else ids
    computed = Prompt((*second.segments, Tokens(ids[:-1])))
    return beside_text(FIRST, states_of(SECOND, computed, -1)[len(second) - 1 :], text)


@slow
def test_hidden_states_of_one_are_rows_of_the_other(by_rows: Served) -> None:
    prompt = last_prompt(prompt_of(FIRST, CHAT), QUESTION)
    assert prompt.has_rows
    answer = ask(by_rows)
    assert answer.usage.prompt_tokens == len(prompt)
    assert set(answer.usage.stages) == {"reader", "writer", "last"}
    assert answer.usage.stages["reader"]["completion_tokens"] == 0
    assert answer.choices[0].token_ids == reference.greedy(tiny(FIRST), prompt, 12)


@slow
def test_what_a_row_of_models_does_not_take_is_refused(by_rows: Served) -> None:
    def refused(path: str, **fields: object) -> str:
        answer = httpx.post(f"{by_rows.v1}{path}", json={"model": "pair"} | fields)
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    assert "several language models in a row; they take chats" in refused(
        "/completions", prompt="x"
    )
    assert "messages has no message of the user" in refused("/chat/completions", messages=CHAT[:1])
    rows = {"type": "prompt_embeds", "data": "A" * 200}
    early = [{"role": "user", "content": [rows]}, {"role": "user", "content": "x"}]
    assert "may stand in the user's last message alone" in refused(
        "/chat/completions", messages=early
    )
    assert "must be a torch.Tensor" in refused("/chat/completions", messages=early[:1])


@pytest.mark.extensions
def test_a_row_of_models_gives_no_hidden_states(by_rows: Served) -> None:
    asked = {"messages": CHAT, "hidden_states": {}}
    ask(by_rows)
    refused = httpx.post(by_rows.v1 + "/chat/completions", json=asked, timeout=60)
    assert refused.status_code == 400
    assert "hidden_states are of one model" in refused.json()["error"]["message"]


@slow
@pytest.mark.parametrize("graph", ["by_text", "by_rows"])
def test_the_first_model_reads_rows_and_the_others_what_it_makes_of_them(
    request: pytest.FixtureRequest, graph: str
) -> None:
    served: Served = request.getfixturevalue(graph)
    cut = QUESTION.index(" island")
    ids = tokenizer_of(tiny(FIRST)).encode(QUESTION[:cut], add_special_tokens=False)
    rows = rows_of(tiny(FIRST), ids)
    file = io.BytesIO()
    torch.save(rows, file)
    data = base64.b64encode(file.getvalue()).decode()
    text = {"type": "text", "text": QUESTION[cut:]}
    parts = [{"type": "prompt_embeds", "data": data}, text]
    answer = ask(served, messages=[CHAT[0], {"role": "user", "content": parts}])
    if graph == "by_text":
        assert answer.choices[0].token_ids == ask(served).choices[0].token_ids
        return
    message: dict[str, Any] = {"role": "user", "content": [ROWS, text]}
    first = prompt_of(FIRST, [CHAT[0], message], rows=[reference.rows_of(rows)])
    # The second and the third read the text that stands beside the rows.
    prompt = last_prompt(first, QUESTION[cut:])
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].token_ids == reference.greedy(tiny(FIRST), prompt, 12)


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ({"layer": 3}, "stages.reader.hidden.layer: 3; the model has 2 layers: -3 to 2"),
        ({"projector": "narrow.safetensors"}, "writer takes rows of 48 elements, and is given 5"),
        ({"projector": "wide.safetensors"}, "projector takes 50 elements; reader gives 48"),
        ({"projector": "torn.safetensors"}, "1.weight takes 9 elements, and 0 before it gives 5"),
        ({"projector": "none.safetensors"}, "none.safetensors cannot be read"),
        ({"positions": "some"}, "Invalid enum value 'some'"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_loads(
    folder: Path, hidden: dict[str, object], said: str
) -> None:
    save_file({"weight": torch.zeros(5, 48)}, folder / "narrow.safetensors")
    save_file({"weight": torch.zeros(48, 50)}, folder / "wide.safetensors")
    save_file(
        {"0.weight": torch.zeros(5, 48), "1.weight": torch.zeros(48, 9)},
        folder / "torn.safetensors",
    )
    with pytest.raises(InvalidRequestError) as error:
        read_graph(graph_of(folder, "wrong", by_hidden(**hidden)))
    assert said in error.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"edges": ["reader.hidden -> writer.prompt"]}, "reader.hidden is HiddenStates, writer"),
        ({"edges": ["reader.text -> writer.hidden"]}, "reader.text is Text, writer.hidden takes"),
        ({"edges": ["reader.text -> writer.prompt"]}, "no edge begins at reader.hidden"),
    ],
)
def test_ports_of_unlike_types_do_not_meet(
    folder: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_graph(graph_of(folder, "wrong", by_hidden(layer=1) | changes))
    assert said in error.value.message
