"""What inlay adds to vLLM's worker processes. vLLM mixes it into its own worker class (`--worker-extension-cls`)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Extension:
    """Calls that `AsyncLLM.collective_rpc` makes by name."""

    model_runner: Any

    def overwrite_not_finite(self) -> int:
        """Put zeros where keys and values are NaN or infinite, between two steps; the number of layers looked at.

        A block vLLM gives to the next request still holds what the last one wrote, and its attention kernels multiply what
        they mask by zero: NaN stays NaN. See upstream's issues 50283 and 44211.
        """
        seen = 0
        for tensor in _tensors(self.model_runner.kv_caches):
            if tensor.is_floating_point():
                # Layer by layer: a mask of the whole cache would need its memory once more.
                torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
                seen += 1
        return seen

    def dense_layers(self) -> int:
        """Linear layers of the pooler: vLLM only writes a line of its log where those of the model's files cannot be read."""
        pooler = getattr(self.model_runner.model, "pooler", None)
        return 0 if pooler is None else sum(isinstance(layer, nn.Linear) for layer in pooler.modules())


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    if isinstance(caches, torch.Tensor):
        yield caches
    elif isinstance(caches, list | tuple):
        for cache in caches:
            yield from _tensors(cache)


__all__ = ["Extension"]
