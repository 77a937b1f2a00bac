"""The zip form of `torch.save`: reader and writer."""

import io
import zipfile

from inlay.messages.prompt import DTYPE_SIZES
from inlay.tensors import pickled
from inlay.tensors.archive import records
from inlay.tensors.tensor import (
    ELEMENT_SIZES,
    MAX_TABLE_ID_LENGTH,
    Tensor,
    c_strides,
    dense,
    quoted,
    refused,
)

PICKLE = "data.pkl"
"""Record of the pickle, in the folder of an archive."""
_TABLE_ID = ".inlay/embedding_table_id"
"""Our own record: `torch.load` reads only the records it knows, so it does not see it."""

_ALIGNMENT = 64


def read_torch(container: memoryview) -> Tensor:
    """The tensor in a file that begins as a zip archive.

    Raises:
        EmbeddingsError: not the zip form of one dense float tensor.
    """
    contents, prefix, value, view = stored(container)
    if value.dtype not in DTYPE_SIZES:
        raise pickled.wrong_dtype("long" if value.dtype == "int64" else "int")
    data = dense(view, value.dtype, value.shape, strides=value.strides, offset=value.offset)
    return Tensor(
        data, value.dtype, value.shape, "torch", _table_id(contents.get(prefix + _TABLE_ID))
    )


def stored(
    container: memoryview,
) -> tuple[dict[str, memoryview], str, pickled.PickledTensor, memoryview]:
    """The records of an archive, their folder, the tensor in it, and the bytes of its storage.

    Raises:
        EmbeddingsError: not the zip form of one dense tensor.
    """
    contents = records(container)
    prefix = folder(contents)
    value = pickled.load(bytes(contents[prefix + PICKLE]))
    if type(value) is not pickled.PickledTensor:
        raise refused(_kind(value))
    return contents, prefix, value, storage_of(contents, prefix, value.storage)


def storage_of(
    contents: dict[str, memoryview], prefix: str, storage: pickled.ElementStorage
) -> memoryview:
    """The bytes of a storage.

    Raises:
        EmbeddingsError: it is not there, or of another size.
    """
    view = contents.get(f"{prefix}data/{storage.key}")
    if view is None:
        raise refused(f"a tensor whose storage {quoted(storage.key)} is not in the archive")
    size = 1 if storage.dtype is None else ELEMENT_SIZES[storage.dtype]
    if len(view) != storage.length * size:
        raise refused(
            f"a tensor whose storage should be {storage.length * size} bytes and is {len(view)}"
        )
    return view


def folder(contents: dict[str, memoryview]) -> str:
    """The folder all records lie in: the archive's name when it was saved.

    Raises:
        EmbeddingsError: no archive of `torch.save`, or one of another byte order.
    """
    pickles = [name for name in contents if name.endswith("/" + PICKLE)]
    if len(pickles) != 1:
        raise refused(
            f"a zip archive with {len(pickles)} records {PICKLE!r} where torch.save writes one "
            "(an .npz file? send .npy)"
        )
    prefix = pickles[0].removesuffix(PICKLE)
    if prefix + "constants.pkl" in contents:
        raise refused("a TorchScript archive")
    _check_byteorder(contents.get(prefix + "byteorder"))
    return prefix


def _check_byteorder(record: memoryview | None) -> None:
    """Files of torch before 2.1 have no such record and are little endian but for rare machines."""
    if record is not None and bytes(record[:16]) != b"little":
        order = bytes(record[:16]).decode("ascii", "replace")
        raise refused(f"a tensor in byte order {quoted(order)}; only little endian is read")


def _kind(value: pickled.Value) -> str:
    if type(value) in (list, tuple, dict):
        return f"a {type(value).__name__} of {len(value)}; send one tensor"
    if type(value) is pickled.ElementStorage:
        return "a storage without a shape"
    return f"a value of type {type(value).__name__}"


def _table_id(record: memoryview | None) -> str | None:
    if record is None:
        return None
    try:
        return bytes(record[: MAX_TABLE_ID_LENGTH + 1]).decode("ascii")
    except UnicodeDecodeError as error:
        raise refused("an embedding table id that is not ASCII") from error


def write_torch(
    data: memoryview, dtype: str, shape: tuple[int, ...], table_id: str | None
) -> bytes:
    """The file `torch.save` would write for a CPU tensor, with the table's id as one more record.

    Args:
        data: elements in C order, little endian.
        dtype: one of `DTYPE_SIZES`.
        shape: every size at least 1.
        table_id: of the embedding table the rows were taken from.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, content: bytes | memoryview) -> None:
            record = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
            # torch maps aligned storages without a copy; the padding sits in an extra field, as
            # torch's own does.
            start = out.tell() + 30 + len(record.filename) + 4
            padding = -start % _ALIGNMENT
            record.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            archive.writestr(record, content)

        add(PICKLE, _pickle(dtype, shape, len(data)))
        add("byteorder", b"little")
        add("data/0", data)
        add("version", b"3\n")
        if table_id is not None:
            add(_TABLE_ID, table_id.encode("ascii"))
    return out.getvalue()


_STORAGE_CLASSES = {dtype: name for name, dtype in pickled.STORAGE_DTYPES.items()}


def _pickle(dtype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """The pickle, protocol 2, of a contiguous tensor in storage "0" on the CPU."""
    named = dtype in _STORAGE_CLASSES
    storage_class = (
        f"torch\n{_STORAGE_CLASSES[dtype]}" if named else "torch.storage\nUntypedStorage"
    )
    length = num_bytes // DTYPE_SIZES[dtype] if named else num_bytes
    rebuild = "_rebuild_tensor_v2" if named else "_rebuild_tensor_v3"
    storage = (
        b"("
        + _string("storage")
        + _global(storage_class)
        + _string("0")
        + _string("cpu")
        + _integer(length)
        + b"tQ"
    )
    hooks = _global("collections\nOrderedDict") + b")R"
    arguments = storage + _integer(0) + _sizes(shape) + _sizes(c_strides(shape)) + b"\x89" + hooks
    if not named:
        arguments += _global(f"torch\n{dtype}")
    return b"\x80\x02" + _global(f"torch._utils\n{rebuild}") + b"(" + arguments + b"tR."


def _string(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _global(name: str) -> bytes:
    return b"c" + name.encode() + b"\n"


def _integer(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def _sizes(sizes: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(_integer(size) for size in sizes) + b"t"
