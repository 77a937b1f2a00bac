"""Copies between host and device that nobody waits for.

To a GPU from pinned memory, and back into it.
"""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`."""
    # torch keeps pinned memory from being used again before its copy is done.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host.

    What becomes of their memory on the device does not matter any more.

    On a CPU they are there: then they must not be changed before they are read.
    """

    __slots__ = ("_copied", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        """Begin; all are on one device."""
        self._copied: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            )
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, in order."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


__all__ = ["Download", "upload"]
