"""A model's configuration files, read for the facts that lay media out."""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer

from inlay.base.errors import InvalidRequestError
from inlay.tensors.checkpoint import model_config

_MAX_BYTES = 64 * 2**20


class Section:
    """One JSON object of a model's configuration, read with checks.

    Args:
        name: what error messages call it.
        values: of the object.
        defaults: where `values` has no key, or null.
    """

    def __init__(
        self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self.values = values
        self._defaults = defaults or {}

    def get(self, key: str) -> Any:
        """The value, its default, or None."""
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`.

        Raises:
            InvalidRequestError: absent without a default, or something else.
        """
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**40:
            raise InvalidRequestError(
                f"{self.name} says {key} = {str(value)[:80]!r}; an integer from {minimum} is needed"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A number of at least 0.001; `default` where it is absent or 0.

        Raises:
            InvalidRequestError: something else.
        """
        value = self.get(key) or default
        if not isinstance(value, int | float) or not 0.001 <= value < 2**40:
            raise InvalidRequestError(f"{self.name} says {key} = {str(value)[:80]!r}, not a number")
        return float(value)

    def text(self, key: str, default: str = "") -> str:
        """A string.

        Raises:
            InvalidRequestError: something else.
        """
        value = self.get(key)
        if isinstance(value, dict):  # an added token with its properties
            value = value.get("content")
        value = default if value is None else value
        if not isinstance(value, str):
            raise InvalidRequestError(f"{self.name} says {key} = {str(value)[:80]!r}, not a string")
        return value

    def section(self, key: str) -> "Section":
        """A nested object; empty where there is none.

        Raises:
            InvalidRequestError: something else.
        """
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise InvalidRequestError(
                f"{self.name} says {key} = {str(value)[:80]!r}, not an object"
            )
        return Section(f"{self.name}: {key}", value or {})

    def over(self, defaults: Mapping[str, Any]) -> "Section":
        """The same with defaults."""
        return Section(self.name, self.values, defaults)

    def size(self, key: str = "size") -> tuple[int, int]:
        """(height, width) of an object with both or with a shortest edge, or of one integer.

        Raises:
            InvalidRequestError: something else.
        """
        value = self.get(key)
        if isinstance(value, int):
            edge = self.integer(key)
            return edge, edge
        inner = self.section(key)
        for edge_key in ("shortest_edge", "longest_edge"):
            if inner.get("height") is None and inner.get(edge_key) is not None:
                edge = inner.integer(edge_key)
                return edge, edge
        return inner.integer("height"), inner.integer("width")


class ModelFiles:
    """Configuration, processor settings and vocabulary of a model's directory.

    Attributes:
        directory: of the model.
        config: config.json, as `model_config` takes it.
        vision: its part about the vision encoder.
        processor: processor_config.json.
        image: settings of the image processor.
        video: of the video processor.
        audio: of the audio feature extractor.
        tokenizer_config: tokenizer_config.json.

    Raises:
        InvalidRequestError: a file that is not a JSON object.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        whole = self._read("config.json")
        self.config = Section(whole.name, model_config({**whole.values}))
        self.vision = self.config.section("vision_config")
        self.processor = self._read("processor_config.json")
        plain = self._read("preprocessor_config.json")
        self.image = self._part("image_processor", plain)
        self.audio = self._part("feature_extractor", plain)
        self.video = self._part("video_processor", self._read("video_preprocessor_config.json"))
        self.tokenizer_config = self._read("tokenizer_config.json")
        self._tokenizer: Tokenizer | None = None

    def _read(self, name: str) -> Section:
        path = self.directory / name
        if not path.is_file():
            return Section(name, {})
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidRequestError(f"{name} is over {_MAX_BYTES} bytes")
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidRequestError(f"{name} is not a JSON object")
        return Section(name, values)

    def _part(self, key: str, alone: Section) -> Section:
        nested = self.processor.section(key)
        return nested if nested.values else alone

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequestError: no tokenizer.json, or one that cannot be read.
        """
        if self._tokenizer is None:
            path = self.directory / "tokenizer.json"
            try:
                self._tokenizer = Tokenizer.from_buffer(path.read_bytes().removeprefix(BOM_UTF8))
            except Exception as error:  # the library raises nothing narrower
                raise InvalidRequestError(f"tokenizer.json cannot be read: {error}") from error
        return self._tokenizer

    def token(self, text: str) -> int:
        """The id of a special token.

        Raises:
            InvalidRequestError: the vocabulary lacks it.
        """
        found = self.tokenizer.token_to_id(text)
        if found is None:
            raise InvalidRequestError(
                f"the tokenizer has no token {text!r}, which the media of a "
                f"{self.config.text('model_type')!r} model need"
            )
        return int(found)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text between special tokens."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def named_token(self, key: str, default: str) -> str:
        """The text of a special token that the tokenizer's configuration names, or `default`."""
        extra = self.tokenizer_config.get("extra_special_tokens")
        if isinstance(extra, dict) and isinstance(extra.get(key), str):
            return str(extra[key])
        return self.tokenizer_config.text(key, default)

    def settings_digest(self, *more: str) -> str:
        """Digest of all processor settings and of `more`, 32 hex digits."""
        parts = [self.processor.values, self.image.values, self.video.values, self.audio.values]
        text = json.dumps([parts, *more], sort_keys=True, separators=(",", ":"))
        return blake3(text.encode()).hexdigest()[:32]
