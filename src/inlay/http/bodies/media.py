"""Media in requests: their sources, fetching, and the segments of a prompt they become.

A source is a URL (data:, https:, or file: where a setting allows it), or embeddings that the
client's own encoder made. Only headers are read here; a worker decodes the file.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.http.bodies.accounting import EmbedsLimits
from inlay.media.data_url import (
    data_url_body,
    decode_data_url,
    decode_frames_url,
    is_frames,
)
from inlay.media.embeds import EmbedsPart, embeds_segments
from inlay.media.fetch import Fetcher
from inlay.media.items import Item, audio_item, image_item, video_item
from inlay.media.spec import KINDS, Detail, Kind, MediaSpec
from inlay.media.video import Encode
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import DTYPE_SIZES, Buffer, Media, Rows, Segment
from inlay.tensors import read

_AT_A_TIME = 8
"""URLs of one request that are fetched at the same time."""


class MediaSource(NamedTuple):
    """Source of an image, audio or a video; one of `url`, `embeds` and `ref` is set.

    Attributes:
        url: of the file.
        embeds: rows from a client's own encoder.
        detail: OpenAI's.
        param: path in the request.
        prompt: index of the prompt it is in.
        ref: id of a stored image.
        kind: of the item.
        of_answer: True in a turn of the assistant.
    """

    url: str | None
    embeds: EmbedsPart | None
    detail: Detail | None
    param: str
    prompt: int = 0
    ref: str | None = None
    kind: Kind = "image"
    of_answer: bool = False

    @property
    def name(self) -> str:
        """Its URL or reference."""
        return self.ref or self.url or ""

    @property
    def tensor(self) -> object:
        """Base64 of a tensor file, where the image is one."""
        return None if self.embeds is None else self.embeds.source

    @property
    def is_data(self) -> bool:
        """True if the URL holds the file itself."""
        return self.url is not None and self.url[:5].lower() == "data:"

    def data(self, lifted: Mapping[str, Buffer], max_bytes: int) -> Buffer:
        """Return the file that the URL holds.

        Args:
            lifted: files that were decoded as the body arrived, by what stands for them.
            max_bytes: of the file.

        Raises:
            InvalidRequestError: not base64, or over the limit.
        """
        encoded = _base64_of(self)
        data = lifted.get(encoded)
        if self.kind == "video" and is_frames(self.url or ""):
            only = None if data is None else data.view
            return Buffer(decode_frames_url(self.url or "", max_bytes=max_bytes, only=only))
        if data is None:
            return Buffer(decode_data_url(self.url or "", max_bytes=max_bytes))
        if len(data) > max_bytes:
            raise InvalidRequestError(
                f"a data: URL holds {len(data)} bytes; allowed: {max_bytes} (--max-media-bytes)"
            )
        return data


def file_data(sources: Sequence[object]) -> list[str]:
    """Return the base64 of the files that `sources` hold in data: URLs.

    Raises:
        InvalidRequestError: a data: URL that is not in base64.
    """
    return [_base64_of(each) for each in sources if isinstance(each, MediaSource) and each.is_data]


def _base64_of(source: MediaSource) -> str:
    url = source.url or ""
    try:
        return url[data_url_body(url) :]
    except InvalidRequestError as error:
        raise error.located(source.param) from None


def is_own(source: MediaSource, card: ModelCard) -> bool:
    """Return True for what a pipeline has made of its model's text, and the model cannot see."""
    return (
        source.of_answer
        and card.stage is not None
        and source.kind in card.stage.outputs
        and (card.media is None or not card.media.takes(source.kind))
    )


def spec_for(card: ModelCard, sources: Sequence[MediaSource]) -> MediaSpec:
    """Return the facts about a model's media.

    Raises:
        InvalidRequestError: it takes none of a kind, not so many, or no embeddings of them.
    """
    spec = card.media
    for source in sources:
        if spec is None or not spec.takes(source.kind):
            taken = [kind for kind in KINDS if spec is not None and spec.takes(kind)]
            named = "images" if source.kind == "image" else source.kind
            beside = f"; kinds of media it takes: {', '.join(taken)}" if taken else ""
            raise InvalidRequestError(
                f"{source.param}: the model `{card.name}` takes no {named}{beside}",
                param=source.param,
            )
    assert spec is not None, "a request with media has a source"
    for (prompt, kind), count in Counter((each.prompt, each.kind) for each in sources).items():
        try:
            spec.check_counts({kind: count})
        except InvalidRequestError as error:
            first = next(each for each in sources if (each.prompt, each.kind) == (prompt, kind))
            raise error.located(first.param) from None
    embeds = next((source for source in sources if source.embeds is not None), None)
    if embeds is not None and not spec.embeds:
        raise InvalidRequestError(
            f"{embeds.param}: You must set --enable-mm-embeds on the server, or on the workers of "
            f"the model `{card.name}`, to send {embeds.kind}_embeds.",
            param=embeds.param,
            reason="disabled",
        )
    return spec


async def fetched(
    fetcher: Fetcher,
    sources: Sequence[MediaSource],
    hold: Callable[[int], None],
    client: str | None = None,
) -> dict[str, Buffer]:
    """Return the files of all sources that have to be fetched, by URL.

    Args:
        fetcher: fetches them.
        sources: of one request.
        hold: reserves bytes as they arrive.
        client: whose request it is.

    Raises:
        InvalidRequestError: one is not allowed, or cannot be had.
        InlayError: `hold` refuses the bytes.
    """
    wanted: dict[str, MediaSource] = {}
    for source in sources:
        if source.url is not None and not source.is_data:
            wanted.setdefault(source.url, source)
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def fetch(url: str, source: MediaSource) -> Buffer:
        async with turns:
            try:
                return Buffer(await fetcher.fetch(url, hold=hold, client=client))
            except InvalidRequestError as error:
                raise error.located(source.param) from None

    tasks = [asyncio.create_task(fetch(url, source)) for url, source in wanted.items()]
    try:
        return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()


class MediaItems:
    """Media of one request as segments of its model's prompt.

    CPU work, for one thread at a time.

    Args:
        card: of the model.
        spec: its facts about images.
        secret: key of digests.
        limits: of embeddings.
        max_bytes: of one file.
        files: those that were fetched, stored or unpacked, by name.
        lifted: files and tensors that were decoded as the body arrived, by what stands for them.
        decode: decodes a string of tensor data to a file.
        hold: reserves bytes of rows that are cast to another dtype.
        encode: tokenizes the times between a video's frames.
    """

    def __init__(
        self,
        card: ModelCard,
        spec: MediaSpec,
        secret: Secret,
        limits: EmbedsLimits,
        *,
        max_bytes: int,
        files: Mapping[str, Buffer],
        lifted: Mapping[str, Buffer],
        decode: Callable[[str], Buffer],
        hold: Callable[[int], None],
        encode: Encode,
    ) -> None:
        self._card = card
        self._spec = spec
        self._secret = secret
        self._limits = limits
        self._max_bytes = max_bytes
        self._files = files
        self._lifted = lifted
        self._decode = decode
        self._hold = hold
        self._encode = encode
        self._made: dict[tuple[Kind, str, Detail | None], tuple[Segment, ...]] = {}

    @property
    def num_fetched_bytes(self) -> int:
        """Bytes of the files that were fetched, stored or unpacked."""
        return sum(map(len, self._files.values()))

    def segments(self, source: MediaSource) -> Sequence[Segment]:
        """Return the positions of an item.

        Raises:
            InvalidRequestError: no file, or no embeddings of one, that the model takes.
            InlayError: `hold` refuses the bytes.
        """
        try:
            if source.embeds is not None:
                return self._of_embeds(source.embeds, source.kind)
            key = source.kind, source.name, source.detail
            if key not in self._made:
                self._made[key] = tuple(
                    msgspec.structs.replace(each, param=source.param)
                    if isinstance(each, Media)
                    else each
                    for each in self._item(source).segments
                )
            return self._made[key]
        except EmbeddingsError as error:
            message = error.message.replace("prompt_embeds", f"{source.kind}_embeds")
            named = EmbeddingsError(message, reason=error.reason)
            raise named.located(source.param) from None
        except InvalidRequestError as error:
            raise error.located(source.param) from None

    def _item(self, source: MediaSource) -> Item:
        data = self._file(source)
        if source.kind == "audio":
            return audio_item(self._spec, data, self._secret)
        if source.kind == "video":
            return video_item(self._spec, data, self._secret, self._encode)
        return image_item(self._spec, data, self._secret, detail=source.detail)

    def _file(self, source: MediaSource) -> Buffer:
        if source.is_data and source.name not in self._files:
            return source.data(self._lifted, self._max_bytes)
        return self._files[source.name]

    def _of_embeds(self, part: EmbedsPart, kind: Kind) -> list[Segment]:
        card = self._card
        data = self._decode(part.source)
        tensor = read(data, limits=self._limits.of(card))
        if tensor.dtype != card.dtype:
            self._hold(len(tensor.data) // DTYPE_SIZES[tensor.dtype] * DTYPE_SIZES[card.dtype])
        found = embeds_segments(
            self._spec,
            tensor,
            grid=tensor.grid if part.grid is None else part.grid,
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            max_abs=card.limits.max_prompt_embeds_abs,
            kind=kind,
        )
        return [
            msgspec.structs.replace(each, digests=row_digests(each, self._secret))
            if isinstance(each, Rows)
            else each
            for each in found
        ]
