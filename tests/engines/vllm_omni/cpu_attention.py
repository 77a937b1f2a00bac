"""Attention of torch, on the platform of `cpu_platform`."""

from typing import Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttention(SDPAImpl):  # type: ignore[misc]
    """Attention of torch; vLLM-Omni's own dispatch knows five kinds of devices, and no other."""

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        """Return the attention of `query` over `key` and `value`, all [batch, length, heads, D]."""
        return self._forward_impl(query, key, value, attn_metadata)


class CpuAttentionBackend(SDPABackend):  # type: ignore[misc]
    """Names `CpuAttention`."""

    @staticmethod
    def get_impl_cls() -> type[CpuAttention]:
        """Return the class of the attention."""
        return CpuAttention
