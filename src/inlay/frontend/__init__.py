"""HTTP: OpenAI's API in front of a router.

`check` looks at the settings' files, `build_app` makes the ASGI app, `serve` runs it. A request's way: `app` (which route) ->
`access` (who asks) -> `clients` (their share) -> `body` (read within limits)
-> `lift` (JSON without its large strings) -> `prompts` or `messages` -> `sampling` -> `respond` (works, choices, events).
"""

from inlay.frontend.app import App, build_app
from inlay.frontend.serve import check, serve
from inlay.frontend.settings import FrontendSettings

__all__ = ["App", "FrontendSettings", "build_app", "check", "serve"]
