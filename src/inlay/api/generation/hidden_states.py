"""Hidden states of a request: what it may ask for, what that takes, and how its answer shows them.

Positions whose states are asked for are computed for the request, never read from a cache: no
client is shown what another's request computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import pybase64
from msgspec import Raw
from msgspec.structs import replace

from inlay.api.generation.choices import ChoiceState
from inlay.api.schema.generation import GenerationRequest
from inlay.api.schema.hidden_states import (
    HiddenStatesOptions,
    LayerStates,
    ShownStates,
    StatesFormat,
    StatesPart,
)
from inlay.base.errors import EngineError, InvalidRequestError, PermissionDeniedError
from inlay.http.references import store_for
from inlay.http.server import Call
from inlay.messages.card import ModelCard
from inlay.messages.hidden_states import HiddenStates, hidden_port
from inlay.messages.prompt import DTYPE_SIZES, Buffer, Prompt
from inlay.messages.request import Sampling
from inlay.tensors import read, write
from inlay.tensors.tensor import NUMPY_DTYPES, ReadLimits

MOST_NUMBERS = 512 * 1024
"""Numbers that an answer has in JSON, about 7 MB."""

_FIELD, _LAST_FIELD = "hidden_states", "return_hidden_states"
_NUMBER_BYTES = 14


def may_read_states(call: Call) -> bool:
    """Return True if the caller may read the hidden states of its own requests."""
    own = call.caller.share.hidden_states
    return call.server.settings.enable_hidden_states if own is None else own


@dataclass(frozen=True, slots=True)
class StatesPlan:
    """Hidden states that a request asks for.

    Attributes:
        layers: their numbers from 0, each once.
        part: positions of the prompt, of the output, or of both.
        format: of the answer.
        project: they go through the worker's projector.
        only_last: the answer has the last one as a list of numbers, as SGLang's.
        width: elements of one.
        dtype: of the model.
    """

    layers: tuple[int, ...]
    part: StatesPart
    format: StatesFormat
    project: bool
    only_last: bool
    width: int
    dtype: str

    @classmethod
    def of(cls, call: Call, request: GenerationRequest, card: ModelCard) -> "StatesPlan":
        """Return what a request asks for that asks for some.

        Raises:
            PermissionDeniedError: the caller may not read hidden states.
            InvalidRequestError: the model gives none, or not these.
            NotFoundError: the server has no store for them.
        """
        _check_right(call)
        if request.hidden_states is not None and request.return_hidden_states:
            raise InvalidRequestError(
                "hidden_states and return_hidden_states are two forms of one field; send one",
                param=_LAST_FIELD,
            )
        # SGLang has the last state of the answer.
        field = _FIELD if request.hidden_states is not None else _LAST_FIELD
        asked = request.hidden_states or HiddenStatesOptions(of="output", format="float")
        if card.stage is not None or card.hidden_layers is None:
            what = "is a pipeline" if card.stage is not None else f"runs on {card.engine}"
            raise InvalidRequestError(
                f"{field} are of one model that runs on the torch engine; `{card.name}` {what}",
                param=field,
            )
        if request.best_of is not None and request.best_of > (request.n or 1):
            raise InvalidRequestError(
                f"{field} are not given with best_of ({request.best_of}) above n", param=field
            )
        if asked.project and card.projected_size is None:
            raise InvalidRequestError(
                f"hidden_states.project: the workers of `{card.name}` have no projector "
                "(--hidden-projector)",
                param=f"{_FIELD}.project",
            )
        if asked.format == "ref":
            store_for(call)
        width = card.projected_size if asked.project else card.hidden_size
        return cls(
            layers=_layers(asked.layers, card.hidden_layers),
            part=asked.of or "prompt",
            format=asked.format or "base64",
            project=bool(asked.project),
            only_last=request.hidden_states is None,
            width=width or card.hidden_size,
            dtype=card.dtype,
        )

    @property
    def element_bytes(self) -> int:
        return DTYPE_SIZES[self.dtype]

    def asked_of(self, prompt: Prompt, number: int) -> HiddenStates | None:
        """Return what is asked of the engine for choice `number` of a prompt.

        Those of the prompt alone come with its first choice. A prompt's own positions are counted,
        so that none is of what the worker puts before it.
        """
        output = self.part in ("output", "all")
        if number and not output:
            return None
        kept = {"prompt": len(prompt), "all": len(prompt), "last": 1, "output": 0}[self.part]
        return HiddenStates(layers=self.layers, prompt=kept, output=output, projected=self.project)

    def applied(
        self, call: Call, prompts: Sequence[Prompt], sampling: Sequence[Sampling]
    ) -> list[Sampling]:
        """Return the settings of each choice with what is asked for; reserve memory for it.

        Raises:
            InvalidRequestError: they may come to more than one answer may have.
            OverloadedError: there is no memory for them now; a client's own share is used up.
        """
        per_prompt = len(sampling) // len(prompts)
        found: list[Sampling] = []
        positions = 0
        for index, own in enumerate(sampling):
            prompt = prompts[index // per_prompt]
            asked = self.asked_of(prompt, index % per_prompt)
            if asked is not None:
                positions += len(asked.positions(len(prompt), own.max_tokens))
            found.append(replace(own, hidden_states=asked))
        numbers = positions * len(self.layers) * self.width
        size = numbers * self.element_bytes
        settings = call.server.settings
        field = _LAST_FIELD if self.only_last else _FIELD
        if size > settings.max_hidden_states_bytes:
            raise InvalidRequestError(
                f"{field} of {positions} positions and {len(self.layers)} layers may take "
                f"{size} bytes; allowed: {settings.max_hidden_states_bytes} "
                "(--max-hidden-states-bytes). Fewer layers, a lower max_tokens for those of the "
                "output, or of: last take less",
                param=field,
            )
        shown = len(sampling) * self.width if self.only_last else numbers
        if self.format == "float" and shown > MOST_NUMBERS:
            raise InvalidRequestError(
                f"{field} may come to {shown} numbers in JSON; allowed: {MOST_NUMBERS}. "
                "format base64, safetensors or ref takes more",
                param=field if self.only_last else f"{_FIELD}.format",
            )
        # As they come and joined; joined and as the answer has them; in the answer and in its body.
        bulk = self._shown_bytes(shown)
        call.reservation.grow(max(2 * size, size + bulk, 2 * bulk))
        return found

    async def finish(self, call: Call, choices: Sequence[ChoiceState]) -> int:
        """Give each choice that has ended its hidden states; return their bytes in the answer.

        Raises:
            EngineError: the worker has given others than were asked for.
            RateLimitedError: the caller's part of the store is used up.
            OverloadedError: the store has no room.
        """
        run, numbers = call.server.run_prepared, 0
        for choice in choices:
            asked = choice.request.sampling.hidden_states
            if asked is None:
                continue
            size = sum(len(payload.data) for payload in choice.payloads)
            arrays = await run(size, self._arrays, choice, asked)
            choice.payloads.clear()
            numbers += self.width if self.only_last else sum(map(np.size, arrays.values()))
            if self.format == "ref":
                choice.hidden_states = [
                    replace(_described(layer, array, self.dtype), ref=await _stored(call, array))
                    for layer, array in arrays.items()
                ]
            else:
                choice.hidden_states = await run(size, self._shown, arrays)
        return self._shown_bytes(numbers)

    def _shown_bytes(self, numbers: int) -> int:
        each = {"float": _NUMBER_BYTES, "ref": 0}.get(self.format, self.element_bytes * 4 / 3)
        return int(numbers * each)

    def _arrays(self, choice: ChoiceState, asked: HiddenStates) -> "dict[int, npt.NDArray[Any]]":
        """Return the states of the tokens that are shown, [positions, width], by layer."""
        prompt = len(choice.request.prompt)
        count = len(asked.positions(prompt, choice.completion_tokens))
        found: dict[int, npt.NDArray[Any]] = {}
        for layer in asked.layers:
            port = hidden_port(layer)
            pieces = [payload for payload in choice.payloads if payload.port == port]
            rows = sum(piece.shape[0] for piece in pieces)
            fit = all((piece.dtype, piece.shape[1]) == (self.dtype, self.width) for piece in pieces)
            if rows < count or not fit:
                raise EngineError(
                    f"the worker gave {rows} hidden states of layer {layer}"
                    f"{'' if fit else ' of another form'}; {count} of {self.width} elements in "
                    f"{self.dtype} were asked for"
                )
            data = b"".join(piece.data.view for piece in pieces)
            array = np.frombuffer(data, NUMPY_DTYPES[self.dtype])
            found[layer] = array.reshape(rows, self.width)[:count]
        return found

    def _shown(self, arrays: "dict[int, npt.NDArray[Any]]") -> ShownStates:
        if self.only_last:
            (array,) = arrays.values()
            return cast("ShownStates", _numbers(array[-1]))
        shown: list[LayerStates | float] = []
        for layer, array in arrays.items():
            if self.format == "float":
                data: Any = _numbers(array)
            else:
                raw = array.tobytes() if self.format == "base64" else write(array, "safetensors")
                data = pybase64.b64encode_as_string(raw)
            shown.append(replace(_described(layer, array, self.dtype), data=data))
        return shown


def _check_right(call: Call) -> None:
    if not may_read_states(call):
        raise PermissionDeniedError(
            "hidden_states: this server gives you none. It gives them to all clients with "
            "--enable-hidden-states, or to one key with `hidden_states: true` in --api-key-file"
        )


def _layers(asked: list[int] | None, last: int) -> tuple[int, ...]:
    """Return numbers from 0. Raises `InvalidRequestError` for none, repeated or unknown ones."""
    numbers = [-1] if asked is None else asked
    found = [layer % (last + 1) for layer in numbers if -last - 1 <= layer <= last]
    if not numbers or len(set(found)) < len(numbers):
        raise InvalidRequestError(
            f"hidden_states.layers is {numbers[:16]}; allowed: {-last - 1} to {last}, at least "
            "one, and each once",
            param=f"{_FIELD}.layers",
        )
    return tuple(found)


def _numbers(array: "npt.NDArray[Any]") -> Raw:
    plain = array.astype(np.float32) if array.dtype.itemsize < 4 else np.ascontiguousarray(array)
    return Raw(orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY))


def _described(layer: int, array: "npt.NDArray[Any]", dtype: str) -> LayerStates:
    return LayerStates(layer=layer, shape=(array.shape[0], array.shape[1]), dtype=dtype)


async def _stored(call: Call, array: "npt.NDArray[Any]") -> str:
    """Store states as a prompt of the caller's; return its id."""
    store = store_for(call)
    data = await call.server.run_prepared(array.nbytes, write, array, "safetensors")
    tensor = read(data, limits=ReadLimits(max_bytes=len(data)))
    stored = await store.put(
        call.caller.tenant.id, Buffer(data), tensor, hold=call.reservation.grow
    )
    return stored.id
