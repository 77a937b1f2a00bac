"""Rows of embeddings as a client holds them, and as the `openai` client sends them."""

import binascii
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from inlay.base.errors import BodyTooLargeError, EmbeddingsError, InvalidRequestError, why_unusable
from inlay.client.uploader import AsyncUploader, Uploader
from inlay.tensors import ReadLimits, TensorFormat, prompts_of, read, write

_BASE64_BEGIN = re.compile(rb"[A-Za-z0-9+/=\s]{16}")
"""No container begins so: each has a control character or a high bit in its first 16 bytes."""

Array: TypeAlias = npt.NDArray[Any]
"""(num_tokens, hidden); bfloat16 and float8 are `ml_dtypes`' types."""


@dataclass(frozen=True, eq=False)
class EmbeddedPrompt:
    """A prompt, or a piece of one, as rows.

    Attributes:
        rows: (num_tokens, hidden), after the model's own scale: what `inputs_embeds` takes.
        table_id: identity of the embedding table the rows are meant for, or None if unknown.
    """

    rows: Array
    table_id: str | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 2:
            raise InvalidRequestError(
                f"a prompt's rows have shape (num_tokens, hidden), got {self.rows.shape}"
            )

    @property
    def num_tokens(self) -> int:
        """Rows, which is positions, which is what usage counts."""
        return int(self.rows.shape[0])

    @property
    def hidden_size(self) -> int:
        """Elements of a row."""
        return int(self.rows.shape[1])

    def __add__(self, other: "EmbeddedPrompt") -> "EmbeddedPrompt":
        """These rows, then the other's. Of two dtypes the wider is kept, which loses nothing.

        Raises:
            InvalidRequestError: the hidden sizes differ, or the two are meant for different tables.
        """
        if not isinstance(other, EmbeddedPrompt):
            return NotImplemented
        if self.hidden_size != other.hidden_size:
            raise InvalidRequestError(
                f"rows of hidden size {self.hidden_size} and {other.hidden_size} cannot be one "
                "prompt"
            )
        if self.table_id and other.table_id and self.table_id != other.table_id:
            raise InvalidRequestError(
                f"rows for the embedding tables {self.table_id} and {other.table_id} cannot be one "
                "prompt"
            )
        return EmbeddedPrompt(
            np.concatenate([self.rows, other.rows]), self.table_id or other.table_id
        )

    def to_bytes(self, format: TensorFormat = "safetensors") -> bytes:
        """The rows in a container, stamped with the table's id; npy has no room for one.

        Raises:
            EmbeddingsError: no rows, or a dtype npy has no name for (bfloat16).
        """
        return write(self.rows, format, table_id=None if format == "npy" else self.table_id)

    def to_base64(self, format: TensorFormat = "safetensors") -> str:
        """`to_bytes` as `prompt_embeds` takes it. "torch" is what vLLM reads as well."""
        return pybase64.b64encode(self.to_bytes(format)).decode("ascii")

    def source(
        self, format: TensorFormat = "safetensors", uploader: Uploader | None = None
    ) -> dict[str, str]:
        """Source of these rows in a request.

        `{"ref": id}` from the uploader's size on, else `{"data": base64}`.

        Raises:
            EmbeddingsError: as `to_bytes`.
            InlayError: the upload failed.
        """
        data = self.to_bytes(format)
        if uploader is not None and len(data) >= uploader.upload_from:
            return {"ref": uploader.ref(data)}
        return {"data": pybase64.b64encode(data).decode("ascii")}

    async def source_async(
        self, uploader: AsyncUploader, format: TensorFormat = "safetensors"
    ) -> dict[str, str]:
        """As `source`, in an event loop."""
        if len(data := self.to_bytes(format)) >= uploader.upload_from:
            return {"ref": await uploader.ref(data)}
        return {"data": pybase64.b64encode(data).decode("ascii")}

    def completion_args(
        self, format: TensorFormat = "safetensors", *, uploader: Uploader | None = None
    ) -> dict[str, Any]:
        """Keyword arguments for `client.completions.create`, beside `model` and others.

        `prompt` is None: inlay and vLLM both take that beside `prompt_embeds`.

        Args:
            format: of the container.
            uploader: sends large rows once and then refers to them.

        Raises:
            InlayError: as `source`.
        """
        return as_completion_args(self.source(format, uploader))

    async def completion_args_async(
        self, uploader: AsyncUploader, format: TensorFormat = "safetensors"
    ) -> dict[str, Any]:
        """As `completion_args`, in an event loop."""
        return as_completion_args(await self.source_async(uploader, format))

    def chat_part(
        self, format: TensorFormat = "safetensors", *, uploader: Uploader | None = None
    ) -> Any:
        """A part for a chat message's `content` list; arguments and errors as `completion_args`.

        Typed `Any`, as the `openai` client's types know only OpenAI's own parts.
        """
        return {"type": "prompt_embeds", **self.source(format, uploader)}

    async def chat_part_async(
        self, uploader: AsyncUploader, format: TensorFormat = "safetensors"
    ) -> Any:
        """As `chat_part`, in an event loop."""
        return {"type": "prompt_embeds", **await self.source_async(uploader, format)}

    def image_fields(
        self,
        *,
        negative: "EmbeddedPrompt | None" = None,
        pooled: "EmbeddedPrompt | None" = None,
        uploader: Uploader | None = None,
    ) -> dict[str, Any]:
        """Fields for `extra_body` of `client.images.generate`: these rows of a text encoder.

        Args:
            negative: what the images are led away from.
            pooled: the one row of the prompt's pooled vector, of models that need it (FLUX).
            uploader: sends large rows once and then refers to them.

        Raises:
            InlayError: as `source`.
        """
        given = {
            "prompt_embeds": self,
            "negative_prompt_embeds": negative,
            "pooled_prompt_embeds": pooled,
        }
        sources = {
            name: rows.source(uploader=uploader) for name, rows in given.items() if rows is not None
        }
        return {name: source.get("data", source) for name, source in sources.items()}


def as_completion_args(source: dict[str, str]) -> dict[str, Any]:
    """Return keyword arguments for `client.completions.create` of a source of rows."""
    return {"prompt": None, "extra_body": {"prompt_embeds": source.get("data", source)}}


class _PeftConfig(msgspec.Struct):
    peft_type: str = ""
    base_model_name_or_path: str | None = None
    num_transformer_submodules: int | None = None


class SoftPrompt(EmbeddedPrompt):
    """Rows that were trained instead of looked up.

    They stand before a text: `soft + embedder.embed(text)`.
    """

    @classmethod
    def from_peft(cls, directory: str | Path) -> "SoftPrompt":
        """The rows of a PEFT prompt-tuning checkpoint.

        Adapter_config.json and adapter_model.safetensors.

        Raises:
            InvalidRequestError: no such checkpoint, another kind of one, or one stored as a pickle.
        """
        root = Path(directory)
        config = _peft_config(root / "adapter_config.json")
        if config.peft_type != "PROMPT_TUNING":
            raise InvalidRequestError(
                f"{root}: a soft prompt is a PROMPT_TUNING checkpoint, this is "
                f"{config.peft_type or 'none'!r}"
            )
        if (config.num_transformer_submodules or 1) != 1:
            raise InvalidRequestError(
                f"{root}: soft prompts of encoder-decoder models are not supported"
            )
        weights = root / "adapter_model.safetensors"
        if not weights.is_file():
            pickled = (root / "adapter_model.bin").is_file()
            command = f"inlay convert {shlex.quote(str(root))}"
            hint = f"; adapter_model.bin is a pickle and is never read: {command}"
            raise InvalidRequestError(
                f"{root}: has no adapter_model.safetensors{hint if pickled else ''}"
            )
        return cls(load(weights).rows)


def load(path: str | Path) -> EmbeddedPrompt:
    """Rows from a file: any container `inlay.tensors` reads, or base64 of one.

    Raises:
        InvalidRequestError: the file cannot be read, or holds anything but the rows of one prompt.
    """
    try:
        with naming(repr(str(path))):
            prompts = loads(Path(path).read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"{str(path)!r}: {why_unusable(error)}") from error
    if len(prompts) != 1:
        raise InvalidRequestError(f"{str(path)!r} holds {len(prompts)} prompts, expected one")
    return prompts[0]


def loads(data: bytes) -> list[EmbeddedPrompt]:
    """The prompts in container bytes, or in base64 of them: one, or as many as the tensor's batch.

    Raises:
        EmbeddingsError: they are not rows of embeddings.
    """
    data = container(data)
    tensor = read(data, limits=ReadLimits(max_bytes=max(len(data), 1)))
    return [EmbeddedPrompt(prompt.array, prompt.table_id) for prompt in prompts_of(tensor)]


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Within it, an error about a file's bytes begins with `file` in place of a request's field."""
    try:
        yield
    except (InvalidRequestError, BodyTooLargeError) as error:
        if isinstance(error, InvalidRequestError) and error.param not in ("prompt_embeds", "data"):
            raise
        message = error.message.removeprefix(error.param or "").lstrip(": ")
        raise type(error)(f"{file}: {message}", param=error.param, code=error.code) from error


def container(data: bytes) -> bytes:
    """Container bytes from themselves or from base64 of them.

    Raises `EmbeddingsError` for broken base64.
    """
    if not _BASE64_BEGIN.match(data):
        return data
    try:
        return pybase64.b64decode(b"".join(data.split()), validate=True)
    except binascii.Error as error:
        raise EmbeddingsError(f"not valid base64, though it begins like it: {error}") from error


def _peft_config(path: Path) -> _PeftConfig:
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(BOM_UTF8), type=_PeftConfig)
    except OSError as error:
        raise InvalidRequestError(
            f"{path.parent}: has no adapter_config.json ({error.strerror})"
        ) from error
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{path}: not a PEFT configuration: {error}") from error
