"""The self-check at the start of a model."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.card import SelfCheck
from inlay.engine.torch.self_check.judgement import BOUND, MOST_NOISE, Judgement, judge
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.weights.media_families import Family
from inlay.errors import EngineError

if TYPE_CHECKING:
    from inlay.engine.torch.model import CausalModel

_logger = logging.getLogger(__name__)

Read = Callable[[], tuple[Any, Any]]
"""Reads the weights; returns a causal language model and its tower, both transformers'."""

Wrap = Callable[[Any, Any, ModuleCheck], "CausalModel"]
"""Replaces the modules that the check finds the same."""


def checked(
    mode: str,
    read: Read,
    wrap: Wrap,
    directory: Path,
    max_model_len: int,
    family: Family,
) -> "CausalModel":
    """Load a model and compare it with its own code.

    A model that is further from it than rounding explains is loaded again without faster modules.

    Args:
        mode: as `EngineSettings.self_check`.
        read: called again if the model is loaded again.
        wrap: called with what `read` returned.
        directory: files of the model.
        max_model_len: positions that it is served with.
        family: of the model.

    Raises:
        EngineError: its numbers are wrong even so; in mode strict, anything differs.
    """
    if mode == "off":
        return wrap(*read(), ModuleCheck())
    model, tower = read()
    begun = time.monotonic()
    reference = Reference.of(
        model, directory, max_model_len, axes=family.rope_axes, rows=takes_rows(model, family)
    )
    seconds = time.monotonic() - begun
    check = ModuleCheck(reference.modules)
    found = wrap(model, tower, check)
    del model, tower
    reference.modules.clear()
    begun = time.monotonic()
    judgement = judge(found, reference)
    seconds += time.monotonic() - begun
    if mode == "strict" and check.left_out:
        raise EngineError(
            f"--self-check strict: {_named(check)} of this model differ in their faster form; "
            "--self-check start serves it without"
        )
    if not judgement.right and not _is_noise(judgement):
        _refuse(mode, judgement)
        _logger.warning(
            "the model's numbers are wrong with faster modules: %s; it is loaded again without "
            "them, and will be slower",
            judgement.reason,
        )
        del found
        check = ModuleCheck(plain=True)
        found = wrap(*read(), check)
        judgement = judge(found, reference)
        if not judgement.right:
            raise EngineError(
                f"the model's numbers are not those of its own code ({reference.by}): "
                f"{judgement.reason}; --self-check off serves it nevertheless"
            )
    found.self_check = _result(check, judgement, reference, seconds)
    _tell(found.self_check)
    return found


def takes_rows(model: Any, family: Family) -> bool:
    """Return True if embedding vectors can be the input of a model's body."""
    per_layer = getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0)
    return not per_layer and family.refuses_rows is None


def _refuse(mode: str, judgement: Judgement) -> None:
    if mode == "strict":
        raise EngineError(
            f"--self-check strict: the model's numbers differ from its own code: {judgement.reason}"
        )


def _is_noise(judgement: Judgement) -> bool:
    """Return True if the reference's own numbers are noise, which no check can judge."""
    return not judgement.noise <= MOST_NOISE


def _named(check: ModuleCheck) -> str:
    names = list(check.left_out)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _result(
    check: ModuleCheck, judgement: Judgement, reference: Reference, seconds: float
) -> SelfCheck:
    result = "passed"
    if _is_noise(judgement):
        result = "noise"
    elif check.plain:
        result = "plain"
    elif check.left_out:
        result = "reduced"
    return SelfCheck(
        result=result,
        reference=reference.by,
        distance=round(judgement.distance, 3),
        place=judgement.place,
        bound=BOUND,
        worst_layer=round(max(judgement.layers, default=0.0), 3),
        noise=round(judgement.noise, 5),
        num_modules=check.checked,
        left_out=tuple(check.left_out),
        seconds=round(seconds, 2),
    )


def _tell(found: SelfCheck) -> None:
    """Log the result in one line."""
    if found.result == "noise":
        _logger.warning(
            "self-check: the model's own numbers (%s) are noise of %.2g: its weights, or their "
            "dtype, are broken, or it is not trained",
            found.reference, found.noise,
        )  # fmt: skip
        return
    _logger.info(
        "self-check: %s against %s: distance %.2f (1 is rounding, allowed %g) in %s; layers at "
        "most %.2f; %d modules compared, %d left as they were; %.1f s",
        found.result, found.reference, found.distance, found.bound, found.place,
        found.worst_layer, found.num_modules, len(found.left_out), found.seconds,
    )  # fmt: skip
