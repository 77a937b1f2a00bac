"""A transform: what is sent in place of the table's rows; those with a name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay_audit.prompts import AuditPrompt, Floats, Rng

if TYPE_CHECKING:
    from inlay_audit.neural.language_model import LanguageModel

OnRows: TypeAlias = Callable[[Floats, AuditPrompt, Rng], Floats]


class Transform(Protocol):
    """Makes the rows that are sent of those of the table."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    def served(self, rows: Floats) -> Floats | None:
        """The rows that the first layer gets where these are sent; None if they enter later.

        It differs from the rows where the model has a key folded into its weights.
        """

    @property
    def can_resend(self) -> bool:
        """True if texts can be sent again, False where rows were only given."""

    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> Sequence[Floats]:
        """Rows to send, (m, h) each.

        Args:
            prompts: of which texts.
            rows: those of the table, (n, h) float32 for each prompt.
            rng: of the randomness that is new each time; keys that are kept are the transform's.

        Raises:
            InvalidRequestError: the transform failed.
        """


@dataclass(frozen=True)
class RowTransform:
    """A transform that works on one prompt at a time.

    Attributes:
        name: as it was asked for.
        on_rows: makes the rows to send.
        folded: takes back a key that is folded into the model's weights; None without one.
    """

    name: str
    on_rows: OnRows
    folded: Callable[[Floats], Floats] | None = None
    can_resend: bool = True

    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> list[Floats]:
        """Rows of each prompt on its own."""
        return [self.on_rows(each, prompt, rng) for prompt, each in zip(prompts, rows, strict=True)]

    def served(self, rows: Floats) -> Floats:
        """The rows, without the key that is folded into the weights."""
        return rows if self.folded is None else self.folded(rows)


@dataclass(frozen=True, eq=False)
class Setting:
    """The setting of transforms with a name.

    Attributes:
        table: the embedding table, (vocabulary, h).
        public: prompts that a learned transform learns from.
        seed: of keys.
        model: loads the whole model, for those that need it. Raises `InvalidRequestError`.
    """

    table: Floats
    public: Sequence[AuditPrompt]
    seed: int
    model: "Callable[[], LanguageModel]"


def named(spec: str, setting: Setting) -> Transform:
    """The transform of a name, with a number behind a colon where it takes one.

    Raises:
        InvalidRequestError: no such name, or a number it does not take.
    """
    name, _, number = spec.partition(":")
    width = setting.table.shape[1]
    rng = np.random.default_rng([setting.seed, 1])
    if name in ("permute", "rotate") and number not in ("", "folded"):
        raise InvalidRequestError(f"--transform {spec}: it is {name} or {name}:folded")
    if name in ("none", "shuffle") and number:
        raise InvalidRequestError(f"--transform {spec}: {name} takes no number")
    match name:
        case "none":
            return RowTransform(spec, lambda rows, prompt, rng: rows)
        case "noise":
            return RowTransform(spec, _noise(_level(spec, number, setting.table)))
        case "shuffle":
            return RowTransform(spec, _shuffle)
        case "permute" | "rotate":
            key = _permutation(width, rng) if name == "permute" else _rotation(width, rng)
            back = (lambda rows: rows @ key.T) if number else None
            return RowTransform(spec, lambda rows, prompt, rng: rows @ key, back)
        case "project":
            kept = int(_number(spec, number, 1, width))
            basis = _rotation(width, rng)[:, :kept]
            return RowTransform(spec, lambda rows, prompt, rng: rows @ basis)
        case "drop":
            return RowTransform(spec, _drop(_number(spec, number, 0, 0.99)))
        case "hidden":
            from inlay_audit.neural.language_model import LayerTransform

            return LayerTransform.of(spec, _number(spec, number, 1, 10_000), setting.model())
        case "learned":
            from inlay_audit.neural.learned import Learned

            weight = _number(spec, number, 0, 100) if number else 1.0
            return Learned(
                spec,
                setting.model(),
                setting.table,
                setting.public,
                seed=setting.seed,
                weight=weight,
            )
    raise InvalidRequestError(f"no transform {spec!r}; known: {NAMES}, MODULE:FUNCTION")


NAMES = (
    "none, noise:LEVEL, shuffle, permute, rotate, permute:folded, rotate:folded, project:WIDTH, "
    "drop:SHARE, hidden:LAYER, learned"
)
WORDS = frozenset(name.partition(":")[0] for name in NAMES.split(", "))
"""Of the names, what stands before the colon."""


def checked(
    sent: Sequence[Floats], prompts: Sequence[AuditPrompt], width: int | None = None
) -> list[Floats]:
    """The rows as float32, if they can be sent.

    Raises:
        InvalidRequestError: not as many arrays as prompts, another shape, NaN or infinity.
    """
    if len(sent) != len(prompts):
        raise InvalidRequestError(
            f"there are rows of {len(sent)} prompts, and {len(prompts)} texts: one for each is "
            "needed, in the same order"
        )
    found = []
    for prompt, rows in zip(prompts, sent, strict=True):
        array = np.asarray(rows)
        where = f"rows of text {prompt.index + 1}"
        if array.ndim != 2 or not array.size:
            raise InvalidRequestError(
                f"{where} have shape {array.shape}; allowed: (rows, width), at least one row"
            )
        width = array.shape[1] if width is None else width
        if array.shape[1] != width:
            raise InvalidRequestError(
                f"{where} are {array.shape[1]} wide, expected {width}: were they made for another "
                "model?"
            )
        array = array.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
        if len(bad):
            raise InvalidRequestError(
                f"{where}: row {int(bad[0])} holds NaN or infinity, which a server refuses; "
                f"{len(bad)} of its {len(array)} rows do. Look for a division by zero or an "
                "overflow in float16"
            )
        found.append(array)
    return found


def natural_level(table: Floats) -> float:
    """Level of noise at which the likeliest wrong token of a table draws level with the right one.

    Rows of width h with noise of level L, in units of their norm, move by L / sqrt(h) in any one
    direction; V other tokens, most of them sqrt(2) norms away, try: sqrt(h) / (2 sqrt(ln V)).
    Levels in this unit compare across models.
    """
    words, width = table.shape
    return float(np.sqrt(width) / (2 * np.sqrt(np.log(words))))


def _level(spec: str, number: str, table: Floats) -> float:
    if number.endswith("x"):
        return _number(spec, number.removesuffix("x"), 0, 1000) * natural_level(table)
    return _number(spec, number, 0, 1000)


def _noise(level: float) -> OnRows:
    """Gaussian noise as long as `level` of the rows' median length, as the playground's slider."""

    def add(rows: Floats, prompt: AuditPrompt, rng: Rng) -> Floats:
        deviation = level * float(np.median(np.linalg.norm(rows, axis=1))) / rows.shape[1] ** 0.5
        return rows + np.float32(deviation) * rng.standard_normal(rows.shape, dtype=np.float32)

    return add


def _shuffle(rows: Floats, prompt: AuditPrompt, rng: Rng) -> Floats:
    """The user's rows in another order each time."""
    order = np.arange(len(rows))
    order[prompt.start : prompt.stop] = prompt.start + rng.permutation(prompt.stop - prompt.start)
    return rows[order]


def _drop(share: float) -> OnRows:
    """A share of the user's rows left out, others each time."""

    def drop(rows: Floats, prompt: AuditPrompt, rng: Rng) -> Floats:
        kept = np.ones(len(rows), np.bool_)
        count = round(share * (prompt.stop - prompt.start))
        kept[prompt.start + rng.permutation(prompt.stop - prompt.start)[:count]] = False
        return rows[kept] if kept.any() else rows[:1]

    return drop


def _rotation(width: int, rng: Rng) -> Floats:
    """A random orthogonal matrix, evenly distributed."""
    found, upper = np.linalg.qr(rng.standard_normal((width, width)))
    return (found * np.sign(np.diag(upper))).astype(np.float32)


def _permutation(width: int, rng: Rng) -> Floats:
    """A random permutation with random signs, as a matrix."""
    signs = rng.choice([-1.0, 1.0], width).astype(np.float32)
    return np.eye(width, dtype=np.float32)[:, rng.permutation(width)] * signs


def _number(spec: str, number: str, low: float, high: float) -> float:
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequestError(
            f"--transform {spec}: a number from {low:g} to {high:g} must follow the colon"
        )
    return value
