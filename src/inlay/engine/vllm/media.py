"""Inputs of vLLM for models that take images.

Images become vLLM's own items: a file is decoded here, and vLLM's processor makes the inputs of the
tower. Embeddings that a client made become items too: those of an image with a grid are vLLM's
`image_embeds`, and other rows its `prompt_embeds`, which no tower sees. So text, images and
embeddings mix in any order, and texts before them are found in the cache of text prompts.

Each item is named by inlay's digest of its content, with the request's salt: of a file as it came,
of rows by value. Never by a name that a client chose: vLLM's caches know an item by its name alone.
Positions are counted before vLLM sees an item, and compared with those that vLLM would give it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from PIL import Image
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
)

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.decoding import finished
from inlay.engine.kv_chain import NotedItem
from inlay.engine.native_media import (
    TRIED,
    ImageRun,
    Pictures,
    image_name,
    named_rows,
    parts_of,
)
from inlay.media.geometry import Layout
from inlay.media.spec import MediaSpec, layout
from inlay.messages.digest import Secret
from inlay.messages.prompt import Media, Rows, Tokens
from inlay.messages.request import Request

_IMAGE, _ROWS = "image", "prompt_embeds"
"""Modalities, by vLLM's names."""


@dataclass(slots=True)
class _Input:
    """An input of vLLM in the making.

    Attributes:
        ids: of all positions; at those of images and rows the id of the image's placeholder.
        items: modality, item, name and positions, in order of the prompt.
        noted: meaning of the names.
    """

    ids: list[int] = field(default_factory=list)
    items: list[tuple[str, MultiModalKwargsItem, str, PlaceholderRange]] = field(
        default_factory=list
    )
    noted: list[NotedItem] = field(default_factory=list)

    def given(self, salt: str | None) -> Any:
        """VLLM's engine input."""
        if not self.items:
            return tokens_input(self.ids, cache_salt=salt)
        found: dict[str, list[Any]] = {modality: [] for modality, *_ in self.items}
        names: dict[str, list[str]] = {modality: [] for modality in found}
        places: dict[str, list[PlaceholderRange]] = {modality: [] for modality in found}
        for modality, item, name, place in self.items:
            found[modality].append(item)
            names[modality].append(name)
            places[modality].append(place)
        return mm_input(self.ids, MultiModalKwargsItems(found), names, places, cache_salt=salt)


class VllmInputs:
    """Makes vLLM's inputs of prompts with images and rows.

    Files are decoded in threads of its own, within a budget of bytes that clients share.

    Args:
        renderer: vLLM's; its processor makes the inputs of the tower.
        spec: layout of images.
        secret: of the namespace.

    Attributes:
        spec: as above.
    """

    def __init__(self, renderer: Any, spec: MediaSpec, secret: Secret) -> None:
        self._renderer = renderer
        self.spec = spec
        self._secret = secret
        self._pictures = Pictures()

    def close(self) -> None:
        """Stop the threads."""
        self._pictures.close()

    def check(self) -> None:
        """Try pictures of several shapes. Raises `EngineError` as `input_of`."""
        for height, width in TRIED:
            picture = Image.new("RGB", (width, height))
            prompt = self._prompt(picture, f"{height} x {width}", {})
            (given,) = self._renderer.render_cmpl([prompt], skip_mm_cache=True)
            self._check(given, layout(self.spec, height, width))

    async def input_of(self, request: Request) -> tuple[Any, list[NotedItem]]:
        """Return vLLM's input for the prompt and the earlier output of `request`.

        Also returns what the names of its items stand for. Rows are copied.

        Raises:
            InvalidRequestError: a file that is no picture or of another size than it was laid out
                for, parts of an image, or rows that do not fill their grid.
            EngineError: vLLM would lay an image out differently.
        """
        prompt = await self._pictures.prompt_of(request, self._secret)
        made, known = _Input(), dict[bytes, tuple[MultiModalKwargsItem, str]]()
        for part in parts_of(prompt):
            if isinstance(part, Tokens):
                made.ids += part.ids
            elif isinstance(part, Rows):
                self._add_rows(made, part, request.salt)
            else:
                run, digest = part[0], part[0].digest
                if digest not in known:
                    try:
                        known[digest] = await self._image(run, request)
                    except InvalidRequestError as error:
                        raise run.located(error) from error
                self._add_image(made, part, *known[digest])
        return made.given(request.salt), made.noted

    def _add_image(
        self,
        made: _Input,
        segments: ImageRun,
        item: MultiModalKwargsItem,
        name: str,
    ) -> None:
        begin = len(made.ids)
        mask: list[bool] = []
        for segment in segments:
            if isinstance(segment, Tokens):
                made.ids += segment.ids
            else:
                made.ids += [self.spec.image_token] * len(segment)
            mask += [isinstance(segment, Media)] * len(segment)
        rows = None if all(mask) else torch.tensor(mask)
        made.items.append((_IMAGE, item, name, PlaceholderRange(begin, len(mask), rows)))
        known = [
            msgspec.structs.replace(each, data=None) if isinstance(each, Media) else each
            for each in segments
        ]
        made.noted.append(NotedItem(name, tuple(known)))

    def _add_rows(self, made: _Input, rows: Rows, salt: str | None) -> None:
        for part in named_rows(rows, len(made.ids), self.spec, self._secret, salt):
            item = _embeds(part.values, part.grid)
            place = PlaceholderRange(len(made.ids), len(part.values))
            modality, name = _ROWS if part.grid is None else _IMAGE, part.name.hex()
            made.items.append((modality, item, name, place))
            made.ids += [self.spec.image_token] * len(part.values)
            made.noted.append(NotedItem(name, (part.digests,)))

    async def _image(self, run: Media, request: Request) -> tuple[MultiModalKwargsItem, str]:
        """VLLM's item of the image that `run` is of, and its name."""
        async with self._pictures.decoded(run, self.spec, request) as (picture, sized):
            name = image_name(run, request.salt).hex()
            settings = sized.settings if run.detail == "low" else {}
            return await self._processed(picture, name, settings, sized.layout)

    async def _processed(
        self, data: Any, name: str, settings: dict[str, Any], laid: Layout
    ) -> tuple[MultiModalKwargsItem, str]:
        """One image through vLLM's processor: its item, and the name that vLLM gave it."""
        prompt = self._prompt(data, name, settings)
        # The cache that is passed by is of what vLLM's other process is thought to have: a request
        # that is stopped between the two would leave it wrong.
        running = asyncio.ensure_future(
            self._renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        )
        (given,) = await finished(running)
        self._check(given, laid)
        return given["mm_kwargs"][_IMAGE][0], given["mm_hashes"][_IMAGE][0]

    def _prompt(self, data: Any, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        prompt: dict[str, Any] = {
            "prompt_token_ids": [self.spec.placeholders["image"].id],
            "multi_modal_data": {_IMAGE: data},
            "multi_modal_uuids": {_IMAGE: [name]},
        }
        return {**prompt, "mm_processor_kwargs": settings} if settings else prompt

    def _check(self, given: Any, laid: Layout) -> None:
        """Raise `EngineError` unless vLLM lays an image out as `laid`."""
        token = self.spec.image_token
        ids = [
            id_
            for part in laid.parts
            for id_ in (part.ids if isinstance(part, Tokens) else [token] * part)
        ]
        rows = [
            flag
            for part in laid.parts
            for flag in [isinstance(part, int)] * (part if isinstance(part, int) else len(part))
        ]
        found = given["mm_placeholders"][_IMAGE]
        theirs = [False] * len(given["prompt_token_ids"])
        for place in found:
            mask = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
            theirs[place.offset : place.offset + place.length] = mask
        if given["prompt_token_ids"] != ids or theirs != rows:
            raise EngineError(
                f"vLLM lays an image out as {sum(theirs)} rows among {len(theirs)} positions, and "
                f"its prompt has {sum(rows)} among {len(rows)}"
            )


def _embeds(values: torch.Tensor, grid: tuple[int, int, int] | None) -> MultiModalKwargsItem:
    """VLLM's item of rows (rows, width); of an image's, where they have a grid.

    The latter is what its processors make of such an image, where they take one: some do not.
    """
    if grid is None:
        shared = MultiModalSharedField(batch_size=1)
        return MultiModalKwargsItem({"embedding": MultiModalFieldElem(values, shared)})
    laid_end_to_end = MultiModalFlatField(slices=[slice(0, len(values))])
    by_image = MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem(
        {
            "image_embeds": MultiModalFieldElem(values, laid_end_to_end),
            "image_grid_thw": MultiModalFieldElem(torch.tensor(grid), by_image),
        }
    )
