"""A transformers model that computes vectors or logits for batches of prompts, without padding."""

import logging
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.embedding.bundles import FIRST_PORTS
from inlay.embedding.cache import Bundle
from inlay.embedding.config import EmbeddingConfig
from inlay.engine.embed import facts
from inlay.engine.embed.attention import IMPLEMENTATION, PackedAttention
from inlay.engine.embed.families import PoolingFamily, family_of
from inlay.engine.embed.gelu import fuse_gelu
from inlay.engine.embed.heads import PairHead, class_of, heads_of, last_head
from inlay.engine.embed.native_layers import NativeBody, fastest, native_body
from inlay.engine.embed.outputs import Head, One, all_outputs
from inlay.engine.embed.relative_bias import RelativeBias, bias_scores
from inlay.engine.embed.roles import with_roles
from inlay.engine.embed.score_tokens import check_words, with_score_tokens
from inlay.engine.embed.self_check import (
    CheckBatch,
    judge_vectors,
    narrowed,
    pool_prompts,
    vector_reference,
)
from inlay.engine.embed.vector_model import EmbedInput
from inlay.engine.pool_reference import PoolVectors
from inlay.engine.sections import PoolingOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import threads
from inlay.engine.torch.attention.chunks import see_chunks
from inlay.engine.torch.batch import DEEPSTACK
from inlay.engine.torch.self_check.judgement import FLOOR, Judgement
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.self_check.start import Steps, Subject, checked
from inlay.engine.torch.weights.checkpoint import device_of, dtype_of, load
from inlay.engine.torch.weights.linear import accelerate
from inlay.engine.weights import directory_of, weights_id
from inlay.media.positions import GRID_FIELD, rope_positions
from inlay.messages.card import SelfCheck
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.tensors.checkpoint import config_of
from inlay.tensors.table import EmbeddingTable

_logger = logging.getLogger(__name__)


class Encoder:
    """A loaded model.

    Attributes:
        path: local directory of the tokenizer.
        dtype: dtype of activations and weights.
        device: device of the model.
        vocab_size: valid token ids are 0 to vocab_size - 1.
        hidden_size: elements of an embedding vector.
        max_model_len: maximum number of positions of a prompt.
        card: description of its vectors for clients.
        weights_id: identity of everything that determines a vector, 32 hex digits.
        embedding_table_id: identity of the input embedding table, 32 hex digits; "" if embedding
            vectors are refused.
        embedding_abs_max: the table's largest absolute value, after the model's own scale.
        refuses_rows: why embedding vectors cannot be prompts, or None.
        takes_media: its prompts may hold images or audio.
        tower: transformers module that computes their features, or None.
        scores: True if it computes logits of pairs instead of vectors.
        self_check: result of the check at start; None without one.
    """

    def __init__(
        self,
        model: Any,
        family: PoolingFamily,
        config: EmbeddingConfig,
        settings: EngineSettings,
        check: ModuleCheck,
        *,
        scores: bool,
    ) -> None:
        """Wrap a transformers model; use `load`.

        Raises:
            InvalidRequestError: unsupported settings, or inconsistent files.
        """
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        base, self.tower = _body_of(model, family), None
        if family.language is not None:
            self.tower = model
            delattr(model, family.language)
        self.takes_media = self.tower is not None
        hidden = model.config.get_text_config()
        self._first = facts.first_position(family, hidden)
        self._narrowed = narrowed(hidden)
        fast = not check.plain
        # Native layers know no positions that others do not see.
        hides = any(role.at_least and not role.attend for role in config.roles.values())
        if hides and family.causal:
            raise InvalidRequestError(
                "queries are filled up with positions that others do not see, which is served of "
                "encoders"
            )
        native = family.native and fast and not hides
        bias = bias_scores(base) if family.biased else None
        self._native = _native(base, settings.pooling, self._first, bias) if native else None
        if self._native is None and family.gelu is not None and fast:
            fuse_gelu(base, family.gelu)
        accelerate(base, family.fused, check=check)
        self._tells_places = see_chunks(base)
        self._base = base
        pooler = getattr(base, "pooler", None) if scores else None
        if hasattr(base, "pooler"):
            # It would read the batch's first position; only a head needs it.
            base.pooler = None
        self._embed = base.get_input_embeddings()
        self._family = family
        self.path = str(config.directory)
        self.scores = scores
        self.vocab_size: int = hidden.vocab_size
        self.hidden_size: int = hidden.hidden_size
        self.check_width = self.hidden_size
        self.max_model_len = facts.max_model_len(
            settings.batch.max_model_len, config, hidden, self._first
        )
        outputs = facts.outputs_of(settings, config, family, hidden)
        self._pairs: PairHead | None = None
        self._heads: dict[str, Head] = {}
        if not scores:
            self._heads = heads_of(outputs, model, config.directory)
        elif family.causal:
            self._heads = {outputs[0].name: last_head(model, outputs[0])}
        else:
            self._pairs = PairHead(model, pooler, outputs[0])
            self._heads = {outputs[0].name: One(outputs[0].name, self._pairs)}
        self.card = with_roles(facts.card_of(settings, config, hidden, outputs), config)
        self.weights_id = facts.identity(config, outputs)
        # Engines that make the first output alone, some of vectors of length 1, have their own.
        alone = [facts.identity(config, outputs[:1], unit=unit) for unit in (False, True)]
        self._pool_ids = tuple(dict.fromkeys([self.weights_id, *alone]))
        self.self_check: SelfCheck | None = None
        # What was asked for: products of about 16 bits.
        coarse = self.dtype == torch.float32 and settings.pooling.float32_matmul_precision == "high"
        self._floor = FLOOR[torch.bfloat16 if coarse else self.dtype]
        self.refuses_rows: str | None = None
        self.embedding_table_id, self.embedding_abs_max = "", 0.0
        if family.causal:
            table = EmbeddingTable.open(config.directory)
            self.embedding_table_id, self.embedding_abs_max = table.id, table.abs_max()
        else:
            self.refuses_rows = "it reads tokens; decoders take rows as well"

    @classmethod
    def load(cls, settings: EngineSettings) -> "Encoder":
        """Load the model that `settings` names, and set the number of CPU threads.

        Raises:
            InvalidRequestError: an unsupported model, dtype or context length; the message says
                what is allowed.
        """
        if settings.compute.quantization is not None:
            raise InvalidRequestError(
                f"--quantization {settings.compute.quantization} is for models that generate text; "
                f"this one is served for the task {settings.model.task}",
                param="quantization",
            )
        directory = directory_of(settings.model.model, settings.model.revision)
        config = with_score_tokens(EmbeddingConfig.read(directory), settings)
        stored = config_of(config.directory)
        family = family_of(stored)
        scores = settings.model.task == "score"
        facts.check_task(stored, family, settings.model.task, config.outputs, decoders=True)
        check_words(config)
        sources = {each.source for each in facts.chosen_outputs(settings.pooling, config)}
        device = device_of(settings.model.device)
        if device.type == "cpu":
            torch.set_num_threads(threads.count(settings.devices.num_threads))
        dtype = dtype_of(settings.model.dtype, stored, device)

        attention: Any = IMPLEMENTATION
        if family.language is not None:
            attention = {"text_config": IMPLEMENTATION}
        kind, inside = class_of(sources, scores=scores), ""
        if family.whole is not None:
            name, inside = family.whole
            kind, attention = getattr(transformers, name), {f"{inside}_config": attention}

        def read() -> Any:
            whole = load(
                kind,
                config.directory,
                dtype=dtype,
                attn_implementation=attention,
                # The pooler is not used here, and many checkpoints lack it.
                spared="" if scores else "pooler.",
            ).to(device)
            return getattr(whole, inside) if inside else whole

        def wrap(model: Any, check: ModuleCheck) -> Encoder:
            return cls(model, family, config, settings, check, scores=scores)

        def reference(model: Any, draw: int) -> Reference:
            hidden = model.config.get_text_config()
            first = facts.first_position(family, hidden)
            length = facts.max_model_len(settings.batch.max_model_len, config, hidden, first)
            base = _body_of(model, family)
            return vector_reference(
                model, base, config.directory, family, length, first,
                # A decoder's head is one product, of states that are compared.
                scores=scores and not family.causal, draw=draw,
            )  # fmt: skip

        subject = Subject(
            weights_id(config.directory),
            dtype,
            (family, settings.model.task, settings.batch.max_model_len, config.max_length),
            (device, settings.pooling.float32_matmul_precision),
        )
        steps = Steps(read, wrap, reference, cls._judged, pool_ids=lambda own: own._pool_ids)
        return checked(settings.health.self_check, subject, steps)

    def _judged(self, reference: Reference) -> Judgement:
        batch = CheckBatch.of(reference.prompts)
        lengths = [len(prompt) for prompt in batch.prompts]
        with torch.inference_mode():
            states = self._hidden(batch.prompts, lengths, batch.second_from, batch.places)
            scores = None if self._pairs is None else self._pairs(states, lengths)
            if reference.states is not None:
                reference.pooled = self._pooled(reference, reference.states)
        return judge_vectors(states, scores, reference, self._floor)

    def _pooled(self, reference: Reference, states: Tensor) -> bytes:
        """Return the reference of the pool: what the heads make of states of the own code."""
        batch = CheckBatch.of(pool_prompts(reference.prompts, scores=self._pairs is not None))
        (first, *_), variants = self._heads, states
        if first not in FIRST_PORTS or (self.scores and self._pairs is None):
            return b""
        if self._pairs is None:
            asked = list(map(EmbedInput, batch.prompts, batch.second_from))
            made = [all_outputs(self._heads, own.to(self.dtype), asked) for own in states]
            variants = torch.tensor(np.array([[each[first] for each in own] for own in made]))
        ids = [tuple(prompt.token_ids()) for prompt in batch.prompts]
        prompts = list(zip(ids, batch.second_from, strict=True))
        dtype = str(self.dtype).removeprefix("torch.")
        return PoolVectors.of(reference.by, dtype, prompts, variants.float().cpu().numpy()).encode()

    def outputs(self, asked: Sequence[EmbedInput]) -> list[Bundle]:
        """Compute what each prompt wants, on the host; states are computed once.

        Args:
            asked: at least one position each, in any order; neighbours of similar length are
                faster.
        """
        prompts = [each.prompt for each in asked]
        lengths = [len(prompt) for prompt in prompts]
        hides = any(each.visible is not None for each in asked)
        with torch.inference_mode():
            states = self._hidden(
                prompts,
                lengths,
                [each.second_from for each in asked],
                visible=[
                    length if each.visible is None else each.visible
                    for each, length in zip(asked, lengths, strict=True)
                ]
                if hides
                else None,
            )
            return all_outputs(self._heads, states, asked)

    def vectors(self, prompts: Sequence[Prompt], second_from: Sequence[int] = ()) -> Tensor:
        """Compute the model's first output, one vector of each prompt: float32 [S, size].

        Args:
            prompts: as for `outputs`.
            second_from: start of each pair's second text; empty if the prompts are not pairs.
        """
        seconds = second_from or [len(prompt) for prompt in prompts]
        found = self.outputs(list(map(EmbedInput, prompts, seconds)))
        return torch.from_numpy(np.stack([next(iter(bundle.values())) for bundle in found]))

    def _hidden(
        self,
        prompts: Sequence[Prompt],
        lengths: Sequence[int],
        second_from: Sequence[int],
        places: "np.ndarray[Any, Any] | None" = None,
        visible: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute the last hidden states of all positions [T, C].

        With `places` [T], as the check computes them: at these positions, and in narrow windows.
        With `visible` [S], others see the first positions of each prompt alone.
        """
        if self._native is not None and visible is None:
            # These take tokens alone.
            ids = [prompt.token_ids() for prompt in prompts]
            second_from = second_from if self._family.token_types else ()
            if places is None:
                return self._native(list(chain.from_iterable(ids)), lengths, second_from)
            starts = places[np.cumsum(lengths) - lengths].tolist()
            return torch.cat(
                [
                    self._native(
                        own, [len(own)], second_from[index : index + 1], shift=starts[index]
                    )
                    for index, own in enumerate(ids)
                ]
            )
        counts = np.asarray(lengths)
        ends = counts.cumsum()
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        options: dict[str, Tensor] = {}
        if self._family.token_types:
            starts = np.repeat(second_from, counts) if len(second_from) else positions + 1
            options["token_type_ids"] = self._moved((positions >= starts).astype(np.int64))
        given: dict[str, Any] = {
            **self._inputs(prompts),
            "position_ids": self._moved((positions if places is None else places) + self._first),
            "packed": PackedAttention(
                lengths,
                self.device,
                _atomic(prompts, ends - counts),
                0 if places is None else self._narrowed,
                visible,
            ),
            **options,
        }
        if self._family.rope_axes > 1 and places is not None:
            given["position_ids"] = given["position_ids"].expand(self._family.rope_axes, 1, -1)
        elif self._family.rope_axes > 1:
            axes = np.concatenate([rope_positions(prompt)[0] for prompt in prompts], axis=1)
            given["position_ids"] = self._moved(axes.astype(np.int64)).transpose(0, 1)
        if self._tells_places:
            given["places"] = self._moved(positions)
        states: Tensor = self._base(
            **given, **({"use_cache": False} if self._family.causal else {})
        ).last_hidden_state[0]
        return states

    def _moved(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(values)[None].to(self.device)

    def _inputs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Compute the embeddings of all positions [1, T, C], and the features beside them.

        Tokens by look-up (with the model's own scale), embedding vectors by copy.
        """
        ids: list[Sequence[int]] = []
        rows: list[tuple[int, Rows]] = []
        first = 0
        for segment in chain.from_iterable(prompt.segments for prompt in prompts):
            if isinstance(segment, Tokens):
                ids.append(segment.ids)
            elif isinstance(segment, Rows):
                ids.append([0] * len(segment))
                rows.append((first, segment))
            else:
                raise EngineError("media are encoded before they come here")
            first += len(segment)
        embeds: Tensor = self._embed(
            torch.tensor(list(chain.from_iterable(ids)), device=self.device)
        )
        for start, segment in rows:
            embeds[start : start + len(segment)] = self._values(segment.data, segment.shape)
        return {"inputs_embeds": embeds[None], **self._inner_features(rows, first)}

    def _inner_features(self, rows: Sequence[tuple[int, Rows]], positions: int) -> dict[str, Any]:
        """Return the arguments by which a body adds features after its first layers (DeepStack).

        Rows without them have zeros.
        """
        found = [
            (place, int(field.name.removeprefix(f"{DEEPSTACK}.")), field)
            for place, (_, each) in enumerate(rows)
            for field in each.bundle
            if field.name != GRID_FIELD
        ]
        if not found:
            return {}
        ends = list(accumulate(len(each) for _, each in rows))
        mask = torch.zeros(1, positions, dtype=torch.bool, device=self.device)
        levels = torch.zeros(
            1 + max(level for _, level, _ in found), ends[-1], self.hidden_size,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        for start, each in rows:
            mask[0, start : start + len(each)] = True
        for place, level, field in found:
            stop = ends[place]
            levels[level, stop - field.shape[0] : stop] = self._values(field.data, field.shape)
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels)}

    def _values(self, data: Buffer, shape: Sequence[int]) -> Tensor:
        # Copied, as torch accepts writable memory only.
        return torch.frombuffer(bytearray(data.view), dtype=self.dtype).view(*shape).to(self.device)


def _body_of(model: Any, family: PoolingFamily) -> Any:
    """Return the layers around which a model has a head or a tower."""
    if family.language is None:
        return model.base_model
    language = getattr(model, family.language)
    return language.model if family.own_head else language


def _atomic(prompts: Sequence[Prompt], starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bounds of segments that see all of themselves, in positions of the batch."""
    return [
        (int(first) + start, int(first) + stop)
        for first, prompt in zip(starts, prompts, strict=True)
        for start, stop in prompt.atomic_bounds()
    ]


def _native(
    base: Any, options: PoolingOptions, first: int, bias: RelativeBias | None
) -> NativeBody | None:
    """Run a BERT-like model's layers in one native call; None if that is not possible."""
    exact = options.float32_matmul_precision == "highest"
    parts = fastest(base.dtype, exact=exact) if base.device.type == "cpu" else None
    return None if parts is None else native_body(base, parts, first, bias)
