"""Parameters of the admin routes."""

from typing import Any

from inlay.api.admin.workers import MAX_WAIT
from inlay.http.openapi import Parameter

_TEXT: dict[str, Any] = {"type": "string"}

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
