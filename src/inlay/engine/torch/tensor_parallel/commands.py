"""Commands of rank 0 to the other ranks, as bytes."""

from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from inlay.engine.torch.batch import Batch


class Reload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load the model again."""


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate pages in place of those from before."""

    num_pages: int
    page_size: int


class Scrub(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Overwrite pages with zeros."""

    page_ids: tuple[int, ...]


class Forward(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute a batch, which is on the host.

    Attributes:
        batch: it.
        largest_window: as in `CausalModel.hidden`.
        forced: rank 0 shares what each layer is given.
    """

    batch: Batch
    largest_window: int | None = None
    forced: bool = False


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute logits of `rows` hidden states, which rank 0 shares."""

    rows: int


Command: TypeAlias = Reload | Allocate | Scrub | Forward | Logits


def _packed(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor as dtype, shape and bytes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a command has no {type(value).__name__}")
    # Where there is one place, its stride may be anything, which a view as bytes refuses.
    flat = torch.as_strided(value.contiguous(), (value.numel(),), (1,))
    dtype = str(value.dtype).removeprefix("torch.")
    return dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()


def _unpacked(_: type, value: Any) -> Tensor:
    name, shape, data = value
    dtype: torch.dtype = getattr(torch, name)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
decode = msgspec.msgpack.Decoder[Command](Command, dec_hook=_unpacked).decode
