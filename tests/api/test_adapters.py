"""Adapters over HTTP: loaded, asked for as models, and unloaded while they are used."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.messages.prompt import Prompt, Tokens
from tests import adapters
from tests.engine import reference
from tests.engine.conformance import ids
from tests.equality.reference import rows_of, tokenizer_of
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.payloads import error, post, saved
from tests.sse import events

TAKEN = "The lora adapter 'a' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
ADMIN = {"authorization": "Bearer chief"}


@pytest.fixture(scope="module")
def adapting() -> Iterator[Fleet]:
    with fleet(
        tiny("llama"), enable_lora=True, max_loras=2, max_cpu_loras=3, max_lora_rank=8
    ) as running:
        yield running


@pytest.fixture(scope="module")
def url(adapting: Fleet) -> str:
    return adapting.serve(enable_prompt_embeds=True, api_key=["plain"], admin_api_key=["chief"])


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.make_lora(tmp_path_factory.mktemp("lora"), tiny("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.make_lora(tmp_path_factory.mktemp("other"), tiny("llama"), seed=2)


@pytest.fixture(scope="module")
def soft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters.make_prompt_tuning(tmp_path_factory.mktemp("soft"), tiny("llama"))


@pytest.fixture(autouse=True)
def nothing_is_left(url: str) -> Iterator[None]:
    yield
    for entry in loras(url):
        unload(url, entry["id"], drain_timeout=0)
    assert loras(url) == []


def load(url: str, name: str, path: object = "", **more: Any) -> httpx.Response:
    body = {"lora_name": name, **({"lora_path": str(path)} if path else {}), **more}
    return httpx.post(url + "/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=180)


def unload(url: str, name: str, **more: Any) -> httpx.Response:
    return httpx.post(
        url + "/v1/unload_lora_adapter",
        json={"lora_name": name, **more},
        headers=ADMIN,
        timeout=180,
    )


def loras(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(url + "/v1/loras", headers=ADMIN).json()["data"]
    return found


def models(url: str) -> dict[str, dict[str, Any]]:
    listed = httpx.get(url + "/v1/models", headers=ADMIN).json()["data"]
    return {entry["id"]: entry for entry in listed}


def complete(
    url: str, model: str, prompt: Any, count: int | None = 8, **more: Any
) -> httpx.Response:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    return post(url, "/v1/completions", body, authorization="Bearer plain")


def output(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_a_loaded_adapter_is_a_model_at_once_and_answers_as_pefts_merged_model(
    url: str, lora: Path
) -> None:
    answer = load(url, "a", lora)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'a' added successfully.",
    )
    entry = models(url)["a"]
    assert (entry["root"], entry["parent"]) == (str(lora), "tiny")
    assert models(url)["tiny"]["adapters"] == ["a"]
    assert httpx.get(url + "/v1/models/a", headers=ADMIN).json()["id"] == "a"
    prompt = ids(1, 30)
    found = complete(url, "a", prompt)
    assert found.json()["model"] == "a"
    assert output(found) == adapters.greedy(tiny("llama"), lora, Prompt.of(Tokens(prompt)), 8)
    assert output(complete(url, "tiny", prompt)) != output(found)
    (listed,) = loras(url)
    assert (listed["state"], listed["kind"], listed["rank"], listed["worker"]) == (
        "ready",
        "lora",
        4,
        "local-0",
    )
    gone = unload(url, "a")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert "a" not in models(url)
    refused = complete(url, "a", prompt)
    assert (refused.status_code, error(refused)["code"]) == (404, "model_not_found")


def test_every_way_to_ask_goes_through_the_adapter(url: str, lora: Path) -> None:
    load(url, "a", lora)
    with openai.OpenAI(base_url=url + "/v1", api_key="plain") as client:
        _ask_in_every_way(client, url, lora)


def _ask_in_every_way(client: openai.OpenAI, url: str, lora: Path) -> None:
    text = "the harbour town counts its lanterns"
    tokens = tokenizer_of(tiny("llama"))(text)["input_ids"]
    expected = adapters.greedy(tiny("llama"), lora, Prompt.of(Tokens(tokens)), 6)
    asked = client.completions.create(
        model="a",
        prompt=text,
        max_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert asked.choices[0].token_ids == expected  # type: ignore[attr-defined]
    rows = saved(rows_of(tiny("llama"), tokens))
    assert output(complete(url, "a", None, 6, prompt_embeds=rows)) == expected
    chat = {"model": "a", "messages": [{"role": "user", "content": "Hello"}]}
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answered = post(
        url, "/v1/chat/completions", {**chat, **options}, authorization="Bearer plain"
    ).json()
    rendered = tokenizer_of(tiny("llama")).apply_chat_template(
        chat["messages"], add_generation_prompt=True, return_dict=False
    )
    assert answered["choices"][0]["token_ids"] == adapters.greedy(
        tiny("llama"), lora, Prompt.of(Tokens(rendered)), 6
    )
    response = client.responses.create(
        model="a", input="Hello", max_output_tokens=16, temperature=0
    )
    assert response.model == "a"
    with client.chat.completions.create(
        model="a", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, stream=True
    ) as stream:
        assert {chunk.model for chunk in stream} == {"a"}
    for path, body in (("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [5]})):
        assert (
            post(url, path, {"model": "a", **body}, authorization="Bearer plain").status_code == 200
        )


def test_several_adapters_answer_at_once(url: str, lora: Path, other: Path) -> None:
    load(url, "a", lora)
    load(url, "b", other)
    paths: dict[str, Path | None] = {"a": lora, "b": other, "tiny": None}
    prompts = {seed: ids(seed, 12 + seed) for seed in range(4)}
    jobs = [(name, seed) for seed in prompts for name in paths]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: output(complete(url, job[0], prompts[job[1]])), jobs))
    for (name, seed), found in zip(jobs, answers, strict=True):
        path, prompt = paths[name], Prompt.of(Tokens(prompts[seed]))
        if path is not None:
            assert found == adapters.greedy(tiny("llama"), path, prompt, 8)
        else:
            assert found == reference.greedy(tiny("llama"), prompt, 8)


def test_the_same_adapter_loaded_by_many_at_once_is_loaded_once(url: str, lora: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: load(url, "a", lora), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert [entry["id"] for entry in loras(url)] == ["a"]


def test_vllms_statuses_and_words(url: str, lora: Path, other: Path, tmp_path: Path) -> None:
    load(url, "a", lora)
    refused = [
        (load(url, "a", other), 400, TAKEN),
        (load(url, "tiny", lora), 400, "The lora adapter 'tiny' conflicts with a served base model."),
        (load(url, "org/tiny", lora), 400, "The lora adapter 'org/tiny' conflicts with a served base model."),
        (load(url, "", lora), 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (load(url, "b"), 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (load(url, "b", tmp_path / "none"), 404, f"No adapter found in {tmp_path / 'none'}: it has no adapter_config.json"),
        (unload(url, "zz"), 404, "The lora adapter 'zz' cannot be found."),
        (unload(url, ""), 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
    ]  # fmt: skip
    for answer, status, message in refused:
        assert (answer.status_code, error(answer)["message"]) == (status, message)
    assert load(url, "a", other, load_inplace=True).status_code == 200
    prompt = ids(3, 20)
    assert output(complete(url, "a", prompt)) == adapters.greedy(
        tiny("llama"), other, Prompt.of(Tokens(prompt)), 8
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": 5}, "lora_name"),
        ({"lora_name": "a", "lora_pth": "x"}, None),
        ({"lora_name": "a", "lora_path": "x", "source": {"uri": "file:///x"}}, "source"),
        ({"lora_name": "a", "source": {"uri": "file:///x", "sha": "0"}}, None),
        ({"lora_name": "a", "lora_path": "/x", "base_model_name": "zz"}, "model"),
        ({"lora_name": "a", "lora_path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": "a\n", "lora_path": "/x"}, "lora_name"),
    ],
)
def test_what_is_no_order_is_refused(url: str, body: dict[str, Any], param: str | None) -> None:
    answer = httpx.post(url + "/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert answer.status_code in (400, 404)
    assert error(answer)["param"] == param or param is None


def test_adapters_are_for_admins(url: str, lora: Path) -> None:
    plain = {"authorization": "Bearer plain"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"lora_name": "a", "lora_path": str(lora)}
        assert httpx.post(url + path, json=body, headers=plain).status_code == 403
        assert httpx.post(url + path, json=body).status_code == 401
    assert httpx.get(url + "/v1/loras", headers=plain).status_code == 403


@pytest.mark.slow
def test_unloading_lets_a_stream_end_and_takes_no_new_request(url: str, lora: Path) -> None:
    load(url, "a", lora)
    began, gone = threading.Event(), threading.Event()

    def stream() -> int:
        body = {
            "model": "a",
            "prompt": [1, 2, 3],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        count = 0
        headers = {"authorization": "Bearer plain"}
        with httpx.stream(
            "POST", url + "/v1/completions", json=body, headers=headers, timeout=180
        ) as answer:
            for data in events(answer):
                if data.startswith("{"):
                    count += bool(json.loads(data)["choices"])
                    began.set()
        return count

    with ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(stream)
        assert began.wait(30)
        unloading = pool.submit(unload, url, "a")
        while complete(url, "a", [1], 1).status_code == 200:
            pass
        gone.set()
        assert complete(url, "a", [1], 1).status_code == 404
        assert streaming.result(60) > 1
        assert unloading.result(60).status_code == 200


def test_a_stream_that_outlasts_the_deadline_ends_with_an_error(url: str, lora: Path) -> None:
    load(url, "a", lora)
    body = {
        "model": "a",
        "prompt": [1, 2, 3],
        "max_tokens": 450,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": "Bearer plain"}
    with httpx.stream(
        "POST", url + "/v1/completions", json=body, headers=headers, timeout=180
    ) as answer:
        found = events(answer)
        next(found)
        assert unload(url, "a", drain_timeout=0).status_code == 200
        rest = list(found)
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["error"]["type"] == "overloaded_error"


def test_an_adapter_with_the_models_own_table_is_served_and_of_a_trained_one_the_cure_is_said(
    url: str, lora: Path, tmp_path: Path
) -> None:
    matrices = load_file(lora / "adapter_model.safetensors")
    table = load_file(tiny("llama") / "model.safetensors")["model.embed_tokens.weight"]
    for name, values in (("same", table), ("trained", table + 1)):
        shutil.copytree(lora, tmp_path / name)
        named = {"base_model.model.model.embed_tokens.weight": values}
        save_file({**matrices, **named}, tmp_path / name / "adapter_model.safetensors")
    assert load(url, "alone", lora).status_code == 200
    assert load(url, "same", tmp_path / "same").status_code == 200
    prompt = [1, 5, 9]
    assert output(complete(url, "same", prompt)) == output(complete(url, "alone", prompt))
    refused = load(url, "trained", tmp_path / "trained")
    assert refused.status_code == 400
    assert "delete it from adapter_model.safetensors" in error(refused)["message"]


def test_a_corrupt_adapter_is_refused_and_the_next_one_loads(
    url: str, lora: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_bytes((lora / "adapter_config.json").read_bytes())
    weights = (lora / "adapter_model.safetensors").read_bytes()
    for content in (b"", weights[:-4], b"\xff" * 8 + weights[8:], weights[:8] + b"{" * 100):
        (bad / "adapter_model.safetensors").write_bytes(content)
        answer = load(url, "a", bad)
        assert answer.status_code == 400, answer.text
    assert loras(url) == []
    assert load(url, "a", lora).status_code == 200


class TestTrainedPrompts:
    """A PEFT prompt-tuning directory is a model of its own, on any engine that takes rows."""

    def expected(self, soft: Path, tokens: list[int], count: int = 8) -> list[int]:
        rows = torch.cat([adapters.prompt_rows(soft), rows_of(tiny("llama"), tokens)])
        return adapters.continued(adapters.base(tiny("llama")), rows[None], count)

    def test_its_rows_stand_before_every_kind_of_prompt(self, url: str, soft: Path) -> None:
        assert load(url, "p", soft).status_code == 200
        (listed,) = loras(url)
        assert (listed["kind"], listed["num_positions"]) == ("prompt", 5)
        tokens = ids(1, 20)
        expected = self.expected(soft, tokens)
        embeds = saved(rows_of(tiny("llama"), tokens))
        ways = [
            complete(url, "p", tokens),
            complete(url, "p", None, prompt_embeds=embeds),
            complete(
                url,
                "p",
                [
                    {"type": "token_ids", "token_ids": tokens[:7]},
                    {"type": "prompt_embeds", "data": saved(rows_of(tiny("llama"), tokens[7:]))},
                ],
            ),
        ]
        for answer in ways:
            assert output(answer) == expected
            assert answer.json()["usage"]["prompt_tokens"] == 25

    def test_pefts_own_model_says_the_same(self, url: str, soft: Path) -> None:
        load(url, "p", soft)
        tokens = ids(1, 20)
        with torch.no_grad():
            logits = adapters.tuned(tiny("llama"), soft)(input_ids=torch.tensor([tokens])).logits[
                0, -1
            ]
        assert output(complete(url, "p", tokens, 1)) == [int(logits.argmax())]

    def test_a_chat_has_them_too(self, url: str, soft: Path) -> None:
        load(url, "p", soft)
        messages = [{"role": "user", "content": "Hello"}]
        body = {
            "model": "p",
            "messages": messages,
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = post(
            url,
            "/v1/chat/completions",
            {**body, "return_token_ids": True},
            authorization="Bearer plain",
        )
        rendered = tokenizer_of(tiny("llama")).apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        found = answer.json()
        assert found["choices"][0]["token_ids"] == self.expected(soft, rendered, 6)
        assert found["usage"]["prompt_tokens"] == len(rendered) + 5

    def test_they_count_in_the_context(self, url: str, soft: Path) -> None:
        load(url, "p", soft)
        limit = models(url)["tiny"]["max_model_len"]
        assert models(url)["p"]["max_model_len"] == limit - 5
        assert complete(url, "p", [5] * (limit - 10), 5).status_code == 200
        refused = complete(url, "p", [5] * (limit - 10), 6)
        assert refused.status_code == 400
        assert "maximum context length" in error(refused)["message"]
        longest = complete(url, "p", [5] * (limit - 10), None)
        assert longest.json()["usage"]["total_tokens"] == limit
        kept = complete(url, "p", [5] * limit, 5, truncate_prompt_tokens=-1)
        usage = kept.json()["usage"]
        counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
        assert counts == [limit - 5, 5, limit]

    def test_prompt_logprobs_of_what_follows_rows_are_refused(self, url: str, soft: Path) -> None:
        load(url, "p", soft)
        refused = complete(url, "p", [5, 6, 7], 1, prompt_logprobs=1)
        assert (refused.status_code, error(refused)["param"]) == (400, "prompt_logprobs")

    @pytest.mark.slow
    def test_they_need_no_embeddings_from_clients_and_no_room_for_lora(self, soft: Path) -> None:
        with fleet(tiny("llama"), lora_modules=[f"p={soft}"]) as plain:
            bare = plain.serve()
            answer = post(
                bare,
                "/v1/completions",
                {"model": "p", "prompt": [1, 2], "max_tokens": 1, "temperature": 0},
            )
            assert answer.json()["usage"]["prompt_tokens"] == 7
            assert (
                httpx.post(bare + "/v1/load_lora_adapter", json={"lora_name": "b"}).status_code
                == 403
            )
