"""`POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter`, `GET /v1/loras`.

An adapter is loaded on every worker of a model, and in a fleet recorded for those that come later.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from inlay.api.admin.schema import (
    AdapterEntry,
    AdapterList,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.http.parsed_request import read_json
from inlay.http.server import Call
from inlay.messages.card import ModelCard
from inlay.messages.commands import ListAdapters, LoadAdapter, UnloadAdapter, WorkerCommand
from inlay.messages.request import Task
from inlay.transport.api import Worker

WITHIN = 3600.0
"""Seconds a worker has to load or unload an adapter; it has shorter limits of its own."""

MAX_DRAIN = 1800.0

T = TypeVar("T")

_load = msgspec.json.Decoder(LoadLoraAdapterRequest)
_unload = msgspec.json.Decoder(UnloadLoraAdapterRequest)
_TEXT = (b"content-type", b"text/plain; charset=utf-8")


async def load_lora_adapter(call: Call) -> None:
    """Load an adapter on every worker of a model, or on none.

    Raises:
        InvalidRequestError: the name is taken, or the adapter cannot be used.
        NotFoundError: no such adapter or model.
        InlayError: a worker failed.
    """
    request = await _read(call, _load)
    name = request.lora_name
    path, sha256 = request.lora_path, None
    if request.source is not None:
        if path:
            raise InvalidRequestError("give one of lora_path and source, not both", param="source")
        path, sha256 = request.source.uri, request.source.sha256
    if not name or not path:
        raise InvalidRequestError(
            "Both 'lora_name' and 'lora_path' must be provided.", param="lora_name"
        )
    if request.is_3d_lora_weight:
        raise InvalidRequestError(
            "is_3d_lora_weight: adapters of experts are not supported", param="is_3d_lora_weight"
        )
    card = _model(call, request.base_model_name)
    _check_name(call, card, name)
    command = LoadAdapter(name, path, sha256, request.load_inplace)
    router = call.server.router
    # Of all weights that have the name now.
    workers = [
        worker
        for worker in router.asked()
        if (worker.card.name, worker.card.role) == (card.name, card.role)
    ]
    if not workers:
        raise router.unready()
    answers = await asyncio.gather(*(_send(worker, command) for worker in workers))
    failed = [answer for answer in answers if isinstance(answer, InlayError)]
    if failed:
        done = [
            worker
            for worker, answer in zip(workers, answers, strict=True)
            if not isinstance(answer, InlayError) and not answer.already
        ]
        raise await _undone(request, done, workers, failed)
    if (record := router.adapter_record()) is not None:
        await record.record_adapter(card.name, command)
    await call.bytes(f"Success: LoRA adapter '{name}' added successfully.".encode(), _TEXT)


async def _undone(
    request: LoadLoraAdapterRequest,
    done: Sequence[Worker],
    workers: Sequence[Worker],
    failed: Sequence[InlayError],
) -> InlayError:
    """Undo a load that failed on some workers, and return its error."""
    first = failed[0]
    if len(workers) == 1:
        return first
    said = (
        f"loading '{request.lora_name}' failed on {len(failed)} of {len(workers)} workers: "
        f"{first.message}"
    )
    if done and request.load_inplace:
        # The replaced adapter is gone; repeating the request loads it where it failed.
        said += f"; it is loaded on {', '.join(worker.id for worker in done)}"
    elif done:
        command = UnloadAdapter(request.lora_name)
        undoing = await asyncio.gather(*(_send(worker, command) for worker in done))
        kept = [
            f"{worker.id} ({answer.message})"
            for worker, answer in zip(done, undoing, strict=True)
            if isinstance(answer, InlayError) and not isinstance(answer, NotFoundError)
        ]
        said += (
            f"; it could not be unloaded again on {', '.join(kept)}"
            if kept
            else "; it is loaded on none"
        )
    return type(first)(said, param=first.param, code=first.code, retry_after=first.retry_after)


async def unload_lora_adapter(call: Call) -> None:
    """Unload an adapter from every worker.

    It accepts no more requests, and its memory is free when this returns.

    Raises:
        NotFoundError: no worker has it.
        InlayError: a worker failed.
    """
    request = await _read(call, _unload)
    name, seconds = request.lora_name, request.drain_timeout
    if not name:
        raise InvalidRequestError(
            "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name"
        )
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= MAX_DRAIN):
        raise InvalidRequestError(
            f"drain_timeout must be from 0 to {MAX_DRAIN:g} seconds, got {seconds:g}",
            param="drain_timeout",
        )
    router = call.server.router
    workers = router.ready()
    if not workers:
        raise router.unready()
    record, models = router.adapter_record(), {worker.card.name for worker in workers}
    # First, so that nobody who comes meanwhile loads it.
    recorded = record is not None and await record.forget_adapter(models, name)
    command = UnloadAdapter(name, seconds)
    answers = await asyncio.gather(*(_send(worker, command) for worker in workers))
    failed = [answer for answer in answers if isinstance(answer, InlayError)]
    unknown = [answer for answer in failed if isinstance(answer, NotFoundError)]
    if len(unknown) == len(workers) and not recorded:
        raise unknown[0]
    for error in failed:
        if not isinstance(error, NotFoundError):
            raise error
    await call.bytes(f"Success: LoRA adapter '{name}' removed successfully.".encode(), _TEXT)


async def list_loras(call: Call) -> None:
    """Answer with every adapter on every worker, whatever its state."""
    workers = call.server.router.ready()
    if not workers:
        raise call.server.router.unready()
    answers = await asyncio.gather(*(_send(worker, ListAdapters()) for worker in workers))
    entries: list[AdapterEntry] = []
    for worker, answer in zip(workers, answers, strict=True):
        if isinstance(answer, InlayError):
            raise answer
        for status in answer.adapters:
            said = msgspec.structs.asdict(status)
            name, path = said.pop("name"), said.pop("path")
            entries.append(
                AdapterEntry(id=name, root=path, worker=worker.id, parent=worker.card.name, **said)
            )
    await call.json(AdapterList(data=entries))


async def _send(worker: Worker, command: WorkerCommand[T]) -> T | InlayError:
    """Return a worker's reply to a command, or its error."""
    try:
        return await worker.call(command, WITHIN)
    except InlayError as error:
        return error


async def _read(call: Call, decoder: "msgspec.json.Decoder[T]") -> T:
    with call.reservation:
        return await read_json(call, decoder)


def _model(call: Call, name: str | None) -> ModelCard:
    """Return the base model of an adapter.

    Raises `InvalidRequestError` if it is not named and several models are served.
    """
    if name is not None:
        model = call.server.model(name)
        if model.adapter is not None:
            raise InvalidRequestError(
                f"base_model_name {name!r} is an adapter itself", param="base_model_name"
            )
        return model.card
    cards = [card for card in call.server.router.models() if Task.GENERATE in card.tasks]
    if len(cards) > 1:
        raise InvalidRequestError(
            f"{len(cards)} models are served; say in base_model_name which of them the adapter is "
            "for",
            param="base_model_name",
        )
    return cards[0] if cards else call.server.card(None)


def _share_adapters(one: ModelCard, other: ModelCard) -> bool:
    """Return True for parts of one model, of which one adapter may be."""
    wholes = [
        card.stage.whole if card.stage is not None and card.stage.shares_adapters else None
        for card in (one, other)
    ]
    return wholes[0] is not None and wholes[0] == wholes[1]


def _check_name(call: Call, card: ModelCard, name: str) -> None:
    """Raise `InvalidRequestError` if another model, or an adapter of one, has this name."""
    router = call.server.router
    for other in router.models():
        if name in (other.name, *other.aliases):
            raise InvalidRequestError(
                f"The lora adapter '{name}' conflicts with a served base model.", param="lora_name"
            )
        if other.name == card.name or _share_adapters(other, card):
            continue
        if any(name == adapter.name for adapter in router.adapters(other)):
            raise InvalidRequestError(
                f"The lora adapter '{name}' has already been loaded for the model '{other.name}'.",
                param="lora_name",
            )
