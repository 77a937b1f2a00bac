"""Adapters from the Hugging Face hub, through its own client and cache."""

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

from inlay.adapter.address import AdapterAddress
from inlay.adapter.config import MAX_CONFIG_BYTES
from inlay.adapter.files import CONFIG, PIPELINE, WEIGHTS
from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.tensors.hub import asking_hub


def from_hub(where: AdapterAddress, max_bytes: int) -> Path:
    """Download an adapter from the hub; return its directory in the hub's cache.

    With `HF_HUB_OFFLINE`, only the cache is used.

    Args:
        where: hf://owner/name[@revision][/directory].
        max_bytes: size limit of its weights.

    Raises:
        NotFoundError: no adapter there.
        InvalidRequestError: it cannot be downloaded, or is too large.
    """
    name, at, revision = (where.segments or ("",))[0].partition("@")
    if not name or (at and not revision):
        raise InvalidRequestError(
            "the address of an adapter on the hub is hf://owner/name[@revision][/directory], got "
            f"{where}"
        )
    repo, below = f"{where.host}/{name}", where.segments[1:]
    try:
        with asking_hub(repo):
            try:
                config = _hub_file(
                    repo, "/".join((*below, CONFIG)), revision or None, MAX_CONFIG_BYTES
                )
            except EntryNotFoundError as error:
                file = "/".join((*below, PIPELINE))
                try:
                    return _hub_file(repo, file, revision or None, max_bytes).parent
                except EntryNotFoundError:
                    raise error from None
            # Use the revision of the config for all files, even if the branch moves meanwhile.
            snapshot = config.parents[len(below)].name
            weights = _hub_file(repo, "/".join((*below, WEIGHTS)), snapshot, max_bytes)
    except InvalidRequestError as error:
        if isinstance(error.__cause__, EntryNotFoundError | RepositoryNotFoundError):
            raise NotFoundError(f"No adapter found at {where}: {error.message}") from error
        raise
    return weights.parent


def _hub_file(repo: str, file: str, revision: str | None, max_bytes: int) -> Path:
    _check_hub_size(
        lambda: get_hf_file_metadata(hf_hub_url(repo, file, revision=revision)).size,
        file,
        max_bytes,
    )
    return Path(hf_hub_download(repo, file, revision=revision))


def _check_hub_size(size_of: Callable[[], int | None], file: str, max_bytes: int) -> None:
    try:
        size = size_of()
    except OfflineModeIsEnabled:
        return  # the size is checked when the file is opened
    if size is not None and size > max_bytes:
        raise InvalidRequestError(
            f"{file} has {size} bytes; allowed: at most {max_bytes} (--max-lora-bytes)"
        )
