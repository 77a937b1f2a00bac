"""`inlay embeds encode`: text, messages, an image or audio to a file of embeddings."""

import asyncio
import json
import secrets
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pybase64

from inlay.base.errors import EmbeddingsError, why_unusable
from inlay.cli.command import UsageError
from inlay.cli.process import Console
from inlay.client import EmbeddedMedia, EmbeddedPrompt, MediaEncoder, PromptEmbedder
from inlay.client.prompts import Array
from inlay.media.spec import Detail, Kind
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Media, Prompt
from inlay.messages.request import Output, Pooling, Request, Task
from inlay_tools.files import as_json, check_destination, read, standard_input, write_bytes
from inlay_tools.settings import EncodeSettings


def run(settings: EncodeSettings) -> int:
    """Write the embeddings; the exit status.

    Raises:
        UsageError: the words contradict each other, or ask for what cannot be had exactly.
        FileError: a file cannot be read or written.
        InvalidRequestError: the model or the messages are no such thing.
    """
    given = {
        "--text": settings.text,
        "--messages": settings.messages,
        "--image": settings.image,
        "--audio": settings.audio,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} cannot both be given")
    is_media = settings.image is not None or settings.audio is not None
    if settings.detail and settings.image is None:
        raise UsageError("--detail is for an --image")
    check_destination(settings)
    made: EmbeddedPrompt | EmbeddedMedia
    if is_media:
        media = encoded(settings)
        made = EmbeddedMedia(_cast(media.rows, settings.dtype), media.grid, media.kind)
    else:
        if settings.model is None:
            raise UsageError("--model is missing: the directory of the model, or its name")
        prompt = _embedded(settings, PromptEmbedder.from_pretrained(settings.model))
        made = EmbeddedPrompt(_cast(prompt.rows, settings.dtype), prompt.table_id)
    try:
        data = made.to_bytes(settings.format)
    except EmbeddingsError as error:
        raise UsageError(f"{error.message} (--format, --dtype)") from error
    if settings.base64:
        data = pybase64.b64encode(data) + b"\n"
    write_bytes(data, settings.output)
    if settings.output is None:
        return 0
    console = Console(sys.stdout, sys.stderr)
    if settings.output_format == "json":
        known = made.table_id if isinstance(made, EmbeddedPrompt) else None
        kept = None if settings.format == "npy" else known
        size = len(data)
        console.out(as_json(settings.output, settings.format, made.rows, size, table_id=kept))
        return 0
    console.line(
        f"{settings.output}: {made.num_tokens} rows of {made.rows.shape[1]}, "
        f"{made.rows.dtype}, {len(data)} bytes"
    )
    return 0


def _embedded(settings: EncodeSettings, embedder: PromptEmbedder) -> EmbeddedPrompt:
    if settings.messages is not None:
        return embedder.embed_messages(_messages(settings.messages))
    text = settings.text if settings.text is not None else standard_input()
    return embedder.embed(text)


def _cast(rows: Array, dtype: str) -> Array:
    """The same values in `dtype`. Raises `UsageError` where it does not hold them all."""
    if dtype == "auto":
        return rows
    wider = np.dtype(dtype)
    if not np.can_cast(rows.dtype, wider):
        raise UsageError(f"--dtype {dtype} does not hold {rows.dtype} rows exactly")
    return rows.astype(wider)


def _messages(path: Path) -> list[dict[str, Any]]:
    try:
        messages = json.loads(read(path, f"--messages {path}"))
    except ValueError as error:
        raise UsageError(f"--messages {path}: not JSON: {why_unusable(error)}") from error
    if isinstance(messages, dict):
        messages = messages.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(
            f"--messages {path}: must be a list of messages, or an object that has one as "
            "'messages'"
        )
    return messages


def encoded(settings: EncodeSettings) -> EmbeddedMedia:
    """The rows of the file that `settings` names.

    Raises:
        UsageError: neither a server nor a model is given.
        FileError: the file cannot be read.
        InlayError: the file is refused, the server cannot be reached, or there is no such model.
    """
    kind: Kind = "image" if settings.audio is None else "audio"
    path = settings.audio or settings.image
    assert path is not None
    data = read(path, f"--{kind} {path}")
    if settings.url is None:
        if settings.model is None:
            raise UsageError(
                f"--{kind} is encoded by a server, --url URL, or here, --model DIRECTORY"
            )
        return asyncio.run(_here(settings.model, data, kind, settings.detail))
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    encoder = MediaEncoder(settings.url, key, model=settings.model)
    return encoder.encode(data, kind=kind, detail=settings.detail)


async def _here(model: str, data: bytes, kind: Kind, detail: Detail | None) -> EmbeddedMedia:
    """Encode a file with the encoder of a model, in this process."""
    from inlay.api.openai.encode import media_rows
    from inlay.engine import EngineSettings, create
    from inlay.media.embeds import grid_beside
    from inlay.media.items import audio_item, image_item
    from inlay.media.unpacking import unpacked

    secret = Secret(secrets.token_bytes(32))
    engine = create(EngineSettings.of(model=model, task="encode"), secret)
    await engine.start()
    try:
        spec = engine.card.media
        assert spec is not None, "only models with media have an encoder"
        if kind == "audio":
            item = audio_item(spec, unpacked(Buffer(data), lambda _: None), secret)
        else:
            item = image_item(spec, Buffer(data), secret, detail=detail)
        prompt = Prompt.of(*item.segments)
        done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        request = Request(id="encode", task=Task.ENCODE, prompts=(prompt,), params=Pooling())
        engine.submit(request, done.set_result)
        output = await done
    finally:
        await engine.close()
    if output.error is not None:
        raise output.error.to_error()
    run = next(part for part in prompt.segments if isinstance(part, Media))
    grid = grid_beside(spec, run)
    return EmbeddedMedia(media_rows({each.port: each for each in output.payloads}), grid, kind)
