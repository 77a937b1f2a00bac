"""The page: playground and fleet, as files that are served as they lie here.

There is no build step. Modules import each other by relative paths, and Preact and htm from
`vendor/`, where `VENDORED` of `tests/web/test_vendored.py` holds their versions and digests. State
lives in one store (`dom.mjs`); text from a model or a file is text and never HTML. Everything the
page knows it asks of the server's public routes (`api.mjs`).
"""

from importlib import resources

_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


def files() -> dict[str, tuple[bytes, bytes]]:
    """Return (media type, bytes) of every file of the page, by name without folder."""
    root = resources.files("inlay.web")
    found = {}
    for folder in (root, root / "vendor"):
        for file in folder.iterdir():
            media = _TYPES.get(f".{file.name.rpartition('.')[2]}")
            if media is not None and file.is_file():
                found[file.name] = media, file.read_bytes()
    return found
