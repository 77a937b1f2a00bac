"""All attackers, one module for each family; those that need torch are in `inlay_audit.neural`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter

from inlay.base.errors import InvalidRequestError
from inlay_audit.attacker import Attacker
from inlay_audit.attackers.geometry import GramMatrix, Signature, SortedValues
from inlay_audit.attackers.nearest import Nearest, WhitenedNearest
from inlay_audit.attackers.order import Averaged, Reordered
from inlay_audit.attackers.pairs import Codebook, LeastSquares, Procrustes, Ridge
from inlay_audit.attackers.sequence import ForwardBackward, Prior


def _with_torch(module: str, name: str) -> Attacker:
    """A new attacker of a module that imports torch."""
    found: Attacker = attrgetter(name)(import_module(f"inlay_audit.neural.{module}"))()
    return found


ALL: dict[str, Callable[[], Attacker]] = {
    "nearest": Nearest,
    "whitened": WhitenedNearest,
    "signature": Signature,
    "gram": GramMatrix,
    "sorted": SortedValues,
    "codebook": Codebook,
    "procrustes": Procrustes,
    "ridge": Ridge,
    "least-squares": LeastSquares,
    "bigram": ForwardBackward,
    "resends": lambda: Averaged("resends", Nearest()),
    "resends-pairs": lambda: Averaged("resends-pairs", LeastSquares()),
    "reordered": lambda: Reordered(Nearest()),
    "inverter": lambda: _with_torch("inverter", "Inverter"),
    "context": lambda: _with_torch("beam", "Beam.of_context"),
    "beam": lambda: _with_torch("beam", "Beam.with_pairs"),
    "hidden-search": lambda: _with_torch("search", "HiddenSearch"),
}
"""By name; the prior always runs beside them."""

NEED_WEIGHTS = ("context", "beam", "hidden-search")
NEED_TORCH = ("inverter", *NEED_WEIGHTS)

FAST = "fast"
"""Word for all that need no torch: seconds for a transform, where the others take minutes."""


def spelled_out(words: Sequence[str]) -> tuple[str, ...]:
    """Names of attackers, each once, with those that `FAST` stands for in its place.

    Raises:
        InvalidRequestError: no attacker has such a name.
    """
    names: list[str] = []
    for word in words:
        if word not in (FAST, *ALL):
            raise InvalidRequestError(f"no attacker {word!r}; there are {FAST}, {', '.join(ALL)}")
        names += [each for each in ALL if each not in NEED_TORCH] if word == FAST else [word]
    return tuple(dict.fromkeys(names))


def chosen(names: Sequence[str]) -> list[Attacker]:
    """New attackers of those names, the prior first."""
    return [Prior(), *(ALL[name]() for name in names)]
