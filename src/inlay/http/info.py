"""Information about the server: `GET /load`, `/tokenizer_info`, `/server_info`, as in vLLM."""

import os
import platform
from collections.abc import Mapping
from typing import Any

import msgspec

import inlay
from inlay.errors import InvalidRequestError
from inlay.http.server import Call

_FORMATS = ("text", "json")

_PATHS = frozenset(
    {
        "vocab_file",
        "merges_file",
        "tokenizer_file",
        "special_tokens_map_file",
        "name_or_path",
        "cache_dir",
    }
)
"""Fields of a tokenizer's configuration that hold file paths of its author."""


class Load(msgspec.Struct, frozen=True):
    """Response of `/load`: number of running requests."""

    server_load: int


async def load(call: Call) -> None:
    """Answer with the number of running requests of this server."""
    await call.json(Load(call.server.inflight.count))


async def tokenizer_info(call: Call) -> None:
    """Answer with the tokenizer's configuration and chat template of `model`.

    Raises:
        InvalidRequestError: unknown query parameter.
        InlayError: no such model.
    """
    server = call.server
    name = call.query().get("model", [None])[-1]
    renderer = await server.renderers.of(server.card(name))
    found = {
        key: _plain(value)
        for key, value in renderer.tokenizer_config.items()
        if key not in _PATHS and key != "chat_template"
    }
    found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if renderer.chat_templates:
        # If there are two, the first is the one for tools.
        found["chat_template"] = renderer.chat_templates[-1]
    await call.json(found)


def _plain(value: Any) -> Any:
    """Return `value` with each token object replaced by its text."""
    if isinstance(value, Mapping):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


async def server_info(call: Call) -> None:
    """Answer with the frontend's settings without keys, the models' cards, and the machine.

    Raises:
        InvalidRequestError: a query other than `config_format` text or json.
    """
    form = call.query().get("config_format", ["text"])[-1]
    if form not in _FORMATS:
        raise InvalidRequestError(
            f"config_format must be text or json, got {form[:40]!r}", param="config_format"
        )
    settings = call.server.settings
    cards = [msgspec.to_builtins(card) for card in call.server.router.models()]
    for card in cards:
        card.pop("secret_fingerprint")
    await call.json(
        {
            "inlay_config": str(settings) if form == "text" else settings.model_dump(mode="json"),
            "models": cards,
            "system_env": {
                "inlay_version": inlay.__version__,
                "python_version": platform.python_version(),
                "python_platform": platform.platform(),
                "cpu_count": os.cpu_count(),
            },
        }
    )
