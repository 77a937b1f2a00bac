"""Renderers of the models, loaded at first use."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

from inlay.card import ModelCard
from inlay.errors import EngineError, InlayError, InvalidRequestError
from inlay.render import Renderer
from inlay.render.template import ChatTemplate
from inlay.single_flight import SingleFlight

_log = logging.getLogger(__name__)


class _Key(NamedTuple):
    path: str
    max_positions: int


class Renderers:
    """Renderers by model directory. Each is loaded once, in a thread.

    Args:
        chat_template: a template that replaces the models' own, as `read_template` takes it, or
            None.
    """

    def __init__(self, chat_template: str | None) -> None:
        self._template = None if chat_template is None else read_template(chat_template)
        self._loaded: dict[_Key, Renderer] = {}
        self._loading: SingleFlight[_Key, Renderer] = SingleFlight(finishes=True)

    async def of(self, card: ModelCard) -> Renderer:
        """Return the renderer of the model of `card`.

        Raises `EngineError` if its directory has no usable tokenizer here; the log says why.
        """
        key = _Key(card.path, card.limits.max_model_len)
        renderer = self._loaded.get(key)
        if renderer is not None:
            return renderer
        return await self._loading.run(key, partial(self._load, key))

    async def _load(self, key: _Key) -> Renderer:
        renderer = self._loaded[key] = await asyncio.to_thread(self._read, key)
        return renderer

    def _read(self, key: _Key) -> Renderer:
        try:
            return Renderer.load(
                key.path, chat_template=self._template, max_positions=key.max_positions
            )
        except InlayError as error:
            # A fault of the server: the client is not shown the paths of its files.
            _log.error("cannot load a tokenizer or chat template: %s", error.message)
            raise EngineError(
                "this server cannot read the model's tokenizer or chat template"
            ) from error


def read_template(given: str) -> str:
    """Return the text of a chat template.

    Args:
        given: path of its file, or the template itself. As in vLLM, it is the template if there
            is no such file and it has a brace or a line break.

    Raises:
        InvalidRequestError: no such file and no template, or a template with an error in its
            syntax.
    """
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not any(character in given for character in "{}\n"):
            raise InvalidRequestError(
                f"cannot read the chat template: {error}", param="chat_template"
            ) from error
        text = given
    ChatTemplate(text, {}).compiled()
    return text
