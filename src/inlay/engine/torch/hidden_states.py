"""Hidden states of chosen layers and positions, recorded while a step runs.

Layers are numbered as by transformers' `output_hidden_states`: 0 is what the first layer reads, i
the output of the i-th, and the last is behind the model's last norm. Shapes: T positions in the
step, N of them recorded, C hidden size.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Run
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.projector import Projector
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.transfers import Download, upload
from inlay.messages.hidden_states import hidden_port
from inlay.messages.prompt import Buffer
from inlay.messages.request import Payload


class ChunkStates:
    """States of consecutive positions of one sequence, on the host."""

    __slots__ = ("_states", "first", "stop")

    def __init__(self, first: int, stop: int, states: dict[int, Tensor]) -> None:
        """Take [positions, C] by layer."""
        self.first = first
        self.stop = stop
        self._states = states

    def states_for(self, sequence: Sequence) -> tuple[Payload, ...]:
        """Return those that `sequence` has not emitted, a payload for each layer it asks for."""
        wanted = sequence.sampling.hidden_states
        start = max(self.first, sequence.wanted_states.start)
        if wanted is None or start >= self.stop:
            return ()
        sequence.wanted_states = range(self.stop, sequence.wanted_states.stop)
        last = not sequence.wanted_states
        return tuple(
            _payload(hidden_port(layer), self._states[layer][start - self.first :], last)
            for layer in wanted.layers
        )


class StateReader(Protocol):
    """A reader of the states of all positions of every step, on the device."""

    @property
    def layers(self) -> tuple[int, ...]:
        """As above."""

    def observe(self, chunks: Run[ScheduledChunk], states: Run[Tensor]) -> None:
        """Take the states of a step, [T, C] for each of `layers`."""


class Recorder:
    """Hidden states of one step that requests, or a reader, want."""

    def __init__(
        self,
        layers: Run[int],
        parts: Run[tuple[ScheduledChunk, int, int, int]],
        chunks: Run[ScheduledChunk] = (),
        reader: StateReader | None = None,
    ) -> None:
        """Use `of`.

        Args:
            layers: numbers of the layers to record.
            parts: of each chunk that wants some: (it, first position, number of positions, index of
                the first in the step).
            chunks: of the step.
            reader: gets all positions of the layers that it reads.
        """
        self._layers = layers
        self._parts = parts
        self._chunks = chunks
        self._reader = reader
        self._count = sum(chunk.count for chunk in chunks)
        indices = [torch.arange(at, at + count) for _, _, count, at in parts]
        self._index = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64)
        self._found: dict[int, Tensor] = {}
        self._whole: dict[int, Tensor] = {}
        self._told: dict[bool, Download] = {}

    @classmethod
    def of(
        cls, chunks: Run[ScheduledChunk], reader: StateReader | None = None
    ) -> "Recorder | None":
        """Return the recorder of a step; None if neither a chunk of it nor a reader wants any."""
        offsets = accumulate((chunk.count for chunk in chunks), initial=0)
        layers: set[int] = set()
        parts: list[tuple[ScheduledChunk, int, int, int]] = []
        for chunk, offset in zip(chunks, offsets, strict=False):
            wanted = chunk.sequence.wanted_states
            first = max(chunk.start, wanted.start)
            count = min(chunk.start + chunk.count, wanted.stop) - first
            if count > 0 and chunk.sequence.sampling.hidden_states is not None:
                parts.append((chunk, first, count, offset + first - chunk.start))
                layers.update(chunk.sequence.sampling.hidden_states.layers)
        wanted_at_all = parts or reader is not None
        return cls(sorted(layers), parts, chunks, reader) if wanted_at_all else None

    @contextmanager
    def capture(self, layers: Run[nn.Module], device: torch.device) -> Iterator[None]:
        """Record what passes between the decoder layers of a model within this context."""
        self._index = upload(self._index, device)
        hooks = []
        for layer in sorted({*self._layers, *self._read_layers}):
            if layer == 0:
                hooks.append(
                    layers[0].register_forward_pre_hook(self._take_input, with_kwargs=True)
                )
            elif layer < len(layers):
                hooks.append(layers[layer - 1].register_forward_hook(self._taker(layer)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def end(self, hidden: Tensor, num_layers: int, projector: Projector | None) -> None:
        """Start the copies to the host, with the last states [T, C] of the step; tell the reader.

        Args:
            hidden: the last states.
            num_layers: of the model.
            projector: makes rows of the states that are asked for projected; None: they stay.
        """
        if num_layers in self._layers or num_layers in self._read_layers:
            self._put(num_layers, hidden[None])
        if self._reader is not None:
            self._reader.observe(self._chunks, [self._whole[each] for each in self._read_layers])
        states = [self._found[layer] for layer in self._layers]
        for projected in {_projected(chunk) for chunk, *_ in self._parts}:
            through = projector if projected else None
            self._told[projected] = Download(*(states if through is None else map(through, states)))

    def read(self) -> dict[ScheduledChunk, ChunkStates]:
        """Return the states of each chunk that wants some. Waits for the device."""
        told = {projected: download.wait() for projected, download in self._told.items()}
        found: dict[ScheduledChunk, ChunkStates] = {}
        row = 0
        for chunk, first, count, _ in self._parts:
            states = {
                layer: tensor[row : row + count]
                for layer, tensor in zip(self._layers, told[_projected(chunk)], strict=True)
            }
            found[chunk] = ChunkStates(first, first + count, states)
            row += count
        return found

    def _take_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._put(0, args[0] if args else kwargs["hidden_states"])

    def _taker(self, layer: int) -> Any:
        def take(_: nn.Module, __: Any, output: Any) -> None:
            self._put(layer, output[0] if isinstance(output, tuple) else output)

        return take

    @property
    def _read_layers(self) -> tuple[int, ...]:
        return () if self._reader is None else self._reader.layers

    def _put(self, layer: int, states: Tensor) -> None:
        # Copies: later layers may add to the same memory.
        if layer in self._layers:
            self._found[layer] = states[0].index_select(0, self._index)
        if layer in self._read_layers:
            self._whole[layer] = states[0, : self._count].clone()


def _projected(chunk: ScheduledChunk) -> bool:
    wanted = chunk.sequence.sampling.hidden_states
    return wanted is not None and wanted.projected


def _payload(port: str, rows: Tensor, last: bool) -> Payload:
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return Payload(
        port, str(rows.dtype).removeprefix("torch."), tuple(rows.shape), Buffer(data), last
    )
