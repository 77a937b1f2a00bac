"""Choice of the task for `--task auto`, from the model's files."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from inlay.engine.options import spec_of
from inlay.engine.settings import EngineSettings
from inlay.engine.source import ModelSource
from inlay.extension import parts
from inlay.tensors.checkpoint import checkpoint_of, config_of

log = logging.getLogger(__name__)

ChosenTask: TypeAlias = Literal["generate", "embed", "score"]

_BY_SUFFIX: tuple[tuple[str, ChosenTask], ...] = (
    ("ForCausalLM", "generate"),
    ("ForConditionalGeneration", "generate"),
    ("LMHeadModel", "generate"),
    ("ChatModel", "generate"),
    ("ForSequenceClassification", "score"),
    ("ForTokenClassification", "embed"),
    ("ForRetrieval", "embed"),
    ("ColQwen2", "embed"),
    ("ForMaskedLM", "embed"),
    ("HF_ColBERT", "embed"),
    ("ForPreTraining", "embed"),
    ("ForTextEncoding", "embed"),
    ("Model", "embed"),
)
"""Tasks by the suffix of an architecture's name, as in vLLM's `ModelConfig` where it has one.

The first match counts.
"""

_FILES = ("config.json", "modules.json")


def with_engine(settings: EngineSettings) -> EngineSettings:
    """Return `settings` with the engine for the files of the model, unless one was chosen."""
    if "engine" in settings.model.model_fields_set:
        return settings
    source: ModelSource
    for _, source in parts("models"):
        engine = source.engine_of(settings.model.model)
        if engine is not None:
            return settings.replace(engine=engine)
    return settings


def with_task(settings: EngineSettings) -> EngineSettings:
    """Return `settings` with the task resolved: `auto` is derived from the files, and logged.

    Raises:
        InvalidRequestError: neither a directory nor an available hub model, or it has no
            config.json.
    """
    if settings.model.task != "auto":
        return settings
    if only := spec_of(settings).task:
        return settings.replace(task=only)
    task: ChosenTask = "generate"
    # The echo engine runs no model: the files do not matter.
    if settings.model.engine != "echo":
        # Imported late: it loads the hub's client.
        from inlay.engine.weights import directory_of

        task, because = task_of(directory_of(settings.model.model, settings.model.revision, _FILES))
        if task != "generate":
            log.info("serving with --task %s: %s", task, because)
    return settings.replace(task=task)


def task_of(directory: Path) -> tuple[ChosenTask, str]:
    """Return the task a model was made for, and the reason."""
    modules = checkpoint_of(directory).file("modules.json")
    if modules is not None:
        if b"LogitScore" in modules:
            return "score", "the model has a LogitScore of sentence-transformers"
        found = _of_architecture(config_of(directory))
        if found[0] == "score":
            return found
        return "embed", "the model has modules.json of sentence-transformers"
    return _of_architecture(config_of(directory))


def _of_architecture(config: Mapping[str, Any]) -> tuple[ChosenTask, str]:
    names = [str(name) for name in config.get("architectures") or ()]
    for name in names:
        for suffix, task in _BY_SUFFIX:
            if name.endswith(suffix):
                return task, f"its architecture is {name}"
    return "generate", f"its architecture is {', '.join(names) or 'not named'}"
