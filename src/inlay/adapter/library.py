"""Fetch and check adapters: from an address to files on this machine."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from inlay.adapter.address import AdapterAddress, AllowedSources, is_hub_name, parse
from inlay.adapter.cache import AdapterCache, AdapterLease
from inlay.adapter.config import MAX_CONFIG_BYTES
from inlay.adapter.download import download
from inlay.adapter.files import (
    CONFIG,
    PIPELINE,
    WEIGHTS,
    AdapterFiles,
    check_finite,
    content_id,
    is_of_pipeline,
    is_there,
    open_adapter,
)
from inlay.adapter.s3 import request_of
from inlay.adapter.tables import ignore, refuse, unchanged_from
from inlay.base.errors import InvalidRequestError, NotFoundError

_CHUNK = 1024 * 1024


class Opened(NamedTuple):
    """A checked adapter. Its files are not evicted until `close`.

    Attributes:
        files: the opened files.
        content_id: digest of the files' bytes, 32 hex digits.
        lease: lock on the cache entry.
    """

    files: AdapterFiles
    content_id: str
    lease: AdapterLease

    def close(self) -> None:
        """Release the files."""
        self.lease.close()


class AdapterLibrary:
    """Fetches and checks adapters. `open` blocks: call it in a thread.

    Args:
        allowed: prefixes of allowed addresses.
        cache_dir: directory of fetched adapters; None for a temporary one.
        cache_bytes: size limit of the cache.
        max_bytes: size limit of one adapter.
        model: directory of the model, which tables in an adapter must equal; without one, or with
            others, they are refused.

    Raises:
        InvalidRequestError: an entry of `allowed` is not an address.
    """

    def __init__(
        self,
        allowed: Sequence[str],
        *,
        cache_dir: Path | None,
        cache_bytes: int,
        max_bytes: int,
        model: Path | None = None,
    ) -> None:
        self._allowed = AllowedSources(allowed)
        self._cache = AdapterCache(cache_dir, cache_bytes)
        self._max_bytes = max_bytes
        self._check_table = refuse if model is None else unchanged_from(model)

    def open(self, address: str, sha256: str | None = None) -> Opened:
        """Fetch and check the adapter at an address.

        A directory, file://, https://, s3://bucket/prefix, hf://owner/name[@revision][/directory].

        Args:
            address: as given by the client; owner/name means the hub if no such directory exists
                and hf:// is allowed.
            sha256: expected digest of the weights file, in hex.

        Raises:
            NotFoundError: no adapter there.
            InvalidRequestError: not allowed, cannot be fetched, too large, wrong checksum, or not
                an adapter.
        """
        if sha256 is not None and (
            len(sha256) != 64 or not set(sha256) <= set("0123456789abcdefABCDEF")
        ):
            raise InvalidRequestError(f"sha256 is 64 hex digits, got {sha256[:80]!r}")
        sha256 = None if sha256 is None else sha256.lower()
        where = self._where(address)
        self._allowed.check(where)
        lease = self._lease(where, sha256)
        try:
            files = open_adapter(
                lease.directory, max_bytes=self._max_bytes, check_table=self._check_table
            )
            check_finite(files)
            return Opened(files, content_id(files), lease)
        except BaseException:
            lease.close()
            raise

    def close(self) -> None:
        """Remove temporary files."""
        self._cache.close()

    def _where(self, address: str) -> AdapterAddress:
        where = parse(address)
        hub = (
            is_hub_name(address)
            and self._allowed.allow_scheme("hf")
            and not is_there(Path(where.path))
        )
        return parse(f"hf://{address}") if hub else where

    def _lease(self, where: AdapterAddress, sha256: str | None) -> AdapterLease:
        if where.scheme == "file":
            return self._local(Path(where.path), sha256)
        if where.scheme == "hf":
            # Imported late: the hub's client is slow to import.
            from inlay.adapter.hub import from_hub

            directory = from_hub(where, self._max_bytes)
            _check_sum(directory, sha256)
            return AdapterLease(directory)
        return self._fetched(where, sha256)

    def _local(self, directory: Path, sha256: str | None) -> AdapterLease:
        for name in (CONFIG, WEIGHTS, PIPELINE):
            # A symbolic link may lead outside the allowed directories.
            self._allowed.check(AdapterAddress("file", "", str(directory / name)))
        if sha256 is not None:
            open_adapter(directory, max_bytes=self._max_bytes, check_table=ignore)
        _check_sum(directory, sha256)
        return AdapterLease(directory)

    def _fetched(self, where: AdapterAddress, sha256: str | None) -> AdapterLease:
        fetch = self._fetch_s3 if where.scheme == "s3" else self._fetch_http
        with self._cache.incoming() as incoming:
            missing, weights, text = None, WEIGHTS, b""
            try:
                fetch(where.joined(CONFIG), incoming / CONFIG, MAX_CONFIG_BYTES)
                text = (incoming / CONFIG).read_bytes()
            except NotFoundError as error:
                missing, weights = error, PIPELINE
            config = blake3(text).hexdigest(16)
            if sha256 is not None:
                lease = self._cache.find(f"{sha256}-{config}")
                if lease is not None:
                    return lease
            try:
                found = fetch(where.joined(weights), incoming / weights, self._max_bytes)
            except NotFoundError as error:
                raise (missing or error) from error
            _hold(found, sha256)
            # Check before adding: the cache holds valid adapters only, of whatever model.
            check_finite(open_adapter(incoming, max_bytes=self._max_bytes, check_table=ignore))
            return self._cache.add(incoming, f"{found}-{config}")

    def _fetch_http(self, where: AdapterAddress, target: Path, max_bytes: int) -> str:
        return download(str(where), target, max_bytes=max_bytes, allowed=self._allowed)

    def _fetch_s3(self, where: AdapterAddress, target: Path, max_bytes: int) -> str:
        url, headers = request_of(where, os.environ)
        return download(url, target, max_bytes=max_bytes, allowed=None, headers=headers)


def _check_sum(directory: Path, sha256: str | None) -> None:
    if sha256 is None:
        return
    hasher = hashlib.sha256()
    weights = PIPELINE if is_of_pipeline(directory) else WEIGHTS
    with (directory / weights).open("rb") as file:
        while piece := file.read(_CHUNK):
            hasher.update(piece)
    _hold(hasher.hexdigest(), sha256)


def _hold(found: str, sha256: str | None) -> None:
    if sha256 is not None and found != sha256:
        raise InvalidRequestError(
            f"the adapter's file of weights has the SHA-256 {found}; expected was {sha256}"
        )
