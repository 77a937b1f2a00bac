"""Selection of the attention implementation of a batch."""

import logging
from functools import cache

import torch

from inlay.engine.torch.attention.cuda import CudaAttention, CudaKernels, Sequences
from inlay.engine.torch.attention.gathered import GatheredAttention
from inlay.engine.torch.attention.latent import LatentAttention
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import PagedAttention
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, Workspace
from inlay.engine.torch.native import kernels

_logger = logging.getLogger(__name__)


@cache
def cuda_kernels() -> CudaKernels | None:
    """Return the kernels for CUDA; None, with a log line, where Triton is not installed."""
    try:
        from inlay.engine.torch.attention.triton_kernels import attend
        from inlay.engine.torch.attention.triton_layers import multiply, prepare
    except ImportError as error:
        _logger.warning(
            "attention gathers pages, which is slow, layers are not fused, and decoding runs "
            "without graphs: Triton, which comes with torch's packages for CUDA on Linux, cannot "
            "be imported: %s",
            error,
        )
        return None
    return CudaKernels(attend, prepare, multiply)


def kernels_on(device: torch.device) -> CudaKernels | None:
    """Return `cuda_kernels` for any device but a CPU."""
    return None if device.type == "cpu" else cuda_kernels()


def attention(
    batch: Batch,
    pages: Pages,
    workspace: Workspace,
    *,
    float32_scores: bool = False,
    invariant: bool = False,
) -> PagedAttention:
    """Return the attention of `batch` for the device of its pages.

    Args:
        batch: batch to compute.
        pages: pages of keys and values.
        workspace: buffers reused by later batches.
        float32_scores: keep scores in float32 whatever the dtype of the activations; on CUDA they
            always are.
        invariant: the bits of a position must not depend on whether it decodes, where native
            kernels attend.
    """
    on_gpu = kernels_on(pages.keys[0].device)
    if on_gpu is not None:
        return with_kernels(batch, pages, on_gpu)
    if pages.latent:
        return LatentAttention(
            batch,
            lambda part: _plain(part, pages, workspace, float32_scores=float32_scores),
            lambda part: GatheredAttention(part, pages, workspace, float32_scores=float32_scores),
        )
    return _plain(batch, pages, workspace, float32_scores=float32_scores, invariant=invariant)


def with_kernels(
    batch: Batch, pages: Pages, on_gpu: CudaKernels, sequences: Sequences | None = None
) -> PagedAttention:
    """Return attention by `on_gpu`; `sequences` replaces lengths computed from the batch."""
    if not pages.latent:
        return CudaAttention(batch, pages, on_gpu, sequences)
    # Always absorbed: products are cheap there, and keys of all heads take memory.
    return LatentAttention(batch, lambda part: CudaAttention(part, pages, on_gpu, sequences), None)


def _plain(
    batch: Batch,
    pages: Pages,
    workspace: Workspace,
    *,
    float32_scores: bool,
    invariant: bool = False,
) -> PagedAttention:
    """Return attention for the keys and values in the pages as they are."""
    native = kernels() if pages.keys[0].device.type == "cpu" else None
    if native is not None and native.attends(pages.keys[0].dtype):
        return NativeAttention(batch, pages, workspace, native, invariant=invariant)
    return GatheredAttention(batch, pages, workspace, float32_scores=float32_scores)
