"""A few positions of recurrent layers, with states in pages."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.native.build import load

_FIELDS = (
    "first", "second", "read", "write", "inputs", "filter", "decay", "strength", "out",
)  # fmt: skip
_SIZES = (
    "first_head", "first_page", "first_size", "second_head", "second_page", "second_size",
    "batch", "length", "width", "key_heads", "value_heads", "key_size", "value_size",
)  # fmt: skip

_Call = type(
    "_Call",
    (ctypes.Structure,),
    {
        "_fields_": [
            *((name, ctypes.c_void_p) for name in _FIELDS),
            *((name, ctypes.c_int64) for name in _SIZES),
            ("threads", ctypes.c_int32),
        ]
    },
)


class DeltaRule(NamedTuple):
    """Sizes of a gated delta rule.

    Attributes:
        key_heads: heads of keys and queries.
        value_heads: heads of values, a multiple of them.
        key_size: elements of a key.
        value_size: elements of a value.
        width: positions that the convolution sees.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @classmethod
    def of(cls, module: Any) -> "DeltaRule":
        """Return those of a module of transformers."""
        return cls(
            module.num_k_heads,
            module.num_v_heads,
            module.head_k_dim,
            module.head_v_dim,
            module.conv_kernel_size,
        )

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def state_size(self) -> int:
        """Elements of a sequence's state: of the rule, then inputs that the convolution sees."""
        rule = self.value_heads * self.key_size * self.value_size
        return rule + self.channels * (self.width - 1)


class DeltaStep:
    """L positions of the gated delta rule for each of B sequences, on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._function = library.inlay_delta_step
        self._function.argtypes, self._function.restype = (ctypes.c_void_p,), None

    def __call__(
        self,
        rule: DeltaRule,
        parts: Sequence[Tensor],
        read: Tensor,
        write: Tensor | None,
        inputs: Tensor,
        kernel: Tensor,
        decay: Tensor,
        strength: Tensor,
    ) -> Tensor:
        """Compute outputs and new states; all tensors are contiguous.

        Args:
            rule: sizes; D channels are queries, keys and values of all heads.
            parts: where states are, as in `Pages.states`; one tensor or two.
            read: [B] int64, pages of the states before.
            write: [B] int64, pages of the states after; None to keep none.
            inputs: [B * L, D] float32, of the convolution.
            kernel: [D, width] float32, of the convolution.
            decay: [B * L, value heads] float32, logarithms.
            strength: [B * L, value heads] float32.

        Returns:
            [B * L, value heads, value size] float32.
        """
        first, second = parts[0], parts[-1]
        out = inputs.new_empty(len(inputs), rule.value_heads, rule.value_size)
        call = _Call(
            *(tensor.data_ptr() for tensor in (first, second, read)),
            None if write is None else write.data_ptr(),
            *(tensor.data_ptr() for tensor in (inputs, kernel, decay, strength, out)),
            *first.stride()[:2], first.shape[2],
            *second.stride()[:2], second.shape[2] if len(parts) > 1 else 0,
            len(read), len(inputs) // len(read), rule.width, rule.key_heads, rule.value_heads,
            rule.key_size, rule.value_size, torch.get_num_threads(),
        )  # fmt: skip
        self._function(ctypes.byref(call))
        return out


@cache
def delta_step() -> DeltaStep | None:
    """Return the kernel, compiled at the first call; None if not available."""
    library = load("recurrent")
    return None if library is None else DeltaStep(library)
