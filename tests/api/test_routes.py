"""Models, tokenizing, probes, metrics and pages."""

import json
from typing import Any, get_type_hints

import httpx
import msgspec
import openai
import pytest

import inlay
from inlay.api.app import routes
from inlay.api.generation import messages
from inlay.api.openai.responses import input as responses
from inlay.http.openapi import Operation, struct_types
from tests.equality.reference import tokenizer_of
from tests.live import Fleet
from tests.payloads import TEXT, constant, error, post


def test_models_are_listed_with_what_a_client_must_know(llama: Fleet, url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
        entry: Any = client.models.retrieve("org/tiny")
    (card,) = llama.router.models()
    assert (entry.max_model_len, entry.hidden_size, entry.dtype) == (512, 48, "float32")
    assert entry.embedding_table_id == card.embedding_table_id
    assert entry.root == "tiny"
    assert set(entry.capabilities) == {
        *("completions", "chat", "responses", "messages", "prompt_embeds")
    }
    assert entry.limits["max_prompt_embeds_bytes"] == 10 * 1024 * 1024


def test_a_server_without_the_flag_does_not_claim_embeds(plain_url: str) -> None:
    assert (
        "prompt_embeds" not in httpx.get(plain_url + "/v1/models").json()["data"][0]["capabilities"]
    )


def test_tokenize_and_detokenize_are_each_others_inverse(llama: Fleet, url: str) -> None:
    answer = post(
        url, "/tokenize", {"model": "tiny", "prompt": TEXT, "return_token_strs": True}
    ).json()
    assert answer["tokens"] == tokenizer_of(llama.path)(TEXT)["input_ids"]
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert "".join(answer["token_strs"]).replace("Ġ", " ") == TEXT
    assert post(url, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": TEXT}
    chat = post(url, "/tokenize", {"messages": [{"role": "user", "content": TEXT}]}).json()
    assert chat["count"] > answer["count"]
    asked = {"messages": [{"role": "user", "content": TEXT}], "add_special_tokens": True}
    bare = tokenizer_of(llama.path)(TEXT, add_special_tokens=False)["input_ids"]
    start = answer["tokens"].index(bare[0])
    before, after = answer["tokens"][:start], answer["tokens"][start + len(bare) :]
    assert post(url, "/tokenize", asked).json()["tokens"] == [*before, *chat["tokens"], *after]
    assert "exactly one" in error(post(url, "/tokenize", {}))["message"]
    assert "out of vocabulary" in error(post(url, "/detokenize", {"tokens": [400]}))["message"]


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
def test_probes_answer(url: str, path: str) -> None:
    assert httpx.get(url + path).status_code == 200
    assert httpx.head(url + path).status_code == 200


def test_metrics_count_what_was_asked(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True)
    post(
        url,
        "/v1/completions",
        {"prompt_embeds": constant(0.5, rows=7), "max_tokens": 3, "ignore_eos": True},
    )
    post(url, "/v1/completions", {"prompt_embeds": constant(float("nan")), "max_tokens": 3})
    text = httpx.get(url + "/metrics").text
    for line in (
        'vllm:prompt_tokens_total{model_name="tiny"} 7.0',
        'vllm:generation_tokens_total{model_name="tiny"} 3.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_time_per_output_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_decode_time_seconds_count{model_name="tiny"} 1.0',
        'vllm:request_queue_time_seconds_count{model_name="tiny"} 1.0',
        'inlay:prompt_embeds_decode_seconds_count{model_name="tiny"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'inlay:prompt_embeds_rows_total{model_name="tiny"} 7.0',
        'inlay:prompt_embeds_rejected_total{reason="not_finite"} 1.0',
        'inlay:http_requests_total{route="/v1/completions",status="200"} 1.0',
        'inlay:http_requests_total{route="/v1/completions",status="400"} 1.0',
    ):
        assert line in text


def test_the_description_covers_every_route_and_resolves(url: str) -> None:
    document = httpx.get(url + "/openapi.json").json()
    assert document["info"]["version"] == inlay.__version__
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models/{id}", "/tokenize"} <= set(
        document["paths"]
    )

    bodies = {path: set(document["paths"][path]["post"]["requestBody"]["content"]) for path in (
        "/v1/completions", "/v1/chat/completions", "/v1/prompt_embeds", "/tokenize"
    )}  # fmt: skip
    assert bodies == {
        "/v1/completions": {"application/json", "multipart/form-data"},
        "/v1/chat/completions": {"application/json", "multipart/form-data"},
        "/v1/prompt_embeds": {
            "application/json",
            "application/octet-stream",
            "application/safetensors",
            "image/*",
        },
        "/tokenize": {"application/json"},
    }

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if "$ref" in value else set()
            return own.union(*(references(child) for child in value.values()))
        return (
            set().union(*(references(child) for child in value))
            if isinstance(value, list)
            else set()
        )

    names = {
        reference.removeprefix("#/components/schemas/")
        for reference in references(document["paths"])
    }
    assert (
        {"CompletionRequest", "ChatRequest", "ErrorResponse"}
        <= names
        <= set(document["components"]["schemas"])
    )


def test_every_type_and_field_is_described_and_refused_ones_say_why(url: str) -> None:
    schemas = httpx.get(url + "/openapi.json").json()["components"]["schemas"]
    fields = [
        (name, field, value)
        for name, schema in schemas.items()
        for field, value in schema.get("properties", {}).items()
    ]
    assert [name for name, schema in schemas.items() if not schema.get("description")] == []
    assert [(name, field) for name, field, value in fields if not value.get("description")] == []
    refused = [value["description"] for _, _, value in fields if value.get("not") == {}]
    assert len(refused) > 50
    assert all(reason.startswith("Refused: ") for reason in refused)
    completion = schemas["CompletionRequest"]["properties"]
    assert "beam search" in completion["use_beam_search"]["description"]
    response = schemas["ResponsesRequest"]["properties"]
    assert response["messages"]["description"].endswith("here it is input.")
    assert "not" not in completion["prompt"]


@pytest.mark.parametrize(("kind", "field", "parts"), [
    ("ChatRequest", "messages", messages.PARTS),
    ("ResponsesRequest", "input", responses.PARTS),
])  # fmt: skip
def test_fields_that_hold_parts_name_each_kind(url: str, kind: str, field: str, parts: str) -> None:
    schemas = httpx.get(url + "/openapi.json").json()["components"]["schemas"]
    said = schemas[kind]["properties"][field]["description"]
    assert [part for part in parts.split(", ") if f"`{part}`" not in said] == []


_TYPES = {"string": str, "integer": int, "number": int | float}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return True if a value is one of a plain schema."""
    assert set(schema) <= {
        "type", "enum", "default", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength"
    }  # fmt: skip
    if "enum" in schema:
        return bool(value in schema["enum"])
    if isinstance(value, str):
        return bool(schema["type"] == "string" and schema.get("minLength", 0) <= len(value))
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    return bool(isinstance(value, _TYPES[schema["type"]]) and low <= value <= high)


def test_every_parameter_is_described_with_an_example_that_fits(url: str) -> None:
    paths = httpx.get(url + "/openapi.json").json()["paths"]
    found = [
        (path, one)
        for path, methods in paths.items()
        for operation in methods.values()
        for one in operation.get("parameters", [])
    ]
    for path, one in found:
        assert one["description"], (path, one)
        for value in (one["example"], one["schema"].get("default", one["example"])):
            assert fits(value, one["schema"]), one
        assert (one["in"] == "path") == (f"{{{one['name']}}}" in path)
    assert {path for path in paths if "{" in path} <= {path for path, _ in found}


@pytest.mark.extensions("stages")
def test_every_field_of_a_request_has_an_example_that_is_read(url: str) -> None:
    schemas = httpx.get(url + "/openapi.json").json()["components"]["schemas"]
    requests = [route.request for route, _ in routes() if route.request is not None]
    for name, kind in struct_types(requests).items():
        hints = get_type_hints(kind)
        for field, value in schemas[name]["properties"].items():
            if value.get("not") == {}:
                assert "examples" not in value
                continue
            (example,) = value["examples"]
            if field in hints:
                msgspec.convert(example, hints[field])
            else:
                assert example in value["enum"]


@pytest.mark.extensions("stages")
def test_every_field_of_an_answer_that_holds_a_value_has_an_example_of_its_type(url: str) -> None:
    schemas = httpx.get(url + "/openapi.json").json()["components"]["schemas"]
    asked = struct_types({route.request for route, _ in routes() if route.request is not None})
    answers = {
        kind
        for route, _ in routes()
        for kind in (route.response, route.event, route.otherwise, route.errors.type)
        if kind is not None
    }
    bare = []
    for name, kind in struct_types(answers).items():
        hints = get_type_hints(kind)
        for field, value in schemas[name].get("properties", {}).items():
            if "examples" in value and name not in asked:
                (example,) = value["examples"]
                try:
                    msgspec.convert(example, hints[field])
                except msgspec.ValidationError as error:
                    bare.append(f"{name}.{field}: {error}")
            elif (
                "examples" not in value
                and "$ref" not in json.dumps(value)
                and value.get("type") != "null"
                and len(value.get("enum", ())) != 1
            ):
                bare.append(f"{name}.{field}")
    assert bare == []


@pytest.mark.parametrize(
    "route", [each for each, _ in routes() if each.examples], ids=lambda route: route.path
)
def test_examples_of_requests_are_what_the_route_reads(route: Operation) -> None:
    for example in route.examples.values():
        msgspec.json.decode(msgspec.json.encode(example), type=route.request)


@pytest.mark.parametrize("path", ["/start", "/docs"])
def test_pages_load_nothing_from_elsewhere(url: str, path: str) -> None:
    response = httpx.get(url + path)
    assert response.headers["content-type"].startswith("text/html")
    assert "sha256-" in response.headers["content-security-policy"]
    assert inlay.__version__ in response.text
    assert "https://" not in response.text
