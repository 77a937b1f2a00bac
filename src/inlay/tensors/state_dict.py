"""A state dict in a file by `torch.save`, tensor by tensor: read as data, never unpickled.

The file is mapped, so memory is that of the tensor that is read. Tensors that share a storage are
each read for themselves.
"""

import mmap
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import msgspec

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.messages.prompt import Buffer
from inlay.tensors import pickled
from inlay.tensors.archive import records
from inlay.tensors.safetensors_file import METADATA
from inlay.tensors.tensor import ELEMENT_SIZES, check_view, elements, quoted, refused, what_came
from inlay.tensors.torch_file import PICKLE, folder, storage_of

_ZIP = b"PK\3\4"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a file by torch before 1.6: its magic number."""

_WRAPPED = ("state_dict", "model_state_dict", "model", "module")
"""Keys of a training's checkpoint that hold the model's weights, as trainers name them."""

_MAX_NAME = 1024
_MAX_EMPTY = (1 << 63) - 1
"""Bytes that an empty tensor would have, were its sizes of zero left out: readers multiply them."""
_MOST_SHARED = 8
"""Times as many bytes as the file that its tensors may have: T5 has its table four times."""


class StateTensor(msgspec.Struct, frozen=True):
    """A tensor of a state dict.

    Attributes:
        name: key in the state dict.
        dtype: by torch's name, one of `ELEMENT_SIZES`.
        shape: elements in each dimension; () for a scalar, with zeros for an empty one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    _value: pickled.PickledTensor
    _storage: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ELEMENT_SIZES[self.dtype]

    def read(self) -> Buffer:
        """Its elements in C order: a view of the file where they lie so, else a copy."""
        if not self.nbytes:
            return Buffer(memoryview(b""))
        value, size = self._value, ELEMENT_SIZES[self.dtype]
        return elements(self._storage, self.shape, value.strides, value.offset, size)


@contextmanager
def open_state_dict(path: Path) -> Iterator[list[StateTensor]]:
    """Yield the tensors of the state dict in a file, in its order; all are checked.

    Raises:
        InvalidRequestError: not such a file; the message says what it is and what can be done.
    """
    try:
        with path.open("rb") as stream:
            first = stream.read(len(_LEGACY))
            if first == _LEGACY:
                raise InvalidRequestError(_legacy(path))
            if not first.startswith(_ZIP):
                raise InvalidRequestError(
                    f"{path} is no file by torch.save: it begins with {first[:8]!r}"
                )
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    # The map is closed when the last view of it is gone.
    try:
        found = state_tensors(memoryview(mapped))
    except EmbeddingsError as error:
        raise InvalidRequestError(
            f"{path} cannot be converted: it is {what_came(error)}"
        ) from error
    yield found


def _legacy(path: Path) -> str:
    code = (
        "import sys, torch; f = sys.argv[1]; "
        "torch.save(torch.load(f, map_location='cpu', weights_only=True), f)"
    )
    return (
        f"{path} has the form of torch before 1.6, which is no archive; write it anew first, with "
        "torch 2.10 or newer (older ones run code in it: CVE-2025-32434, CVE-2026-24747): "
        f'python -c "{code}" {shlex.quote(str(path))}'
    )


def state_tensors(container: memoryview) -> list[StateTensor]:
    """Return the tensors of the state dict in a file, in its order.

    Raises:
        EmbeddingsError: not the zip form of a state dict of dense tensors that lie in its storages.
    """
    contents = records(container, large=True)
    prefix = folder(contents)
    pickle = contents[prefix + PICKLE]
    if len(pickle) > pickled.STATE_DICT.max_bytes:
        raise refused(f"a pickle of {len(pickle)} bytes")
    values = _state_dict(pickled.load(bytes(pickle), pickled.STATE_DICT))
    found = []
    for name, value in values.items():
        if type(value) is not pickled.PickledTensor:
            raise refused(
                f"a state dict whose {quoted(str(name))} is {_kind(value)} and not a tensor"
            )
        if type(name) is not str or not 0 < len(name) <= _MAX_NAME or name == METADATA:
            raise refused(f"a state dict with the key {quoted(str(name))}")
        storage = storage_of(contents, prefix, value.storage)
        tensor = StateTensor(name, value.dtype, value.shape, value, storage)
        size = ELEMENT_SIZES[value.dtype]
        if 0 in value.shape and min(value.shape) >= 0:
            if prod(n or 1 for n in value.shape) * size > _MAX_EMPTY:
                raise refused(f"a state dict whose {quoted(name)} has sizes beyond 64 bits")
            found.append(tensor)
            continue
        try:
            check_view(value.shape, value.strides, value.offset, size, len(storage))
        except EmbeddingsError as error:
            raise refused(f"a state dict whose {quoted(name)} is {what_came(error)}") from error
        found.append(tensor)
    total = sum(tensor.nbytes for tensor in found)
    if total > _MOST_SHARED * len(container):
        raise refused(
            f"a state dict whose tensors share memory: they have {total} bytes, the file "
            f"{len(container)}; allowed: at most {_MOST_SHARED} times as much"
        )
    return found


def _state_dict(value: pickled.Value) -> dict[pickled.Value, pickled.Value]:
    """The state dict that a file holds, alone or among what a training keeps."""
    if type(value) is dict and not any(
        type(each) is pickled.PickledTensor for each in value.values()
    ):
        inner = [value[key] for key in _WRAPPED if type(value.get(key)) is dict]
        value = inner[0] if len(inner) == 1 else value
    if type(value) is not dict or not value:
        raise refused(f"{_kind(value)} and not a state dict" if value else "an empty state dict")
    return value


def _kind(value: pickled.Value) -> str:
    return "a tensor" if type(value) is pickled.PickledTensor else f"a {type(value).__name__}"
