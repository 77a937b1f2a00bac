"""Rows of an image or audio, by a server or by the model's encoder here."""

import asyncio
import secrets

from inlay.cli.command import UsageError
from inlay.cli.files import read
from inlay.cli.settings import EncodeSettings
from inlay.client import EmbeddedMedia, MediaEncoder
from inlay.digest import Secret
from inlay.media.spec import Detail, Kind
from inlay.prompt import Buffer, Media, Prompt
from inlay.request import Output, Pooling, Request, Task


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
    from inlay.media.items import audio_item, image_item

    secret = Secret(secrets.token_bytes(32))
    engine = create(EngineSettings(model=model, task="encode"), secret)
    await engine.start()
    try:
        spec = engine.card.media
        assert spec is not None, "only models with media have an encoder"
        if kind == "audio":
            item = audio_item(spec, Buffer(data), secret)
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
    grid = next(part.grid for part in prompt.segments if isinstance(part, Media))
    return EmbeddedMedia(media_rows({each.port: each for each in output.payloads}), grid, kind)
