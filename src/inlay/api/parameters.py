"""Parameters of routes in the path, the query and the headers."""

from typing import Any

from inlay.http.openapi import Parameter
from inlay.http.paging import limit_parameter

STORED = Parameter("id", "id of a stored prompt.", "pe-5d0f", place="path")
MODEL_NAME = Parameter("id", "name of a model, which may hold slashes.", "my-model", place="path")
FILE = Parameter("name", "name of a file.", "style.css", place="path")

UPLOAD_MODEL = Parameter(
    "model", "model that the upload is meant for: it is checked for it now.", "my-model"
)
TOKENIZER_MODEL = Parameter("model", "name of the model; the first when absent.", "my-model")
CONFIG_FORMAT = Parameter(
    "config_format", "form of the settings.", "json", {"enum": ["text", "json"], "default": "text"}
)

GENERATION = (
    Parameter(
        "X-Session-Id",
        "name of a conversation: its requests go to one worker. `session_id` and "
        "`prompt_cache_key` of the body come before it.",
        "my-chat-1",
        {"type": "string", "minLength": 1, "maxLength": 512},
        "header",
    ),
    Parameter(
        "X-Show-Workers", "admin: comments in the stream say which worker makes it.", "1",
        place="header",
    ),
)  # fmt: skip

# Anthropic's.

VERSIONS = (b"2023-06-01", b"2026-10-21")
MOST = 1000
USUAL = 20
"""Models of a page, at most and where the client does not say."""


def _version(text: str) -> Parameter:
    known: dict[str, Any] = {"enum": [version.decode() for version in VERSIONS]}
    return Parameter("anthropic-version", text, "2023-06-01", known, "header")


VERSION = _version("version of Anthropic's API; it may be absent.")
ASKS_ANTHROPIC = _version(
    "as Anthropic's clients send it: the answer has their form, and so have its errors."
)
PAGES = (
    limit_parameter("models of a page, in Anthropic's form.", 100, USUAL, MOST),
    Parameter("after_id", "the page after this model, in Anthropic's form.", "my-model"),
    Parameter("before_id", "the page before this model, in Anthropic's form.", "my-model"),
)

# Of admin routes.

MAX_WAIT = 86_400.0

ONE_MODEL = Parameter("model", "only the workers of this model.", "my-model")
ONE_WORKER = Parameter("worker", "only the worker of this id.", "w-5d0f")
DRAINED = Parameter("worker", "id of the worker.", "w-5d0f", required=True)
SLEEP = (
    Parameter(
        "level",
        "1 or 2. On a GPU 1 keeps the weights in the host's memory and 2 forgets them; on a CPU "
        "both read them from the checkpoint again.",
        2,
        {"enum": [1, 2], "default": 1},
    ),
    Parameter(
        "mode",
        "what running requests get: abort ends them at once, wait after the seconds of `wait`.",
        "wait",
        {"enum": ["abort", "wait"], "default": "abort"},
    ),
    Parameter(
        "wait", "seconds that mode wait gives them.", 60,
        {"type": "number", "minimum": 0, "maximum": MAX_WAIT, "default": 30},
    ),
    ONE_MODEL,
    ONE_WORKER,
)  # fmt: skip
WAKE = (
    Parameter(
        "tags", "parts to wake, given several times or parted by commas; all when absent.",
        "weights", {"enum": ["weights", "kv_cache"]},
    ),
    ONE_MODEL,
    ONE_WORKER,
)  # fmt: skip
