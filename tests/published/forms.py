"""One prompt in every form that completions take."""

from pathlib import Path
from typing import Any

import httpx

from inlay.client import PromptEmbedder, Uploader
from tests.published.numbers import TOKENS, Steps, is_exact
from tests.serving import Served


def forms(embedder: PromptEmbedder, uploader: Uploader, text: str) -> dict[str, dict[str, Any]]:
    """Fields of a completion by the name of the form; rows come from the model's own table."""
    whole = embedder.embed(text)
    ids = list(embedder.renderer.encode(text))
    third, two_thirds = len(ids) // 3, 2 * len(ids) // 3

    def tokens(start: int, stop: int) -> dict[str, Any]:
        return {"type": "token_ids", "token_ids": ids[start:stop]}

    def rows(start: int, stop: int, **by: Any) -> dict[str, Any]:
        part: dict[str, Any] = embedder.embed_tokens(ids[start:stop]).chat_part(**by)
        return part

    stored: dict[str, Any] = {"uploader": uploader}
    return {
        "text": {"prompt": text},
        "ids": {"prompt": ids},
        "rows": _fields(whole.completion_args()),
        "stored rows": _fields(whole.completion_args(**stored)),
        "tokens, rows, tokens": {
            "prompt": [tokens(0, third), rows(third, two_thirds), tokens(two_thirds, len(ids))]
        },
        "rows, tokens, stored rows": {
            "prompt": [
                rows(0, third),
                tokens(third, two_thirds),
                rows(two_thirds, len(ids), **stored),
            ]
        },
    }


def _fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the `openai` client as fields of a body."""
    return {**arguments, **arguments.pop("extra_body", {})}


def all_forms_have_one_answer(server: Served, path: Path, text: str, tokens: int = TOKENS) -> None:
    """Check `tokens` ids and their logprobs, bit by bit where the server's card says `exact`."""
    embedder = PromptEmbedder.from_pretrained(path)
    uploader = Uploader(server.v1, upload_from=0)
    with httpx.Client(base_url=server.url, timeout=400) as http:
        exact = is_exact(http)
        found = {
            name: Steps.of(http, **fields, max_tokens=tokens)
            for name, fields in forms(embedder, uploader, text).items()
        }
    for name, steps in found.items():
        steps.expect(found["text"], exact=exact, what=name)
