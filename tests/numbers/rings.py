"""Which ring of the check at start sees a seeded fault: the answer's, the layers', the modules'.

A fault of a kind must show in the answer or in all layers together. One of an instance may be lost there, as trained layers
are redundant; it must show in its layer or its module.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check import start
from inlay.engine.torch.self_check.judgement import BOUND, judge_answers, judge_layers
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.weights.linear import FusedPart, RMSNorm
from inlay.engine.torch.weights.linear_methods import LinearMethod
from tests.numbers.distance import load
from tests.numbers.faults import FAULTS

_PARTS = {
    "project": ("q_proj", "k_proj", "v_proj"),
    "gate_up": ("gate_proj", "up_proj"),
    "out": ("o_proj",),
    "down": ("down_proj",),
}
"""Modules of the original whose outputs a product of a fused layer has."""


class Checked(NamedTuple):
    """A model that passed the check at its start, and all that was compared with."""

    model: CausalModel
    reference: Reference


def checked(directory: Path, **options: Any) -> Checked:
    """Load a model whose check must pass with every module replaced."""
    kept: list[Reference] = []
    usual = Reference.of

    def of(*given: Any, **named: Any) -> Reference:
        found = usual(*given, **named)
        # A start drops the rows of modules once it has compared them.
        kept.append(replace(found, modules=dict(found.modules)))
        return found

    with (
        mock.patch.object(Reference, "of", of),
        # One that was kept has neither layers nor modules.
        mock.patch.object(start, "find", return_value=None),
    ):
        model = load(directory, self_check="strict", **options)
    # The small model of the same structure, if any, comes first.
    return Checked(model, kept[-1])


class Shown(NamedTuple):
    """Where a fault shows.

    Attributes:
        ring: the first of "answer", "layers" (all together), "layer" and "module" whose bound it
            crosses, or "none".
        distance: of the answer.
    """

    ring: str
    distance: float


def seeded(found: Checked) -> Iterator[tuple[str, Shown]]:
    """Seed each fault that the model can have, one after another."""
    for name, fault in FAULTS.items():
        with fault.into(found.model) as made:
            if made:
                yield name, _shown(found)


def _shown(found: Checked) -> Shown:
    answers = judge_answers(*found)
    # Not a number is beyond any bound.
    if not answers.distance <= BOUND:
        return Shown("answer", answers.distance)
    judged = judge_layers(*found, answers)
    if not judged.similar:
        return Shown("layers", judged.distance)
    if not judged.right:
        return Shown("layer", judged.distance)
    return Shown("module" if differing(found) else "none", judged.distance)


def differing(found: Checked) -> list[str]:
    """Modules that now give something else than the model's own did in the reference's pass."""
    check = ModuleCheck(found.reference.modules)
    for path, parent in found.model._model.named_modules():
        for names, module in _replaced(parent):
            paths = [f"{path}.{name}" if path else name for name in names]
            if found.reference.modules.keys() >= set(paths):
                like = found.reference.modules[paths[0]][0]
                check.agrees(paths, like.shape[1], like, module, module)
    assert check.checked > len(found.model.decoder_layers)
    return list(check.left_out)


def _replaced(parent: nn.Module) -> Iterable[tuple[tuple[str, ...], nn.Module]]:
    """Products and norms of a module, each with the names that the original has for it."""
    joint: dict[nn.Module, tuple[str, ...]] = {}
    for name, child in parent.named_children():
        if isinstance(child, FusedPart):
            joint[child.whole] = (*joint.get(child.whole, ()), name)
        elif isinstance(child, LinearMethod | RMSNorm):
            joint[child] = _PARTS.get(name, (name,))
    return [(names, module) for module, names in joint.items()]
