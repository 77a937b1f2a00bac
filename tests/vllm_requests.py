"""Request types and routes of vLLM, as its source says them: read, not imported.

    python -m tests.vllm_requests FOLDER VERSION

writes `vllm_requests.json` beside this module, from the unpacked source of a release.
"""

import ast
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from inlay.api.admin.schema import LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from inlay.api.anthropic.schema import MessagesInput, MessagesRequest
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.openai.schema.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
)
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.api.openai.schema.scoring import RerankRequest, ScoreRequest
from inlay.api.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from inlay.api.schema.chat import ChatRequest

_FILE = Path(__file__).with_suffix(".json")

PAIRS: list[tuple[str, type[msgspec.Struct]]] = [
    ("openai.completion.protocol.CompletionRequest", CompletionRequest),
    ("openai.chat_completion.protocol.ChatCompletionRequest", ChatRequest),
    ("openai.responses.protocol.ResponsesRequest", ResponsesRequest),
    ("anthropic.protocol.AnthropicMessagesRequest", MessagesRequest),
    ("anthropic.protocol.AnthropicCountTokensRequest", MessagesInput),
    ("pooling.embed.protocol.EmbeddingCompletionRequest", EmbeddingRequest),
    ("pooling.embed.protocol.EmbeddingChatRequest", EmbeddingRequest),
    ("pooling.embed.protocol.EmbeddingBatchChatRequest", EmbeddingRequest),
    ("pooling.embed.protocol.EmbeddingChatInputRequest", EmbeddingRequest),
    ("pooling.pooling.protocol.PoolingCompletionRequest", PoolingRequest),
    ("pooling.pooling.protocol.PoolingChatRequest", PoolingRequest),
    ("pooling.pooling.protocol.IOProcessorRequest", PoolingRequest),
    ("pooling.classify.protocol.ClassificationCompletionRequest", ClassificationRequest),
    ("pooling.classify.protocol.ClassificationChatRequest", ClassificationRequest),
    ("pooling.scoring.protocol.ScoreDataRequest", ScoreRequest),
    ("pooling.scoring.protocol.ScoreQueriesDocumentsRequest", ScoreRequest),
    ("pooling.scoring.protocol.ScoreQueriesItemsRequest", ScoreRequest),
    ("pooling.scoring.protocol.ScoreTextRequest", ScoreRequest),
    ("pooling.scoring.protocol.RerankRequest", RerankRequest),
    ("serve.tokenize.protocol.TokenizeCompletionRequest", TokenizeRequest),
    ("serve.tokenize.protocol.TokenizeChatRequest", TokenizeRequest),
    ("serve.tokenize.protocol.DetokenizeRequest", DetokenizeRequest),
    ("serve.lora.protocol.LoadLoRAAdapterRequest", LoadLoraAdapterRequest),
    ("serve.lora.protocol.UnloadLoRAAdapterRequest", UnloadLoraAdapterRequest),
]
"""vLLM's types, below `vllm.entrypoints`, and what parses the same bodies here."""


@cache
def known() -> dict[str, Any]:
    """`version`, `types` (default by field, by type) and `routes` of the release in the file."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


class _Source:
    """The classes of all modules below a folder."""

    def __init__(self, folder: Path) -> None:
        self.classes: dict[str, dict[str, ast.ClassDef]] = {}
        self.routes: set[str] = set()
        for file in sorted(folder.rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            module = ".".join(file.relative_to(folder).with_suffix("").parts)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, {})[module] = node
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    self._route(node)

    def _route(self, call: ast.Call) -> None:
        assert isinstance(call.func, ast.Attribute)
        first = call.args[0] if call.args else None
        path = first.value if isinstance(first, ast.Constant) else None
        names = ("post", "get", "delete", "websocket", "add_api_route")
        if call.func.attr in names and isinstance(path, str) and path.startswith("/"):
            self.routes.add(path)

    def fields(self, name: str, module: str | None = None) -> dict[str, Any]:
        """The fields of a class and its bases, with their defaults; null where there is none."""
        kinds = self.classes.get(name, {})
        kind = kinds.get(module or "") or next(iter(kinds.values()), None)
        if kind is None:
            return {}
        found: dict[str, Any] = {}
        for base in kind.bases:
            found |= self.fields(ast.unparse(base).split("[")[0].split(".")[-1])
        for node in kind.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(node.annotation) and node.target.id[0] != "_":
                found[node.target.id] = _default(node.value)
        return found


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        given = [word.value for word in value.keywords if word.arg == "default"]
        value = next(iter([*given, *value.args]), None)
    try:
        found = None if value is None else ast.literal_eval(value)
    except ValueError:
        return None
    return None if found is ... else found


def main(folder: Path, version: str) -> None:
    """Write the file."""
    source = _Source(folder / "vllm" / "entrypoints")
    types = {
        name: source.fields(name.rpartition(".")[2], name.rpartition(".")[0]) for name, _ in PAIRS
    }
    assert all(types.values())
    found = {"version": version, "types": types, "routes": sorted(source.routes)}
    _FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
