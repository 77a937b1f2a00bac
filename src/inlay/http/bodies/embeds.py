"""Embeddings in requests: their sources, checks, and conversion to rows of a model.

A source is base64 in the JSON, a multipart part, or a stored prompt.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import msgspec

from inlay.base.errors import EmbeddingsError, InvalidRequestError, NotFoundError
from inlay.http.bodies.accounting import EmbedsLimits
from inlay.http.bodies.media import MediaItems, MediaSource, is_own
from inlay.http.errors import HOW_TO_SEND
from inlay.http.metrics.requests import Metrics
from inlay.http.quoting import shown_at
from inlay.messages.card import EMBEDS_OFF, ModelCard
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import DTYPE_SIZES, Buffer, Rows, Segment
from inlay.store import Target
from inlay.tensors import Tensor, prompts_of, read, to_rows
from inlay.tensors.tensor import quoted


class TensorSource(NamedTuple):
    """One source of embeddings.

    Exactly one of the first three must be set, to a string.

    Attributes:
        data: base64 of a tensor file.
        ref: id of a stored prompt.
        part: name of a part of a multipart body.
        param: path in the request.
        object: the object at that path, for error messages.
    """

    data: object
    ref: object
    part: object
    param: str
    object: Mapping[str, Any] | None = None


Source: TypeAlias = TensorSource | MediaSource
"""One source of positions that are no tokens."""


def tensor_data(sources: Sequence[Source]) -> list[str]:
    """Return the strings among `sources` that are tensor data."""
    found = (
        source.data if isinstance(source, TensorSource) else source.tensor for source in sources
    )
    return [data for data in found if isinstance(data, str)]


def check_source(source: TensorSource) -> None:
    """Raise `InvalidRequestError` unless exactly one of data, ref and part is set, to a string."""
    given = {
        name: value
        for name, value in (("data", source.data), ("ref", source.ref), ("part", source.part))
        if value is not None
    }
    if len(given) != 1:
        got = " and ".join(given) or shown_at(source.object or {}, "data")
        raise InvalidRequestError(
            f"{source.param}: give exactly one of data, ref and part, got {got}",
            param=source.param,
        )
    ((name, value),) = given.items()
    if not isinstance(value, str):
        where = f"{source.param}.{name}"
        if name == "data":
            raise EmbeddingsError(
                f"{where}: prompt_embeds must be valid base64, got {type(value).__name__}: "
                f"{HOW_TO_SEND}",
                param=where,
                reason="base64",
            )
        raise InvalidRequestError(
            f"{where} must be a string, got {type(value).__name__}", param=where
        )


def _kinds(source: Source) -> str:
    """Return the name of what a source holds, in the plural."""
    if isinstance(source, TensorSource):
        return "prompt_embeds"
    return "audio files" if source.kind == "audio" else f"{source.kind}s"


@contextmanager
def _placed(param: str) -> Iterator[None]:
    """Within it, an error about embeddings names their place in the request."""
    try:
        yield
    except EmbeddingsError as error:
        if param == error.param:
            raise
        raise error.located(param) from error


class EmbedsReader:
    """Checks and reads embeddings for one server's settings.

    Its methods are CPU work, safe to call from any thread.

    Args:
        enabled: True if this server accepts embeddings.
        limits: of one request.
        secret: key of row digests.
        metrics: counts what was read.
    """

    def __init__(
        self, enabled: bool, limits: EmbedsLimits, secret: Secret, metrics: Metrics
    ) -> None:
        self._enabled = enabled
        self._limits = limits
        self._secret = secret
        self._metrics = metrics

    def require_enabled(self) -> None:
        """Raise `InvalidRequestError` if this server accepts no embeddings."""
        if not self._enabled or self._limits.off_everywhere:
            where = "workers" if self._enabled else "server"
            raise InvalidRequestError(
                f"You must set --enable-prompt-embeds on the {where} to send prompt_embeds.",
                param="prompt_embeds",
                reason="disabled",
            )

    def tensors(self, found: Sequence[Source]) -> list[str]:
        """Return the sources of a request that are tensor data.

        Raises `InvalidRequestError` when they are not allowed.
        """
        if found:
            if any(isinstance(source, TensorSource) for source in found):
                self.require_enabled()
            self._limits.check_count(
                [_kinds(source) for source in found], lambda index: found[index].param
            )
        return tensor_data(found)

    def target(self, card: ModelCard) -> Target:
        """Return the format of a model's rows. Raises `EmbeddingsError` if it takes none."""
        if card.prompt_embeds is not None:
            raise EmbeddingsError(
                f"The model `{card.name}` takes no prompt_embeds: {card.prompt_embeds}",
                reason="disabled" if card.prompt_embeds == EMBEDS_OFF else None,
            )
        return Target(
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            max_abs=card.limits.max_prompt_embeds_abs,
            table_id=card.embedding_table_id or None,
        )

    def check(self, tensor: Tensor, card: ModelCard) -> list[Rows]:
        """Return the prompts of a tensor as rows of the model, without digests.

        Raises:
            EmbeddingsError: not acceptable for this model.
        """
        target = self.target(card)
        prompts = prompts_of(tensor, max_prompts=self._limits.max_prompts)
        return [to_rows(prompt, **msgspec.structs.asdict(target)) for prompt in prompts]

    def rows(self, data: Buffer, card: ModelCard, hold: Callable[[int], None]) -> list[Rows]:
        """Return the prompts of a tensor file as rows of the model, with their digests.

        Args:
            data: the file.
            card: of the model.
            hold: reserves the bytes of rows that are cast to another dtype.

        Raises:
            EmbeddingsError: not an acceptable tensor for this model.
            InlayError: `hold` refuses the bytes.
        """
        began = time.perf_counter()
        tensor = read(data, limits=self._limits.of(card))
        if tensor.dtype != card.dtype:
            hold(len(tensor.data) // DTYPE_SIZES[tensor.dtype] * DTYPE_SIZES[card.dtype])
        prompts = [
            msgspec.structs.replace(rows, digests=row_digests(rows, self._secret))
            for rows in self.check(tensor, card)
        ]
        seconds = time.perf_counter() - began
        self._metrics.embeds_read(card.name, len(data), sum(map(len, prompts)), seconds)
        return prompts


class Embeddings:
    """Embeddings of one request as rows of its model, from any kind of source.

    CPU work, for one thread at a time.

    Args:
        reader: of tensor files.
        card: of the model.
        decode: decodes a string of tensor data to a file.
        hold: as in `EmbedsReader.rows`.
        parts: parts of a multipart body by name; None for other bodies.
        stored: stored prompts that the request refers to, by id.
        media: of the request; None if it has none.
    """

    def __init__(
        self,
        reader: EmbedsReader,
        card: ModelCard,
        decode: Callable[[str], Buffer],
        *,
        hold: Callable[[int], None],
        parts: Mapping[str, Buffer] | None = None,
        stored: Mapping[str, Sequence[Rows]] | None = None,
        media: MediaItems | None = None,
    ) -> None:
        self._reader = reader
        self._card = card
        self._decode = decode
        self._hold = hold
        self._parts = parts
        self._stored = stored or {}
        self._media = media
        self._read: dict[str, list[Rows]] = {}

    def prompts(self, source: TensorSource) -> Sequence[Rows]:
        """Return the prompts of a source: one, or as many as its tensor's batch.

        Raises:
            EmbeddingsError: not an acceptable tensor for the model.
            InvalidRequestError: not exactly one string, or a missing part.
            NotFoundError: no such stored prompt.
        """
        check_source(source)
        if isinstance(source.ref, str):
            if source.ref not in self._stored:
                raise NotFoundError(
                    f"prompt_embeds {quoted(source.ref)} not found", param=source.param
                )
            return self._stored[source.ref]
        if isinstance(source.part, str):
            return self._of_part(source.part, source.param)
        with _placed(source.param):
            return self._reader.rows(self._decode(str(source.data)), self._card, self._hold)

    def one(self, source: TensorSource) -> Rows:
        """Return the rows of a source inside a prompt.

        Raises as `prompts`, and if it holds several prompts.
        """
        prompts = self.prompts(source)
        if len(prompts) != 1:
            raise EmbeddingsError(
                f"{source.param}: a part is one prompt, got a batch of {len(prompts)}",
                param=source.param,
            )
        return prompts[0]

    @property
    def num_fetched_bytes(self) -> int:
        """Bytes of files that were not in the request's body."""
        return 0 if self._media is None else self._media.num_fetched_bytes

    def in_chat(self, source: MediaSource) -> Sequence[Segment] | None:
        """As `media`; None for what the model's pipeline has made in an earlier answer."""
        return None if is_own(source, self._card) else self.media(source)

    def media(self, source: MediaSource) -> Sequence[Segment]:
        """Return the positions of an item. Raises as `MediaItems.segments`."""
        assert self._media is not None, "media are read with the sources of the request"
        return self._media.segments(source)

    def _of_part(self, name: str, param: str) -> list[Rows]:
        if self._parts is None:
            raise InvalidRequestError(
                f"{param}: part {name[:80]!r} is not in the request: the body is not multipart",
                param=param,
            )
        data = self._parts.get(name)
        if data is None:
            raise InvalidRequestError(f"{param}: the body has no part {name[:80]!r}", param=param)
        # A part that is named several times is read once.
        if name not in self._read:
            with _placed(param):
                self._read[name] = self._reader.rows(data, self._card, self._hold)
        return self._read[name]
