"""Text and chat messages to rows, as the model itself would look them up."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

from inlay.base.errors import InvalidRequestError
from inlay.client.media import MediaEncoder, MediaFile, image_part
from inlay.client.prompts import EmbeddedPrompt
from inlay.client.uploader import Uploader
from inlay.media.spec import Detail
from inlay.render import Renderer
from inlay.tensors import ModelDType, TensorFormat
from inlay.tensors.hub import asking_hub, gguf_on_hub, local_directory
from inlay.tensors.table import EmbeddingTable
from inlay.tensors.weight_files import WHOLE, find_weights

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]


def model_directory(model: str | Path, revision: str | None = None) -> Path:
    """The directory or file with the model's tokenizer, configuration and embedding table.

    What is here is taken as it is. A name on the hub is fetched, or found in the hub's cache: the
    small files and, of a model in several weight files, only those whose tensors are called after
    an embedding.

    Raises:
        InvalidRequestError: neither a directory nor a model the hub gives us.
    """
    local = local_directory(model)
    if local is not None:
        return local
    name = str(model)
    if (gguf := gguf_on_hub(name, revision)) is not None:
        return gguf
    with asking_hub(name):
        fetched = snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES)
        for file in _table_files(Path(fetched), name, revision):
            hf_hub_download(name, file, revision=revision)
    return Path(fetched)


def _table_files(directory: Path, name: str, revision: str | None) -> set[str]:
    """Return the files to fetch for the table: none where one file has all and is fetched."""
    try:
        hf_hub_download(name, WHOLE, revision=revision)
    except EntryNotFoundError:
        weights = find_weights(directory)
        if weights is None:
            raise
        index = weights.index
        return {file for tensor, file in index.items() if "emb" in tensor or "wte" in tensor}
    return set()


class PromptEmbedder:
    """Looks tokens up in a model's embedding table, which stays on disk.

    Only the rows asked for are read.

    Attributes:
        table: the embedding table.
        renderer: tokenizer and chat template.
        dtype: of the rows, or None for the table's own.
    """

    def __init__(
        self, table: EmbeddingTable, renderer: Renderer, *, dtype: ModelDType | None = None
    ) -> None:
        self.table = table
        self.renderer = renderer
        self.dtype = dtype
        self._table_id = table.id

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, revision: str | None = None, dtype: ModelDType | None = None
    ) -> "PromptEmbedder":
        """For a model directory, a GGUF file, or a name on the hub.

        The weights are neither loaded nor, where they are apart, fetched.

        Args:
            model: the directory, file or name.
            revision: of a model on the hub.
            dtype: of the rows; the table's own unless given, of GGUF mostly bfloat16. Give the
                dtype the model is served in where that is wider than the checkpoint's and the model
                scales its embeddings: the product is rounded in it.

        Raises:
            InvalidRequestError: no such model, or one without a tokenizer or an embedding table in
                safetensors or GGUF.
        """
        directory = model_directory(model, revision)
        return cls(EmbeddingTable.open(directory), Renderer.load(directory), dtype=dtype)

    def embed(self, text: str, *, add_special_tokens: bool = True) -> EmbeddedPrompt:
        """The rows of `text`: what a completion of it starts from.

        Args:
            text: any text.
            add_special_tokens: what the model wants around a text of its own, such as a begin
                token. Without them for text that stands inside something longer.

        Raises:
            InvalidRequestError: the text has no tokens.
        """
        ids = self.renderer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise InvalidRequestError("the text has no tokens, and a prompt has at least one row")
        return self.embed_tokens(ids)

    def embed_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> EmbeddedPrompt:
        """The rows of a chat, its template applied.

        What a chat completion of the messages starts from.
        """
        prompt = self.renderer.chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return self.embed_tokens(prompt.token_ids())

    def embed_tokens(self, ids: Sequence[int]) -> EmbeddedPrompt:
        """The rows of token ids.

        Raises:
            InvalidRequestError: an id is not in the table.
        """
        return EmbeddedPrompt(self.table.rows(ids, self.dtype), self._table_id)

    def completion_args(
        self, text: str, format: TensorFormat = "safetensors", *, uploader: Uploader | None = None
    ) -> dict[str, Any]:
        """`text` as keyword arguments for `client.completions.create`.

        See `EmbeddedPrompt.completion_args`.
        """
        return self.embed(text).completion_args(format, uploader=uploader)

    def chat_part(
        self, text: str, format: TensorFormat = "safetensors", *, uploader: Uploader | None = None
    ) -> Any:
        """`text` as a part of a chat message's `content`.

        No special tokens, as it stands inside the template.
        """
        return self.embed(text, add_special_tokens=False).chat_part(format, uploader=uploader)

    def image_part(
        self,
        image: MediaFile,
        *,
        detail: Detail | None = None,
        uploader: Uploader | None = None,
        encoder: MediaEncoder | None = None,
    ) -> Any:
        """An image as a part of a chat message's `content`, or of a completion's prompt.

        Args:
            image: its path or bytes.
            detail: OpenAI's; "low" takes fewer positions where the model has a smaller layout.
            uploader: sends large files once and then refers to them.
            encoder: encodes the image; then its rows are sent in place of the file.

        Raises:
            InvalidRequestError: no image, or none of a format that servers read.
            InlayError: the upload or the encoding failed.
        """
        if encoder is not None:
            return encoder.encode(image, detail=detail).chat_part()
        return image_part(image, detail=detail, uploader=uploader)
