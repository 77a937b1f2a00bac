"""The renderer of each model, loaded at first use."""

import asyncio
from pathlib import Path

from inlay.errors import InvalidRequestError
from inlay.protocol.work import ModelCard
from inlay.render import Renderer


class Renderers:
    """Renderers by model directory. Loading happens in a thread, once, whoever asks.

    Args:
        chat_template: file of a template that replaces the models' own, or None.
    """

    def __init__(self, chat_template: str | None) -> None:
        self._template = None if chat_template is None else _read(chat_template)
        self._loaded: dict[str, Renderer] = {}
        self._loading: dict[str, asyncio.Task[Renderer]] = {}

    async def of(self, card: ModelCard) -> Renderer:
        """The renderer of the model of `card`. Raises `InlayError` when its directory has no usable tokenizer."""
        renderer = self._loaded.get(card.path)
        if renderer is not None:
            return renderer
        task = self._loading.get(card.path)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._load, card.path))
            self._loading[card.path] = task
            task.add_done_callback(lambda _: self._loading.pop(card.path, None))
        # Shielded: one waiter that leaves must not take the others' renderer with it.
        renderer = await asyncio.shield(task)
        self._loaded[card.path] = renderer
        return renderer

    def _load(self, path: str) -> Renderer:
        return Renderer.load(path, chat_template=self._template)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot read the chat template: {error}", param="chat_template") from error
