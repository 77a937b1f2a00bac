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
