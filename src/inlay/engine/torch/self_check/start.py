"""The self-check at the start of a model."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from inlay.base.errors import EngineError
from inlay.engine import pool_reference
from inlay.engine.references import LocalReferences, references
from inlay.engine.torch.self_check.fingerprint import Fingerprint, comparer, find, keep, key_of
from inlay.engine.torch.self_check.judgement import BOUND, MOST_NOISE, Judgement
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.self_check.shadow import SHADOW_BOUND, Shadow
from inlay.messages.card import SelfCheck

_logger = logging.getLogger(__name__)

DRAWS = 3
"""Comparisons, each with other prompts, that a model must fail to be wrong.

Rounding may move one position far, where two keys or two experts are alike, and all that attend to
it: of right models one start in some hundred, with experts one in ten. A fault shows in each.
"""

Checked = TypeVar("Checked", bound="HasCheck")


class HasCheck(Protocol):
    """A loaded model, which keeps the result of its check.

    `check_width` is the numbers at a position of which some are compared: logits, or channels.
    """

    device: torch.device
    vocab_size: int
    check_width: int
    self_check: SelfCheck | None


class Subject(NamedTuple):
    """Traits that determine the numbers of a model that is to be loaded.

    Attributes:
        weights_id: identity of its weights.
        dtype: that it is served in.
        traits: whatever else its own code's numbers depend on.
        variant: settings that change which modules are replaced, and by what.
    """

    weights_id: str
    dtype: torch.dtype
    traits: tuple[object, ...]
    variant: tuple[object, ...]


class Steps(NamedTuple, Generic[Checked]):
    """Steps in which a model is loaded and compared.

    Attributes:
        read: returns the model as transformers reads it; called again to load it again.
        wrap: replaces those of its modules that the check finds the same.
        reference: runs its own code, before anything is replaced, on prompts of one draw.
        judge: compares a loaded model with the reference.
        shadow: compares a small model of the same structure; None where it cannot.
        pool_ids: identities of the weights of its pools, where these are not the subject's.
    """

    read: Callable[[], Any]
    wrap: Callable[[Any, ModuleCheck], Checked]
    reference: Callable[[Any, int], Reference]
    judge: Callable[[Checked, Reference], Judgement]
    shadow: Callable[[], Shadow | None] = lambda: None
    pool_ids: Callable[[Checked], Sequence[str]] = lambda _: ()


def checked(mode: str, subject: Subject, steps: Steps[Checked]) -> Checked:
    """Load a model and compare it with its own code.

    A model that is further from it than rounding explains is loaded again without faster modules.

    Args:
        mode: as `EngineSettings.self_check`.
        subject: the model.
        steps: how it is loaded and compared.

    Raises:
        EngineError: its numbers are wrong even so; in mode strict, anything differs.
    """
    key = key_of(subject.weights_id, subject.dtype, *subject.traits)
    if mode == "off":  # asks no fleet, which may be away
        left_out = _left_out(find(key, LocalReferences()), subject)
        return steps.wrap(steps.read(), ModuleCheck(known=left_out))
    known = None if mode == "full" else find(key)
    if known is not None and not (mode == "strict" and known.left_out):
        found = _as_before(key, known, subject, steps)
        if found is not None:
            return found
    return _for_the_first_time(mode, key, subject, steps)


def _as_before(
    key: str, known: Fingerprint, subject: Subject, steps: Steps[Checked]
) -> Checked | None:
    """Load the model by what an earlier start found; None if it is wrong now."""
    # The reference is good for all; which modules agree, where other code or another CPU ran.
    check = ModuleCheck(known=_left_out(known, subject))
    same = check.known is not None
    model = steps.wrap(steps.read(), check)
    begun = time.monotonic()
    try:
        reference = known.reference(model.device, model.vocab_size, model.check_width)
    except ValueError as error:
        _logger.info("the self-check of an earlier start is not used: %s", error)
        return None
    judgement = steps.judge(model, reference)
    if not judgement.right or judgement.left_out or (not same and check.left_out):
        # In full, to say what is wrong.
        return None
    if same:
        check.checked, check.left_out = known.num_modules, dict.fromkeys(known.left_out, 0.0)
    else:
        keep(key, Fingerprint.of(reference, comparer(*subject.variant), check.checked, ()))
    _agree(subject, steps.pool_ids(model), reference)
    model.self_check = _result(check, judgement, f"{known.by}, kept", time.monotonic() - begun)
    _tell(model.self_check)
    return model


def _left_out(known: Fingerprint | None, subject: Subject) -> tuple[str, ...] | None:
    """Return which modules an earlier start here left out; None if they are to be compared."""
    same = known is not None and known.compared_by == comparer(*subject.variant)
    return known.left_out if known is not None and same else None


def _for_the_first_time(mode: str, key: str, subject: Subject, steps: Steps[Checked]) -> Checked:
    begun = time.monotonic()
    shadow = steps.shadow()
    seconds = time.monotonic() - begun
    same = shadow is None or shadow.right
    if shadow is not None and not same:
        _differs(mode, shadow)
    read = steps.read()
    begun = time.monotonic()
    try:
        reference = steps.reference(read, 0)
    except Exception as error:  # a model's own code may raise anything
        if mode == "strict":
            raise EngineError(
                f"--self-check strict: the model's own code does not run here: {error}"
            ) from error
        _logger.exception("self-check: the model's own code does not run here")
        return _modules_alone(read, steps, ModuleCheck(plain=not same))
    seconds += time.monotonic() - begun
    compared = _compared(steps, read, reference, plain=not same)
    del read
    seconds += compared.seconds
    for draw in range(1, DRAWS):
        if compared.passes(mode):
            break
        _logger.info("self-check: %s; compared with other prompts", compared.judgement.reason)
        # Freed first: there may be no room for both.
        del compared
        begun = time.monotonic()
        read = steps.read()
        compared = _compared(steps, read, steps.reference(read, draw), plain=not same)
        del read
        seconds += time.monotonic() - begun
    found, reference, check, judgement, _ = compared
    if mode == "strict" and check.left_out:
        raise EngineError(
            f"--self-check strict: {_named(check)} of this model differ in their faster form; "
            "--self-check start serves it without"
        )
    if not compared.passes(mode):
        if mode == "strict":
            raise EngineError(
                "--self-check strict: the model's numbers are not those of its own code "
                f"({reference.by}): {judgement.reason}"
            )
        _logger.warning(
            "the model's numbers are wrong with faster modules: %s; it is loaded again without "
            "them, and will be slower",
            judgement.reason,
        )
        del found, compared
        check = ModuleCheck(plain=True)
        found = steps.wrap(steps.read(), check)
        judgement = steps.judge(found, reference)
        if not judgement.right and not (judgement.finite and _is_noise(judgement)):
            raise EngineError(
                f"the model's numbers are not those of its own code ({reference.by}): "
                f"{judgement.reason}; --self-check off serves it nevertheless"
            )
    elif judgement.right and same:
        compared_by = comparer(*subject.variant)
        keep(key, Fingerprint.of(reference, compared_by, check.checked, tuple(check.left_out)))
        _agree(subject, steps.pool_ids(found), reference, replace=mode == "full")
    distance = 0.0 if shadow is None else shadow.distance
    found.self_check = _result(check, judgement, reference.by, seconds, distance)
    _tell(found.self_check)
    return found


class _Compared(NamedTuple, Generic[Checked]):
    """A model that was compared with its own code, and how long that took beside loading it."""

    model: Checked
    reference: Reference
    check: ModuleCheck
    judgement: Judgement
    seconds: float

    def passes(self, mode: str) -> bool:
        """Return True if it is right, or nothing says that it is wrong."""
        judgement = self.judgement
        # Where the reference is noise, no bound says anything; but its numbers are numbers.
        return judgement.right or (judgement.finite and mode != "strict" and _is_noise(judgement))


def _compared(
    steps: Steps[Checked], read: Any, reference: Reference, *, plain: bool
) -> _Compared[Checked]:
    """Wrap what was read, and compare it with its own numbers."""
    check = ModuleCheck(plain=True) if plain else ModuleCheck(reference.modules)
    found = steps.wrap(read, check)
    reference.modules.clear()
    begun = time.monotonic()
    reference = reference.moved(found.device)
    judgement = steps.judge(found, reference)
    check.left_out |= judgement.left_out
    return _Compared(found, reference, check, judgement, time.monotonic() - begun)


def _agree(
    subject: Subject, ids: Sequence[str], reference: Reference, *, replace: bool = False
) -> None:
    """Have pools held to the model's own numbers, if they are not held to any."""
    for weights_id in ids or (subject.weights_id,):
        if reference.pooled:
            key = pool_reference.key_of(weights_id, str(subject.dtype).removeprefix("torch."))
            references().agreed(key, reference.pooled, replace=replace)


def _modules_alone(read: Any, steps: Steps[Checked], check: ModuleCheck) -> Checked:
    """Replace modules that agree on made inputs, where there is nothing else to compare with."""
    found = steps.wrap(read, check)
    left_out = tuple(check.left_out)
    found.self_check = SelfCheck(
        result="partial", reference="", num_modules=check.checked, left_out=left_out
    )
    _logger.warning(
        "self-check: partial: %d modules compared, %d left as they were; the model as a whole was "
        "not compared with its own code",
        check.checked, len(left_out),
    )  # fmt: skip
    return found


def _differs(mode: str, shadow: Shadow) -> None:
    """Refuse a model whose structure differs, or warn."""
    reason = (
        f"a small model of the same structure in float32 differs from its own code by "
        f"{shadow.distance:.3g} (allowed: {SHADOW_BOUND:g}): {shadow.place}"
    )
    if mode == "strict":
        raise EngineError(f"--self-check strict: {reason}; --self-check start serves the model")
    _logger.warning("%s; the model is loaded without faster modules, and will be slower", reason)


def _is_noise(judgement: Judgement) -> bool:
    """Return True if the reference's own numbers are noise, which no check can judge."""
    return not judgement.noise <= MOST_NOISE


def _named(check: ModuleCheck) -> str:
    names = list(check.left_out)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _result(
    check: ModuleCheck, judgement: Judgement, by: str, seconds: float, shadow: float = 0.0
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
        reference=by,
        distance=_rounded(judgement.distance),
        bound=BOUND,
        distances={place: _rounded(found) for place, found in judgement.distances.items()},
        layers=tuple(_rounded(layer) for layer in judgement.layers),
        noise=_rounded(judgement.noise, 7),
        num_modules=check.checked,
        left_out=tuple(check.left_out),
        seconds=round(seconds, 2),
        shadow=float(f"{shadow:.2g}"),
    )


def _rounded(number: float, digits: int = 3) -> float:
    """Round; JSON has no number for what is not one, for which -1 stands."""
    return round(number, digits) if math.isfinite(number) else -1.0


def _tell(found: SelfCheck) -> None:
    """Log the result in one line."""
    if found.result == "noise":
        _logger.warning(
            "self-check: the model's own numbers (%s) are noise of %.2g: its weights or their "
            "dtype are broken, or it is not trained",
            found.reference, found.noise,
        )  # fmt: skip
        return
    _logger.info(
        "self-check: %s, %.2f of the rounding of %s (allowed: %g); %d modules compared, %d left as "
        "they were; structure %s; %.1f s",
        found.result, found.distance, found.reference, found.bound, found.num_modules,
        len(found.left_out), f"by {found.shadow:g}" if found.shadow else "not compared",
        found.seconds,
    )  # fmt: skip
