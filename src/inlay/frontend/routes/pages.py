"""The pages for people: `/` and `/docs`, whole in themselves."""

import base64
import hashlib
from importlib import resources

import inlay
from inlay.frontend.server import Call

_HTML = (b"content-type", b"text/html; charset=utf-8")


def _page(name: str) -> tuple[bytes, bytes]:
    """(the page, its content security policy).

    Only the scripts and styles that are in it may run.
    """
    text = resources.files("inlay.frontend").joinpath("html", name).read_text(encoding="utf-8")
    text = text.replace("{{version}}", inlay.__version__)
    policy = [
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
    """The API reference, drawn from `/openapi.json`."""
    await _send(call, _DOCS)


async def home(call: Call) -> None:
    """Where to begin."""
    await _send(call, _HOME)
