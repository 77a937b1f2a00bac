"""Files that are served and are no directory of one model: extensions know them."""

from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import BaseModel

from inlay.engine.extension_options import check_loaded
from inlay.engine.settings import EngineSettings
from inlay.extension import parts
from inlay.messages.card import Stage


class Served(NamedTuple):
    """An engine that is served: of a model, or of a stage of a pipeline.

    Attributes:
        engine: its settings.
        stage: for the cards of its workers.
        workers: how many `inlay serve` starts.
    """

    engine: EngineSettings
    stage: Stage | None = None
    workers: int = 1


class ModelSource(Protocol):
    """Files that an extension serves: `Extension.models`."""

    def engine_of(self, model: str) -> str | None:
        """Return the engine for a directory of the extension's format; None for any other."""

    def check(self, engine: EngineSettings, directory: Path | None) -> bool:
        """Check the model of an engine of the extension; False for any other.

        Args:
            engine: settings of it.
            directory: of the model, where that is on this machine.

        Raises:
            InvalidRequestError: the engine does not run it.
        """

    def is_plan(self, model: str) -> bool:
        """Return True for a file that says which engines are to be served."""

    def plan(self, given: EngineSettings, command: BaseModel) -> list[Served]:
        """Return the engines of such a file, `given.model`.

        Args:
            given: what it sets is for all of them.
            command: settings of `inlay serve`, with the extension's section.

        Raises:
            InvalidRequestError: of one of the files.
        """

    def planned(self, given: EngineSettings, command: BaseModel) -> Served:
        """Return the one engine of such a file that `inlay worker` runs.

        Arguments and errors as `plan`.
        """

    def check_model(self, command: BaseModel) -> None:
        """Raise `InvalidRequestError` for options of a plan, where a model is served."""


def plan_of(model: str, command: BaseModel) -> ModelSource | None:
    """Return the extension that serves a file by a plan; None where it is a model.

    Raises:
        InvalidRequestError: it is a model, and `command` has options of a plan; or options of an
            extension that is not loaded.
    """
    check_loaded(command)
    sources: list[ModelSource] = [source for _, source in parts("models")]
    for source in sources:
        if source.is_plan(model):
            return source
    for source in sources:
        source.check_model(command)
    return None
