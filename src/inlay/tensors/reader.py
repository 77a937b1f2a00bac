"""Container bytes to one tensor, whatever the format."""

from typing import TypeAlias

from inlay.prompt import Buffer
from inlay.tensors.npy_file import MAGIC, read_npy
from inlay.tensors.safetensors_file import read_safetensors
from inlay.tensors.tensor import ReadLimits, Tensor, check_size, refused
from inlay.tensors.torch_file import read_torch

Container: TypeAlias = bytes | bytearray | memoryview | Buffer

_DEFAULT_LIMITS = ReadLimits()


def read(data: Container, *, limits: ReadLimits = _DEFAULT_LIMITS) -> Tensor:
    """Read the dense float tensor in a file by `torch.save`, safetensors or `numpy.save`.

    The format is recognised by content.

    Nothing is executed or inflated. Elements are not copied unless they are a strided view, and
    memory beyond that copy, which is never larger than `data`, stays under a megabyte whatever the
    bytes say. Values are not looked at: `to_rows` does.

    Args:
        data: the container's bytes; must not change while the tensor or its rows live.
        limits: what is allowed.

    Raises:
        EmbeddingsError: too small, too large, or not one dense float tensor; the message names what
            it is instead.
    """
    container = (data if isinstance(data, Buffer) else Buffer(data)).view
    check_size(len(container), limits=limits)
    start = bytes(container[:16])
    if start.startswith(b"PK\3\4"):
        return read_torch(container)
    if start.startswith(MAGIC):
        return read_npy(container)
    if start[8:9] == b"{":
        return read_safetensors(container)
    if start.startswith(b"\x80"):
        raise refused(
            "a bare pickle (the legacy non-zip form of torch.save?); save again without "
            "_use_new_zipfile_serialization=False"
        )
    raise refused(f"bytes in no known format, beginning with {start[:8]!r}")
