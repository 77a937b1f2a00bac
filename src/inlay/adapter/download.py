"""HTTP downloads with limits on size, time and redirects."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import IO

from inlay.adapter.address import AllowedSources, parse
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError

SECONDS = 600.0
"""Time limit of one file."""

SILENCE = 30.0
"""Seconds without data after which a download fails."""

_CHUNK = 256 * 1024
_GONE = frozenset({404, 410})


class _Redirections(urllib.request.HTTPRedirectHandler):
    """Follow redirects to allowed addresses only, without the original headers."""

    max_redirections = 5

    def __init__(self, allowed: AllowedSources | None) -> None:
        self._allowed = allowed

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the next request. Raises `InvalidRequestError` if the target is not allowed."""
        if self._allowed is None:
            raise InvalidRequestError(
                f"{_shown(req.full_url)} was answered with a redirection, which is not followed "
                "here"
            )
        address = parse(newurl, redirected=True)
        self._allowed.check(address)
        return urllib.request.Request(str(address), headers=_HEADERS)


_HEADERS = {"accept-encoding": "identity", "user-agent": "inlay"}


def download(
    url: str,
    target: Path,
    *,
    max_bytes: int,
    allowed: AllowedSources | None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Write the content of `url` to a new file; return its SHA-256 in hex.

    Args:
        url: http or https, already checked.
        target: path of the file; must not exist.
        max_bytes: size limit of the file.
        allowed: allowed redirect targets; None to follow no redirects.
        headers: request headers.

    Raises:
        NotFoundError: the server answered 404 or 410.
        InvalidRequestError: too large, too slow, redirected elsewhere, or any other failure.
    """
    opener = urllib.request.OpenerDirector()
    # Not `build_opener`: its openers also read local files.
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirections(allowed),
    ):
        opener.add_handler(handler)
    ends = time.monotonic() + SECONDS
    try:
        with opener.open(
            urllib.request.Request(url, headers={**_HEADERS, **(headers or {})}), timeout=SILENCE
        ) as answer:
            return _write(answer, url, target, max_bytes, ends)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _GONE:
            raise NotFoundError(
                f"No adapter found at {_shown(url)}: the server answered {error.code}"
            ) from error
        raise InvalidRequestError(
            f"{_shown(url)} cannot be had: the server answered {error.code}"
        ) from error
    except InlayError:
        raise
    except (OSError, http.client.HTTPException) as error:
        # urllib's own error only says that there was one.
        why = getattr(error, "reason", error)
        why = getattr(why, "strerror", None) or why
        raise InvalidRequestError(f"{_shown(url)} cannot be had: {why}") from error


def _write(
    answer: http.client.HTTPResponse, url: str, target: Path, max_bytes: int, ends: float
) -> str:
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequestError(
            f"{_shown(url)} came with content-encoding {encoding[:40]!r}, which was not asked for"
        )
    hasher, size = hashlib.sha256(), 0
    with target.open("xb") as file:
        while piece := answer.read(_CHUNK):
            size += len(piece)
            if size > max_bytes:
                raise InvalidRequestError(
                    f"{_shown(url)} has more than the {max_bytes} bytes that are allowed "
                    "(--max-lora-bytes)"
                )
            if time.monotonic() > ends:
                raise InvalidRequestError(f"{_shown(url)} took longer than {SECONDS:g} s")
            hasher.update(piece)
            file.write(piece)
    if answer.length:
        raise InvalidRequestError(f"{_shown(url)} ended {answer.length} bytes early")
    return hasher.hexdigest()


def _shown(url: str) -> str:
    return url.partition("?")[0][:200]
