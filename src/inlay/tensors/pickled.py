"""The pickle inside a `torch.save` file, interpreted.

A short list of opcodes and names, and values that do nothing.

Nothing is imported, looked up or called. A name on the list becomes a `Name`, what the pickle would
call becomes a record of what it would have been called with (`PickledTensor`), and everything else
is refused. Time and memory are bounded by the limits of a `PickleForm`: each opcode costs a
constant, and no value is ever walked.

Opcodes: `pickletools` in Python's standard library, protocols 2 to 5.
"""

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from inlay.tensors.tensor import quoted, refused

Value: TypeAlias = Any
"""None, bool, int, float, str, tuple, list, dict, or one of the records below."""


class Name(msgspec.Struct, frozen=True):
    """A module's attribute, by name only."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class ElementStorage(msgspec.Struct, frozen=True):
    """Location of elements: record `data/<key>` of the archive.

    Attributes:
        dtype: of the elements, or None for bytes without one.
        key: of the record.
        length: elements, or bytes where there is no dtype.
    """

    dtype: str | None
    key: str
    length: int


class PickledTensor(msgspec.Struct, frozen=True):
    """A view of a storage, as the pickle describes it.

    Nothing about it is checked beyond the types.

    Attributes:
        storage: what it views.
        dtype: of its elements.
        offset: first element.
        shape: elements a dimension.
        strides: elements from one index to the next, a dimension.
    """

    storage: ElementStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
"""dtypes that have a storage class of their own in module `torch`."""

INTEGER_STORAGES: dict[str, str] = {"LongStorage": "int64", "IntStorage": "int32"}
"""The same of integers, which only `inlay.tensors.integers` takes."""

_OTHER_STORAGES = {
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
"""The same of what only a model's weights may be."""
_INTEGERS = (*INTEGER_STORAGES.values(), *_OTHER_STORAGES.values(), "uint16", "uint32", "uint64")


def _in_torch(names: dict[str, str]) -> dict[Name, str]:
    return {Name("torch", name): dtype for name, dtype in names.items()}


_UNTYPED_STORAGE = Name("torch.storage", "UntypedStorage")
_TENSOR_DTYPES = {
    Name("torch", dtype): dtype
    for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
_ORDERED_DICT = Name("collections", "OrderedDict")
_TENSOR_V2 = Name("torch._utils", "_rebuild_tensor_v2")
_TENSOR_V3 = Name("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Name("torch._utils", "_rebuild_parameter")
_PARAMETER_WITH_STATE = Name("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = Name("torch._tensor", "_rebuild_from_type_v2")
_TENSOR_TYPES = {
    Name("torch", "Tensor"),
    Name("torch.nn.parameter", "Parameter"),
    Name("torch.nn.parameter", "Buffer"),
}
_NAMES = {
    _UNTYPED_STORAGE, _ORDERED_DICT, _TENSOR_V2, _TENSOR_V3, _PARAMETER, _PARAMETER_WITH_STATE,
    _FROM_TYPE, *_TENSOR_TYPES,
}  # fmt: skip


class PickleForm(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of pickle, and its limits.

    Attributes:
        what: it is the pickle of.
        storages: dtype of each class of storages that it may name.
        dtypes: name of each dtype of tensors.
        max_bytes: of the pickle.
        max_steps: opcodes; each makes at most one value.
        max_stack: values beside each other.
        max_memo: values that are remembered.
        has_state: a dict may have a state of its own, which is left out (`_metadata` of modules).
    """

    what: str
    storages: dict[Name, str]
    dtypes: dict[Name, str]
    max_bytes: int
    max_steps: int
    max_stack: int
    max_memo: int
    has_state: bool = False


ONE_TENSOR = PickleForm(
    what="a plain tensor",
    storages=_in_torch(STORAGE_DTYPES | INTEGER_STORAGES),
    dtypes=_TENSOR_DTYPES,
    max_bytes=8192,
    max_steps=8192,
    max_stack=512,
    max_memo=4096,
)
STATE_DICT = PickleForm(
    what="a state dict",
    storages=ONE_TENSOR.storages | _in_torch(_OTHER_STORAGES),
    dtypes=_TENSOR_DTYPES | _in_torch({dtype: dtype for dtype in _INTEGERS}),
    max_bytes=32 << 20,
    max_steps=4_000_000,
    max_stack=8192,
    max_memo=2_000_000,
    has_state=True,
)

_KINDS = {
    "_rebuild_sparse_tensor": "a sparse tensor; call .to_dense() before saving",
    "_rebuild_qtensor": "a quantized tensor; call .dequantize() before saving",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "_rebuild_nested_tensor": "a nested tensor; send its parts one by one",
    "_rebuild_njt": "a nested (jagged) tensor; send its parts one by one",
    "_rebuild_wrapper_subclass": "a tensor subclass; send a plain tensor",
    "_rebuild_device_tensor_from_numpy": "a tensor saved on its device; call .cpu() before saving",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor saved on its device; call .cpu() before "
    "saving",
}
"""Calls in pickles of tensors that are refused, and the error of each."""

_MARK = object()


def load(data: bytes, form: PickleForm = ONE_TENSOR) -> Value:
    """The value that pickle `data` describes: a `PickledTensor` for a tensor or parameter.

    Raises:
        EmbeddingsError: anything that a pickle of this form, or of a list or dict of plain tensors,
            does not hold.
    """
    if len(data) > form.max_bytes:
        raise refused(
            f"a pickle of {len(data)} bytes, which is more than {form.what}; allowed: at most "
            f"{form.max_bytes} bytes"
        )
    return _Machine(data, form).run()


class _Machine:
    """A pickle machine that only moves values about."""

    def __init__(self, data: bytes, form: PickleForm) -> None:
        self._data = data
        self._form = form
        self._at = 0
        self._stack: list[Value] = []
        self._memo: dict[int, Value] = {}

    def run(self) -> Value:
        if self._take(1) != b"\x80" or not 2 <= self._take(1)[0] <= 5:
            raise _malformed("it does not begin with a protocol of 2 to 5")
        form = self._form
        for _ in range(form.max_steps):
            code = self._take(1)[0]
            if code == _STOP:
                value = self._pop()
                if self._stack or self._at != len(self._data):
                    raise _malformed("something is left after its end")
                return value
            step = _STEPS.get(code)
            if step is None or (code == _BUILD and not form.has_state):
                raise refused(
                    f"a pickle with opcode {code:#04x}, which the pickle of {form.what} does "
                    "not hold"
                )
            step(self)
            if len(self._stack) > form.max_stack or len(self._memo) > form.max_memo:
                raise _malformed(
                    f"it is nested deeper than {form.max_stack} or remembers more than "
                    f"{form.max_memo} values"
                )
        raise _malformed(f"it has over {form.max_steps} opcodes")

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise _malformed("it is cut short")
        self._at += count
        return taken

    def _unpack(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise _malformed("it is cut short")
        line = self._data[self._at : end]
        self._at = end + 1
        return _text(line)

    def _pop(self) -> Value:
        if not self._stack or self._stack[-1] is _MARK:
            raise _malformed("it takes a value that is not there")
        return self._stack.pop()

    def _top(self) -> Value:
        if not self._stack or self._stack[-1] is _MARK:
            raise _malformed("it takes a value that is not there")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Value]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise _malformed("it takes a mark that is not there")

    def push(self, value: Value) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._stack.append(_MARK)

    def frame(self) -> None:
        self._take(8)

    def integer(self, form: struct.Struct) -> None:
        self.push(self._unpack(form))

    def long(self) -> None:
        size = self._take(1)[0]
        if size > 8:
            raise _malformed(f"it holds an integer of {size} bytes")
        self.push(int.from_bytes(self._take(size), "little", signed=True))

    def string(self, length: struct.Struct) -> None:
        self.push(_text(self._take(self._unpack(length))))

    def tuple(self, size: int | None) -> None:
        if size is None:
            self.push(tuple(self._pop_to_mark()))
            return
        values = [self._pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def append(self) -> None:
        value = self._pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Value]) -> None:
        target = self._top()
        if type(target) is not list:
            raise _malformed("it appends to something that is not a list")
        target.extend(values)

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, items: list[Value]) -> None:
        target = self._top()
        if type(target) is not dict or len(items) % 2:
            raise _malformed("it sets items of something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, bool):
                raise _malformed("a dict in it has a key that is neither text nor a number")
            target[key] = value

    def put(self, index: struct.Struct) -> None:
        self._memo[self._unpack(index)] = self._top()

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def get(self, index: struct.Struct) -> None:
        at = self._unpack(index)
        if at not in self._memo:
            raise _malformed("it recalls a value that it never remembered")
        self.push(self._memo[at])

    def build(self) -> None:
        state, target = self._pop(), self._top()
        if type(state) is not dict or type(target) is not dict:
            raise _malformed("it gives a state to something that is not a dict")

    def name(self) -> None:
        module = self._line()
        self.push(_name(module, self._line(), self._form))

    def stack_name(self) -> None:
        attribute, module = self._pop(), self._pop()
        if type(module) is not str or type(attribute) is not str:
            raise _malformed("it names something by what is not text")
        self.push(_name(module, attribute, self._form))

    def persistent(self) -> None:
        self.push(_storage(self._pop(), self._form))

    def reduce(self) -> None:
        arguments, called = self._pop(), self._pop()
        if type(called) is not Name or type(arguments) is not tuple:
            raise _malformed("it calls something that is not a name")
        self.push(_call(called, arguments, self._form))


_BYTE, _SHORT, _INT, _UINT, _DOUBLE = map(struct.Struct, ("<B", "<H", "<i", "<I", ">d"))
_STOP, _BUILD = ord(b"."), ord(b"b")
_STEPS: dict[int, Callable[[_Machine], None]] = {
    ord(b"("): _Machine.mark,
    ord(b")"): lambda machine: machine.push(()),
    ord(b"]"): lambda machine: machine.push([]),
    ord(b"}"): lambda machine: machine.push({}),
    ord(b"N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord(b"K"): lambda machine: machine.integer(_BYTE),
    ord(b"M"): lambda machine: machine.integer(_SHORT),
    ord(b"J"): lambda machine: machine.integer(_INT),
    ord(b"G"): lambda machine: machine.integer(_DOUBLE),
    0x8A: _Machine.long,
    ord(b"X"): lambda machine: machine.string(_UINT),
    0x8C: lambda machine: machine.string(_BYTE),
    ord(b"t"): lambda machine: machine.tuple(None),
    0x85: lambda machine: machine.tuple(1),
    0x86: lambda machine: machine.tuple(2),
    0x87: lambda machine: machine.tuple(3),
    ord(b"a"): _Machine.append,
    ord(b"e"): _Machine.appends,
    ord(b"s"): _Machine.set_item,
    ord(b"u"): _Machine.set_items,
    ord(b"q"): lambda machine: machine.put(_BYTE),
    ord(b"r"): lambda machine: machine.put(_UINT),
    0x94: _Machine.memoize,
    ord(b"h"): lambda machine: machine.get(_BYTE),
    ord(b"j"): lambda machine: machine.get(_UINT),
    _BUILD: _Machine.build,
    ord(b"c"): _Machine.name,
    0x93: _Machine.stack_name,
    ord(b"Q"): _Machine.persistent,
    ord(b"R"): _Machine.reduce,
    0x95: _Machine.frame,
}


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _malformed("a string in it is not UTF-8") from error


def _name(module: str, attribute: str, form: PickleForm) -> Name:
    name = Name(module, attribute)
    if name in _NAMES or name in form.storages or name in form.dtypes:
        return name
    if attribute in _KINDS and module.startswith("torch."):
        raise refused(_KINDS[attribute])
    if module == "torch" and attribute.endswith("Storage"):
        raise wrong_dtype(attribute.removesuffix("Storage").lower(), form)
    if module == "torch" and attribute.startswith(
        ("float", "int", "uint", "bool", "complex", "bits", "quint", "qint")
    ):
        raise wrong_dtype(attribute, form)
    if module.startswith("torch.nested."):
        raise refused(_KINDS["_rebuild_njt"])
    raise refused(
        f"a pickle that names {quoted(str(name))}, which the pickle of {form.what} does not"
    )


def wrong_dtype(name: str, form: PickleForm = ONE_TENSOR) -> Exception:
    """The error for a tensor of a dtype that those of `form` cannot have."""
    return refused(f"a tensor of dtype {quoted(name)}; allowed: {', '.join(form.dtypes.values())}")


def _storage(identity: Value, form: PickleForm) -> ElementStorage:
    """The storage that `torch.save` names by ("storage", class, key, device, length)."""
    if type(identity) is tuple and len(identity) == 5:
        tag, kind, key, device, length = identity
        if (
            tag == "storage"
            and type(kind) is Name
            and type(key) is str
            and type(device) is str
            and _is_count(length)
            and (kind == _UNTYPED_STORAGE or kind in form.storages)
        ):
            return ElementStorage(form.storages.get(kind), key, length)
    raise _malformed("it refers to something other than a storage")


def _call(called: Name, arguments: tuple[Value, ...], form: PickleForm) -> Value:
    """The result of calling `called`, as an inert record."""
    if called == _ORDERED_DICT and not arguments:
        return {}
    if called == _TENSOR_V2 and len(arguments) in (6, 7):
        storage, offset, shape, strides, _, _, *metadata = arguments
        dtype = storage.dtype if type(storage) is ElementStorage else None
        return _tensor(storage, dtype, offset, shape, strides, metadata)
    if called == _TENSOR_V3 and len(arguments) in (7, 8):
        storage, offset, shape, strides, _, _, dtype, *metadata = arguments
        named = form.dtypes.get(dtype) if type(dtype) is Name else None
        return _tensor(storage, named, offset, shape, strides, metadata)
    if called == _PARAMETER and len(arguments) == 3:
        return _already_tensor(arguments[0])
    if called == _PARAMETER_WITH_STATE and len(arguments) == 4:
        return _already_tensor(arguments[0])
    if called == _FROM_TYPE and len(arguments) == 4:
        inner, kind, inner_arguments, _ = arguments
        callable_ = type(inner) is Name and inner != _FROM_TYPE
        if (
            callable_
            and type(kind) is Name
            and kind in _TENSOR_TYPES
            and type(inner_arguments) is tuple
        ):
            return _already_tensor(_call(inner, inner_arguments, form))
    raise _malformed(f"it calls {called} with arguments that torch.save does not write")


def _tensor(
    storage: Value,
    dtype: str | None,
    offset: Value,
    shape: Value,
    strides: Value,
    metadata: list[Value],
) -> PickledTensor:
    if type(storage) is not ElementStorage or dtype is None or (storage.dtype not in (None, dtype)):
        raise _malformed("a tensor in it has no storage, or one of another dtype")
    if metadata and metadata[0]:
        pending = "a tensor with a pending negation or conjugation"
        raise refused(f"{pending}; call .resolve_neg().resolve_conj() before saving")
    for sizes in (shape, strides):
        if type(sizes) is not tuple or any(type(size) is not int for size in sizes):
            raise _malformed("the sizes or strides of a tensor in it are not integers")
    if type(offset) is not int:
        raise _malformed("the offset of a tensor in it is not an integer")
    return PickledTensor(storage, dtype, offset, shape, strides)


def _already_tensor(value: Value) -> PickledTensor:
    if type(value) is not PickledTensor:
        raise _malformed("it makes a parameter out of something that is not a tensor")
    return value


def _is_count(value: Value) -> bool:
    return type(value) is int and value >= 0


def _malformed(why: str) -> Exception:
    return refused(f"a pickle that torch.save did not write: {why}")
