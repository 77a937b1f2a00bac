"""OpenAPI description, made from the types that parse requests."""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

import msgspec

from inlay.http.bodies.framing import MULTIPART
from inlay.http.errors import OPENAI, ErrorForm
from inlay.messages.fields import fields_of

_REF = "#/components/schemas/{name}"

Refused: TypeAlias = Callable[[type, str], str]
"""Returns the reason why a field of a type of requests is refused."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a route.

    Attributes:
        name: as it is written in a request.
        text: its meaning.
        example: a value.
        schema: type, bounds and default, as JSON Schema.
        place: where it stands.
        required: the route cannot do without it.
    """

    name: str
    text: str
    example: Any
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    place: Literal["query", "path", "header"] = "query"
    required: bool = False

    def described(self) -> dict[str, Any]:
        """Return it as OpenAPI has it."""
        return {
            "name": self.name,
            "in": self.place,
            "description": self.text,
            "required": self.required or self.place == "path",
            "schema": dict(self.schema),
            "example": self.example,
        }


_REQUEST_ID = Parameter(
    "X-Request-Id",
    "id of the request, of 1 to 128 visible characters; one is made when absent. It comes back.",
    "my-request-1",
    place="header",
)
_TIMEOUT = Parameter(
    "X-Request-Timeout",
    "seconds that the request may take in all; the server's own bound holds too.",
    30,
    {"type": "number", "exclusiveMinimum": 0},
    "header",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a route.

    Attributes:
        method: upper case.
        path: path, with `{name}` for parameters.
        summary: description in one line.
        request: type of the body, or None.
        response: type of the answer, or union of types, or None where it is not JSON.
        event: type, or union of types, of a stream's events; None where there is no stream.
        parameters: in its path and query, and headers of its own.
        otherwise: type of the answer in another API's form, or None.
        multipart: the body may also be a form: a part `request` of that type, and files.
        files: media types of which the body may also be a raw file.
        answers: media types of which the answer may be a file.
        open: no API key is required.
        admin: for admins only.
        errors: form of its errors.
        examples: bodies to try, by a description of a few words.
    """

    method: str
    path: str
    summary: str
    request: type | None = None
    response: Any = None
    event: Any = None
    parameters: tuple[Parameter, ...] = ()
    otherwise: Any = None
    multipart: bool = False
    files: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    open: bool = False
    admin: bool = False
    errors: ErrorForm = OPENAI
    examples: Mapping[str, Any] = field(default_factory=dict)

    def all_parameters(self) -> Iterator[Parameter]:
        """Yield its own parameters and the headers that other routes read too."""
        yield from self.parameters
        if not self.open:
            yield _REQUEST_ID
            if self.method != "GET" and not self.admin:
                yield _TIMEOUT


_FIELD = re.compile(r" {4}(\w+): (.*)")


@cache
def field_descriptions(kind: type) -> Mapping[str, str]:
    """Return what is said of fields, where they are declared or under "Attributes:", by field.

    A subclass may say more of its bases' fields.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        declared = fields_of(one) if issubclass(one, msgspec.Struct) else {}
        found |= {name: each.text for name, each in declared.items() if name in one.__annotations__}
        name = ""
        _, _, attributes = inspect.cleandoc(one.__dict__.get("__doc__") or "").partition(
            "\nAttributes:\n"
        )
        for line in attributes.split("\n"):
            if begins := _FIELD.fullmatch(line):
                name, found[begins[1]] = begins[1], begins[2]
            elif name and line.strip():
                found[name] += " " + line.strip()
    return found


def summary(kind: type) -> str:
    """Return the docstring of a type without its attributes."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[0].strip()


def struct_types(kinds: Iterable[Any]) -> Mapping[str, type]:
    """Return the struct types that make up `kinds`, by their name in a JSON schema."""
    found: dict[str, set[type]] = {}
    pending: list[Any] = list(msgspec.inspect.multi_type_info(kinds))
    while pending:
        info = pending.pop()
        if isinstance(info, msgspec.inspect.StructType):
            named = found.setdefault(info.cls.__name__, set())
            if info.cls in named:
                continue
            named.add(info.cls)
        for name in getattr(info, "__struct_fields__", ()):
            value = getattr(info, name)
            pending.extend(value if isinstance(value, tuple) else [value])
    return {
        name if len(named) == 1 else f"{kind.__module__}.{kind.__qualname__}": kind
        for name, named in found.items()
        for kind in named
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_FILE = {"type": "string", "format": "binary"}


def _bodies(operation: Operation, schema: dict[str, Any]) -> dict[str, Any]:
    content = _json(schema)
    if operation.examples:
        content["application/json"]["examples"] = {
            name: {"value": value} for name, value in operation.examples.items()
        }
    if operation.multipart:
        form = {"type": "object", "properties": {"request": schema}, "required": ["request"]}
        content[MULTIPART] = {
            "schema": form | {"additionalProperties": _FILE},
            "encoding": {"request": {"contentType": "application/json"}},
        }
    content |= {media: {"schema": _FILE} for media in operation.files}
    return content


def _responses(operation: Operation, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    content |= {media: {"schema": _FILE} for media in operation.answers}
    if operation.response is not None:
        found = [operation.response, operation.otherwise]
        forms = [schemas[kind] for kind in found if kind is not None]
        content |= _json(forms[0] if len(forms) == 1 else {"anyOf": forms})
    if operation.event is not None:
        content["text/event-stream"] = {"schema": schemas[operation.event]}
    ok: dict[str, Any] = {"description": "The answer."}
    if content:
        ok["content"] = content
    error = {"description": "An error.", "content": _json(schemas[operation.errors.type])}
    return {"200": ok, "default": error}


def _explain(
    components: Mapping[str, dict[str, Any]],
    kinds: Mapping[str, type],
    requests: Iterable[type],
    refused: Refused,
) -> None:
    """Write descriptions of types and fields into their schemas, and examples of fields.

    Args:
        components: schemas by name.
        kinds: types by the same names.
        requests: types of bodies. A field means in one what it means in the others, so that it is
            described once.
        refused: returns the reason why a field of a request is refused.
    """
    asked = set(struct_types(requests).values())
    shared: dict[str, str] = {}
    examples: dict[str, Any] = {}
    for request in requests:
        shared = {**field_descriptions(request), **shared}
        for name, each in fields_of(request).items():
            if each.example is not None:
                examples.setdefault(name, each.example)
    for name, kind in kinds.items():
        schema = components[name]
        schema["description"] = summary(kind)
        said = {**(shared if kind in requests else {}), **field_descriptions(kind)}
        for known, value in schema.get("properties", {}).items():
            if value.get("not") == {}:
                if "description" not in value:
                    value["description"] = f"Refused: {refused(kind, known)}."
                continue
            if known in said:
                value["description"] = said[known]
            words = value.get("enum", ())
            if value.get("type") == "null":
                value.setdefault("description", "Always null.")
            elif len(words) == 1:
                value.setdefault("description", f"Always {json.dumps(words[0])}.")
            if "examples" not in value and (kind in asked or len(words) != 1):
                example = examples.get(known) if kind in asked else None
                example = _example(value) if example is None else example
                if example is not None:
                    value["examples"] = [example]


def _example(schema: Mapping[str, Any]) -> Any:
    """Return a value of a boolean or of a few words, other than the default; else None."""
    for one in schema.get("anyOf", [schema]):
        values = one.get("enum", [False, True] if one.get("type") == "boolean" else [])
        others = [value for value in values if value != schema.get("default")]
        if others:
            return others[-1]
    return None


def describe(
    operations: Iterable[Operation], version: str, refused: Refused, root_path: str = ""
) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of `operations`, which clients see below `root_path`."""
    listed = tuple(operations)
    types = {
        kind
        for each in listed
        for kind in (each.request, each.response, each.event, each.otherwise, each.errors.type)
        if kind is not None
    }
    ordered = sorted(types, key=str)
    found, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas = dict(zip(ordered, found, strict=True))
    requests = dict.fromkeys(each.request for each in listed if each.request is not None)
    _explain(components, struct_types(ordered), requests, refused)
    paths: dict[str, dict[str, Any]] = {}
    for operation in listed:
        entry: dict[str, Any] = {
            "summary": operation.summary,
            "responses": _responses(operation, schemas),
        }
        if operation.request is not None:
            entry["requestBody"] = {
                "required": True,
                "content": _bodies(operation, schemas[operation.request]),
            }
        parameters = [one.described() for one in operation.all_parameters()]
        if parameters:
            entry["parameters"] = parameters
        if not operation.open:
            entry["security"] = [{"key": []}]
        if operation.admin:
            entry["tags"] = ["admin"]
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "inlay",
            "version": version,
            "description": "OpenAI's API for models whose prompts may be embeddings.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
