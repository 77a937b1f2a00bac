"""Parameters of Anthropic's routes."""

from typing import Any

from inlay.api.anthropic.models import MOST, USUAL
from inlay.api.anthropic.route import VERSIONS
from inlay.http.openapi import Parameter

_TEXT: dict[str, Any] = {"type": "string"}

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
