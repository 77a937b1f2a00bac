"""Models named by a directory or by a name on the hub, and errors of the hub in plain words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from inlay.base.errors import InvalidRequestError


def local_directory(model: str | Path) -> Path | None:
    """The directory `model` names, or None where it is written as a name on the hub.

    Raises:
        InvalidRequestError: it is neither.
    """
    name, path = str(model), Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InvalidRequestError(
            f"{name!r} is not a directory, nor a name on the hub (owner/model)", param="model"
        )
    return None


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Within it, what the hub's client raises becomes one sentence about the model `name`.

    Raises:
        InvalidRequestError: the hub does not give it.
    """
    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InvalidRequestError(
            f"model {name!r}: not a directory here, and {_said(error)}", param="model"
        ) from error


def _said(error: Exception) -> str:
    match error:
        case LocalEntryNotFoundError():
            return "the hub cannot be reached, nor is a copy in its cache"
        case GatedRepoError():
            return "the hub asks for a token (HF_TOKEN) of a user who has accepted its terms"
        case RepositoryNotFoundError():
            return "the hub has no such model, or not for everyone (HF_TOKEN)"
        case RevisionNotFoundError():
            return "the hub has no such revision of it"
    return f"the hub says: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
