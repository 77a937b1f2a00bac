"""HTML pages: `/` and `/docs`, without external resources."""

import base64
import hashlib
from importlib import resources

import inlay
from inlay.http.server import Call

_HTML = (b"content-type", b"text/html; charset=utf-8")


def _page(name: str) -> tuple[bytes, bytes]:
    """Return a page and its content security policy, which allows its own scripts and styles."""
    text = resources.files("inlay.http").joinpath("html", name).read_text(encoding="utf-8")
    text = text.replace("{{version}}", inlay.__version__)
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        if f"<{tag}>" in text:
            content = text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            policy.append(f"{directive} 'sha256-{digest}'")
    return text.encode(), "; ".join(policy).encode()


_DOCS = _page("docs.html")
_HOME = _page("home.html")


async def _send(call: Call, page: tuple[bytes, bytes]) -> None:
    body, policy = page
    headers = [
        _HTML,
        (b"content-length", str(len(body)).encode()),
        (b"content-security-policy", policy),
        (b"referrer-policy", b"no-referrer"),
    ]
    await call.send({"type": "http.response.start", "status": 200, "headers": headers})
    await call.send({"type": "http.response.body", "body": body})


async def docs(call: Call) -> None:
    """Answer with the API reference, made from `/openapi.json`."""
    await _send(call, _DOCS)


async def home(call: Call) -> None:
    """Answer with the start page."""
    await _send(call, _HOME)
