"""Routes of no API: probes, `/version`, `/metrics`, `/load`, `/tokenizer_info`, `/server_info`."""

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

import inlay
from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.http.metrics import requests as metrics
from inlay.http.metrics.engine_health import combined_status, health_of
from inlay.http.request_scope import shutting_down
from inlay.http.server import Call
from inlay.messages.card import ModelCard
from inlay.messages.fields import field
from inlay.router.router import ASLEEP_RETRY_AFTER

_TEXT = (b"content-type", metrics.CONTENT_TYPE)


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


class Status(msgspec.Struct, frozen=True):
    """Response of the probes."""

    status: Annotated[str, field("`live` or `ready`.", "ready")]


class Version(msgspec.Struct, frozen=True):
    """Response of `/version`."""

    version: Annotated[str, field("version of inlay.", "0.2.0")]


async def live(call: Call) -> None:
    """Answer that the process is alive."""
    await call.json(Status("live"))


async def ready(call: Call) -> None:
    """Answer 200 if a request for some model would be accepted, else raise `OverloadedError`.

    That is so if the server does not drain, and a worker is ready, awake and healthy; of a
    pipeline, if every stage has one that is ready.
    """
    if call.server.inflight.draining:
        raise shutting_down()
    router = call.server.router
    cut_off = router.unreachable()
    if cut_off is not None:
        raise OverloadedError(cut_off, retry_after=1)
    found = [health_of(worker) for worker in router.ready()]
    if not found:
        if router.awaits_workers:
            await call.json(Status("ready"))
            return
        raise router.unready()
    if all(worker.state == "asleep" for worker in found):
        raise OverloadedError("all workers are asleep", retry_after=ASLEEP_RETRY_AFTER)
    if not any(worker.well and worker.state != "asleep" for worker in found):
        said = "; ".join(worker.reason for worker in found)
        raise OverloadedError(f"no worker is well: {said}", retry_after=1)
    lacking = _lacking([worker.card for worker in router.asked()])
    if lacking:
        raise OverloadedError(f"no pipeline has all its stages: {lacking}", retry_after=1)
    await call.json(Status("ready"))


def _lacking(cards: Sequence[ModelCard]) -> str:
    """Return the stages that pipelines lack; empty where some model or pipeline is whole."""
    served = {card.name for card in cards}
    found = set()
    for card in cards:
        missing = None if card.stage is None else card.stage.missing(served)
        if card.stage is None or not missing:
            return ""
        found.add(f"{card.stage.whole} lacks {', '.join(missing)}")
    return "; ".join(sorted(found))


async def health(call: Call) -> None:
    """Answer with the last probe of every worker's engine; 503 if a model has no healthy worker."""
    router = call.server.router
    cut_off = router.unreachable()
    if cut_off is None:
        found = combined_status(router.models(), router.ready(), router.unavailable())
    else:
        found = combined_status(router.models(), [], {**router.unavailable(), "NATS": cut_off})
    await call.json(found, OverloadedError.status if found.error is not None else 200)


async def version(call: Call) -> None:
    """Answer with inlay's version."""
    await call.json(Version(inlay.__version__))


async def exposition(call: Call) -> None:
    """Answer with all metrics in Prometheus' text format, made at most twice a second."""
    await call.bytes(await call.server.exposition.result(), _TEXT)


class Load(msgspec.Struct, frozen=True):
    """Response of `/load`: number of running requests."""

    server_load: Annotated[int, field("requests that are running.", 3)]


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
