"""Each field of each route, with values of all JSON types that its description does not allow."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from inlay.engine.settings import EngineSettings
from inlay.store.settings import BatchSettings, ResponseSettings
from tests import output_models
from tests.embedding_models import tiny_scoring
from tests.live import fleet
from tests.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.extensions("batches", "stages", "state")]

VALUES: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": 3,
    "number": 1.5,
    "string": "no such value",
    "array": [[]],
    "object": {"a": {}},
}
"""Of each type one value."""

ODD: tuple[Any, ...] = (
    float("nan"), "\ud800", "x" * 20_000, 10**30, [], [None], {}, {"type": []},
)  # fmt: skip
"""What stands where its type may: it is served or refused."""

DEEP = 2
PARTS = 8
MODELS = {
    "embeds": ("/v1/embeddings", "/pooling", "/embed", "/embed_all", "/embed_sparse", "/v1/embed", "/v2/embed", "/similarity", "/"),
    "scores": ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/classify", "/predict"),
}  # fmt: skip
"""Which of the models a route needs, if not the one that writes."""

LEFT = ("/sleep", "/wake_up", "/drain")
SHORT = {"max_output_tokens": 16, "max_completion_tokens": 1, "max_tokens": 1}
"""Of these a body has the first that it may have."""

GIVEN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"documents": ["a"]},
    "/v1/prompt_embeds/encode": {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
}
"""What a body needs that its description does not require, as one of several fields would do."""

Schema = dict[str, Any]


class Wrong(NamedTuple):
    """A body that is refused, and the fields on the way to what is wrong."""

    names: tuple[str, ...]
    body: dict[str, Any]


class Server:
    """Running servers, with what stands at each path's `{id}`."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.document = self.client.get("/openapi.json").json()
        self.types: Schema = self.document["components"]["schemas"]
        self._ids = {
            "/v1/conversations/": self.client.post("/v1/conversations", json={}).json()["id"],
            "/v1/prompt_embeds/": "pe-none",
        }

    def post(self, path: str, body: object) -> httpx.Response:
        for begin, found in self._ids.items():
            if path.startswith(begin):
                path = path.replace("{id}", found)
        head = {"content-type": "application/json"}
        return self.client.post(path, content=json.dumps(body), headers=head)

    def bodies(self, part: int) -> list[tuple[str, Schema]]:
        """Return paths and the types of their bodies, of a part of the routes."""
        found = []
        for path, methods in self.document["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" in content and path not in LEFT:
                found.append((path, content["application/json"]["schema"]))
        return found[part::PARTS]

    def variants(self, schema: Schema) -> Iterator[Schema]:
        """The types that one of several is made of."""
        if "$ref" in schema:
            yield from self.variants(self.types[schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema:
            for each in schema["anyOf"]:
                yield from self.variants(each)
        else:
            yield schema

    def kinds(self, schema: Schema) -> set[str]:
        """The JSON types that a schema allows."""
        found: set[str] = set()
        for each in self.variants(schema):
            values = [each["const"]] if "const" in each else each.get("enum")
            if values is not None:
                found |= {kind_of(value) for value in values}
            else:
                found |= {each["type"]} if "type" in each else VALUES.keys()
        return found | {"integer"} if "number" in found else found

    def sample(self, schema: Schema) -> Any:
        """A value that a schema allows."""
        if "examples" in schema:
            return schema["examples"][0]
        each = next(self.variants(schema))
        if "const" in each or "enum" in each:
            return each.get("const", each.get("enum", [None])[0])
        if each.get("type") == "array":
            return [self.sample(each["items"])] * each.get("minItems", 0)
        if each.get("type") == "object":
            return self.required(each)
        return VALUES[each.get("type", "string")]

    def required(self, schema: Schema) -> dict[str, Any]:
        """The least object that a schema allows."""
        return {
            name: self.sample(schema["properties"][name]) for name in schema.get("required", ())
        }

    def wrong(self, schema: Schema, deep: int = DEEP) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Values that a schema does not allow, each behind the fields on the way to it."""
        for kind in VALUES.keys() - self.kinds(schema):
            yield (), VALUES[kind]
        for each in self.variants(schema) if deep else ():
            if isinstance(each.get("items"), dict):
                for names, value in self.wrong(each["items"], deep - 1):
                    yield names, [value]
            for name, inner in each.get("properties", {}).items():
                for names, value in self.wrong(inner, deep - 1):
                    yield (name, *names), {**self.required(each), name: value}

    def whole(self, path: str, schema: Schema) -> dict[str, Any]:
        """A body that is right."""
        (each,) = self.variants(schema)
        model = next((name for name, paths in MODELS.items() if path in paths), "tiny")
        fields = each["properties"]
        short = next(({name: value} for name, value in SHORT.items() if name in fields), {})
        named = {"model": model} if "model" in fields else {}
        return {**self.required(each), **short, **named, **GIVEN.get(path, {})}


def kind_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    others = [
        EngineSettings.of(model=str(path), served_model_name=[name], task=task, health_probe_interval=0)
        for path, name, task in (
            (output_models.bge_m3(), "embeds", "embed"),
            (tiny_scoring("bert"), "scores", "score"),
        )
    ]  # fmt: skip
    with fleet(tiny("llama"), others=others) as running:
        url = running.serve(
            admin_api_key=["admin"],
            enable_prompt_embeds=True,
            enable_embedding_lookup=True,
            enable_hidden_states=True,
            batches=BatchSettings(batch_store="memory"),
            responses=ResponseSettings(response_store="memory"),
        )
        head = {"authorization": "Bearer admin"}
        with httpx.Client(base_url=url, timeout=180, headers=head) as client:
            yield Server(client)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_value_that_is_not_of_a_fields_type_is_refused_by_name(server: Server, part: int) -> None:
    missed = []
    for path, schema in server.bodies(part):
        (body,) = server.variants(schema)
        for name, field in body["properties"].items():
            for names, value in server.wrong(field):
                given = {**server.whole(path, schema), name: value}
                answer = server.post(path, given)
                way = (name, *names)
                said = answer.text
                if not (400 <= answer.status_code < 500 and any(each in said for each in way)):
                    missed.append((path, ".".join(way), value, answer.status_code, said[:200]))
    assert not missed, "\n".join(map(str, missed))


def test_the_bodies_that_values_are_put_into_are_served(server: Server) -> None:
    others = ("images", "speech", "batches", "/encode", "prompt_embeds", "lora")
    for path, schema in (each for part in range(PARTS) for each in server.bodies(part)):
        if path == "/v1/prompt_embeds/encode" or not any(word in path for word in others):
            answer = server.post(path, server.whole(path, schema))
            assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_value_of_a_fields_type_is_a_fault_of_the_server(server: Server, part: int) -> None:
    failed = []
    for path, schema in server.bodies(part):
        (body,) = server.variants(schema)
        for name, field in body["properties"].items():
            allowed = server.kinds(field)
            for value in ODD:
                if kind_of(value) in allowed:
                    answer = server.post(path, {**server.whole(path, schema), name: value})
                    if answer.status_code >= 500:
                        failed.append((path, name, value, answer.status_code, answer.text[:200]))
    assert not failed, "\n".join(map(str, failed))
