"""The module ring: a module that replaces others is compared with them, per element."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.self_check.shares import Mode, ShareMessages
from inlay.engine.torch.weights.linear_methods import TOLERANCE, differ

_logger = logging.getLogger(__name__)

_SLOPE = 2**-9
"""Largest relative difference of a typical element from the original: rounding has none."""

MADE, MADE_FOR_BLOCKS = 24, 8
"""Rows of made inputs; sums of products with blocks are of integers, and as many rows are one step
of theirs."""

Compute = Callable[[Tensor], Tensor]

Kept = Mapping[str, tuple[Tensor, Tensor]]
"""Rows of the inputs [R, in] and outputs [R, out] of modules in the model's own pass, by path."""


class _Rows(NamedTuple):
    """The rows that a module is compared on.

    Attributes:
        given: [R, in].
        outputs: [R, out] of each module that it replaces, from the model's own pass.
        summed: it computes an addend of these, as every rank does.
    """

    given: Tensor
    outputs: Sequence[Tensor] = ()
    summed: bool = False


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
        self._shares: ShareMessages | None = None
        self.plain = plain
        self.known = known
        self.checked = 0
        self.left_out: dict[str, float] = {}

    def divide(self, shares: ShareMessages) -> None:
        """Compare the ranks' shares of modules from now on, as rank 0 does."""
        self._shares = shares
        known = None if self.known is None else tuple(self.known)
        mode = shares.mode(Mode(self.plain, known))
        self.plain, self.known = mode.plain, mode.known

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
        only: Tensor | None = None,
        made: int = MADE,
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
            only: outputs that `expected` gives, int64, where the model's own pass gave none; None
                for all.
            made: rows of made inputs.
        """
        name = paths[0] if whole is None else whole
        if whole is None and len(paths) > 1:
            name = " + ".join([paths[0], *(path.rpartition(".")[2] for path in paths[1:])])
        if self.plain:
            return False
        if self.known is not None:
            return name not in self.known
        with torch.inference_mode():
            rows = self._rows(paths, size, like, made)
            own = found(rows.given)
            wanted = self._wanted(rows, own) if whole is None else None
            compared = found
            if wanted is None:
                wanted = expected(rows.given)
                if only is not None:
                    own, compared = own[..., only], lambda x: found(x)[..., only]
            differences = _differences(compared, rows.given, own, wanted)
            bounds = [roundings * TOLERANCE[like.dtype], _SLOPE]
            if rows.summed and self._shares is not None:
                adding, wanted = self._shares.adding(found), torch.cat([*rows.outputs], -1)
                differences += _differences(adding, rows.given, adding(rows.given), wanted)
                # Each addend is rounded, and their sum.
                bounds += [(roundings + self._shares.size) * TOLERANCE[like.dtype], _SLOPE]
        if self._shares is not None:
            differences = self._shares.largest(differences)
        self.checked += 1
        # Not a number is not near.
        wrong = [pair for pair in zip(differences, bounds, strict=True) if not pair[0] <= pair[1]]
        if not wrong:
            return True
        worst, allowed = wrong[0]
        self.left_out[name] = worst
        _logger.warning(
            "%s is left as it is: its faster form differs by %.3g (allowed: %.3g)",
            name, worst, allowed,
        )  # fmt: skip
        return False

    def _rows(self, paths: Sequence[str], size: int, like: Tensor, made: int) -> _Rows:
        kept = [rows for path in paths if (rows := self._kept_of(path, like)) is not None]
        if kept:
            given, outputs = kept[0][0], [found for _, found in kept]
            if given.shape[1] == size:
                return _Rows(given, outputs)
            if self._shares is not None and given.shape[1] == size * self._shares.size:
                return _Rows(self._shares.part(given), outputs, summed=True)
        return _Rows(_made(made, size, like))

    def _kept_of(self, path: str, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what the module of the whole model was given, in the dtype of `like`, and gave."""
        kept = self._kept.get(path if self._shares is None else self._shares.whole(path))
        # The model's own code may have run elsewhere, before the model was divided.
        found = kept and (kept[0].to(like.device), kept[1].to(like.device))
        if found is not None and any(part.dtype != like.dtype for part in found):
            found = None
        return found if self._shares is None else self._shares.rows(found, like)

    def _wanted(self, rows: _Rows, own: Tensor) -> Tensor | None:
        """Return what the model's own pass has in place of `own`; None if that is not known."""
        if not rows.outputs or rows.summed:
            return None
        wanted = torch.cat([*rows.outputs], -1)
        if wanted.shape != own.shape and self._shares is not None:
            wanted = torch.cat([*map(self._shares.part, rows.outputs)], -1)
        return wanted if wanted.shape == own.shape else None


def _differences(found: Compute, given: Tensor, own: Tensor, wanted: Tensor) -> list[float]:
    """Return the largest difference of an element, and by how much a typical one is off."""
    # One row, a few and several have different kernels.
    few = [differ(found(given[:rows]), wanted[:rows], wanted) for rows in (1, 3)]
    # Not a number is the largest.
    error = max(differ(own, wanted), *few, key=lambda each: (each != each, each))
    return [error, _slope(own, wanted)]


def _made(count: int, size: int, like: Tensor) -> Tensor:
    """Return made inputs [count, size]: random, with two loud channels as trained models have."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(count, size, generator=generator)
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
