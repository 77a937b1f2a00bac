"""Keys and values of all sequences, in pages of `page_size` positions.

Shapes: H key/value heads, N pages besides the null page, P positions a page, D key size, E value
size.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.base.errors import EngineError
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.cache.kv_layout import PageGroup
from inlay.engine.torch.large_pages import large_pages
from inlay.engine.torch.transfers import upload

_SMALL = 1 << 21
"""Bytes of a head of a layer that are not in huge pages, which are of 2 MiB on most systems.

They hold some thousand positions. Of a model of 8 billion weights the first position alone would
take 1 GB in huge ones.
"""


class Pages:
    """One pair of tensors for each layer place of a page. Page ownership is not known here.

    The layers of a group have one place each; layers of different groups in the same place share
    tensors, but never a page. The head is the first dimension, so that the pages of one head gather
    into one contiguous run of positions. Memory is not initialised: attention reads only positions
    within a sequence's length. The exception is page 0, the null page, which is zero: a kernel may
    read it in place of pages that have left a window, with a weight of zero.

    Attributes:
        keys: a tensor [H, 1 + N, P, D] for each layer.
        values: [H, 1 + N, P, E] likewise; of latent layers, views of the keys.
        groups: page group of each layer.
        kept: of each layer, the tensors that hold all of it.
        latent: there are latent layers.
        num_pages: N.
        page_size: P.
        states: of each recurrent layer, where its states are: float32 [H, 1 + N, elements], a
            part of each head's keys, and of its values if that does not suffice. A head has an
            equal part of a state.
    """

    __slots__ = (
        "_tensors",
        "_together",
        "groups",
        "kept",
        "keys",
        "latent",
        "num_pages",
        "page_size",
        "states",
        "values",
    )

    def __init__(
        self,
        layers: Sequence[LayerShape],
        groups: Sequence[PageGroup],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the pages.

        Args:
            layers: shape of each layer; layers in the same place of different groups have the same
                shape.
            groups: a partition of the layers.
            num_pages: number of pages besides the null page.
            page_size: positions in a page.
            dtype: of keys and values.
            device: device of the tensors.

        Raises:
            EngineError: pages are too small for the state of a layer.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        owners = {layer: group for group, members in enumerate(groups) for layer in members.layers}
        places = {layer: place for members in groups for place, layer in enumerate(members.layers)}
        self.groups = tuple(owners[layer] for layer in range(len(layers)))
        widest = max(groups, key=lambda members: len(members.layers))
        shapes = []
        for layer in widest.layers:
            heads, *sizes = layers[layer].kept
            shapes.append([(heads, 1 + num_pages, page_size, size) for size in sizes if size])
        # Those of one shape are one tensor, so that pages of all layers are scrubbed by one call.
        counts = Counter(shape for each in shapes for shape in each)
        self._together = [
            _uninitialised((count, *shape), dtype, device) for shape, count in counts.items()
        ]
        left = {
            shape: iter([whole[place] for place in range(len(whole))])
            for shape, whole in zip(counts, self._together, strict=True)
        }
        self._tensors = [[next(left[shape]) for shape in each] for each in shapes]
        self.states: dict[int, list[Tensor]] = {}
        self.latent = any(layer.latent for layer in layers)
        self.kept = [self._tensors[places[layer]] for layer in range(len(layers))]
        self.keys = [tensors[0] for tensors in self.kept]
        self.values = [
            tensors[-1][..., : layer.value_size]
            for layer, tensors in zip(layers, self.kept, strict=True)
        ]
        for layer, shape in enumerate(layers):
            if shape.state_size:
                self.states[layer] = self._state_parts(layer, shape.state_size)
        self.scrub([0])

    def stored(self, layer: int) -> list[Tensor]:
        """Return all that pages hold of a layer: its states, or keys [H, 1 + N, P, D] and values.

        Views; the rest of a page that holds a state is whatever was there before.
        """
        return self.states.get(layer) or self.kept[layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of positions.

        Args:
            layer: index of the layer.
            slots: [T] int64, page * page_size + offset, distinct but for padding.
            keys: [H, T, D].
            values: [H, T, E]; of latent layers, they are in the keys.
        """
        for pages, new in zip(self.kept[layer], (keys, values), strict=False):
            pages.view(pages.shape[0], -1, pages.shape[3]).index_copy_(1, slots, new)

    def read_states(self, layer: int, pages: Tensor) -> Tensor:
        """Return the states of a recurrent layer in `pages` [B] int64: float32 [B, size]."""
        parts = [part.index_select(1, pages) for part in self.states[layer]]
        whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        return whole.transpose(0, 1).flatten(1)

    def write_states(self, layer: int, pages: Tensor, states: Tensor) -> None:
        """Store the states of a recurrent layer: float32 [B, size] into `pages` [B] int64."""
        parts = self.states[layer]
        whole = states.view(len(states), len(parts[0]), -1).transpose(0, 1)
        lengths = [part.shape[2] for part in parts]
        for part, values in zip(parts, torch.split(whole, lengths, 2), strict=True):
            part.index_copy_(1, pages, values)

    def _state_parts(self, layer: int, size: int) -> list[Tensor]:
        """Return where the states of a layer are, as in `states`."""
        tensors = [pages.flatten(2).view(torch.float32) for pages in self.kept[layer]]
        left, parts = size // len(tensors[0]), []
        for tensor in tensors:
            parts.append(tensor[..., :left])
            left = max(0, left - tensor.shape[2])
        if left:
            raise EngineError(f"pages of {self.page_size} positions do not hold {size} float32")
        return [part for part in parts if part.shape[2]]

    def scrub(self, page_ids: Sequence[int]) -> None:
        """Overwrite pages with zeros in every layer."""
        index = upload(torch.tensor(page_ids, dtype=torch.int64), self.keys[0].device)
        for whole in self._together:
            whole.index_fill_(2, index, 0)


def _uninitialised(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor for pages; on Linux in huge pages of memory, which the system may refuse.

    Keys and values lie anywhere: with pages of 4 KB, much of the time to read many of them goes
    into the addresses of those.
    """
    size = math.prod(shape) * dtype.itemsize
    # Not of an allocator, which may be told to use huge pages for all.
    found = large_pages(size, shape[0] * shape[1], _SMALL) if device.type == "cpu" else None
    if found is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return found.view(dtype).view(shape)
