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
from inlay.embedding.files import field_of, json_of, object_of
from inlay.embedding.plan import OutputPlan, RolePlan

ENDLESS = 1 << 31
"""Positions from which on a tokenizer's limit means none."""

_SETTINGS, _TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"


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
        path = directory / "config_sentence_transformers.json"
        said = object_of(path)
        try:
            found = layouts.read(directory, modules, said)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequestError(
                f"{directory} describes its modules wrongly: {error!r}"
            ) from error
        given = field_of(path, said, "prompts", dict) or {}
        prompts = {name: field_of(path, given, name, str) or "" for name in given}
        return cls(
            directory=found.directory,
            outputs=found.outputs,
            max_length=_max_length(found.directory),
            lower_case=bool(_settings(found.directory).get("do_lower_case", False)),
            prompts={**found.prompts, **prompts},
            default_prompt=field_of(path, said, "default_prompt_name", str) or found.default_prompt,
            activation=field_of(path, said, "activation_fn", str),
            roles=found.roles,
            guess=found.guess,
        )

    def output(self, name: str) -> OutputPlan | None:
        """Return the output called `name`, or None."""
        return next((each for each in self.outputs if each.name == name), None)


def _settings(directory: Path) -> dict[str, Any]:
    return object_of(directory / _SETTINGS)


def _max_length(directory: Path) -> int | None:
    """Return the model's limit, else its tokenizer's (1e30 there means none)."""
    for file, name in ((_SETTINGS, "max_seq_length"), (_TOKENIZER, "model_max_length")):
        path = directory / file
        length = field_of(path, object_of(path), name, float)
        if length is not None:
            return int(length) if length < ENDLESS else None
    return None
