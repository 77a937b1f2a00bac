"""A CPU as a platform of vLLM-Omni: what it lacks to run diffusion pipelines on one, in float32.

Its attention is in a module of its own, which needs the platform.
"""

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

_MEMORY = 1 << 30


class CpuOmniPlatform(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """One CPU: nothing to choose, to wait for or to measure."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        """Return the name of the attention's backend."""
        return f"{__package__}.cpu_attention.CpuAttentionBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Return False: nothing is compiled."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Return 1."""
        return 1

    @classmethod
    def synchronize(cls) -> None:
        """Do nothing: results are there when a call returns."""

    @classmethod
    def empty_cache(cls) -> None:
        """Do nothing: there is no cache."""

    @classmethod
    def reset_peak_memory_stats(cls, *_: Any) -> None:
        """Do nothing: there are no statistics."""

    @classmethod
    def max_memory_reserved(cls, *_: Any) -> int:
        """Return 0: nothing is measured."""
        return 0

    @classmethod
    def max_memory_allocated(cls, *_: Any) -> int:
        """Return 0: nothing is measured."""
        return 0

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Return a size that is always there."""
        return _MEMORY

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Return free and total memory."""
        return _MEMORY, _MEMORY
