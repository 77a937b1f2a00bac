"""Hidden states of an answer, as a client reads them and sends them on to another model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from inlay.base.errors import InvalidRequestError
from inlay.client.prompts import EmbeddedPrompt, as_completion_args, loads
from inlay.tensors.tensor import NUMPY_DTYPES


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states of one layer, which may be the prompt of another model.

    Attributes:
        layer: its number; 0 is what the first layer reads.
        shape: number of positions, and elements of each.
        ref: id of the stored prompt that they are, or None.
        prompt: their rows; None where they were stored.
    """

    layer: int
    shape: tuple[int, int]
    ref: str | None = None
    prompt: EmbeddedPrompt | None = None

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """The states, of `shape`. Raises `InvalidRequestError` where they were stored."""
        return self._here().rows

    def chat_part(self) -> Any:
        """A part for a chat message's `content` list."""
        return {"type": "prompt_embeds", **self._source()}

    def completion_args(self) -> dict[str, Any]:
        """Keyword arguments for `client.completions.create`, beside `model` and others."""
        return as_completion_args(self._source())

    def _source(self) -> dict[str, str]:
        return {"ref": self.ref} if self.ref is not None else self._here().source()

    def _here(self) -> EmbeddedPrompt:
        if self.prompt is None:
            raise InvalidRequestError(
                f"the hidden states of layer {self.layer} are stored as {self.ref!r}; formats "
                "base64, float and safetensors bring their numbers"
            )
        return self.prompt


def hidden_states(answer: Any) -> list[HiddenStates]:
    """Return the hidden states in an answer, in the order of the layers that were asked for.

    Args:
        answer: what has the field `hidden_states`: a choice, the delta of a stream's event, or a
            response of the `openai` client; or the same as a mapping.

    Raises:
        InvalidRequestError: it has none, or only numbers of one vector, as SGLang's clients ask.
    """
    found = (
        answer.get("hidden_states")
        if isinstance(answer, Mapping)
        else getattr(answer, "hidden_states", None)
    )
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise InvalidRequestError(
            "the answer has no hidden states by layer; ask for them with "
            '`extra_body={"hidden_states": {...}}`'
        )
    return [_read(one) for one in found]


def _read(one: Mapping[str, Any]) -> HiddenStates:
    layer, shape, data = one["layer"], (one["shape"][0], one["shape"][1]), one.get("data")
    if data is None:
        return HiddenStates(layer, shape, ref=one["ref"])
    dtype = NUMPY_DTYPES[one["dtype"]]
    if isinstance(data, list):
        return HiddenStates(layer, shape, prompt=EmbeddedPrompt(np.array(data, dtype)))
    raw = pybase64.b64decode(data, validate=True)
    if len(raw) == shape[0] * shape[1] * np.dtype(dtype).itemsize:
        return HiddenStates(
            layer, shape, prompt=EmbeddedPrompt(np.frombuffer(raw, dtype).reshape(shape))
        )
    (prompt,) = loads(raw)
    return HiddenStates(layer, shape, prompt=prompt)
