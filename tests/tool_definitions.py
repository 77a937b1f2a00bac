"""Tool definitions as libraries and servers write them: pydantic, zod, MCP servers, others.

`TOOLS` has the parameters of each by name.
"""

import datetime
import enum
import ipaddress
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types
import pydantic
from typing_extensions import TypedDict


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Address(pydantic.BaseModel):
    """Where somebody lives."""

    street: str = pydantic.Field(description="Street and number", max_length=40)
    zip: Annotated[str, pydantic.Field(pattern=r"^\d{5}$")]
    country: Literal["de", "fr"] = "de"


class Person(pydantic.BaseModel):
    name: str
    address: Address
    former: list[Address] = []
    boss: "Person | None" = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    barks: bool


class Zoo(pydantic.BaseModel):
    animal: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    others: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]] = []


class Optional_(pydantic.BaseModel):
    limit: int | None = None
    text: str | None = None
    either: int | str = 5
    many: list[int] | None = None
    free: Any = None
    loose: dict[str, Any] = {}


class Numbers(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    age: Annotated[int, annotated_types.Ge(0), annotated_types.Lt(150)]
    share: float = pydantic.Field(gt=0, le=1)
    step: int = pydantic.Field(multiple_of=5)
    price: Decimal
    level: Level
    colour: Colour


class Formats(pydantic.BaseModel):
    day: datetime.date
    at: datetime.datetime
    clock: datetime.time
    takes: datetime.timedelta
    id: uuid.UUID
    home: pydantic.HttpUrl
    password: pydantic.SecretStr
    file: Path
    folder: pydantic.DirectoryPath
    net: ipaddress.IPv4Network
    host: ipaddress.IPv6Address
    data: bytes
    coded: pydantic.Base64Bytes
    body: pydantic.Json[Any]


class Collections(pydantic.BaseModel):
    tags: set[str]
    pair: tuple[int, str]
    points: list[tuple[float, float]]
    scores: dict[str, int]
    by_colour: dict[Colour, int]
    by_id: dict[uuid.UUID, str]
    by_key: dict[Annotated[str, pydantic.Field(pattern="^x-")], str]
    some: Annotated[list[str], pydantic.Field(min_length=1, max_length=3)]
    frozen: frozenset[Level]


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = pydantic.Field(default=[], max_length=2)


class Page(TypedDict, total=False):
    page_id: str
    database_id: str


class Lists(TypedDict):
    colours: list[Colour]
    nested: list[dict[str, list[int] | None]]


class Notion(pydantic.BaseModel):
    parent: Page | str
    children: list[dict[str, Any]] | None = None


class Renamed(pydantic.BaseModel):
    from_: str = pydantic.Field(alias="from")
    json_: dict[str, Any] = pydantic.Field(alias="$json")
    dotted: int = pydantic.Field(alias="a.b/c")


class Empty(pydantic.BaseModel):
    """A tool without parameters."""


_TYPES: tuple[tuple[str, Any], ...] = (
    ("typed_dict", Page), ("lists", Lists), ("union", Cat | Dog),
)  # fmt: skip

PYDANTIC: dict[str, Any] = {
    f"pydantic_{model.__name__.strip('_').lower()}": model.model_json_schema()
    for model in (
        Address,
        Person,
        Cat,
        Zoo,
        Optional_,
        Numbers,
        Formats,
        Collections,
        Tree,
        Notion,
        Renamed,
        Empty,
    )
} | {
    f"function_{name}": pydantic.TypeAdapter(arguments).json_schema() for name, arguments in _TYPES
}

_DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
_DRAFT2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def _object(properties: Any, required: Any = None, **more: Any) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, **more}


def _zod(properties: Any, required: Any = None, **more: Any) -> dict[str, Any]:
    return {
        **_object(properties, required), "additionalProperties": False, **_DRAFT7, **more,
    }  # fmt: skip


ZOD: dict[str, Any] = {
    "zod_email_with_look_ahead": _zod(
        {
            "to": {
                "type": "string",
                "format": "email",
                "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            }
        }
    ),
    "zod_record": _zod({"labels": {"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER}}),
    "zod_record_of_enum": _zod(
        {
            "by": {
                "type": "object",
                "propertyNames": {"type": "string", "enum": ["a", "b"]},
                "additionalProperties": {"type": "boolean"},
                "required": ["a", "b"],
            }
        }
    ),
    "zod_never": _zod({"never": {"not": {}}, "some": STRING}, ["some"]),
    "zod_any": _zod({"value": {}, "name": STRING}),
    "zod_union": _zod({"id": {"anyOf": [STRING, {"type": "number"}]}, "kind": {"type": ["string", "null"]}}),
    "zod_literals": _zod({"a": {"type": "string", "const": "x"}, "b": {"type": "number", "const": 5}, "c": {"type": "boolean", "const": True}}),
    "zod_nullable": _zod({"a": {"anyOf": [{"type": "object", "properties": {"b": STRING}}, {"type": "null"}], "default": None}}),
    "zod_tuple": _zod({"at": {"type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "number"}, {"type": "number"}]}}),
    "zod_tuple_2020": {**_zod({"at": {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2}}), **_DRAFT2020},
    "zod_set": _zod({"tags": {"type": "array", "uniqueItems": True, "items": STRING}}),
    "zod_lazy": _zod({"node": {"$ref": "#/definitions/node"}}, definitions={"node": _zod({"next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]}})}),
    "zod_reused": _zod({"from": _object({"city": STRING}), "to": {"$ref": "#/properties/from"}}),
    "zod_intersection": _zod({"both": {"allOf": [_object({"a": STRING}), _object({"b": INTEGER})]}}),
    "zod_discriminated": _zod(
        {"shape": {"oneOf": [_object({"type": {"type": "string", "const": "circle"}, "r": INTEGER}), _object({"type": {"type": "string", "const": "square"}, "a": INTEGER})]}}
    ),
    "zod_named": {"$ref": "#/definitions/Args", "definitions": {"Args": _zod({"a": INTEGER})}, **_DRAFT7},
    "zod_integer": {**_zod({"n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}, "p": {"type": "integer", "exclusiveMinimum": 0}}), **_DRAFT2020},
    "zod_formats": _zod(
        {
            name.replace("-", "_"): {"type": "string", "format": name}
            for name in ("uri", "uuid", "date-time", "cuid", "cuid2", "ulid", "emoji", "jwt", "base64url", "nanoid", "e164", "ip", "cidrv4", "regex")
        }
    ),
    "zod_strict_records": _zod({"env": {"type": "object", "additionalProperties": STRING}}, []),
}  # fmt: skip

MCP: dict[str, Any] = {
    "read_text_file": {**_zod({"path": STRING, "tail": {"type": "number", "description": "last lines"}, "head": {"type": "number"}}, ["path"])},
    "read_multiple_files": _zod({"paths": {"type": "array", "items": STRING, "minItems": 1, "description": "files"}}),
    "edit_file": _zod(
        {
            "path": STRING,
            "edits": {"type": "array", "items": {"type": "object", "properties": {"oldText": STRING, "newText": STRING}, "required": ["oldText", "newText"], "additionalProperties": False}},
            "dryRun": {"type": "boolean", "default": False},
        }, ["path", "edits"],
    ),
    "directory_tree": _zod({"path": STRING, "excludePatterns": {"type": "array", "items": STRING, "default": []}}, ["path"]),
    "list_allowed_directories": {"type": "object", "properties": {}, "required": []},
    "create_issue": _object(
        {"owner": STRING, "repo": STRING, "title": STRING, "body": STRING, "assignees": {"type": "array", "items": STRING}, "milestone": {"type": "number"}, "labels": {"items": STRING, "type": "array"}},
        ["owner", "repo", "title"],
    ),
    "list_issues": _object(
        {"state": {"enum": ["open", "closed", "all"]}, "sort": {"type": "string", "enum": ["created", "updated"]}, "per_page": {"type": "number", "minimum": 1, "maximum": 100}, "since": {"type": "string", "format": "date-time"}},
        [],
    ),
    "push_files": _object({"branch": STRING, "files": {"type": "array", "items": _object({"path": STRING, "content": STRING})}}),
    "search_code": _object({"q": STRING, "order": {"enum": ["asc", "desc"], "type": "string"}, "page": {"type": "number", "minimum": 1}}, ["q"]),
    "create_or_update_file": _object({"path": STRING, "content": STRING, "sha": {"type": "string", "pattern": "^[0-9a-f]{40}$"}}, ["path", "content"]),
    "pull_request_review": _object(
        {"event": {"type": "string", "enum": ["APPROVE", "COMMENT"]}, "comments": {"type": "array", "items": {"anyOf": [_object({"path": STRING, "position": INTEGER, "body": STRING}), _object({"path": STRING, "line": INTEGER, "body": STRING})]}}},
        ["event"],
    ),
    "API-post-page": {
        "type": "object",
        "$defs": {
            "parentRequest": {"type": "object", "properties": {"page_id": {"type": "string", "format": "uuid"}}, "required": ["page_id"]},
            "titleRequest": {"type": "object", "properties": {"title": {"type": "array", "items": {"$ref": "#/$defs/richText"}}}, "required": ["title"]},
            "richText": {"type": "object", "properties": {"text": {"type": "object", "properties": {"content": STRING}, "required": ["content"]}}, "required": ["text"], "additionalProperties": False},
        },
        "properties": {
            "parent": {"$ref": "#/$defs/parentRequest"},
            "properties": {"$ref": "#/$defs/titleRequest"},
            "children": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/richText"}, STRING]}},
            "icon": {"type": "string", "format": "json"},
        },
        "required": ["parent", "properties"],
    },
    "API-post-search": _object(
        {"query": STRING, "sort": _object({"direction": STRING, "timestamp": STRING}), "filter": {"description": "a filter", "properties": {"value": STRING, "property": STRING}}, "page_size": {"type": "integer", "default": 100}},
        [],
    ),
    "slack_post_message": _object({"channel_id": {"type": "string", "description": "ID"}, "text": STRING}),
    "slack_get_channel_history": _object({"channel_id": STRING, "limit": {"type": "number", "default": 10}, "oldest": {"type": "string", "pattern": r"^\d{10}\.\d{6}$"}}, ["channel_id"]),
    "slack_list_channels": {"type": "object", "properties": {"limit": {"type": "number"}, "cursor": STRING}},
    "browser_click": {**_zod({"element": STRING, "ref": STRING, "button": {"type": "string", "enum": ["left", "right", "middle"]}, "modifiers": {"type": "array", "items": {"type": "string", "enum": ["Alt", "Shift"]}}}, ["element", "ref"])},
    "browser_fill_form": _zod({"fields": {"type": "array", "items": _object({"name": STRING, "type": {"type": "string", "enum": ["textbox", "checkbox"]}, "value": STRING})}}),
    "execute_sql": _object({"sql": STRING, "params": {"type": "array", "items": {}}}, ["sql"]),
    "kubernetes_apply": _object({"resource": {"type": "string", "pattern": "^[a-z]"}, "namespace": {"type": ["string", "null"]}}, ["resource"]),
    "firecrawl_scrape": {
        **_DRAFT2020,
        **_object(
            {
                "url": {"type": "string", "format": "uri"},
                "formats": {
                    "type": "array",
                    "items": {"anyOf": [{"type": "string", "enum": ["markdown", "html"]}, _object({"type": {"type": "string", "const": "json"}, "schema": {"type": "object", "propertyNames": STRING, "additionalProperties": {}}}, ["type"])]},
                },
                "headers": {"type": "object", "propertyNames": STRING, "additionalProperties": STRING},
                "waitFor": {"type": "number"},
            }, ["url"],
        ),
        "additionalProperties": False,
    },
    "sequentialthinking": _object({"thought": STRING, "nextThoughtNeeded": {"type": "boolean"}, "thoughtNumber": {"type": "integer", "minimum": 1}, "totalThoughts": {"type": "integer", "minimum": 1}}),
    "memory_create_relations": _zod({"relations": {"type": "array", "items": _zod({"from": STRING, "to": STRING, "relationType": STRING})}}),
    "jira_search": _object({"jql": STRING, "fields": {"anyOf": [{"type": "array", "items": STRING}, STRING], "default": "summary"}, "limit": {"default": 10, "exclusiveMinimum": True, "minimum": 0, "type": "integer"}}, ["jql"]),
    "openapi_components": {
        **_object({"pet": {"$ref": "#/components/schemas/Pet"}}),
        "components": {"schemas": {"Pet": _object({"name": {"type": "string", "nullable": True, "example": "Rex", "format": "password"}, "tag": {"$ref": "#/components/schemas/Tag"}}), "Tag": {"type": "string", "enum": ["a", "b"]}}},
    },
    "with_an_id": {"$id": "https://tools.test/x.json", **_object({"a": {"$ref": "https://tools.test/x.json#/$defs/A"}, "b": {"$ref": "#/$defs/A"}, "c": {"$ref": "#a"}}), "$defs": {"A": {"$anchor": "a", "type": "integer"}}},
    "dashboards": _object({"panels": {"type": "array", "contains": INTEGER, "items": INTEGER}, "time": {"if": {"const": "now"}, "then": STRING, "else": STRING, "type": "string"}}),
    "at_least_one": _object({"id": STRING, "name": STRING}, [], oneOf=[{"required": ["id"]}, {"required": ["name"]}]),
    "dependent": _object({"card": STRING, "billing": STRING}, [], dependentRequired={"card": ["billing"]}, minProperties=1),
    "counted": _object({"a": STRING, "b": STRING}, ["a"], minProperties=1, additionalProperties=INTEGER),
    "one_of_two": _object({"a": STRING, "b": STRING}, [], minProperties=1, maxProperties=1, additionalProperties=False),
    "one_more": _object({"a": STRING, "b": STRING}, ["a"], minProperties=2, additionalProperties=False),
    "unevaluated": _object({"a": STRING}, unevaluatedProperties=False),
    "two_patterns": _object({"meta": {"type": "object", "patternProperties": {"^x": STRING, "y$": INTEGER}}}),
}  # fmt: skip

HABITS: dict[str, Any] = {
    "null_properties": {"type": "object", "properties": None, "required": None},
    "null_parameters": None,
    "empty_parameters": {},
    "php_properties": {"type": "object", "properties": [], "required": []},
    "required_in_the_property": {"type": "object", "properties": {"a": {"type": "string", "required": True}, "b": {"type": "string", "required": False}}},
    "null_keywords": _object({"a": {"type": "string", "enum": None, "pattern": None, "minLength": None, "format": None, "default": None, "items": None, "anyOf": None}}),
    "python_types": _object({"a": {"type": "int"}, "b": {"type": "str"}, "c": {"type": "dict"}, "d": {"type": "float"}, "e": {"type": "any"}}),
    "numbers_as_text": _object({"a": {"type": "string", "minLength": "1"}, "b": {"type": "integer", "minimum": "0"}}),
    "whole_floats": _object({"a": {"type": "array", "items": INTEGER, "maxItems": 2.0}}),
    "empty_enum": _object({"a": {"type": "string", "enum": []}, "b": {"anyOf": []}}),
    "enum_of_another_type": _object({"a": {"type": "string", "enum": [1, 2]}}),
    "dangling": _object({"a": {"$ref": "#/$defs/Gone"}, "b": {"$ref": "https://elsewhere.test/b.json"}}),
    "schemas_as_text": _object({"a": "string", "b": {"type": "object", "properties": {"c": "integer"}}}),
    "no_type": {"properties": {"a": INTEGER}},
    "huge_numbers": _object({"a": {"type": "integer", "maximum": 10**30, "default": 10**40}}),
    "too_costly": _object({"a": {"type": "string", "pattern": "(a{1000}){1000}"}, "b": INTEGER}),
    "no_expression": _object({"a": {"type": "string", "pattern": "(a"}, "b": INTEGER}),
    "a_word_boundary": _object({"a": {"type": "string", "pattern": r"\bfoo\b"}}),
    "circular_with_siblings": {"$ref": "#/$defs/N", "$defs": {"N": _object({"n": {"$ref": "#/$defs/N", "type": "object"}}, [])}},
    "formats_as_a_list": _object({"a": {"type": "object", "propertyNames": {"format": ["date"]}}}),
    "never": _object({"a": False}, []),
}  # fmt: skip

TOOLS: dict[str, Any] = {**PYDANTIC, **ZOD, **MCP, **HABITS}
