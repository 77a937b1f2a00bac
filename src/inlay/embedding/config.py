"""Vector configuration of a model directory: its outputs, prompts, roles and limits.

Read from the files of sentence-transformers, as other embedding servers do, and from those of
ColBERT, PyLate and BGE-M3 (`layouts`). A module that is not known is refused: ignoring it would
change the vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.base.errors import InvalidRequestError
from inlay.embedding import layouts
from inlay.embedding.files import json_of, object_of
from inlay.embedding.plan import OutputPlan, RolePlan

ENDLESS = 1 << 31
"""Positions from which on a tokenizer's limit means none."""


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Steps from texts to vectors.

    Attributes:
        directory: directory of transformer and tokenizer.
        outputs: what the model gives, the first unless a request says otherwise.
        max_length: maximum number of positions of a text, special tokens included; None if only the
            transformer limits it.
        lower_case: lower-case texts before tokenizing.
        prompts: prefixes of texts, by name; an empty one is a prompt too.
        default_prompt: name of the prefix for requests that name none.
        activation: torch class of what follows a `CrossEncoder`'s scores, or None.
        roles: what a multi-vector model does to texts, by "query" and "document".
        guess: a warning of what the files leave open, or None.
    """

    directory: Path
    outputs: tuple[OutputPlan, ...]
    max_length: int | None
    lower_case: bool
    prompts: dict[str, str]
    default_prompt: str | None
    activation: str | None = None
    roles: Mapping[str, RolePlan] = field(default_factory=dict)
    guess: str | None = None

    @classmethod
    def read(cls, directory: Path) -> "EmbeddingConfig":
        """Read the files of `directory`.

        Without `modules.json` the model is a bare transformer, whose vectors are normalised, or
        what its architecture says.

        Raises:
            InvalidRequestError: an unsupported module or setting, or a damaged file.
        """
        modules = json_of(directory / "modules.json", [])
        if not isinstance(modules, list):
            raise InvalidRequestError(f"{directory / 'modules.json'} must hold a list")
        said = object_of(directory / "config_sentence_transformers.json")
        try:
            found = layouts.read(directory, modules, said)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(
                f"{directory} describes its modules wrongly: {error!r}"
            ) from error
        settings = object_of(found.directory / "sentence_bert_config.json")
        prompts = {**found.prompts, **(said.get("prompts") or {})}
        return cls(
            directory=found.directory,
            outputs=found.outputs,
            max_length=_max_length(settings, object_of(found.directory / "tokenizer_config.json")),
            lower_case=bool(settings.get("do_lower_case", False)),
            prompts={str(name): str(text or "") for name, text in prompts.items()},
            default_prompt=said.get("default_prompt_name") or found.default_prompt,
            activation=said.get("activation_fn"),
            roles=found.roles,
            guess=found.guess,
        )

    def output(self, name: str) -> OutputPlan | None:
        """Return the output called `name`, or None."""
        return next((each for each in self.outputs if each.name == name), None)


def _max_length(settings: dict[str, Any], tokenizer: dict[str, Any]) -> int | None:
    """Return the model's limit, else its tokenizer's (1e30 there means none)."""
    length = settings.get("max_seq_length") or tokenizer.get("model_max_length")
    return int(length) if length is not None and length < ENDLESS else None
