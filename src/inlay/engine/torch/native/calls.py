"""Calls of C functions on tensors."""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Names of dtypes in those of functions."""

Functions = dict[torch.dtype, "ctypes._NamedFuncPointer"]
"""A kernel compiled for each dtype."""

pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def structure(name: str, **fields: type) -> type[ctypes.Structure]:
    """Return a structure of C with these fields, in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def with_tensors(call: ctypes.Structure, **tensors: torch.Tensor) -> Any:
    """Return a copy of `call` whose fields of these names point to `tensors`."""
    copy = type(call).from_buffer_copy(call)
    for name, tensor in tensors.items():
        setattr(copy, name, tensor.data_ptr())
    return copy


def functions(
    library: ctypes.CDLL,
    name: str,
    *arguments: type,
    dtypes: Mapping[torch.dtype, str] = NAMES,
    result: type | None = None,
) -> Functions:
    """Return the kernel `name` of `library` for each of `dtypes`."""
    found = {}
    for dtype, suffix in dtypes.items():
        function = getattr(library, f"inlay_{name}_{suffix}")
        function.argtypes, function.restype = arguments, result
        found[dtype] = function
    return found
