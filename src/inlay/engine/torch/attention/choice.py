"""Selection of the attention implementation of a batch."""

from torch import Tensor

from inlay.engine.torch.attention.gathered import GatheredAttention, Workspace
from inlay.engine.torch.attention.latent import LatentAttention
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import PagedAttention, Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.varlen import VarlenAttention, does, reads_pages
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.native import kernels


class CudaAttention:
    """Flash attention for the layers it supports, if it can read the pages.

    Gathered pages for all other layers.
    """

    def __init__(
        self, batch: Batch, pages: Pages, workspace: Workspace, *, float32_scores: bool = False
    ) -> None:
        self._page_size = pages.page_size
        self._causal = not batch.wholes
        self._varlen = VarlenAttention(batch, pages)
        self._gathered = GatheredAttention(batch, pages, workspace, float32_scores=float32_scores)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        flash = (
            self._causal
            and does(key, value, scoring)
            and reads_pages(
                key.device,
                key.dtype,
                key.shape[2],
                self._page_size,
                windowed=scoring.window is not None,
                sunk=scoring.sinks is not None,
            )
        )
        chosen = self._varlen if flash else self._gathered
        return chosen.attend(layer, query, key, value, scoring)


def attention(
    batch: Batch, pages: Pages, workspace: Workspace, *, float32_scores: bool = False
) -> PagedAttention:
    """Return the attention of `batch` for the device of its pages.

    Args:
        batch: batch to compute.
        pages: pages of keys and values.
        workspace: buffers reused by later batches.
        float32_scores: keep scores in float32 whatever the dtype of the activations; flash
            attention always does.
    """
    if pages.latent:
        return LatentAttention(
            batch,
            lambda part: _plain(part, pages, workspace, float32_scores=float32_scores),
            lambda part: GatheredAttention(part, pages, workspace, float32_scores=float32_scores),
        )
    return _plain(batch, pages, workspace, float32_scores=float32_scores)


def _plain(
    batch: Batch, pages: Pages, workspace: Workspace, *, float32_scores: bool
) -> PagedAttention:
    """Return attention for the keys and values in the pages as they are."""
    if pages.keys[0].device.type != "cpu":
        return CudaAttention(batch, pages, workspace, float32_scores=float32_scores)
    native = kernels()
    if native is not None and native.attends(pages.keys[0].dtype):
        return NativeAttention(batch, pages, workspace, native)
    return GatheredAttention(batch, pages, workspace, float32_scores=float32_scores)
