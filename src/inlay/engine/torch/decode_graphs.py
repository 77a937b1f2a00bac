"""Decode steps as captured CUDA graphs.

A step with one token per sequence is launched at once: look-up, body and head.

A graph always uses the same memory, so there is one graph for each of a few numbers of sequences,
and a step takes the smallest that fits. Its inputs are in one tensor, which is filled on the host
and copied. Missing sequences are padding: each has position 0 of the last page, which no sequence
is ever given, and sees only itself.

The capture function is injected. One that runs the function directly makes all of this testable on
a CPU.

Shapes: B sequences of a graph, W pages of the longest sequence, N page groups, C hidden size.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.varlen import Lengths, VarlenAttention, does, reads_pages
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.cache.kv_layout import EngineLimits, pages_for
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.transfers import upload
from inlay.errors import EngineError

_logger = logging.getLogger(__name__)

MOST_SEQUENCES = 512
"""Maximum number of sequences of a graph: beyond, launch overhead is small."""


class Capture(Protocol):
    """Captures a function as a graph."""

    def __call__(self, function: Callable[[], None], /) -> Callable[[], None]:
        """Return a function that repeats what `function` does now, on the same memory."""
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory: only one of them runs at a time.

    Not run on a GPU yet.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None], /) -> Callable[[], None]:
        """Warm up `function` twice on a side stream, as torch requires, then capture it.

        Raises:
            EngineError: CUDA could not capture it.
        """
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        aside.wait_stream(current)
        try:
            with torch.cuda.stream(aside):
                for _ in range(2):
                    function()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError as error:
            raise EngineError(
                f"decoding could not be captured as a CUDA graph: {error}; --enforce-eager does "
                "without"
            ) from error
        replay: Callable[[], None] = graph.replay
        return replay


class _Inputs(NamedTuple):
    """Inputs of a graph: views of one int64 tensor.

    Attributes:
        memory: the whole tensor.
        token_ids: [B] int64.
        positions: [B] int64.
        rope: [3, B] int64, of models that number positions by three axes; else [0, B].
        slots: [N, B] int64.
        contexts: [B] int32, number of positions of each sequence including this one.
        block_table: [N, B, W] int32.
    """

    memory: Tensor
    token_ids: Tensor
    positions: Tensor
    rope: Tensor
    slots: Tensor
    contexts: Tensor
    block_table: Tensor

    @classmethod
    def of(
        cls,
        device: torch.device,
        size: int,
        groups: int,
        width: int,
        axes: int,
        *,
        pinned: bool = False,
    ) -> "_Inputs":
        """Return zeros for `size` sequences and `axes` rotary positions of each."""
        pairs = -(-size // 2), -(-groups * size * width // 2)
        sizes = [size, size, axes * size, groups * size, *pairs]
        memory = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        token_ids, positions, rope, slots, contexts, table = memory.split_with_sizes(sizes)
        return cls(
            memory,
            token_ids,
            positions,
            rope.view(axes, size),
            slots.view(groups, size),
            contexts.view(torch.int32)[:size],
            table.view(torch.int32)[: groups * size * width].view(groups, size, width),
        )


class _Graph(NamedTuple):
    """One captured step.

    Attributes:
        inputs: its inputs.
        replay: runs it.
    """

    inputs: _Inputs
    replay: Callable[[], None]


class _FlashOnly:
    """Flash attention without any dependence on the data in tensors.

    Other implementations depend on it, and cannot be captured.

    Attributes:
        kinds: (dtype, head size, has a window, has sinks) of the layers it was called for.
    """

    def __init__(self, varlen: VarlenAttention) -> None:
        self.kinds: set[tuple[torch.dtype, int, bool, bool]] = set()
        self._varlen = varlen

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does.

        Raises `EngineError` for a layer that flash attention does not support.
        """
        if not does(key, value, scoring):
            raise EngineError(f"layer {layer} asks for what flash attention does not do")
        self.kinds.add(
            (key.dtype, key.shape[2], scoring.window is not None, scoring.sinks is not None)
        )
        return self._varlen.attend(layer, query, key, value, scoring)


class DecodeGraphs:
    """The captured decode steps of one model and its pages.

    Outputs are valid until the next step.
    """

    def __init__(
        self, model: CausalModel, pages: Pages, bounds: EngineLimits, capture: Capture
    ) -> None:
        """Capture, the largest first, so that smaller graphs reuse its memory.

        Args:
            model: the model.
            pages: its keys and values; the last page must be unused by others.
            bounds: maximum number of sequences in a step, and of positions in a sequence.
            capture: captures a function.

        Raises:
            EngineError: capturing failed.
        """
        self._model = model
        self._pages = pages
        self._width = pages_for(bounds.max_model_len, pages.page_size)
        self._max_context = bounds.max_model_len
        most = min(bounds.max_num_seqs, MOST_SEQUENCES)
        self._hidden = torch.empty(most, model.hidden_size, dtype=model.dtype, device=model.device)
        self._logits = torch.empty(most, model.vocab_size, dtype=torch.float32, device=model.device)
        pages.scrub([pages.num_pages])
        self._graphs: dict[int, _Graph] = {}
        for size in reversed(sizes(most)):
            inputs = self._new_inputs(size)
            inputs.memory.copy_(self._filled(size, None).memory)
            self._graphs[size] = _Graph(inputs, capture(self._step(inputs)))

    @classmethod
    def of(
        cls, model: CausalModel, pages: Pages, bounds: EngineLimits, capture: Capture
    ) -> "DecodeGraphs | None":
        """Create them; None, with a log line, if the model cannot be captured."""
        reason = reason_unsupported(model, pages, bounds)
        if reason is not None:
            _logger.warning("decoding runs without graphs: %s", reason)
            return None
        return cls(model, pages, bounds, capture)

    def fits(self, batch: Batch) -> bool:
        """Return True if there is a graph for `batch`.

        It must have one token per sequence, all must sample, and none may use an adapter.
        """
        count = len(batch.token_ids)
        whole = len(batch.sampled) == len(batch.counts) == count <= len(self._hidden)
        return whole and not len(batch.row_index) and not batch.adapters

    def run(self, batch: Batch, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute a batch for which `fits` is true.

        Args:
            batch: batch on the host.
            chosen: [number of pending sequences] int64, on the device: their tokens; None if no
                token is pending.

        Returns:
            As `CausalModel.hidden` and `CausalModel.logits`; the next step overwrites the memory.
        """
        count = len(batch.token_ids)
        size = min(size for size in self._graphs if size >= count)
        graph = self._graphs[size]
        # New pinned memory for each step: torch does not reuse it before its copy is done.
        graph.inputs.memory.copy_(self._filled(size, batch).memory, non_blocking=True)
        if chosen is not None:
            graph.inputs.token_ids.index_copy_(0, upload(batch.pending, chosen.device), chosen)
        graph.replay()
        return self._hidden[:count], self._logits[:count]

    def _new_inputs(self, size: int) -> _Inputs:
        return _Inputs.of(
            self._model.device, size, len(self._model.page_groups), self._width, _axes(self._model)
        )

    def _filled(self, size: int, batch: Batch | None) -> _Inputs:
        """Return the inputs of `size` sequences on the host: those of `batch`, then padding."""
        groups = len(self._model.page_groups)
        host = _Inputs.of(
            torch.device("cpu"),
            size,
            groups,
            self._width,
            _axes(self._model),
            pinned=self._model.device.type == "cuda",
        )
        count = 0
        if batch is not None:
            count = len(batch.token_ids)
            host.token_ids[:count] = batch.token_ids
            host.positions[:count] = batch.positions
            if batch.rope is not None:
                host.rope[:, :count] = batch.rope
            host.slots[:, :count] = batch.slots
            host.contexts[:count] = torch.tensor(batch.contexts, dtype=torch.int32)
            host.block_table[:, :count, : batch.block_table.shape[2]] = batch.block_table
        host.slots[:, count:] = self._pages.num_pages * self._pages.page_size
        host.contexts[count:] = 1
        host.block_table[:, count:, 0] = self._pages.num_pages
        return host

    def _step(self, inputs: _Inputs) -> Callable[[], None]:
        """Return the function that computes the outputs from `inputs`."""
        size = len(inputs.token_ids)
        batch, paged = _batch(inputs, self._pages, self._max_context)

        @torch.inference_mode()
        def step() -> None:
            hidden = self._model.hidden(batch, self._pages, paged)
            self._hidden[:size].copy_(hidden)
            self._model.logits(hidden, self._logits[:size])

        return step


def sizes(most: int) -> list[int]:
    """Return the numbers of sequences to capture: powers of two, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def reason_unsupported(model: CausalModel, pages: Pages, bounds: EngineLimits) -> str | None:
    """Return the reason why decoding cannot be captured, or None.

    A step is rehearsed on meta tensors: code that depends on data fails there.
    """
    inputs = _Inputs.of(
        model.device,
        2,
        len(model.page_groups),
        pages_for(bounds.max_model_len, pages.page_size),
        _axes(model),
    )
    batch, paged = _batch(inputs, pages, bounds.max_model_len)
    try:
        model.rehearse(batch, pages, paged)
    except (RuntimeError, EngineError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    for dtype, size, windowed, sunk in sorted(paged.kinds, key=str):
        if not reads_pages(
            model.device, dtype, size, pages.page_size, windowed=windowed, sunk=sunk
        ):
            return "flash attention does not read pages here"
    return None


def _axes(model: CausalModel) -> int:
    """Return the number of rotary positions of a position; 0 where it is one, the position."""
    return model.rope_axes if model.rope_axes > 1 else 0


def _batch(inputs: _Inputs, pages: Pages, max_context: int) -> tuple[Batch, _FlashOnly]:
    """Return the batch that views `inputs`, and its attention."""
    size = len(inputs.token_ids)
    device = inputs.memory.device
    batch = Batch(
        inputs.token_ids,
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty(0, 0, device=device),
        inputs.positions,
        inputs.slots,
        torch.arange(size, device=device),
        torch.empty(0, dtype=torch.int64, device=device),
        inputs.block_table,
        (1,) * size,
        (max_context,) * size,
        rope=inputs.rope if len(inputs.rope) else None,
    )
    starts = torch.arange(size + 1, dtype=torch.int32, device=device)
    return batch, _FlashOnly(
        VarlenAttention(batch, pages, Lengths(starts, inputs.contexts, 1, max_context))
    )


__all__ = [
    "MOST_SEQUENCES",
    "Capture",
    "CudaCapture",
    "DecodeGraphs",
    "reason_unsupported",
    "sizes",
]
