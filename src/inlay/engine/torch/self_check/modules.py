"""The module ring: a module that replaces others is compared with them, per element."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from inlay.engine.torch.weights.linear_methods import TOLERANCE, differ

_logger = logging.getLogger(__name__)

_SLOPE = 2**-9
"""Largest relative difference of a typical element from the original: rounding has none."""

Compute = Callable[[Tensor], Tensor]

Kept = Mapping[str, tuple[Tensor, Tensor]]
"""Rows of the inputs [R, in] and outputs [R, out] of modules in the model's own pass, by path."""


class ModuleCheck:
    """Compares modules, and remembers which were left as they were.

    Attributes:
        plain: nothing is to be replaced.
        known: modules that are not to be replaced, all others are; None to compare them.
        checked: number of comparisons.
        left_out: paths of modules that were not replaced, each with its difference.
    """

    def __init__(
        self,
        kept: Kept | None = None,
        *,
        plain: bool = False,
        known: Collection[str] | None = None,
    ) -> None:
        """Compare with `kept` rows, and on made ones where there are none."""
        self._kept = kept or {}
        self.plain = plain
        self.known = known
        self.checked = 0
        self.left_out: dict[str, float] = {}

    def agrees(
        self,
        paths: Sequence[str],
        size: int,
        like: Tensor,
        found: Compute,
        expected: Compute,
        *,
        roundings: int = 1,
        whole: str | None = None,
    ) -> bool:
        """Return True if `found` computes what `expected` does, rounded otherwise.

        Args:
            paths: modules that `found` replaces, which have one input; it has their outputs, one
                after another.
            size: elements of the input.
            like: a tensor of the input's dtype and device.
            found: the replacement.
            expected: the module itself.
            roundings: of its intermediate results too, one after another.
            whole: path of one module that `found` replaces, which gets the input that `paths` have,
                and whose output is not theirs.
        """
        name = paths[0] if whole is None else whole
        if whole is None and len(paths) > 1:
            name = " + ".join([paths[0], *(path.rpartition(".")[2] for path in paths[1:])])
        allowed = roundings * TOLERANCE[like.dtype]
        if self.plain:
            return False
        if self.known is not None:
            return name not in self.known
        kept = [self._kept[path] for path in paths if path in self._kept]
        given = kept[0][0] if kept else None
        if given is None or given.shape[1] != size or given.dtype != like.dtype:
            given, kept = _made(size, like), []
        # The model's own code may have run elsewhere, before the model was divided.
        given, kept = given.to(like.device), [(x, y.to(like.device)) for x, y in kept]
        with torch.inference_mode():
            own = found(given)
            wanted = torch.cat([rows for _, rows in kept], -1) if kept and whole is None else None
            # Not so where another rank has the rest of them.
            if wanted is None or wanted.shape != own.shape:
                wanted = expected(given)
            # One row and several have different kernels.
            error = max(differ(own, wanted), differ(found(given[:1]), wanted[:1], wanted))
            slope = _slope(own, wanted)
        self.checked += 1
        # Not a number is not near.
        if error <= allowed and slope <= _SLOPE:
            return True
        worst, allowed = (error, allowed) if not error <= allowed else (slope, _SLOPE)
        self.left_out[name] = worst
        _logger.warning(
            "%s is left as it is: its faster form differs by %.3g (allowed: %.3g)",
            name, worst, allowed,
        )  # fmt: skip
        return False


def _made(size: int, like: Tensor) -> Tensor:
    """Return made inputs [24, size]: random, with two loud channels as trained models have."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(24, size, generator=generator)
    rows[:, [size // 3, size // 2]] *= 50
    return rows.to(like)


def _slope(found: Tensor, expected: Tensor) -> float:
    """Return by how much a typical element of `found` is too large or too small, relatively.

    Less twice the standard error over rows: where an intermediate result is loud, its rounding is
    that of a whole row.
    """
    expected = expected.float()
    large = expected.abs() > expected.abs().median(-1, keepdim=True).values
    if int(large.sum()) < 64:
        # Too few for roundings to even out.
        return 0.0
    # Bounded, so that no single one decides.
    excess = (found.float() / expected - 1).clamp(-0.05, 0.05).where(large, 0.0)
    rows = excess.sum(-1) / large.sum(-1).clamp(min=1)
    chance = 2 * rows.std() / len(rows) ** 0.5 if len(rows) > 1 else 0.0
    return float((rows.mean().abs() - chance).clamp(min=0))
