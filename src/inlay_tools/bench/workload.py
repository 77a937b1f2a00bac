"""Request bodies of a measurement: made at random from a seed, or lines of JSON in a file."""

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.cli.command import FileError, UsageError
from inlay.client import EmbeddedPrompt, Uploader
from inlay_tools.files import read
from inlay_tools.http_client import HttpClient, ListedModel
from inlay_tools.settings import WorkloadSettings

MAX_PREPARED_BYTES = 2 << 30
"""Bytes of the bodies that are held at a time, since making them while measuring would disturb."""

ROW_SCALE = 0.02
"""Standard deviation of random rows: about that of embedding tables."""

_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
_TOGETHER = 8
"""Prompts that are made at a time."""

_SYLLABLES = ("ba", "cor", "den", "fi", "gal", "hu", "ki", "lo", "mar", "ne", "pol", "ri", "sen")
_QUESTION = "What is in the picture?"


@dataclass(frozen=True)
class Body:
    """A request that is ready to be sent."""

    path: str
    data: bytes


@dataclass(frozen=True)
class Workload:
    """Makes the bodies for one server."""

    settings: WorkloadSettings
    model: ListedModel
    client: HttpClient
    uploader: Uploader

    def check(self, *, held: bool = True) -> None:
        """Check what can be known before anything is made.

        Args:
            held: all bodies are held in memory at a time.

        Raises:
            UsageError: the settings contradict each other, or the bodies would not fit in memory.
            InvalidRequestError: the model cannot take such requests.
        """
        settings, model = self.settings, self.model
        if settings.prefix_len > settings.input_len:
            raise UsageError(
                f"--prefix-len is part of --input-len: {settings.prefix_len} is more than "
                f"{settings.input_len}"
            )
        if settings.prompts == "images" and settings.endpoint == "completions":
            raise UsageError("pictures are asked about in chats: leave --endpoint out")
        limit = model.max_model_len
        if limit is not None and settings.input_len + settings.output_len > limit:
            raise UsageError(
                f"--input-len {settings.input_len} and --output-len {settings.output_len} are more "
                f"than the {limit} positions of {model.name}"
            )
        if settings.prompts not in ("embeds", "refs"):
            return
        if model.hidden_size is None or model.dtype not in _DTYPES:
            raise InvalidRequestError(
                f"{self.client.server.url} does not say the hidden size and dtype of {model.name}, "
                "which rows are made by; send a file of bodies: --bodies"
            )
        size = settings.input_len * model.hidden_size * np.dtype(_DTYPES[model.dtype]).itemsize
        total = size * 4 // 3 * settings.num_prompts
        if held and settings.prompts == "embeds" and total > MAX_PREPARED_BYTES:
            raise UsageError(
                f"{settings.num_prompts} prompts of {size} bytes are more than the "
                f"{MAX_PREPARED_BYTES} bytes that are held ready: use fewer, shorter ones, or "
                "--prompts refs"
            )

    async def bodies(self, round_: int, count: int, *, stream: bool = True) -> AsyncIterator[Body]:
        """Make bodies; the same ones for the same seed, round and model.

        Args:
            round_: another one has other prompts, which no cache knows; the shared prefix is the
                same in all.
            count: how many.
            stream: ask for a stream.

        Raises:
            InlayError: the server cannot be asked, or takes no uploads.
        """
        make = self._maker()
        for start in range(0, count, _TOGETHER):
            indices = range(start, min(start + _TOGETHER, count))
            made = await asyncio.gather(
                *(make(np.random.default_rng([self.settings.seed, round_, i])) for i in indices)
            )
            for source in made:
                yield self._body(source, stream)

    def _maker(self) -> Callable[[np.random.Generator], Coroutine[Any, Any, dict[str, Any]]]:
        """A function that makes what is asked about: `text`, `rows` or a `part` of a message."""
        settings = self.settings
        prefix = np.random.default_rng([settings.seed])
        own = settings.input_len - settings.prefix_len
        if settings.prompts in ("text", "images"):
            words = _words(prefix, settings.prefix_len)

            async def text(rng: np.random.Generator) -> dict[str, Any]:
                said = await self._cut(words, _words(rng, own))
                if settings.prompts == "text":
                    return {"text": said}
                return {"text": f"{said} {_QUESTION}", "part": _picture(rng, settings.image_size)}

            return text
        head = self._rows(prefix, settings.prefix_len)

        async def rows(rng: np.random.Generator) -> dict[str, Any]:
            prompt = EmbeddedPrompt(np.concatenate([head, self._rows(rng, own)]))
            data = prompt.to_bytes()
            if settings.prompts == "refs":
                return {"rows": {"ref": (await asyncio.to_thread(self.uploader.upload, data)).id}}
            return {"rows": {"data": pybase64.b64encode(data).decode("ascii")}}

        return rows

    def _rows(self, rng: np.random.Generator, count: int) -> npt.NDArray[Any]:
        """(count, hidden) in the model's dtype."""
        values = rng.standard_normal((count, self.model.hidden_size or 0), dtype=np.float32)
        return (values * np.float32(ROW_SCALE)).astype(_DTYPES[self.model.dtype or "float32"])

    async def _cut(self, prefix: str, own: str) -> str:
        """Text of the wanted number of tokens, by the server's own tokenizer.

        Where the server has no such route each word counts as a token.
        """
        settings = self.settings
        try:
            head = (await self._tokens(prefix))[: settings.prefix_len]
            tail = (await self._tokens(own))[: settings.input_len - len(head)]
            answer = await self.client.json(
                "POST", "../detokenize", {"model": self.model.name, "tokens": [*head, *tail]}
            )
        except NotFoundError:
            return f"{prefix} {own}".strip()
        text: str = answer["prompt"]
        return text

    async def _tokens(self, text: str) -> list[int]:
        if not text:
            return []
        body = {"model": self.model.name, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = (await self.client.json("POST", "../tokenize", body))["tokens"]
        return tokens

    def _body(self, source: dict[str, Any], stream: bool) -> Body:
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": settings.output_len,
            "ignore_eos": True,
            "temperature": 0,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        rows = source.get("rows")
        chat = settings.endpoint == "chat" or settings.prompts == "images"
        if chat:
            content: Any = source.get("text")
            if rows is not None:
                content = [{"type": "prompt_embeds", **rows}]
            elif "part" in source:
                content = [source["part"], {"type": "text", "text": content}]
            body["messages"] = [{"role": "user", "content": content}]
        elif rows is not None:
            body |= {"prompt": None, "prompt_embeds": rows.get("data", rows)}
        else:
            body["prompt"] = source["text"]
        return Body("/chat/completions" if chat else "/completions", msgspec.json.encode(body))


def _words(rng: np.random.Generator, count: int) -> str:
    """Words, each of one token at least."""
    parts = rng.integers(len(_SYLLABLES), size=(count, 2))
    return " ".join(_SYLLABLES[first] + _SYLLABLES[second] for first, second in parts)


def _picture(rng: np.random.Generator, size: int) -> dict[str, Any]:
    """The part of a message with a picture of coloured squares, as PNG."""
    squares = rng.integers(256, size=(8, 8, 3), dtype=np.uint8)
    at = np.arange(size) * 8 // size
    pixels = squares[at][:, at]
    lines = np.concatenate([np.zeros((size, 1), np.uint8), pixels.reshape(size, -1)], axis=1)
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        _png_chunk(name, body)
        for name, body in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(lines.tobytes(), 1)),
            (b"IEND", b""),
        )
    )
    url = "data:image/png;base64," + pybase64.b64encode(data).decode("ascii")
    return {"type": "image_url", "image_url": {"url": url}}


def _png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


class _Known(msgspec.Struct):
    model: str | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_embeds: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_bodies(path: Path) -> Sequence[bytes]:
    """The lines of a file.

    Raises:
        FileError: it cannot be read, is empty, too large, or a line is no body of a request.
    """
    if str(path) != "-" and path.is_file() and path.stat().st_size > MAX_PREPARED_BYTES:
        raise FileError(
            f"{path}: {path.stat().st_size} bytes; up to {MAX_PREPARED_BYTES} are held ready"
        )
    lines = [line for line in read(path).splitlines() if line.strip()]
    if not lines:
        raise FileError(f"{path}: holds no requests")
    for number, line in enumerate(lines, 1):
        try:
            known = msgspec.json.decode(line, type=_Known)
        except msgspec.MsgspecError as error:
            raise FileError(f"{path}, line {number}: no body of a request: {error}") from error
        if known.messages is msgspec.UNSET and known.prompt is known.prompt_embeds:
            raise FileError(
                f"{path}, line {number}: has neither messages, prompt nor prompt_embeds"
            )
    return lines


def prepared(line: bytes, model: str, *, always: bool) -> Body:
    """A line as it is sent: as a stream with usage.

    Args:
        line: a body.
        model: asked for where the body names none.
        always: ask for it in any case.
    """
    fields: dict[str, msgspec.Raw | object] = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    if always or "model" not in fields:
        fields["model"] = model
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    path = "/chat/completions" if "messages" in fields else "/completions"
    return Body(path, msgspec.json.encode(fields))
