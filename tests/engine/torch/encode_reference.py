"""Requests to encode images, at engines, and the rows that transformers makes of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.engine import EncodeEngine
from inlay.media.items import image_item
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt
from inlay.messages.request import Output, Pooling, Request, Task
from tests.engine.torch.vision_reference import Picture, directory_of, model_of, pixels

SECRET = Secret(bytes(32))


class Features(NamedTuple):
    """What transformers makes of a picture: rows [rows, hidden], and the same of each level."""

    rows: Tensor
    levels: list[Tensor]


def features(family: str, picture: Picture, **processing: Any) -> Features:
    """The image features of transformers, with settings of its processor."""
    model = model_of(directory_of(family))
    body = model if family == "llama4" else model.model
    with torch.no_grad():
        found = body.get_image_features(**pixels(family, [picture], **processing), return_dict=True)
        rows = found.pooler_output
        if family == "llama4":
            rows = body.multi_modal_projector(found.last_hidden_state)
    levels = getattr(found, "deepstack_features", None) or ()
    return Features(_flat(rows), [_flat(level) for level in levels])


def _flat(found: Any) -> Tensor:
    parts = [found] if isinstance(found, Tensor) else found
    return torch.cat([part.flatten(0, -2) for part in parts])


def settings(family: str, **values: object) -> EngineSettings:
    return EngineSettings.of(
        **{"model": str(directory_of(family)), "task": "encode", "device": "cpu", "num_threads": 1}
        | values
    )


@asynccontextmanager
async def encoding(family: str, **values: object) -> AsyncIterator[EncodeEngine]:
    engine = EncodeEngine(settings(family, **values), SECRET)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def prompt_of(engine: Engine, data: bytes) -> Prompt:
    """The prompt of one image, laid out as a frontend does."""
    assert engine.card.media is not None
    return Prompt.of(*image_item(engine.card.media, Buffer(data), SECRET).segments)


def damaged(data: bytes) -> bytes:
    """A PNG file whose headers are as before, and whose pixels cannot be decoded."""
    middle = len(data) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


def request_of(name: str, *prompts: Prompt, **values: Any) -> Request:
    return Request(id=name, task=Task.ENCODE, prompts=prompts, params=Pooling(), **values)


async def answer(engine: Engine, request: Request) -> Output:
    """The only output of a request."""
    done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
    engine.submit(request, done.set_result)
    async with asyncio.timeout(60):
        return await done


def arrays(output: Output) -> list[dict[str, "np.ndarray[Any, Any]"]]:
    """The payloads of an output, by prompt and port."""
    assert output.error is None, output.error
    found: list[dict[str, np.ndarray[Any, Any]]] = []
    for payload in output.payloads:
        if payload.port == "embeddings":
            found.append({})
        flat = np.frombuffer(payload.data.view, payload.dtype)
        found[-1][payload.port] = flat.reshape(payload.shape)
    return found
