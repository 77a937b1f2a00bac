"""HTML pages: `/` and `/fleet` with their files, `/start` and `/docs`; no external resources."""

import base64
import hashlib
from importlib import resources

import inlay
from inlay import web
from inlay.base.errors import NotFoundError
from inlay.http.server import Call

_POLICY = (
    "default-src 'none'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
_WEB_POLICY = "; ".join(
    [*_POLICY, "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:"]
).encode()
"""Policy of the playground: files of this server alone, and pictures that the user chose."""


def _page(name: str) -> tuple[bytes, bytes]:
    """Return a page and its content security policy: its own script and styles, and the sheet."""
    text = resources.files("inlay.http").joinpath("html", name).read_text(encoding="utf-8")
    text = text.replace("{{version}}", inlay.__version__)
    policy = [*_POLICY, "img-src 'self'"]
    for tag, directive in (("script", "script-src"), ("style", "style-src 'self'")):
        content = text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy.append(f"{directive} 'sha256-{digest}'")
    return text.encode(), "; ".join(policy).encode()


_FOR_ADMINS = (b" data-admins", b'<a href="fleet">Fleet</a>\n')
"""Fragments of pages that are left out where nobody can be an admin."""

_HTML = b"text/html; charset=utf-8"
_DOCS = _page("docs.html")
_START = _page("start.html")
_FILES = web.files()
_TAGS = {
    name: f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
    for name, (_, body) in _FILES.items()
}


async def _send(call: Call, body: bytes, policy: bytes) -> None:
    if not call.server.keys.admits_admins:
        for fragment in _FOR_ADMINS:
            body = body.replace(fragment, b"", 1)
    more = [(b"content-security-policy", policy), (b"referrer-policy", b"no-referrer")]
    await call.bytes(body, (b"content-type", _HTML), more=more)


async def docs(call: Call) -> None:
    """Answer with the API reference, made from `/openapi.json`."""
    await _send(call, *_DOCS)


async def start(call: Call) -> None:
    """Answer with requests to try."""
    await _send(call, *_START)


async def home(call: Call) -> None:
    """Answer with the playground."""
    await _send(call, _FILES["index.html"][1], _WEB_POLICY)


async def fleet(call: Call) -> None:
    """Answer with the page of the workers."""
    await _send(call, _FILES["fleet.html"][1], _WEB_POLICY)


async def asset(call: Call) -> None:
    """Answer with a file of the pages, or with 304 where the browser has it.

    Raises:
        NotFoundError: no such file.
    """
    name = str(call.path_params["name"])
    if name not in _FILES:
        raise NotFoundError("the pages have no such file")
    (media, body), tag = _FILES[name], _TAGS[name]
    same = call.headers.get(b"if-none-match") == tag
    more = [(b"etag", tag), (b"cache-control", b"no-cache")]
    await call.bytes(b"" if same else body, (b"content-type", media), 304 if same else 200, more)
