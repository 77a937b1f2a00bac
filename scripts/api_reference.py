"""Write docs/api-reference.md from the types that the server parses requests with."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import inlay
from inlay.api.app import refused, routes
from inlay.engine.sglang import capabilities as sglang
from inlay.engine.vllm import capabilities as vllm
from inlay.http import openapi
from inlay.http.openapi import Operation
from inlay.messages.card import Refusal

PAGE = Path(__file__).parents[1] / "docs" / "api-reference.md"
REFUSED = "Refused: "

_INTRODUCTION = """\
# Routes and fields

    curl http://127.0.0.1:8000/openapi.json     # the same, for programs; /docs is a page to try them

Made from the types that the server parses requests with, by `make reference`. Rules are in
[HTTP API](api.md), differences from vLLM in [Coming from vLLM](from-vllm.md). "key": needs one where the server has keys.
"""


def reference() -> str:
    """Return the page: routes, fields of several, fields of each, and those that are refused."""
    operations = [operation for operation, _ in routes()]
    types = openapi.describe(operations, inlay.__version__, refused)["components"]["schemas"]
    paths: dict[str, list[str]] = {}
    for operation in operations:
        if isinstance(operation.request, type):
            paths.setdefault(operation.request.__name__, []).append(operation.path)
    fields = {name: dict(_described(types[name]["properties"], types)) for name in paths}
    uses = Counter(pair for of_type in fields.values() for pair in of_type.items())
    shared: dict[str, str] = {}
    for (field, said), count in uses.most_common():
        if count > 1 and not _refused(said):
            shared.setdefault(field, said)
    lines = [_INTRODUCTION, *_routes(operations)]
    lines += ["", "## Fields of several routes", "", "| field | |", "|---|---|"]
    lines += [f"| `{field}` | {said} |" for field, said in shared.items()]
    for name, where in paths.items():
        lines += _fields(fields[name], where, types[name].get("required", ()), shared)
    lines += _refusals(fields, paths)
    lines += _refused_by_engines()
    return "\n".join(lines) + "\n"


def _described(
    properties: Mapping[str, Any], types: Mapping[str, Any], within: str = ""
) -> Iterator[tuple[str, str]]:
    """Names and descriptions; of a field that is one object, also those of its fields."""
    for field, one in properties.items():
        choices = one.get("anyOf", [one])
        words = [word for choice in choices for word in choice.get("enum", ())]
        said = _cell(one["description"])
        if any(f'"{word}"' not in said for word in words):
            said += f" One of {', '.join(map(str, words))}."
        yield f"{within}{field}", said
        inner = [types[each["$ref"].rpartition("/")[2]] for each in choices if "$ref" in each]
        if len(inner) == 1 and len(choices) == 2:
            yield from _described(inner[0]["properties"], types, f"{within}{field}.")


def _routes(operations: Iterable[Operation]) -> Iterator[str]:
    yield "| route | | needs |"
    yield "|---|---|---|"
    for one in operations:
        needs = "admin" if one.admin else "" if one.open else "key"
        yield f"| `{one.method} {one.path}` | {one.summary} | {needs} |"


def _fields(
    fields: Mapping[str, str],
    paths: list[str],
    required: Collection[str],
    shared: Mapping[str, str],
) -> Iterator[str]:
    own = {
        field: said
        for field, said in fields.items()
        if not _refused(said) and shared.get(field) != said
    }
    yield f"\n## {', '.join(paths)}\n"
    if own:
        yield "| field | |"
        yield "|---|---|"
    for field, said in own.items():
        yield f"| `{field}`{' (needed)' if field in required else ''} | {said} |"
    others = [field for field, said in fields.items() if shared.get(field) == said]
    if others:
        yield f"\nAnd of [several routes](#fields-of-several-routes): {_listed(others)}."


def _refusals(
    fields: Mapping[str, Mapping[str, str]], paths: Mapping[str, list[str]]
) -> Iterator[str]:
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for name, of_type in fields.items():
        for field, said in of_type.items():
            if _refused(said):
                names, where = found.setdefault(said.removeprefix(REFUSED), ({}, {}))
                names[field] = where[paths[name][0]] = None
    yield "\n## Fields that are refused\n"
    yield "They would change the answer, and are not served: a 400. `null` counts as absent.\n"
    yield "| field | of | because |"
    yield "|---|---|---|"
    for reason, (names, where) in found.items():
        yield f"| {_listed(names)} | {_listed(where)} | {reason} |"


_USUAL = {
    "ids_are_looked_up": False,
    "own_reasoning": False,
    "mixes_logprobs": False,
    "counts_thinking": True,
}
_OF_VLLM = {
    "": {},
    ", with its second model runner, and speculation": {"ids_are_looked_up": True},
    ", with `--reasoning-parser` after `--`": {"own_reasoning": True},
    ", with its first model runner": {"mixes_logprobs": True},
    ", models with images": {"takes_images": True},
    ", no form of reasoning known": {"counts_thinking": False},
}
"""Where vLLM refuses more than usual, and the facts of it."""


def _refused_by_engines() -> Iterator[str]:
    yield "\n## Refused by vLLM and SGLang\n"
    yield "Beside the above, behind inlay: a 400 with engine, version and reason.\n"
    yield "| feature | with prompts | engine | because |"
    yield "|---|---|---|---|"
    shown = set()
    for where, facts in _OF_VLLM.items():
        for one in vllm.refusals(**_USUAL | facts):
            if one not in shown:
                shown.add(one)
                yield _refusal(one, f"vLLM{where}")
    yield f"| `/sleep?level=2` | | vLLM | {_cell(vllm.NO_LEVEL_2)} |"
    for one in sglang.REFUSALS:
        yield _refusal(one, "SGLang")
    yield _refusal(sglang.SEEDED_MIN_P, "SGLang, with `--enable-deterministic-inference`")


def _refusal(one: Refusal, engine: str) -> str:
    prompts = "text and rows" if one.prompts == "mixed" else one.prompts
    return f"| `{one.feature}` | {prompts} | {engine} | {_cell(one.reason)} |"


def _refused(said: str) -> bool:
    return said.startswith(REFUSED)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
