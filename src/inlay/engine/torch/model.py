"""A transformers causal language model over paged keys and values, with embeddings as input."""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.model_files import default_sampling, eos_token_ids, generation_config
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.attention.choice import attention, kernels_on
from inlay.engine.torch.attention.chunks import see_chunks
from inlay.engine.torch.attention.layers import least_page_size, observe
from inlay.engine.torch.attention.paged import IMPLEMENTATION, PagedAttention, WithLargestWindow
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.recurrent import RecurrentStates, keep_states
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.batch import Batch, Workspace
from inlay.engine.torch.body_arguments import has_inputs_per_layer, inner_features
from inlay.engine.torch.cache.kv_layout import page_groups
from inlay.engine.torch.checks import check_recurrent
from inlay.engine.torch.lora import LoraBank, Selection
from inlay.engine.torch.native import kernels
from inlay.engine.torch.projector import Projector
from inlay.engine.torch.self_check.judgement import judge
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.self_check.shadow import shadow_of
from inlay.engine.torch.self_check.shares import ShareMessages
from inlay.engine.torch.self_check.start import Steps, Subject, checked
from inlay.engine.torch.tensor_parallel import commands
from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.engine.torch.tensor_parallel.sharding import is_divided, shard
from inlay.engine.torch.weights import division
from inlay.engine.torch.weights.checkpoint import device_of, dtype_of, load, parsed_config
from inlay.engine.torch.weights.families import (
    PER_LAYER,
    check_positions,
    check_windows,
    context_length,
    family_of,
)
from inlay.engine.torch.weights.fused import fuse, fuse_on_gpu
from inlay.engine.torch.weights.gguf import block_products
from inlay.engine.torch.weights.invariance import make_invariant
from inlay.engine.torch.weights.joint import joint
from inlay.engine.torch.weights.latent import keep_latent
from inlay.engine.torch.weights.linear import accelerate, least_rows
from inlay.engine.torch.weights.media_families import ImageFamily
from inlay.engine.torch.weights.quantised.reading import dequantise
from inlay.engine.weights import directory_of, weights_id
from inlay.messages.card import SelfCheck
from inlay.tensors.checkpoint import config_of
from inlay.tensors.table import EmbeddingTable

_logger = logging.getLogger(__name__)


class CausalModel:
    """A loaded model.

    Attributes:
        path: local directory of the model, with tokenizer and chat template.
        dtype, device: of activations, weights, keys and values.
        vocab_size: width of the logits.
        hidden_size: elements of an embedding vector.
        embedding: look-up of ids, with the model's own scale.
        max_model_len: most positions of a sequence.
        layers: shape of each layer's keys and values, or state.
        recurrent: some layers keep a state.
        least_page_size: least positions of a page.
        lora: adapter slots, or None.
        page_groups: layers that share pages.
        windows: window of each page group.
        eos_token_ids: the model's own end tokens.
        default_sampling: fields of `Sampling` set by its generation config.
        activations: what products round to, as `BlockProducts.rounding`; "" for nothing.
        weights_id: identity of configuration, weights and `activations`, 32 hex digits.
        embedding_table_id: identity of the input embedding table, 32 hex digits.
        embedding_abs_max: the table's largest absolute value, after the model's own scale.
        refuses_rows: why embedding vectors cannot be prompts, or None.
        takes_media: its prompts may hold images.
        tower: transformers module that computes image features; None without images, or where
            other workers encode them.
        rope_axes, bidirectional: as in `ImageFamily`.
        named_head: its head for some ids in float32, or None.
        decoder_layers: in their order; none where the body has them otherwise.
        projector: of the hidden states that requests ask for, or None.
        group: the ranks that have a share of the model each, or None.
        batch_invariant: a position's bits depend neither on what is beside it nor on chunks.
        self_check: result of the check at start; None without one.
    """

    def __init__(
        self,
        model: Any,
        tower: Any,
        family: ImageFamily,
        directory: Path,
        generation: dict[str, Any],
        max_model_len: int,
        check: ModuleCheck,
        lora: LoraBank | None = None,
        *,
        language_only: bool = False,
        group: TensorParallelGroup | None = None,
        batch_invariant: bool | None = None,
        activations: str = "",
    ) -> None:
        """Wrap the parts of a transformers model (`split_tower`); use `load`.

        Raises:
            InvalidRequestError: its attention layers use an unsupported option, or it cannot be
                `batch_invariant`.
        """
        self.takes_media = tower is not None
        if tower is not None:
            dequantise(tower)
        self.tower = None if language_only else tower
        self.group = group
        if group is not None:
            shard(model, group)
            model.to(group.device)
        keep_latent(model, lora)
        native = kernels() if model.device.type == "cpu" else None
        # Adapters of many positions are faster as products of torch.
        free = native is not None and native.invariance_is_free and lora is None
        self.batch_invariant = free if batch_invariant is None else batch_invariant
        accelerate(model, family.fused, lora, check, invariant=self.batch_invariant)
        if lora is not None and family.language is not None:
            # Adapters name modules as they are in the whole model.
            lora.rename(
                "model.",
                f"{family.language}.model." if family.own_head else f"model.{family.language}.",
            )
        self.lora = lora
        config = model.config.get_text_config()
        table = EmbeddingTable.open(directory)
        self._model = model
        self._head = division.head_of(model)
        self.named_head = division.NamedHead.of(model) if not activations else None
        self._divided_head = is_divided(model)
        self.embedding: nn.Module = model.base_model.get_input_embeddings()
        self._float32_scores = family.float32_scores
        self._workspace = Workspace()
        self._unsettled: RecurrentStates | None = None
        self._least_rows = least_rows(model)
        self.path = str(directory)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.vocab_size: int = config.vocab_size
        self.check_width = self.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_model_len = max_model_len
        self.recurrent = keep_states(model)
        self._tells_places = see_chunks(model)
        self.layers: tuple[LayerShape, ...] = observe(model.base_model, recurrent=self.recurrent)
        self.least_page_size = least_page_size(self.layers, self.dtype)
        check_windows(config, self.layers)
        self.page_groups = page_groups(self.layers, max_model_len)
        self.decoder_layers: tuple[nn.Module, ...] = tuple(getattr(model.base_model, "layers", ()))
        self.projector: Projector | None = None
        self.windows = tuple(group.window for group in self.page_groups)
        if native is not None and native.serve(model.dtype):
            fuse(model, self.layers, native, check)
        elif (on_gpu := kernels_on(model.device)) is not None:
            fuse_on_gpu(model, self.layers, on_gpu, check)
        self.body: Any = joint(model.base_model, native, check.known)
        if self.batch_invariant and (reason := make_invariant(model, native, group)) is not None:
            if batch_invariant:
                raise InvalidRequestError(f"--batch-invariant: {reason}", param="batch_invariant")
            self.batch_invariant = False
        self.eos_token_ids = eos_token_ids(generation, config.eos_token_id)
        self.default_sampling = default_sampling(generation)
        self.activations = activations
        self.weights_id = weights_id(directory, activations)
        self.embedding_table_id = table.id
        self.embedding_abs_max = table.abs_max()
        self._per_layer = has_inputs_per_layer(config)
        self.refuses_rows = PER_LAYER if self._per_layer else family.refuses_rows
        self.rope_axes = family.rope_axes
        self.bidirectional = family.bidirectional
        self.self_check: SelfCheck | None = None

    @classmethod
    def load(
        cls, settings: EngineSettings, group: TensorParallelGroup | None = None
    ) -> "CausalModel":
        """Load the model that `settings` names, and set the number of CPU threads.

        Raises:
            InvalidRequestError: an unsupported model, dtype or context length; the message says
                what is allowed.
        """
        directory = directory_of(settings.model.model, settings.model.revision)
        config, lora = config_of(directory), settings.adapters
        family = family_of(config)
        device = device_of(settings.model.device) if group is None else group.device
        check_recurrent(settings.devices, family)
        if family.language is None:
            context_length(settings.batch.max_model_len, config)
        if device.type == "cpu":
            processes = 1 if group is None else threads.bind(group.rank, group.size)
            torch.set_num_threads(threads.count(settings.devices.num_threads, processes))
        parsed = parsed_config(directory)
        text = parsed.get_text_config()
        max_model_len = context_length(settings.batch.max_model_len, text.to_dict())
        check_positions(text, max_model_len, recurrent=family.recurrent)
        follows = group is not None and group.rank > 0
        without_tower = settings.media.language_model_only or follows
        language_only = family.language is not None and without_tower
        if language_only:
            division.drop_tower_layers(parsed)

        dtype = dtype_of(settings.model.dtype, config, device)
        blocks = block_products(settings, directory, device)
        activations = "" if blocks is None else blocks.rounding

        def read() -> tuple[Any, Any]:
            model = load(
                getattr(transformers, family.architecture),
                directory,
                dtype=dtype,
                attn_implementation=(
                    IMPLEMENTATION if family.language is None else {"text_config": IMPLEMENTATION}
                ),
                config=copy.deepcopy(parsed),
                keep_quantised=device.type == "cpu",
                blocks=blocks,
                # A model that is divided fits no one device as a whole.
                device=None if device.type == "cpu" or group is not None else device,
            )
            if group is None:
                model.to(device)
            return division.split_tower(model, family)

        def wrap(parts: tuple[Any, Any], check: ModuleCheck) -> CausalModel:
            if group is not None:
                group.load()
                check.divide(ShareMessages(group))
            return cls(
                *parts,
                family,
                directory,
                generation_config(settings.model, directory),
                max_model_len,
                check,
                LoraBank(settings.step_loras, lora.max_lora_rank) if lora.enable_lora else None,
                language_only=language_only,
                group=group,
                batch_invariant=settings.compute.batch_invariant,
                activations=activations,
            )

        rows = family.refuses_rows is None and not has_inputs_per_layer(text)

        def reference(parts: tuple[Any, Any], draw: int) -> Reference:
            return Reference.of(
                parts[0], directory, max_model_len,
                axes=family.rope_axes, rows=rows, draw=draw, activations=activations,
            )  # fmt: skip

        if group is not None and follows:
            found = wrap(read(), ModuleCheck())
        else:
            invariant = settings.compute.batch_invariant
            variant = device, lora.enable_lora, invariant, group and group.size
            weights = weights_id(directory, activations)
            subject = Subject(weights, dtype, (family, max_model_len), variant)
            shadow = partial(shadow_of, cls, parsed, family, max_model_len, rows=rows)
            steps = Steps(read, wrap, reference, judge, shadow)
            found = checked(settings.health.self_check, subject, steps)
        if settings.pooling.hidden_projector is not None:
            file = Path(settings.pooling.hidden_projector)
            found.projector = Projector(file, found.hidden_size, found.dtype, found.device)
        return found

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules of the language model, replaced ones in place of the original."""
        yield from self._model.modules()

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page of `page_size` positions, over all its layers.

        Ranks on one CPU's memory are counted together.
        """
        widest = max(self.page_groups, key=lambda group: len(group.layers))
        here = sum(self.layers[layer].elements for layer in widest.layers)
        ranks = self.group.size if self.group is not None and self.device.type == "cpu" else 1
        return here * page_size * self.dtype.itemsize * ranks

    def new_pages(self, num_pages: int, page_size: int) -> Pages:
        """Allocate `num_pages` pages besides the null page, on all ranks in place of the last."""
        self._tell(commands.Allocate(num_pages, page_size))
        return Pages(
            self.layers,
            self.page_groups,
            num_pages=num_pages,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )

    def scrub(self, pages: Pages, page_ids: Sequence[int]) -> None:
        """Overwrite pages with zeros in every layer, on all ranks."""
        self._tell(commands.Scrub(tuple(page_ids)))
        pages.scrub(page_ids)

    def upload(self, batch: Batch, window: int | None = None, *, forced: bool = False) -> Batch:
        """Copy a batch from the host to the device; other ranks begin to compute it.

        The next call must be `hidden`, with that `window`; `forced` as in `commands.Forward`.
        """
        self._tell(commands.Forward(batch, window, forced))
        return batch.to(self.device)

    def _tell(self, command: commands.Command) -> None:
        if self.group is not None:
            self.group.tell(command)

    def forget_workspace(self) -> None:
        """Free the buffers of earlier steps."""
        self._workspace, self._unsettled = Workspace(), None

    def forward(self, batch: Batch, pages: Pages) -> Tensor:
        """Compute the logits of sampled positions: float32 [chunks that sample, vocab_size].

        Raises as `hidden`.
        """
        batch = self.upload(batch)
        # Copied outside: tensors of inference mode may not be changed in place elsewhere.
        return self.logits(self.hidden(batch, pages)[batch.sampled]).to(torch.float32, copy=True)

    def hidden(
        self,
        batch: Batch,
        pages: Pages,
        paged: PagedAttention | None = None,
        *,
        largest_window: int | None = None,
    ) -> Tensor:
        """Compute a batch and store its keys and values in `pages`.

        Args:
            batch: batch on the model's device.
            pages: pages of keys and values.
            paged: attention for this batch over these pages; unless given, the fastest one for the
                device.
            largest_window: layers with a sliding window see at most so many positions.

        Returns:
            The last hidden states [T, C], after the last norm, in the model's dtype.

        Raises:
            EngineError: embedding vectors that are not (R, hidden size) in the model's dtype.
        """
        with torch.inference_mode():
            if self.group is not None and len(batch.pending):
                # Only rank 0 has these tokens.
                self.group.share(batch.token_ids)
            more: dict[str, Any] = {}
            if self.recurrent:
                states = RecurrentStates(batch, pages, native=paged is None)
                self._unsettled = more["states"] = states
            if paged is None:
                paged = attention(
                    batch,
                    pages,
                    self._workspace,
                    float32_scores=self._float32_scores,
                    invariant=self.batch_invariant,
                )
            if largest_window is not None:
                paged = WithLargestWindow(paged, largest_window)
            padding = max(0, self._least_rows - len(batch.positions))
            positions = F.pad(batch.rotary_positions(self.rope_axes), (0, padding))
            if self._tells_places:
                more["places"] = F.pad(batch.positions[None], (0, padding))
            if batch.features is not None:
                more |= inner_features(batch, batch.features, padding)
            with self._adapted(batch, padding):
                hidden: Tensor = self.body(
                    inputs_embeds=F.pad(self.inputs(batch), (0, 0, 0, padding))[None],
                    position_ids=positions,
                    use_cache=False,
                    paged=paged,
                    **more,
                    **self._per_layer_inputs(batch, padding),
                ).last_hidden_state[0]
        return hidden[: len(batch.positions)]

    def commit_recurrent_state(self, kept: Sequence[int]) -> None:
        """Keep the states of recurrent layers after the last batch, for its uncertain positions.

        To be called before the next batch, if the last one had such positions.

        Args:
            kept: of each chunk, how many of its uncertain positions are not computed again.
        """
        states, self._unsettled = self._unsettled, None
        if states is not None and any(kept):
            with torch.inference_mode():
                states.commit_recurrent_state(kept)

    def _per_layer_inputs(self, batch: Batch, padding: int) -> dict[str, Any]:
        """Return the argument with the further embeddings of ids that each layer adds (Gemma 4).

        An image has those of the padding token, as in transformers.
        """
        if not self._per_layer:
            return {}
        body = self._model.base_model
        ids = batch.token_ids.index_fill(0, batch.row_index, body.config.pad_token_id or 0)
        return {"per_layer_inputs": body.get_per_layer_inputs(F.pad(ids, (0, padding))[None])}

    def _adapted(self, batch: Batch, padding: int) -> AbstractContextManager[None]:
        """Select the adapters of `batch` within this context."""
        if self.lora is None:
            return nullcontext()
        rows = len(batch.positions) + padding
        return self.lora.selected(Selection.of(batch.adapters, batch.counts, rows, self.device))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the logits of some `hidden` states of a batch.

        Args:
            hidden: [N, C].
            out: float32 [N, vocab_size], output buffer; allocated unless given.

        Returns:
            [N, vocab_size], in the model's dtype, or in float32 if the head computes in it and N >
            0.
        """
        with torch.inference_mode():
            if not len(hidden):
                # A step that samples nothing (a chunk of a long prompt) need not read the head's
                # weights for its padding.
                return hidden.new_empty(0, self.vocab_size) if out is None else out
            if self.group is not None and self._divided_head:
                self.group.tell(commands.Logits(len(hidden)))
                self.group.share(hidden)
            padding = max(0, self._least_rows - len(hidden))
            logits: Tensor = self._head(
                inputs_embeds=F.pad(hidden, (0, 0, 0, padding))[None]
            ).logits[0]
        return logits[: len(hidden)] if out is None else out.copy_(logits[: len(hidden)])

    def trace_on_meta(self, batch: Batch, pages: Pages, paged: PagedAttention) -> None:
        """Run `forward` on meta tensors: nothing is computed, and nothing changes.

        Raises:
            RuntimeError: it depends on data (as routing loops over experts do) and cannot be
                captured.
        """
        # Some modules cache values, and must not cache meta tensors.
        kept = [(module, _copied(vars(module))) for module in self._model.modules()]
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
                self.logits(self.hidden(batch, pages, paged))
        finally:
            for module, attributes in kept:
                vars(module).clear()
                vars(module).update(attributes)

    def inputs(self, batch: Batch, table: nn.Module | None = None) -> Tensor:
        """Compute the embeddings of a batch [T, C].

        Tokens by look-up in `table` (unless given the model's own, with its scale), embedding
        vectors by copy.
        """
        embeds: Tensor = (self.embedding if table is None else table)(batch.token_ids)
        if len(batch.row_index):
            if (
                batch.row_values.dtype != self.dtype
                or batch.row_values.shape[1] != self.hidden_size
            ):
                raise EngineError(
                    f"rows are {batch.row_values.dtype} of {batch.row_values.shape[1]} elements; "
                    f"the model takes {self.dtype} of {self.hidden_size}"
                )
            embeds.index_copy_(0, batch.row_index, batch.row_values)
        return embeds


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy a module's attributes, and its dictionaries of parameters, buffers and modules."""
    return {
        name: copy.copy(value) if isinstance(value, dict) else value
        for name, value in attributes.items()
    }
