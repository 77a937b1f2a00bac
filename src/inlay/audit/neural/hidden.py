"""Hidden states in place of rows, as split inference sends them. Needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from inlay.audit.neural.language_model import LanguageModel
from inlay.audit.prompts import AuditPrompt, Floats, Rng
from inlay.errors import InvalidRequestError


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """A transform: what a layer of the model makes of the rows.

    Attributes:
        name: as it was asked for.
        layer: counted from 1.
        model: that has it.
    """

    name: str
    layer: int
    model: LanguageModel
    can_resend: bool = False

    @classmethod
    def of(cls, name: str, layer: float, model: LanguageModel) -> "HiddenStates":
        """Of a layer. Raises `InvalidRequestError` where the model has no such layer."""
        if layer != int(layer) or layer > model.layers:
            raise InvalidRequestError(
                f"--transform {name}: the model has layers 1 to {model.layers}"
            )
        return cls(name, int(layer), model)

    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> list[Floats]:
        """The states of each row."""
        found = dict(self.model.hidden_states(rows))
        return [found[index][self.layer - 1] for index in range(len(rows))]

    def served(self, rows: Floats) -> None:
        """None: they enter the model behind this layer."""
