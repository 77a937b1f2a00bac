"""Import and use of transformers on a CPU without torch's compiler, which a worker never calls.

transformers imports all of it for a few decorators and one class of a rare mask, torch does to run
functions that it would leave out, and transformers imports torch's distributed tensors for its own
division of models: nearly half of the time of a worker's imports.
"""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

_logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"

_IMPORTED = ("modeling_utils", "masking_utils", "generation.utils")
"""Modules of transformers that come with any model, and import the others."""


def import_light() -> None:
    """Import the modules of transformers that come with any model, `without_compiler`.

    transformers then takes torch for one without `torch.distributed`, which itself is as ever. It
    divides no model here. Nothing is done where a GPU can be used, or they are imported already;
    what fails is told, and they are imported in full by those who need them.
    """
    if torch.cuda.is_available() or "transformers.modeling_utils" in sys.modules:
        return
    if find_spec("torchvision") is not None:  # transformers imports it, and it the compiler
        return
    try:
        with without_compiler():
            _without_distributed()
            for name in _IMPORTED:
                importlib.import_module(f"transformers.{name}")
    except Exception:  # other releases may import anything
        _logger.info(
            "transformers is imported with torch's compiler, which takes longer: without it failed",
            exc_info=True,
        )


def _without_distributed() -> None:
    from transformers.utils.import_utils import is_torch_distributed_available

    available = torch.distributed.is_available
    is_torch_distributed_available.cache_clear()
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # remembers its answer
    finally:
        torch.distributed.is_available = available


@contextmanager
def without_compiler() -> Iterator[None]:
    """Have imports of `torch._dynamo` get decorators without effect, where it is not yet imported.

    Whoever asks it for something else gets all of it. No effect where a GPU can be used.
    """
    if torch.cuda.is_available() or _COMPILER in sys.modules:
        yield
        return
    compiler, masks = ModuleType(_COMPILER), ModuleType(_MASKS)

    def leave() -> None:
        for module in (compiler, masks):
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]

    def other(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        leave()
        return getattr(importlib.import_module(_COMPILER), name)

    names = "allow_in_graph", "assume_constant_result", "disable"
    vars(compiler).update(dict.fromkeys(names, _undecorated), __getattr__=other)
    vars(masks).update(TransformGetItemToIndex=_mask_mode)
    sys.modules.update({_COMPILER: compiler, _MASKS: masks})
    try:
        yield
    finally:
        leave()


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return `function`, or without one a decorator that does."""
    return _undecorated if function is None else function


def _mask_mode() -> Any:
    """Return a new mode of torch functions for masks that are made element by element."""
    return importlib.import_module(_MASKS).TransformGetItemToIndex()
