"""`Runner`: launches the model on the chunks of a step."""

from collections.abc import Sequence as Run

from torch import Tensor

from inlay.engine.torch import prompt_logprobs
from inlay.engine.torch.adapters import LoraAdapters
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.decode_graphs import DecodeGraphs
from inlay.engine.torch.hidden_states import Recorder, StateReader
from inlay.engine.torch.in_flight_step import InFlightStep
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.named_logits import with_named
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.prompt_logprobs import Scored
from inlay.engine.torch.sampling.chooser import TokenChooser


class Runner:
    """A model over its pages, by captured graphs where they fit.

    Args:
        model: the model.
        pages: its keys and values.
        graphs: captured decode steps, or None.
        adapters: the loaded adapters.
        chooser: begins to compute the masks of grammars meanwhile.
        reader: gets hidden states of every step, or None.
    """

    def __init__(
        self,
        model: CausalModel,
        pages: Pages,
        graphs: DecodeGraphs | None,
        adapters: LoraAdapters,
        chooser: TokenChooser,
        reader: StateReader | None,
    ) -> None:
        self._model = model
        self._pages = pages
        self._graphs = graphs
        self._adapters = adapters
        self._chooser = chooser
        self._reader = reader

    def run(self, chunks: Run[ScheduledChunk], before: InFlightStep | None) -> InFlightStep:
        """Launch a step; `before` is the last one, unless it was read."""
        recorder: Recorder | None = None
        scores: dict[ScheduledChunk, Scored] = {}
        asks_more = [chunk for chunk in chunks if chunk.sequence.asks_more]
        if asks_more:
            slots = self._adapters.place(chunk.sequence.request.adapter for chunk in chunks)
            for chunk in chunks:
                chunk.sequence.adapter = slots[chunk.sequence.request.adapter]
            self._chooser.begin_masks(
                chunk for chunk in chunks if chunk.samples and not chunk.sequence.has_pending_token
            )
        if asks_more or self._reader is not None:
            recorder = Recorder.of(chunks, self._reader)
        hidden, logits = self._forward(chunks, before, recorder)
        if asks_more:
            scores = prompt_logprobs.score(self._model, hidden, chunks)
            logits = with_named(self._model, hidden, logits, chunks)
        return InFlightStep(chunks, hidden, logits, scores, recorder)

    def _forward(
        self,
        chunks: Run[ScheduledChunk],
        before: InFlightStep | None,
        recorder: Recorder | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all positions, and the logits of the sampled ones."""
        model = self._model
        batch = Batch.of(chunks, self._pages.page_size, bidirectional=model.bidirectional)
        tokens: Tensor | None = None
        if before is not None and len(batch.pending):
            tokens = before.pending(
                [chunk.sequence for chunk in chunks if chunk.sequence.has_pending_token]
            )
        if recorder is None and self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch, tokens)
        batch = model.upload(batch)
        if tokens is not None:
            batch.token_ids.index_copy_(0, batch.pending, tokens)
        if recorder is None:
            hidden = model.hidden(batch, self._pages)
        else:
            with recorder.capture(model.decoder_layers, model.device):
                hidden = model.hidden(batch, self._pages)
            recorder.end(hidden, len(model.decoder_layers), model.projector)
        return hidden, model.logits(hidden[batch.sampled])
