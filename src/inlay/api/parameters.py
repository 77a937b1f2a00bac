"""Parameters of routes in the path, the query and the headers."""

from typing import Any

from inlay.http.openapi import Parameter

_TEXT: dict[str, Any] = {"type": "string"}

STORED = Parameter("id", "id of a stored prompt.", _TEXT, "pe-5d0f", "path")
MODEL_NAME = Parameter("id", "name of a model, which may hold slashes.", _TEXT, "my-model", "path")
FILE = Parameter("name", "name of a file.", _TEXT, "style.css", "path")

UPLOAD_MODEL = Parameter(
    "model", "model that the upload is meant for: it is checked for it now.", _TEXT, "my-model"
)
TOKENIZER_MODEL = Parameter("model", "name of the model; the first when absent.", _TEXT, "my-model")
CONFIG_FORMAT = Parameter(
    "config_format", "form of the settings.", {"enum": ["text", "json"], "default": "text"}, "json"
)

GENERATION = (
    Parameter(
        "X-Session-Id",
        "name of a conversation: its requests go to one worker. `session_id` and "
        "`prompt_cache_key` of the body come before it.",
        _TEXT | {"minLength": 1, "maxLength": 512},
        "my-chat-1",
        "header",
    ),
    Parameter(
        "X-Show-Workers",
        "admin: comments in the stream say which worker makes it.",
        _TEXT,
        "1",
        "header",
    ),
)

# Anthropic's.

VERSIONS = (b"2023-06-01", b"2026-10-21")
MOST = 1000
USUAL = 20
"""Models of a page, at most and where the client does not say."""

_VERSIONS = {"enum": [version.decode() for version in VERSIONS]}
VERSION = Parameter(
    "anthropic-version",
    "version of Anthropic's API; it may be absent.",
    _VERSIONS,
    "2023-06-01",
    "header",
)
ASKS_ANTHROPIC = Parameter(
    "anthropic-version",
    "as Anthropic's clients send it: the answer has their form, and so have its errors.",
    _VERSIONS,
    "2023-06-01",
    "header",
)
PAGES = (
    Parameter(
        "limit",
        "models of a page, in Anthropic's form.",
        {"type": "integer", "minimum": 1, "maximum": MOST, "default": USUAL},
        100,
    ),
    Parameter("after_id", "the page after this model, in Anthropic's form.", _TEXT, "my-model"),
    Parameter("before_id", "the page before this model, in Anthropic's form.", _TEXT, "my-model"),
)

# Of admin routes.

MAX_WAIT = 86_400.0

ONE_MODEL = Parameter("model", "only the workers of this model.", _TEXT, "my-model")
ONE_WORKER = Parameter("worker", "only the worker of this id.", _TEXT, "w-5d0f")
DRAINED = Parameter("worker", "id of the worker.", _TEXT, "w-5d0f", required=True)
SLEEP = (
    Parameter(
        "level",
        "1 or 2. On a GPU 1 keeps the weights in the host's memory and 2 forgets them; on a CPU "
        "both read them from the checkpoint again.",
        {"enum": [1, 2], "default": 1},
        2,
    ),
    Parameter(
        "mode",
        "what running requests get: abort ends them at once, wait after the seconds of `wait`.",
        {"enum": ["abort", "wait"], "default": "abort"},
        "wait",
    ),
    Parameter(
        "wait",
        "seconds that mode wait gives them.",
        {"type": "number", "minimum": 0, "maximum": MAX_WAIT, "default": 30},
        60,
    ),
    ONE_MODEL,
    ONE_WORKER,
)
WAKE = (
    Parameter(
        "tags",
        "parts to wake, given several times or parted by commas; all when absent.",
        {"enum": ["weights", "kv_cache"]},
        "weights",
    ),
    ONE_MODEL,
    ONE_WORKER,
)
