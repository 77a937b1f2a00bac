"""HTTP server: OpenAI's API in front of a router.

`serve.check` checks the files that settings name, `build_app` makes the ASGI app, `serve.serve`
runs it. `server.Server` holds all that endpoints share, `server.Call` is one HTTP request.

    bodies/      reading bodies within limits: base64 extraction, multipart, tensor files to rows
    callers/     API keys, tenants, rate limits, quotas
    generation/  completions and chats: from a body to engine requests, from outputs to responses
    responses/   OpenAI's Responses API, translated to chats
    vectors/     embeddings, pooling, classes, scores
    routes/      models, adapters, stored prompts, tokens, health, admin, pages
    metrics/     Prometheus metrics

A completion passes through: `app` (route) -> `access` (authentication) -> `callers.clients` (quota)
-> `bodies.body` and `bodies.base64_extractor` (bounded reading) -> `generation.prompts` or
`generation.messages` (prompts) -> `generation.sampling` -> `generation.respond` (engine requests,
choices, events).

Invariants:
- Bytes are reserved before they are held (`bodies.admission`), for each request, each client and
  the server; memory is given back when the request ends.
- CPU work on more than 16 KiB runs off the event loop (`Server.prepare`).
- A request is checked in full before its first output; later errors are events of the stream.
- Logs and metrics hold counts and times, never text of requests or answers.
"""

from typing import TYPE_CHECKING

from inlay.lazy import exported

if TYPE_CHECKING:
    from inlay.frontend.app import App, build_app
    from inlay.frontend.settings import FrontendSettings

__all__ = ["App", "FrontendSettings", "build_app"]

__getattr__ = exported(
    __name__,
    {
        "App": "app",
        "build_app": "app",
        "FrontendSettings": "settings",
    },
)
