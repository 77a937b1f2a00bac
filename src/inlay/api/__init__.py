"""The APIs that clients speak, on top of `inlay.http`.

`app` lists every route: start there. `build_app` makes the ASGI app.

    openai/      OpenAI's API with vLLM's additions: `schema/` has the types of requests and
                 responses, and every route has a module or a folder of its name
    anthropic/   Anthropic's Messages API
    generation/  what APIs that generate share: prompts, sampling, grammars, choices
    schema/      types of requests that all APIs share
    fields       checks of fields that many routes have
    admin/       sleep, caches and adapters of workers

In a route's folder, `route` has the handlers and `shape` makes the JSON of responses and events.
Modules of `schema` import nothing of this room but each other. `generation` knows no API, and an
API no other one.
"""

from typing import TYPE_CHECKING

from inlay.base.lazy import exported

if TYPE_CHECKING:
    from inlay.api.app import build_app

__all__ = ["build_app"]

__getattr__ = exported(__name__, {"build_app": "app"})
