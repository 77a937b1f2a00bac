"""Files that are served and are no directory of one model: extensions know them."""

from pathlib import Path
from typing import NamedTuple, Protocol

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

    def plan(self, given: EngineSettings, deploy: Path | None) -> list[Served]:
        """Return the engines of such a file, `given.model`.

        Args:
            given: what it sets is for all of them, over which the deployment goes.
            deploy: file of the deployment, or None.

        Raises:
            InvalidRequestError: of one of the files.
        """

    def planned(self, given: EngineSettings, deploy: Path | None, stage: str | None) -> Served:
        """Return the engine of one stage of such a file. Arguments and errors as `plan`."""


def plan_of(model: str) -> ModelSource | None:
    """Return the extension that serves a file by a plan; None where it is a model."""
    source: ModelSource
    for _, source in parts("models"):
        if source.is_plan(model):
            return source
    return None
