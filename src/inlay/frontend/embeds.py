"""Tensor data in requests: which strings are it, and how its bytes become rows of a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from inlay.digest import Secret, row_digests
from inlay.errors import EmbeddingsError, InlayError, InvalidRequestError, NotFoundError
from inlay.frontend.metrics import Metrics
from inlay.frontend.settings import FrontendSettings
from inlay.prompt import Rows
from inlay.protocol.openai.completions import CompletionRequest, EmbedsSource, PromptEmbedsPart
from inlay.protocol.work import ModelCard
from inlay.tensors import ReadLimits, prompts_of, read, to_rows


class EmbedsReader:
    """Checks and reads embeddings for one server's settings. Its methods are CPU work, safe to call from any thread.

    Attributes:
        limits: of one tensor file.
    """

    def __init__(self, settings: FrontendSettings, secret: Secret, metrics: Metrics) -> None:
        self._enabled = settings.enable_prompt_embeds
        self._secret = secret
        self._metrics = metrics
        self.limits = ReadLimits(max_bytes=settings.max_prompt_embeds_bytes)

    def require_enabled(self) -> None:
        """Raise `InvalidRequestError` when this server takes no embeddings."""
        if not self._enabled:
            raise InvalidRequestError(
                "You must set --enable-prompt-embeds on the server to send prompt_embeds.",
                param="prompt_embeds",
            )

    def in_completion(self, request: CompletionRequest) -> list[str]:
        """The strings of `request` that are tensor data. Raises `InvalidRequestError` when they are not allowed."""
        found: list[str] = []
        embeds = sources_of(request)
        if embeds:
            found = [source for source in embeds if isinstance(source, str)]
            self.require_enabled()
        elif isinstance(request.prompt, list):
            for item in request.prompt:
                for part in item if isinstance(item, list) else (item,):
                    if isinstance(part, PromptEmbedsPart):
                        self.require_enabled()
                        if part.data is not None:
                            found.append(part.data)
        return found

    def in_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """The strings of a chat that are tensor data. Raises `InvalidRequestError` when they are not allowed."""
        found: list[str] = []
        for message in messages:
            content = message.get("content")
            if not isinstance(content, list):
                continue
            for part in content:
                if isinstance(part, dict) and part.get("type") == "prompt_embeds":
                    self.require_enabled()
                    data = part.get("data")
                    if isinstance(data, str):
                        found.append(data)
        return found

    def rows(self, data: bytes, card: ModelCard) -> list[Rows]:
        """The prompts of a tensor file, as rows of the model, with their digests.

        Raises:
            EmbeddingsError: not an acceptable tensor for this model.
        """
        if card.prompt_embeds is not None:
            raise EmbeddingsError(f"The model `{card.name}` takes no prompt_embeds: {card.prompt_embeds}")
        prompts = []
        for tensor in prompts_of(read(data, limits=self.limits)):
            rows = to_rows(
                tensor,
                hidden_size=card.hidden_size,
                dtype=card.dtype,
                max_abs=card.limits.max_prompt_embeds_abs,
                table_id=card.embedding_table_id or None,
            )
            prompts.append(msgspec.structs.replace(rows, digests=row_digests(rows, self._secret)))
        self._metrics.embeds_read(card.name, len(data), sum(map(len, prompts)))
        return prompts


def sources_of(request: CompletionRequest) -> list[str | EmbedsSource]:
    """The `prompt_embeds` of a request as a list."""
    embeds = request.prompt_embeds
    if embeds is None:
        return []
    return embeds if isinstance(embeds, list) else [embeds]


def part_rows(data: object, ref: object, part: object, param: str, read: Callable[[str], list[Rows]]) -> Rows:
    """The rows of one `prompt_embeds` part of a prompt or a message.

    Raises:
        InvalidRequestError: not exactly one of `data`, `ref` and `part`, or a file of several prompts.
        NotFoundError: a reference to what is not there.
    """
    if data is None or ref is not None or part is not None:
        raise unresolved(ref, part, param, data)
    if not isinstance(data, str):
        raise EmbeddingsError(
            f"{param}.data: prompt_embeds must be valid base64, got {type(data).__name__}",
            param=f"{param}.data",
        )
    prompts = read(data)
    if len(prompts) != 1:
        raise EmbeddingsError(f"{param}: a part is one prompt, got a batch of {len(prompts)}", param=param)
    return prompts[0]


def unresolved(ref: object, part: object, param: str, data: object = None) -> InlayError:
    """The error for embeddings that are named instead of sent."""
    if (data is not None) + (ref is not None) + (part is not None) != 1:
        return InvalidRequestError(f"{param}: give exactly one of data, ref and part", param=param)
    if ref is not None:
        return NotFoundError(f"{param}: stored embeddings {str(ref)[:80]!r} not found", param=param)
    return InvalidRequestError(
        f"{param}: part {str(part)[:80]!r} is not in the request: the body is not multipart", param=param
    )
