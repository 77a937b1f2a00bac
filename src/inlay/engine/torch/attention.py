"""Which attention a batch gets."""

from inlay.engine.torch.batch import Batch
from inlay.engine.torch.cpu_attention import CpuAttention, Workspace
from inlay.engine.torch.paged_attention import PagedAttention
from inlay.engine.torch.pages import Pages
from inlay.engine.torch.varlen_attention import VarlenAttention


def attention(
    batch: Batch, pages: Pages, workspace: Workspace, *, float32_scores: bool = False
) -> PagedAttention:
    """The attention of `batch` on the device its pages are on.

    Args:
        batch: what is computed.
        pages: where keys and values are.
        workspace: memory that later batches use again.
        float32_scores: on a CPU, keep scores in float32 whatever the activations' dtype is.
    """
    if pages.keys[0].device.type == "cpu":
        return CpuAttention(batch, pages, workspace, float32_scores=float32_scores)
    return VarlenAttention(batch, pages)
