"""Inputs of SGLang for models that take images.

Each image and each run of rows becomes one of SGLang's items, with SGLang's key of an item set to
inlay's digest of its content and the request's salt: all of its caches know an item by that key.
Files are decoded here and made into patches by the image processor that SGLang has loaded; its own
way in, which fetches URLs, and hashes what it made of them, is not used.

Rows that a client made, an image's or others, are items too, with the embeddings in them, so they
mix with files. They are items of SGLang's kind VIDEO, of which there are no others: where some
items of one kind in a batch have embeddings and some have not, SGLang 0.5.23 ends, whoever sent
them. A prompt with rows is cached for prompts with the same rows alone: rows that are not finite in
a layer make all positions before them so, by a weight of 0 times NaN, and SGLang would keep these
as those of the text. Positions in three dimensions are counted by inlay.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from PIL import Image
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.decoding import SizedImage, in_thread
from inlay.engine.native_media import (
    TRIED,
    ImageRun,
    Pictures,
    image_name,
    named_rows,
    parts_of,
)
from inlay.media.geometry import Layout
from inlay.media.positions import rope_positions
from inlay.media.spec import MediaSpec, layout
from inlay.messages.digest import Secret
from inlay.messages.prompt import Media, Prompt, Rows, Tokens
from inlay.messages.request import Request


@dataclass(slots=True)
class _SglangInput:
    """An input of SGLang in the making.

    Attributes:
        ids: of all positions; at those of images and rows the id of the image's placeholder.
        items: in order of the prompt.
        rows: names of those that are rows.
    """

    ids: list[int] = field(default_factory=list)
    items: list[MultimodalDataItem] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)

    def add(
        self, modality: Modality, name: bytes, count: int, placeholder: int, **content: Any
    ) -> None:
        """Add an item of `count` positions."""
        end = len(self.ids) + count
        item = MultimodalDataItem(modality=modality, offsets=[(len(self.ids), end - 1)], **content)
        item.set_identity(blake3(name).digest())
        self.items.append(item)
        self.ids += [placeholder] * count

    def given(self, prompt: Prompt, placeholder: int, salt: str | None) -> dict[str, Any]:
        """The arguments of SGLang's request that say the prompt, and who may find it."""
        if not self.items:
            return {"input_ids": self.ids, "cache_salt": salt}
        if self.rows:
            salt = blake3(b"".join(self.rows)).hexdigest()
        positions, delta = rope_positions(prompt)
        made = MultimodalProcessorOutput(
            mm_items=self.items,
            input_ids=self.ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(self.ids, self.items),
            im_token_id=placeholder,
            video_token_id=placeholder,
            mrope_positions=torch.from_numpy(positions).long(),
            mrope_position_delta=torch.tensor([[delta]]),
        )
        return {"input_ids": self.ids, "cache_salt": salt, "image_data": [made]}


class SglangInputs:
    """Makes SGLang's inputs of prompts with images and rows.

    Args:
        processor: SGLang's of the model; from now on it passes what this makes.
        spec: layout of images, whose positions are in three dimensions.
        secret: of the namespace.

    Attributes:
        spec: as above.
    """

    def __init__(self, processor: Any, spec: MediaSpec, secret: Secret) -> None:
        processor.process_mm_data_async = _passed
        self._processor = processor._processor.image_processor
        self._pictures = Pictures()
        self._secret = secret
        self.spec = spec

    def close(self) -> None:
        """Stop the threads."""
        self._pictures.close()

    def check(self) -> None:
        """Try pictures of several shapes. Raises `EngineError` as `input_of`."""
        for height, width in TRIED:
            laid = layout(self.spec, height, width)
            picture = Image.new("RGB", (width, height))
            self._patches(picture, self.spec.processor_settings(None), laid)

    async def input_of(self, request: Request) -> dict[str, Any]:
        """Return the arguments of SGLang's request for the prompt and the earlier output.

        Rows are copied: nothing refers to them afterwards.

        Raises:
            InvalidRequestError: a file that is no picture or of another size than it was laid out
                for, parts of an image, or rows that do not fill their grid.
            EngineError: SGLang's processor would lay an image out differently.
        """
        prompt = await self._pictures.prompt_of(request, self._secret)
        made, known = _SglangInput(), dict[bytes, dict[str, torch.Tensor]]()
        for part in parts_of(prompt):
            if isinstance(part, Tokens):
                made.ids += part.ids
            elif isinstance(part, Rows):
                self._add_rows(made, part, request.salt)
            else:
                await self._add_image(made, part, request, known)
        return made.given(prompt, self.spec.image_token, request.salt)

    def _add_rows(self, made: _SglangInput, rows: Rows, salt: str | None) -> None:
        for part in named_rows(rows, len(made.ids), self.spec, self._secret, salt):
            made.rows.append(part.name)
            made.add(
                Modality.VIDEO,
                part.name,
                len(part.values),
                self.spec.image_token,
                format=MultimodalInputFormat.PRECOMPUTED_EMBEDDING,
                precomputed_embeddings=part.values,
            )

    async def _add_image(
        self,
        made: _SglangInput,
        segments: ImageRun,
        request: Request,
        known: dict[bytes, dict[str, torch.Tensor]],
    ) -> None:
        run = segments[0]
        if run.digest not in known:
            try:
                known[run.digest] = await self._image(run, request)
            except InvalidRequestError as error:
                raise run.located(error) from error
        inputs = known[run.digest]
        name = image_name(run, request.salt)
        (count,) = (len(each) for each in segments if isinstance(each, Media))
        made.add(
            Modality.IMAGE,
            name,
            count,
            self.spec.image_token,
            feature=inputs["pixel_values"],
            model_specific_data={"image_grid_thw": inputs["image_grid_thw"]},
        )

    async def _image(self, run: Media, request: Request) -> dict[str, torch.Tensor]:
        """Patches and grid of the image that `run` is of."""
        async with self._pictures.decoded(run, self.spec, request) as (picture, sized):
            return await in_thread(self._pictures.threads, self._sized, picture, sized)

    def _sized(self, picture: Any, sized: SizedImage) -> dict[str, torch.Tensor]:
        return self._patches(picture, sized.settings, sized.layout)

    def _patches(
        self, picture: Any, settings: dict[str, Any], laid: Layout
    ) -> dict[str, torch.Tensor]:
        """Patches (patches, numbers) and grid (1, 3) of a picture.

        Raises `EngineError` unless they are as `laid`.
        """
        found = self._processor(images=[picture], return_tensors="pt", **settings)
        grid = tuple(int(side) for side in found["image_grid_thw"][0])
        if grid != laid.grid:
            raise EngineError(
                f"SGLang's processor lays an image out as {grid} patches, and its prompt has "
                f"{laid.grid}"
            )
        return {name: found[name] for name in ("pixel_values", "image_grid_thw")}


async def _passed(*, image_data: list[Any], **_: Any) -> Any:
    """Stand in for SGLang's `process_mm_data_async`, with what was made before."""
    (made,) = image_data
    return made
