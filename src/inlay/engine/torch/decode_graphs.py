"""Decode steps as captured CUDA graphs.

A step with one token per sequence is launched at once: look-up, body and head.

A graph always uses the same memory, so there is one graph for each of a few numbers of sequences,
and a step takes the smallest that fits. Its inputs are in two tensors, which are filled on the host
and copied: block tables, of which only the columns in use are, and the rest. Missing sequences are
padding: each has position 0 of the last page, which no sequence is ever given, and sees only
itself.

The capture function is injected. One that runs the function directly makes all of this testable on
a CPU.

Shapes: B sequences of a graph, W pages of the longest sequence, N page groups, C hidden size.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor

from inlay.base.errors import EngineError
from inlay.engine.torch.attention.choice import cuda_kernels, with_kernels
from inlay.engine.torch.attention.cuda import CudaKernels, Sequences
from inlay.engine.torch.attention.paged import PagedAttention
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.cache.kv_layout import EngineLimits, pages_for
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check.graphs import graph_distance
from inlay.engine.torch.self_check.judgement import BOUND
from inlay.engine.torch.transfers import upload

_logger = logging.getLogger(__name__)

GRAPHS = "decode graphs"
"""Name of the graphs among what the check at start leaves out."""

MOST_SEQUENCES = 512
"""Maximum number of sequences of a graph: beyond, launch overhead is small."""


Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a function; returns one that repeats what it does now, on the same memory."""


class CudaCapture:
    """CUDA graphs that share one pool of memory: only one of them runs at a time.

    Not run on a GPU yet.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace for each stream that it has seen.
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None], /) -> Callable[[], None]:
        """Warm up `function` twice on a side stream, as torch requires, then capture it.

        Raises:
            EngineError: CUDA could not capture it.
        """
        current = torch.cuda.current_stream()
        self._aside.wait_stream(current)
        try:
            with torch.cuda.stream(self._aside):
                for _ in range(2):
                    function()
            current.wait_stream(self._aside)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
            ):
                function()
        except RuntimeError as error:
            raise EngineError(
                f"decoding could not be captured as a CUDA graph: {error}; --enforce-eager does "
                "without"
            ) from error
        replay: Callable[[], None] = graph.replay
        return replay


class _GraphInputs(NamedTuple):
    """Inputs of a graph: views of one int64 tensor, and the block tables.

    Attributes:
        memory: the whole of that tensor.
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
    ) -> "_GraphInputs":
        """Return zeros for `size` sequences of `width` pages and `axes` rotary positions."""
        sizes = [size, size, axes * size, groups * size, -(-size // 2)]
        memory = torch.zeros(sum(sizes), dtype=torch.int64, device=device, pin_memory=pinned)
        token_ids, positions, rope, slots, contexts = memory.split_with_sizes(sizes)
        table = torch.zeros(
            groups, size, width, dtype=torch.int32, device=device, pin_memory=pinned
        )
        return cls(
            memory,
            token_ids,
            positions,
            rope.view(axes, size),
            slots.view(groups, size),
            contexts.view(torch.int32)[:size],
            table,
        )

    def fill(self, host: "_GraphInputs") -> None:
        """Copy inputs from the host, whose tables may be narrower. Does not wait."""
        self.memory.copy_(host.memory, non_blocking=True)
        # What is beyond is of earlier steps, and beyond the sequences' positions.
        self.block_table[..., : host.block_table.shape[2]].copy_(
            host.block_table, non_blocking=True
        )


class _Graph(NamedTuple):
    """One captured step.

    Attributes:
        inputs: its inputs.
        step: what was captured; it holds all other tensors that the graph reads.
        replay: runs it.
    """

    inputs: _GraphInputs
    step: Callable[[], None]
    replay: Callable[[], None]


class DecodeGraphs:
    """The captured decode steps of one model and its pages.

    Outputs are valid until the next step.
    """

    def __init__(
        self,
        model: CausalModel,
        pages: Pages,
        bounds: EngineLimits,
        capture: Capture,
        kernels: CudaKernels,
    ) -> None:
        """Capture, the largest first, so that smaller graphs reuse its memory.

        Args:
            model: the model.
            pages: its keys and values; the last page must be unused by others.
            bounds: maximum number of sequences in a step, and of positions in a sequence.
            capture: captures a function.
            kernels: of its layers.

        Raises:
            EngineError: capturing failed.
        """
        self._model = model
        self._pages = pages
        self._width = pages_for(bounds.max_model_len, pages.page_size)
        self._kernels = kernels
        most = min(bounds.max_num_seqs, MOST_SEQUENCES)
        self._hidden = torch.empty(most, model.hidden_size, dtype=model.dtype, device=model.device)
        self._logits = torch.empty(most, model.vocab_size, dtype=torch.float32, device=model.device)
        pages.scrub([pages.num_pages])
        self._graphs: dict[int, _Graph] = {}
        for size in reversed(sizes(most)):
            inputs = self._new_inputs(model.device, size, self._width)
            inputs.fill(self._filled(size, None))
            step = self._step(inputs)
            self._graphs[size] = _Graph(inputs, step, capture(step))

    @classmethod
    def of(
        cls, model: CausalModel, pages: Pages, bounds: EngineLimits, capture: Capture
    ) -> "DecodeGraphs | None":
        """Create them; None, with a log line, if the model cannot be captured, or is not right."""
        kernels = cuda_kernels()
        if kernels is None:
            return None
        reason = reason_unsupported(model, pages, bounds)
        if reason is not None:
            _logger.warning("decoding runs without graphs: %s", reason)
            return None
        found = cls(model, pages, bounds, capture, kernels)
        return found if found._agree() else None

    def _agree(self) -> bool:
        """Compare the graphs with launched steps; False, with a log line, if they differ."""
        model = self._model
        check = model.self_check
        if check is None:
            return True
        counts = sorted(self._graphs)
        # One that is smaller than its graph has padding.
        counts += [count - 1 for count in counts if count > 2]
        distance = graph_distance(model, self._pages, self.run, counts, check.noise)
        if distance <= BOUND:
            return True
        _logger.warning(
            "decoding runs without graphs: their logits differ by %.3g of the model's rounding "
            "(allowed: %g)",
            distance, BOUND,
        )  # fmt: skip
        left_out = tuple(dict.fromkeys((*check.left_out, GRAPHS)))
        result = "reduced" if check.result == "passed" else check.result
        model.self_check = replace(check, result=result, left_out=left_out)
        return False

    def fits(self, batch: Batch) -> bool:
        """Return True if there is a graph for `batch`.

        It must have one token per sequence, all must sample, and none may use an adapter. Nor may
        a state depend on what is sampled.
        """
        count = len(batch.token_ids)
        whole = len(batch.sampled) == len(batch.counts) == count <= len(self._hidden)
        settled = not (self._model.recurrent and any(batch.uncertain))
        return whole and settled and not len(batch.row_index) and not batch.adapters

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
        graph.inputs.fill(self._filled(size, batch))
        if chosen is not None:
            graph.inputs.token_ids.index_copy_(0, upload(batch.pending, chosen.device), chosen)
        graph.replay()
        return self._hidden[:count], self._logits[:count]

    def _new_inputs(self, device: torch.device, size: int, width: int) -> _GraphInputs:
        on_gpu = self._model.device.type == "cuda"
        return _GraphInputs.of(
            device,
            size,
            len(self._model.page_groups),
            width,
            _axes(self._model),
            pinned=on_gpu and device.type == "cpu",
        )

    def _filled(self, size: int, batch: Batch | None) -> _GraphInputs:
        """Return the inputs of `size` sequences on the host: those of `batch`, then padding."""
        width = 1 if batch is None else batch.block_table.shape[2]
        host = self._new_inputs(torch.device("cpu"), size, width)
        count = 0
        if batch is not None:
            count = len(batch.token_ids)
            host.token_ids[:count] = batch.token_ids
            host.positions[:count] = batch.positions
            if batch.rope is not None:
                host.rope[:, :count] = batch.rope
            host.slots[:, :count] = batch.slots
            host.contexts[:count] = torch.tensor(batch.contexts, dtype=torch.int32)
            host.block_table[:, :count] = batch.block_table
        host.slots[:, count:] = self._pages.num_pages * self._pages.page_size
        host.contexts[count:] = 1
        host.block_table[:, count:, 0] = self._pages.num_pages
        return host

    def _step(self, inputs: _GraphInputs) -> Callable[[], None]:
        """Return the function that computes the outputs from `inputs`."""
        size = len(inputs.token_ids)
        batch, paged = _batch(inputs, self._pages, self._kernels)

        @torch.inference_mode()
        def step() -> None:
            hidden = self._model.hidden(batch, self._pages, paged)
            self._hidden[:size].copy_(hidden)
            self._model.logits(hidden, self._logits[:size])

        return step


_SILENT = CudaKernels(lambda *_: None, lambda *_: None, lambda gate_up, *, gelu: gate_up)
"""Kernels that compute nothing, of attention."""


def sizes(most: int) -> list[int]:
    """Return the numbers of sequences to capture: 1, 2, 4, every 8, and `most`."""
    return [*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most]


def reason_unsupported(model: CausalModel, pages: Pages, bounds: EngineLimits) -> str | None:
    """Return the reason why decoding cannot be captured, or None.

    A step is rehearsed on meta tensors, without the kernels of attention: code that depends on data
    fails there.
    """
    inputs = _GraphInputs.of(
        model.device,
        2,
        len(model.page_groups),
        pages_for(bounds.max_model_len, pages.page_size),
        _axes(model),
    )
    batch, paged = _batch(inputs, pages, _SILENT)
    try:
        model.trace_on_meta(batch, pages, paged)
    except (RuntimeError, EngineError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _axes(model: CausalModel) -> int:
    """Return the number of rotary positions of a position; 0 where it is one, the position."""
    return model.rope_axes if model.rope_axes > 1 else 0


def _batch(
    inputs: _GraphInputs, pages: Pages, kernels: CudaKernels
) -> tuple[Batch, PagedAttention]:
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
        # Only the device knows them.
        (1,) * size,
        rope=inputs.rope if len(inputs.rope) else None,
    )
    starts = torch.arange(size + 1, dtype=torch.int32, device=device)
    sequences = Sequences(starts, inputs.contexts, size, single=True, several=False)
    return batch, with_kernels(batch, pages, kernels, sequences)
