"""HTTP server below every API: it knows requests, callers and bytes, and no API's fields.

`serve.check` checks the files that settings name, `serve.serve` runs an `app.App`, which
`inlay.api.build_app` makes. `server.Server` holds all that endpoints share, `server.Call` is one
HTTP request.

    bodies/      reading bodies within limits: base64 extraction, multipart, tensor files to rows
    callers/     API keys, tenants, rate limits, quotas, admin rights
    metrics/     Prometheus metrics
    info, pages  routes that belong to no API

A request passes through: `app` (routing) -> `callers.auth` (authentication) -> `callers.clients`
(quota) -> a route of `inlay.api`, which calls `parsed_request` (the body read within its limits and
parsed) and, where the request names embeddings or media, `references` (its parts, the store, URLs).

Invariants:
- Bytes are reserved before they are held (`bodies.accounting`), for each request, each client and
  the server; memory is given back when the request ends.
- CPU work on more than 16 KiB runs off the event loop (`Server.run_prepared`).
- Logs and metrics hold counts and times, never text of requests or answers.
"""

from typing import TYPE_CHECKING

from inlay.base.lazy import exported

if TYPE_CHECKING:
    from inlay.http.app import App
    from inlay.http.settings import FrontendSettings

__all__ = ["App", "FrontendSettings"]

__getattr__ = exported(__name__, {"App": "app", "FrontendSettings": "settings"})
