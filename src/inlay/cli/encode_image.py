"""`inlay embeds encode --image`: rows of an image, by a server or by the model's encoder here."""

import asyncio
import secrets

from inlay.cli.command import UsageError
from inlay.cli.files import read
from inlay.cli.settings import EncodeSettings
from inlay.client import EmbeddedImage, ImageEncoder
from inlay.digest import Secret
from inlay.media.spec import Detail
from inlay.prompt import Buffer, Media, Prompt
from inlay.request import Output, Pooling, Request, Task


def encoded(settings: EncodeSettings) -> EmbeddedImage:
    """The rows of the image that `settings` names.

    Raises:
        UsageError: neither a server nor a model is given.
        FileError: the image cannot be read.
        InlayError: the image is refused, the server cannot be reached, or there is no such model.
    """
    assert settings.image is not None
    data = read(settings.image, f"--image {settings.image}")
    detail: Detail | None = settings.detail
    if settings.url is None:
        if settings.model is None:
            raise UsageError(
                "--image is encoded by a server, --url URL, or here, --model DIRECTORY"
            )
        return asyncio.run(_here(settings.model, data, detail))
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    encoder = ImageEncoder(settings.url, key, model=settings.model)
    return encoder.encode(data, detail=detail)


async def _here(model: str, data: bytes, detail: Detail | None) -> EmbeddedImage:
    """Encode an image with the encoder of a model, in this process."""
    from inlay.api.openai.encode import image_rows
    from inlay.engine import EngineSettings, create
    from inlay.media.items import image_item

    secret = Secret(secrets.token_bytes(32))
    engine = create(EngineSettings(model=model, task="encode"), secret)
    await engine.start()
    try:
        spec = engine.card.media
        assert spec is not None, "only models with images have an encoder"
        prompt = Prompt.of(*image_item(spec, Buffer(data), secret, detail=detail).segments)
        done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        request = Request(id="image", task=Task.ENCODE, prompts=(prompt,), params=Pooling())
        engine.submit(request, done.set_result)
        output = await done
    finally:
        await engine.close()
    if output.error is not None:
        raise output.error.to_error()
    grid = next(part.grid for part in prompt.segments if isinstance(part, Media))
    return EmbeddedImage(image_rows({each.port: each for each in output.payloads}), grid)
