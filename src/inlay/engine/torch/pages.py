"""The keys and values of all sequences, in pages of `page_size` positions.

Shapes: H key/value heads, N pages, P positions a page, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pages:
    """One pair of tensors a layer. Who owns which page is not known here.

    The head comes first, so that one head's pages gather into one contiguous run of positions. Memory is not initialised:
    what attention reads is bounded by each sequence's length, and stale content never has an effect.

    Attributes:
        keys: a tensor [H, N, P, D] for each layer.
        values: likewise.
        num_pages: N.
        page_size: P.
    """

    __slots__ = ("keys", "num_pages", "page_size", "values")

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_heads, num_pages, page_size, head_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store positions.

        Args:
            layer: which.
            slots: [T] int64, page * page_size + offset, distinct.
            keys: [H, T, D].
            values: [H, T, D].
        """
        for pages, new in ((self.keys[layer], keys), (self.values[layer], values)):
            pages.view(pages.shape[0], -1, pages.shape[3]).index_copy_(1, slots, new)

    def scrub(self, page_ids: Sequence[int]) -> None:
        """Overwrite pages with zeros, in every layer."""
        index = torch.tensor(page_ids, dtype=torch.int64, device=self.keys[0].device)
        for pages in (*self.keys, *self.values):
            pages.index_fill_(1, index, 0)
