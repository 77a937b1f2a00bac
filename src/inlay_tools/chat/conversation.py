"""The messages of a chat, and the request that asks for the next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inlay.client import Uploader
from inlay_tools.chat.attachment import Attachment, EmbeddingsFile
from inlay_tools.settings import ChatSettings


@dataclass
class ConversationMessage:
    """One message.

    Attributes:
        role: "user" or "assistant".
        text: what was typed or answered.
        attachments: files before the text.
    """

    role: str
    text: str
    attachments: Sequence[Attachment] = ()

    def content(self, uploader: Uploader) -> str | list[dict[str, Any]]:
        """The content as the API takes it. Raises `InlayError` if an upload fails."""
        if not self.attachments:
            return self.text
        parts = [attached.part(uploader) for attached in self.attachments]
        return [*parts, {"type": "text", "text": self.text}] if self.text else parts


@dataclass
class Transcript:
    """The messages so far, and the files of the next one.

    Attributes:
        settings: sampling.
        model: the model's name at the server.
        system: the system message, or None.
        messages: in order.
        attached: files for the next message.
    """

    settings: ChatSettings
    model: str
    system: str | None = None
    messages: list[ConversationMessage] = field(default_factory=list)
    attached: list[Attachment] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add a message of the user, with what is attached."""
        self.messages.append(ConversationMessage("user", text, tuple(self.attached)))
        self.attached.clear()

    def take_back(self) -> None:
        """Remove the last message of the user; its files are attached again."""
        self.attached[:0] = self.messages.pop().attachments

    def clear(self) -> None:
        """Forget all messages and files; the system message stays."""
        self.messages.clear()
        self.attached.clear()

    def embeddings(self) -> list[EmbeddingsFile]:
        """All embeddings in it, those for the next message last."""
        said = [attached for message in self.messages for attached in message.attachments]
        return [each for each in [*said, *self.attached] if isinstance(each, EmbeddingsFile)]

    def body(self, uploader: Uploader) -> dict[str, Any]:
        """The request for the next answer. Raises `InlayError` if an upload fails."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        said = [{"role": each.role, "content": each.content(uploader)} for each in self.messages]
        settings = self.settings
        chosen = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
        }
        return {
            "model": self.model,
            "messages": [*system, *said],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in chosen.items() if value is not None},
        }
