"""Asynchronous copies between host and device, through pinned memory."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`."""
    # torch does not reuse pinned memory before its copy is done.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host.

    Their device memory may be reused at once.

    On a CPU nothing is copied: they must not be changed before `wait`.
    """

    __slots__ = ("_copied", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        """Start the copies; all tensors are on one device."""
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
        """Return the tensors on the host, in order. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
