"""The part ring: what runs its library's own code, in the dtype that it is served in.

Towers of images and sound, denoisers, text encoders, decoders and talkers replace no module, so
that only their dtype can be wrong: float16 overflows in published towers. Each is run on one input
of a usual size as it is served, and again in float32, one layer's weights at a time.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from inlay.base.errors import EngineError
from inlay.engine.torch.self_check.reference import relative
from inlay.messages.card import SelfCheck

_logger = logging.getLogger(__name__)

PART_BOUND = 0.1
"""Relative distance to float32 of most parts: lifelike ones have 0.003 to 0.013 in bfloat16."""

_MOST_SECONDS = 20.0
"""A part that takes longer is not run again in float32."""


class CheckedPart(NamedTuple):
    """A part of a model.

    Attributes:
        modules: that it consists of.
        run: computes it on an input that is always the same: rows [R, N] of each of its outputs.
        bound: distance to float32 over which what it makes is its dtype's rounding.
    """

    modules: Sequence[nn.Module]
    run: Callable[[], Sequence[Tensor]]
    bound: float = PART_BOUND


def checked_parts(
    mode: str, dtype: torch.dtype, parts: Mapping[str, CheckedPart], found: SelfCheck | None = None
) -> SelfCheck | None:
    """Compare parts with themselves in float32.

    Args:
        mode: as `EngineSettings.self_check`.
        dtype: that they are served in.
        parts: by name.
        found: result of what else the model has.

    Returns:
        `found` with the result; None if nothing was compared.

    Raises:
        EngineError: what a part makes is not finite; in mode strict, it is rounding, or the part
            does not run.
    """
    if mode == "off" or not parts:
        return found
    begun, partial = time.monotonic(), False
    distances: dict[str, float] = {}
    for name, part in parts.items():
        try:
            with torch.inference_mode():
                distances[name] = _distance(name, part, dtype)
        except EngineError:
            raise
        except Exception as error:  # a library's code may raise anything
            if mode == "strict":
                raise EngineError(
                    f"--self-check strict: the model's {name} could not be compared with float32: "
                    f"{error}"
                ) from error
            _logger.exception("self-check: the model's %s could not be compared", name)
            partial = True
    seconds = time.monotonic() - begun
    rounding = {name: far for name, far in distances.items() if not far <= parts[name].bound}
    for name, far in rounding.items():
        reason = (
            f"what the model's {name} makes in {_named(dtype)} is {far:.2g} from float32 (allowed: "
            f"{parts[name].bound:g}): {_advice(dtype)}"
        )
        if mode == "strict":
            raise EngineError(f"--self-check strict: {reason}")
        _logger.warning("%s", reason)
    _logger.info(
        "self-check: %s; %.1f s",
        ", ".join(f"{name} by {far:.2g} from float32" for name, far in distances.items()),
        seconds,
    )
    base = found or SelfCheck(result="passed", reference=f"the same in float32, {_named(dtype)}")
    result = base.result
    if rounding:
        result = "noise"
    elif partial and result == "passed":
        result = "partial"
    return replace(
        base,
        result=result,
        parts={name: float(f"{far:.3g}") for name, far in distances.items()},
        seconds=round(base.seconds + seconds, 2),
    )


def _distance(name: str, part: CheckedPart, dtype: torch.dtype) -> float:
    """Return the typical relative distance of a row to float32; the largest of all outputs."""
    begun = time.monotonic()
    served = part.run()
    seconds = time.monotonic() - begun
    if not all(rows.isfinite().all() for rows in served):
        raise EngineError(
            f"what the model's {name} makes in {_named(dtype)} is not finite: {_advice(dtype)}; "
            "--self-check off serves it nevertheless"
        )
    if dtype == torch.float32:
        return 0.0
    if seconds > _MOST_SECONDS:
        raise TimeoutError(f"it took {seconds:.0f} s, and would take as long again")
    with in_float32(part.modules):
        exact = part.run()
    far = max(
        float(relative(rows, wanted, wanted).median())
        for rows, wanted in zip(served, exact, strict=True)
    )
    return far if math.isfinite(far) else math.inf


def _advice(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return "serve it with --dtype bfloat16 or float32"
    return "its weights or their dtype are broken"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def in_float32(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compute `modules` in float32 within this context, from the weights that they have.

    The weights of one layer at a time are float32: while it runs.
    """
    with ExitStack() as undo:
        for root in modules:
            for module, tensors in _units(root):
                raised = _Raised(tensors)
                before = module.register_forward_pre_hook(raised.before, with_kwargs=True)
                undo.callback(before.remove)
                undo.callback(module.register_forward_hook(raised.after, always_call=True).remove)
        yield


def _units(root: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield modules and their weights: layers whole, and of what has a list of layers its own."""
    holds = any(isinstance(module, nn.ModuleList) for module in root.modules())
    tensors = [*root.parameters(recurse=not holds), *root.buffers(recurse=not holds)]
    yield root, [each for each in tensors if each.is_floating_point()]
    if holds:
        for child in root.children():
            yield from _units(child)


class _Raised:
    """Makes weights float32 before a module runs, and what it is given."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._kept: list[Tensor] = []

    def before(
        self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        # A layer that calls itself again is float32 already.
        self._kept = self._kept or [tensor.data for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.data = tensor.data.float()
        return _float32(given), {name: _float32(value) for name, value in named.items()}

    def after(self, *_: Any) -> None:
        for tensor, data in zip(self._tensors, self._kept, strict=True):
            tensor.data = data
        self._kept = []


def _float32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_float32, value))
    return value
