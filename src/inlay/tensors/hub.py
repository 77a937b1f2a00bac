"""Models named by a directory or by a name on the hub, and errors of the hub in plain words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from inlay.base.errors import InvalidRequestError
from inlay.tensors.gguf import SUFFIX, is_gguf, models_in
from inlay.tensors.weight_files import find_pickled, find_weights

_FORM = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAMED = 8
"""Files that a message names."""


def local_directory(model: str | Path) -> Path | None:
    """The model on this machine that `model` names, or None where it is a name on the hub.

    Returns:
        A directory, or a GGUF file: also of a directory that holds one and no other weights.

    Raises:
        InvalidRequestError: it is neither, or a directory with several GGUF files.
    """
    name, path = str(model), Path(model).expanduser()
    if path.is_dir():
        return _gguf_in(path) or path
    if is_gguf(path):
        return path
    written_as_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith(SUFFIX)
    if written_as_path or name.count("/") != 1:
        raise InvalidRequestError(
            f"{name!r} is not a directory, nor a name on the hub (owner/model)"
            f"{', nor a file' if name.endswith(SUFFIX) else ''}",
            param="model",
        )
    return None


def gguf_on_hub(model: str, revision: str | None) -> Path | None:
    """The GGUF file that `owner/model:Q4_K_M` names, fetched, or found in the hub's cache.

    None for a name without a colon. What stands behind it is the end of the file's name, in any
    case; of a model in parts, all are fetched.

    Raises:
        InvalidRequestError: the hub does not give it, or has no such file, or several.
    """
    name, colon, form = model.partition(":")
    if not colon:
        return None
    if not _FORM.fullmatch(form):
        raise InvalidRequestError(
            f"{model!r}: behind the colon must be the end of a GGUF file's name, as Q4_K_M",
            param="model",
        )
    # Imported late: every command imports this module, and the hub's client is slow to import.
    from huggingface_hub import snapshot_download

    ends = [f"*{case}{part}{SUFFIX}" for case in _cases(form) for part in ("", "-?????-of-?????")]
    with asking_hub(name):
        snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=ends))
    found = sorted(
        file
        for folder in (snapshot, *snapshot.glob("*/"))
        for file in models_in(folder)
        if any(fnmatchcase(file.name, end) for end in ends)
    )
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:_NAMED])
        raise InvalidRequestError(
            f"model {name!r} has {len(found)} GGUF files whose names end in {form}"
            f"{': ' if names else ''}{names}; expected one",
            param="model",
        )
    return found[0]


def _cases(form: str) -> list[str]:
    return [*dict.fromkeys((form, form.upper(), form.lower()))]


def _gguf_in(directory: Path) -> Path | None:
    """Return the GGUF model of a directory; None where it has none, or other weights as well."""
    found = models_in(directory)
    if not found or find_weights(directory) or find_pickled(directory):
        return None
    # The image tower of a model lies beside it, in a file of its own.
    models = [file for file in found if not file.name.startswith("mmproj")] or found
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:_NAMED])
        raise InvalidRequestError(
            f"{directory} holds {len(models)} GGUF models ({names}"
            f"{', ...' if len(models) > _NAMED else ''}): name one of them, "
            f"{directory / models[0].name}",
            param="model",
        )
    return models[0]


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Within it, what the hub's client raises becomes one sentence about the model `name`.

    Raises:
        InvalidRequestError: the hub does not give it.
    """
    try:
        yield
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
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
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError):
        return "the hub cannot be reached"
    return f"the hub says: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
