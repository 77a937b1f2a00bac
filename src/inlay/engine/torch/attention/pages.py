"""The keys and values of all sequences, in pages of `page_size` positions.

Shapes: H key/value heads, N pages besides the null page, P positions a page, D key size, E value
size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from inlay.engine.torch.attention.layers import LayerShape
from inlay.engine.torch.cache.page_groups import PageGroup


class Pages:
    """A pair of tensors for each place of a page. Who owns which page is not known here.

    The layers of a group have a place each; layers of different groups in the same place share
    tensors, and never a page. The head comes first, so that one head's pages gather into one
    contiguous run of positions. Memory is not initialised: what attention reads is bounded by each
    sequence's length, and stale content never has an effect. But for page 0, the null page: a
    kernel may read it in place of pages that a window has passed, and times a weight of zero it
    must be zero.

    Attributes:
        keys: a tensor [H, 1 + N, P, D] for each layer.
        values: [H, 1 + N, P, E] likewise.
        groups: of each layer the number of its page group.
        num_pages: N.
        page_size: P.
    """

    __slots__ = ("_tensors", "groups", "keys", "num_pages", "page_size", "values")

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
        """Make room.

        Args:
            layers: what each layer keeps; layers in the same place of different groups keep the
                same.
            groups: each layer is in one of them.
            num_pages: besides the null page.
            page_size: positions in a page.
            dtype: of keys and values.
            device: where they are.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        owners = {layer: group for group, members in enumerate(groups) for layer in members.layers}
        places = {layer: place for members in groups for place, layer in enumerate(members.layers)}
        self.groups = tuple(owners[layer] for layer in range(len(layers)))
        widest = max(groups, key=lambda members: len(members.layers))
        self._tensors = []
        for layer in widest.layers:
            _, heads, *sizes = layers[layer]
            pair = [
                torch.empty(heads, 1 + num_pages, page_size, size, dtype=dtype, device=device)
                for size in sizes
            ]
            self._tensors.append(pair)
        self.keys = [self._tensors[places[layer]][0] for layer in range(len(layers))]
        self.values = [self._tensors[places[layer]][1] for layer in range(len(layers))]
        self.scrub([0])

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store positions.

        Args:
            layer: which.
            slots: [T] int64, page * page_size + offset, distinct but for padding.
            keys: [H, T, D].
            values: [H, T, E].
        """
        for pages, new in ((self.keys[layer], keys), (self.values[layer], values)):
            pages.view(pages.shape[0], -1, pages.shape[3]).index_copy_(1, slots, new)

    def scrub(self, page_ids: Sequence[int]) -> None:
        """Overwrite pages with zeros, in every layer."""
        index = torch.tensor(page_ids, dtype=torch.int64, device=self.keys[0].device)
        for pair in self._tensors:
            for pages in pair:
                pages.index_fill_(1, index, 0)
