"""HTTP: OpenAI's API in front of a router.

`serve.check` looks at the settings' files, `build_app` makes the ASGI app, `serve.serve` runs it. A
request's way: `app` (which route) -> `access` (who asks) -> `clients` (their share) -> `body` (read
within limits) -> `lift` (JSON without its large strings) -> `prompts` or `messages` -> `sampling`
-> `respond` (works, choices, events).
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
