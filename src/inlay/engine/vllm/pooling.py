"""vLLM's pooling models as a `EmbeddingModel`.

Its asynchronous engine pools, inlay batches and normalises.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import vllm
from transformers import AutoConfig
from vllm.pooling_params import PoolingParams
from vllm.usage.usage_lib import UsageContext

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.embedding.cache import Bundle
from inlay.embedding.config import EmbeddingConfig
from inlay.engine.embed import facts
from inlay.engine.embed.families import FAMILIES
from inlay.engine.embed.vector_model import EmbedInput, LoadedEmbeddingModel
from inlay.engine.model_files import row_facts
from inlay.engine.sections import ModelOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.vllm import capabilities
from inlay.engine.vllm.arguments import engine_args
from inlay.engine.vllm.capabilities import ids_are_looked_up, rows_refused
from inlay.engine.vllm.launching import launch, refused, shut_down
from inlay.engine.vllm.prompts import engine_input
from inlay.engine.vllm.stats import Counters
from inlay.engine.weights import directory_of, for_other_engines
from inlay.messages.card import EmbeddingCard, Limits, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Task
from inlay.tensors.checkpoint import config_of

log = logging.getLogger(__name__)

_TYPES: dict[str, str] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
"""vLLM's names of its ways of pooling."""

_BATCHES = 2
"""Given to vLLM at a time: it has the next when it is done with one."""


class VllmPooling:
    """vLLM with a model that makes vectors, or scores pairs."""

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._llm: Any = None
        self._placeholder = self._dense = 0
        self._task = "classify" if settings.model.task == "score" else "embed"
        self._numbers = count()

    async def start(self) -> LoadedEmbeddingModel:
        """Start vLLM's processes and load the model.

        Raises:
            InvalidRequestError: a model, a setting or a word after -- that vLLM or inlay refuses.
            EngineError: vLLM did not start, or does not make the vectors the model's files
                describe.
        """
        # It blocks for as long as the model takes to load.
        loaded = await asyncio.to_thread(self._load)
        try:
            await self._check(loaded)
        except BaseException:
            await self.close()
            raise
        return loaded

    async def _check(self, loaded: LoadedEmbeddingModel) -> None:
        """Have vLLM make a vector.

        Some of what it cannot do it finds out then, and some it would not tell.
        """
        first = Prompt.of(Tokens((0,)))
        (vector,) = await self.vectors([EmbedInput(first, len(first))])
        wanted = loaded.card.embedding.size if loaded.card.embedding is not None else 0
        if len(vector) != wanted:
            raise EngineError(
                f"the model's vectors have {wanted} elements, and vLLM makes {len(vector)}"
            )
        if self._task == "embed":
            (layers,) = set(await self._llm.collective_rpc("dense_layers"))
            if layers != self._dense:
                raise EngineError(
                    f"the model has {self._dense} Dense layers, and vLLM loaded {layers}"
                )

    def _load(self) -> LoadedEmbeddingModel:
        settings = self._settings
        directory = directory_of(settings.model.model, settings.model.revision)
        config = EmbeddingConfig.read(directory)
        stored = config_of(config.directory)
        family = FAMILIES.get(str(stored.get("model_type")))
        facts.check_task(stored, family, settings.model.task, config.outputs)
        output = facts.dense_of(settings, config, family)
        self._dense, modes = len(output.head), output.select or ()
        tidy = for_other_engines(directory)
        own = tidy / config.directory.relative_to(directory)
        model = AutoConfig.from_pretrained(own, local_files_only=True)
        card = facts.card_of(settings, config, model, [output])
        more: dict[str, Any] = {}
        if family is not None:
            first = facts.first_position(family, model)
            more["max_model_len"] = facts.max_model_len(
                settings.batch.max_model_len, config, model, first
            )
        given = settings.library.engine_arguments
        if stored.get("model_type") not in capabilities.ROWS_FROM:
            # A server takes rows for any of its models; to vLLM it would be another way through
            # this one.
            given = [word for word in given if word != "--enable-prompt-embeds"]
        words = [*given, "--runner", "pooling", *_pooler_words(settings.model, modes)]
        changed = settings.replace(**more, engine_arguments=words)
        arguments = engine_args(changed, tidy)
        counters = Counters()
        with refused():
            known = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        self._llm = launch(known, counters)
        return LoadedEmbeddingModel(
            self._card(known, config, card, facts.identity(config, [output])),
            int(known.scheduler_config.max_num_batched_tokens),
            _BATCHES,
        )

    def _card(
        self, known: Any, config: EmbeddingConfig, embedding: EmbeddingCard, weights_id: str
    ) -> ModelCard:
        model, settings = known.model_config, self._settings
        vocab_size = int(model.get_vocab_size())
        self._placeholder = 0 if ids_are_looked_up(known) else vocab_size
        dtype = str(model.dtype).removeprefix("torch.")
        rows = row_facts(
            settings.limits,
            config.directory,
            dtype,
            rows_refused(known, config_of(config.directory)),
        )
        names = settings.model.names
        return ModelCard(
            name=names[0],
            aliases=tuple(names[1:]),
            path=str(config.directory),
            weights_id=weights_id,
            dtype=dtype,
            vocab_size=vocab_size,
            hidden_size=int(model.get_inputs_embeds_size()),
            limits=Limits(
                max_model_len=int(model.max_model_len),
                max_num_seqs=int(known.scheduler_config.max_num_seqs),
                max_num_queued_tokens=settings.pooling.max_num_queued_tokens,
                max_prompt_embeds_abs=rows.bound,
            ),
            engine="vllm",
            engine_version=vllm.__version__,
            tasks=(Task(settings.model.task),),
            embedding_table_id=rows.table_id,
            embedding_abs_max=rows.abs_max,
            prompt_embeds=rows.refused,
            secret_fingerprint=self._secret.fingerprint,
            embedding=embedding,
        )

    async def outputs(self, batch: Sequence[EmbedInput]) -> list[Bundle]:
        """As `EmbeddingModel.outputs`; the model has one."""
        name = "labels" if self._settings.model.task == "score" else "dense"
        return [{name: vector} for vector in await self.vectors(batch)]

    async def vectors(self, batch: Sequence[EmbedInput]) -> npt.NDArray[np.float32]:
        """Vectors of the prompts: float32 [len(batch), size].

        Raises `EngineError` when it has died.
        """
        found = np.stack(await asyncio.gather(*map(self._vector, batch)))
        if not np.isfinite(found).all():
            log.warning("a vector is not finite: keys and values that are not are overwritten")
            await self._llm.collective_rpc("overwrite_not_finite")
            await self._llm.reset_prefix_cache()
        return found

    async def _vector(self, asked: EmbedInput) -> npt.NDArray[np.float32]:
        from vllm.v1.engine.exceptions import EngineDeadError

        pair = asked.second_from < len(asked.prompt)
        params = PoolingParams(
            task=self._task,
            use_activation=False,
            extra_kwargs={"compressed_token_type_ids": asked.second_from} if pair else None,
        )
        given = engine_input(asked.prompt, asked.salt, self._placeholder)
        try:
            queue = await self._llm.add_request(
                f"{self._task}-{next(self._numbers)}", given, params
            )
            output = queue.get_nowait() or await queue.get()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died") from error
        if output.error is not None:
            raise EngineError(f"vLLM failed to run the request: {output.error}")
        vector: npt.NDArray[np.float32] = output.outputs.data.float().numpy()
        return vector

    async def failed(self) -> EngineError:
        """Return why, once vLLM's core has died."""
        await asyncio.wait({self._llm.output_handler})
        return EngineError("vLLM's engine process died")

    async def close(self) -> None:
        """End vLLM's processes."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await shut_down(llm)


def _pooler_words(options: ModelOptions, modes: Sequence[str]) -> list[str]:
    """VLLM's settings for pooling. Raises `InvalidRequestError` where vLLM cannot pool so."""
    if options.task == "score":
        return []
    if len(modes) != 1 or modes[0] not in _TYPES:
        raise InvalidRequestError(
            f"vLLM pools by one of {', '.join(_TYPES)}; this model wants {' and '.join(modes)}",
            param="pooling",
        )
    return ["--pooler-config", json.dumps({"seq_pooling_type": _TYPES[modes[0]]})]
