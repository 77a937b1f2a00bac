"""Pages as records: bytes that depend on no device, with name and checksum.

A record is the digest of a page, a checksum, zeros up to 64 bytes, and its layers in order, for
each the keys [H, P, D] and then the values [H, P, E] in C order, little endian; of latent layers
the keys alone. Of recurrent layers it is the state after the page's last position, float32, as
`Pages.states` divides it. The checksum is a keyed BLAKE3 over the layout, the group, the digest and
keyed sums of the data (`inlay.engine.torch.native.pages`): a record of another name, group, layout
or secret, or with a changed bit, is none.

Each end reads a page once: sums, and whether numbers are finite, are taken while it is copied.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.native.pages import INFINITIES, Bytes, PageRuns, Sums
from inlay.engine.torch.transfers import Download, upload
from inlay.messages.digest import Secret

PIECE_BYTES = 4 << 20
"""Bytes of records that are copied between two steps of running sequences, or one page."""

QUESTION_BYTES = 32 << 20
"""Bytes of records that are asked for at a time; a larger page is asked for alone."""

VERSION = 3
"""Version of the form of records, a part of the layout."""

CHECKSUM_SIZE = 16
HEADER_SIZE = 64
"""Bytes of a record before its data, a line of a processor's cache."""


class RecordPart(NamedTuple):
    """Consecutive numbers of a record."""

    dtype: torch.dtype
    elements: int

    @property
    def num_bytes(self) -> int:
        """Bytes of them."""
        return self.elements * self.dtype.itemsize


class RecordShape(NamedTuple):
    """Sizes and names that the records of one model have.

    Attributes:
        layout: hex digits, equal where the data of a page means the same: page size, dtype, and
            the layers of each group, their states included.
        parts: numbers of a page in order, by group, those of one dtype together.
    """

    layout: str
    parts: tuple[tuple[RecordPart, ...], ...]

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerShape],
        groups: Sequence[PageGroup],
        page_size: int,
        dtype: torch.dtype,
    ) -> "RecordShape":
        """Of a model with these `layers` in these page `groups`."""
        members = [
            (group.window, [_named(layers[layer]) for layer in group.layers]) for group in groups
        ]
        # One shard of one: pages of a model that is divided among devices mean something else.
        named = repr((VERSION, page_size, str(dtype), (0, 1), members))
        parts = []
        for group in groups:
            own = [_part(layers[layer], page_size, dtype) for layer in group.layers]
            alike = groupby(own, lambda part: part.dtype)
            parts.append(
                tuple(RecordPart(kind, sum(part.elements for part in run)) for kind, run in alike)
            )
        return cls(blake3(named.encode()).hexdigest()[:32], tuple(parts))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the data of a page, by group."""
        return tuple(sum(part.num_bytes for part in parts) for parts in self.parts)

    def record_bytes(self, group: int) -> int:
        return HEADER_SIZE + sum(part.num_bytes for part in self.parts[group])

    def piece(self, group: int) -> int:
        """Return the number of pages of `group` that are copied at a time."""
        return max(1, PIECE_BYTES // self.record_bytes(group))

    def question(self, group: int) -> int:
        """Return the number of pages of `group` that are asked for at a time."""
        return max(1, QUESTION_BYTES // self.record_bytes(group))

    def data(self, records: Tensor) -> Tensor:
        """Return what `records` (uint8 [n, record_bytes]) hold of pages: uint8 [n, bytes]."""
        return records[:, HEADER_SIZE:]

    def values(self, group: int, data: Tensor) -> list[Tensor]:
        """Return the numbers in `data` (uint8 [n, bytes]): [n, elements] of each dtype in turn."""
        found = []
        for part in self.parts[group]:
            found.append(data[:, : part.num_bytes].view(part.dtype))
            data = data[:, part.num_bytes :]
        return found


def _named(layer: LayerShape) -> tuple[object, ...]:
    """Return what of a layer decides the meaning of a page."""
    return (*layer.kept, layer.state_size) if layer.state_size else layer.kept


def _part(layer: LayerShape, page_size: int, dtype: torch.dtype) -> RecordPart:
    if layer.state_size:
        return RecordPart(torch.float32, layer.state_size)
    return RecordPart(dtype, layer.elements * page_size)


class PageSealer:
    """Writes and checks the names and checksums of records. Safe in any thread.

    Attributes:
        shape: as above.
        sums: of the data of records.
    """

    def __init__(self, shape: RecordShape, secret: Secret) -> None:
        self.shape = shape
        self.sums = Sums(secret.pages)
        self._key = secret.pages

    def seal(self, group: int, digests: Sequence[bytes], records: Tensor, sums: Bytes) -> None:
        """Write names and checksums into `records`, uint8 [len(digests), record_bytes].

        Args:
            group: of the pages.
            digests: their names.
            records: with their data.
            sums: of the data.
        """
        headers = records.numpy()[:, :HEADER_SIZE]
        for row, digest, own in zip(headers, digests, sums, strict=True):
            row[:] = np.frombuffer(self._header(group, digest, own), np.uint8)

    def good(self, group: int, digests: Sequence[bytes], records: Tensor, sums: Bytes) -> int:
        """Return how many leading records are those of `digests`; `sums` [n, ...] are of them."""
        headers = records.numpy()[: len(sums), :HEADER_SIZE]
        for index, (row, digest, own) in enumerate(zip(headers, digests, sums, strict=False)):
            if row.tobytes() != self._header(group, digest, own):
                return index
        return len(headers)

    def _header(self, group: int, digest: bytes, sums: Bytes) -> bytes:
        hasher = blake3(f"{self.shape.layout}/{group}/".encode() + digest, key=self._key)
        checksum = hasher.update(sums.data).digest(CHECKSUM_SIZE)
        return (digest + checksum).ljust(HEADER_SIZE, b"\0")


class PageCopier:
    """Copies between pages and records. For the thread that runs the model.

    On a CUDA device through pinned memory, on a stream of its own. Pages that are read were
    verified before: the step that runs does not write to them, and is not waited for. Pages that
    are written may be read by that step: they are written after it, and before the next one. A page
    may be given to another sequence as soon as a call returns.
    """

    def __init__(self, pages: Pages, groups: Sequence[PageGroup], shape: RecordShape) -> None:
        self.shape = shape
        self._tensors = [
            [tensor for layer in group.layers for tensor in pages.stored(layer)] for group in groups
        ]
        self._device = self._tensors[0][0].device
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._runs = [
            PageRuns.of(each) if self._device.type == "cpu" else None for each in self._tensors
        ]

    def empty(self, group: int, count: int) -> Tensor:
        """Return memory for records, uint8 [count, record_bytes] on the host."""
        return torch.empty(count, self.shape.record_bytes(group), dtype=torch.uint8)

    def read(
        self,
        sealer: PageSealer,
        group: int,
        page_ids: Sequence[int],
        digests: Sequence[bytes],
        records: Tensor,
    ) -> None:
        """Write pages with these names into `records`, uint8 [n, record_bytes] on the host."""
        data, runs = self.shape.data(records), self._runs[group]
        if runs is not None and sealer.sums.copies:
            sums = sealer.sums.read(runs, page_ids, data.numpy())
        else:
            self._gather(group, page_ids, data)
            sums = sealer.sums(data.numpy())
        sealer.seal(group, digests, records, sums)

    def write(
        self,
        sealer: PageSealer,
        group: int,
        page_ids: Sequence[int],
        digests: Sequence[bytes],
        records: Tensor,
    ) -> int:
        """Overwrite pages with `records`, uint8 [n, record_bytes] on the host.

        Returns the number of leading ones that are those of `digests`, unchanged and finite. What
        is in the other pages then is finite.
        """
        data, runs = self.shape.data(records), self._runs[group]
        if runs is not None and sealer.sums.copies:
            _, sums = sealer.sums.write(runs, page_ids, data.numpy())
            return sealer.good(group, digests, records, sums)
        finite = torch.stack([_finite(each) for each in self.shape.values(group, data)]).all(0)
        count = int(finite.cummin(0).values.sum())
        good = sealer.good(group, digests, records, sealer.sums(data[:count].numpy()))
        if good:
            self._scatter(group, page_ids[:good], data[:good])
        return good

    def _gather(self, group: int, page_ids: Sequence[int], data: Tensor) -> None:
        on_cpu = self._device.type == "cpu"
        with torch.cuda.stream(self._stream):
            staged = data if on_cpu else torch.empty_like(data, device=self._device)
            index = upload(torch.tensor(page_ids, dtype=torch.int64), self._device)
            for tensor, part in self._parts(group, staged):
                part.copy_(tensor.index_select(1, index).transpose(0, 1))
            if staged is not data:
                data.copy_(Download(staged).wait()[0])

    def _scatter(self, group: int, page_ids: Sequence[int], data: Tensor) -> None:
        own, model = self._stream, None if self._stream is None else torch.cuda.current_stream()
        with torch.cuda.stream(own):
            index = upload(torch.tensor(page_ids, dtype=torch.int64), self._device)
            staged = data if self._device.type == "cpu" else upload(data.contiguous(), self._device)
            if own is not None and model is not None:
                own.wait_stream(model)
            for tensor, part in self._parts(group, staged):
                tensor.index_copy_(1, index, part.transpose(0, 1))
        if own is not None and model is not None:
            model.wait_stream(own)

    def _parts(self, group: int, data: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor [H, 1 + N, ...] of a group with its part of `data`: [n, H, ...]."""
        found, start = [], 0
        for tensor in self._tensors[group]:
            shape = tensor.shape[:1] + tensor.shape[2:]
            stop = start + shape.numel() * tensor.element_size()
            part = data[:, start:stop].view(tensor.dtype)
            found.append((tensor, part.view(len(data), *shape)))
            start = stop
        return found


def _finite(data: Tensor) -> Tensor:
    """Return bool [n]: True for rows of `data` [n, elements] that are wholly finite."""
    infinity = INFINITIES.get(data.dtype)
    if infinity is None:
        # The largest of each: NaN and infinity stay what they are, and no mask is made of all.
        return torch.isfinite(data.abs().amax(dim=1))
    # As integers floats of one sign have the order of their sizes, and NaN is above infinity. The
    # largest with a sign is of those above zero, without one of those below. No mask: in a copy of
    # all without their signs it would be one look, and take six times as long.
    size = data.element_size()
    unsigned = data.view(torch.uint8).numpy().view(f"u{size}")
    below = infinity | 1 << (8 * size - 1)
    signed = unsigned.view(f"i{size}")
    return torch.from_numpy((signed.max(axis=1) < infinity) & (unsigned.max(axis=1) < below))
