"""SGLang's embedding models as a `EmbeddingModel`.

SGLang pools and gives vectors length 1, inlay batches.
"""

import asyncio
import json
from collections.abc import Sequence
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
import sglang
from sglang.srt.managers.io_struct import EmbeddingReqInput
from transformers import AutoConfig

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.embedding.cache import Bundle
from inlay.embedding.config import EmbeddingConfig
from inlay.embedding.plan import OutputPlan
from inlay.engine.embed import facts
from inlay.engine.embed.families import FAMILIES
from inlay.engine.embed.vector_model import EmbedInput, LoadedEmbeddingModel
from inlay.engine.model_files import row_facts
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang import capabilities
from inlay.engine.sglang.arguments import server_args
from inlay.engine.sglang.loading import dtype_of, longest, rows_refused
from inlay.engine.sglang.process import Process
from inlay.engine.sglang.prompts import input_of
from inlay.engine.weights import directory_of, for_other_engines
from inlay.messages.card import EmbeddingCard, Limits, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Task
from inlay.tensors.checkpoint import config_of

_BATCHES = 2
"""Given to SGLang at a time: it has the next when it is done with one."""

_BUDGET = 2048
"""Positions of a batch where SGLang chooses how much it computes at once."""

_KEPT = 8
"""Positions of its context that SGLang keeps for itself."""


class SglangEmbedding:
    """SGLang with a model that makes vectors."""

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._process = Process()

    async def start(self) -> LoadedEmbeddingModel:
        """Start SGLang's processes and load the model.

        Raises:
            InvalidRequestError: a model, a setting or a word after -- that SGLang or inlay refuses:
                what SGLang would pool in another way than the model's files say.
            EngineError: SGLang did not start, or does not make the vectors the model's files
                describe.
        """
        settings = self._settings
        directory = directory_of(settings.model.model, settings.model.revision)
        config = EmbeddingConfig.read(directory)
        stored = config_of(config.directory)
        model_type = str(stored.get("model_type"))
        family = FAMILIES.get(model_type)
        facts.check_task(stored, family, settings.model.task, config.outputs)
        output = facts.dense_of(settings, config, family)
        _check(output, model_type)
        tidy = for_other_engines(config.directory)
        model = AutoConfig.from_pretrained(tidy, local_files_only=True)
        card = msgspec.structs.replace(facts.card_of(settings, config, model, [output]), unit=True)
        # Its cache of prefixes knows no tenants here: requests for vectors take no salt.
        words = ["--is-embedding", "--disable-radix-cache"]
        encoder = capabilities.POOLS[model_type] == "cls"
        if encoder:
            # SGLang would cut an encoder's text where a batch is full, and neither part would see
            # the other.
            words += ["--chunked-prefill-size", "-1"]
        if encoder and "position_embedding_type" not in stored:
            # SGLang reads it, and transformers has stopped to say it for those that do not.
            words += [
                "--json-model-override-args",
                json.dumps({"position_embedding_type": "absolute"}),
            ]
        wanted = None
        if family is not None:
            first = facts.first_position(family, model)
            wanted = facts.max_model_len(settings.batch.max_model_len, config, model, first)
            own = int(model.max_position_embeddings) - first
            words += ["--context-length", str(min(own, wanted + _KEPT))]
        otherwise = {"max_model_len": None} | ({"max_num_batched_tokens": None} if encoder else {})
        plain = settings.replace(**otherwise)
        arguments = server_args(plain, tidy, *words)
        await self._process.start(arguments)
        try:
            loaded = LoadedEmbeddingModel(
                self._card(config, card, facts.identity(config, [output], unit=True), wanted),
                settings.batch.max_num_batched_tokens
                if encoder
                else arguments.chunked_prefill_size or _BUDGET,
                _BATCHES,
            )
            probe = Prompt.of(Tokens((0,)))
            (vector,) = await self.vectors([EmbedInput(probe, len(probe))])
            if len(vector) != card.size:
                raise EngineError(
                    f"the model's vectors have {card.size} elements, and SGLang makes {len(vector)}"
                )
        except BaseException:
            await self.close()
            raise
        return loaded

    def _card(
        self, config: EmbeddingConfig, embedding: EmbeddingCard, weights_id: str, wanted: int | None
    ) -> ModelCard:
        settings, model = self._settings, self._process.client.model_config
        dtype = dtype_of(self._process)
        refused = rows_refused(config_of(config.directory).get("model_type"))
        rows = row_facts(settings.limits, config.directory, dtype, refused)
        names = settings.model.names
        fits = longest(self._process)
        return ModelCard(
            name=names[0],
            aliases=tuple(names[1:]),
            path=str(config.directory),
            weights_id=weights_id,
            dtype=dtype,
            vocab_size=int(model.vocab_size),
            hidden_size=int(model.hidden_size),
            limits=Limits(
                max_model_len=fits if wanted is None else min(fits, wanted),
                max_num_seqs=settings.batch.max_num_seqs,
                max_num_queued_tokens=settings.pooling.max_num_queued_tokens,
                max_prompt_embeds_abs=rows.bound,
            ),
            engine="sglang",
            engine_version=sglang.__version__,
            tasks=(Task.EMBED,),
            embedding_table_id="" if rows.refused else rows.table_id,
            embedding_abs_max=0.0 if rows.refused else rows.abs_max,
            prompt_embeds=rows.refused,
            secret_fingerprint=self._secret.fingerprint,
            embedding=embedding,
        )

    async def outputs(self, batch: Sequence[EmbedInput]) -> list[Bundle]:
        """As `EmbeddingModel.outputs`; the model has one."""
        name = "dense"
        return [{name: vector} for vector in await self.vectors(batch)]

    async def vectors(self, batch: Sequence[EmbedInput]) -> npt.NDArray[np.float32]:
        """Vectors of the prompts: float32 [len(batch), size].

        Raises `EngineError` when it has died.
        """
        return np.stack(await asyncio.gather(*map(self._vector, batch)))

    async def _vector(self, asked: EmbedInput) -> npt.NDArray[np.float32]:
        request = EmbeddingReqInput(rid=uuid4().hex, sampling_params={}, **input_of(asked.prompt))
        try:
            async for answer in self._process.answers(request):
                if "embedding" in answer:
                    return np.asarray(answer["embedding"], np.float32)
        except InlayError:
            raise
        except Exception as error:
            raise EngineError(f"SGLang failed to run the request: {error}") from error
        raise EngineError("SGLang ended the request without a vector")

    async def failed(self) -> EngineError:
        """Return why, once SGLang has died."""
        return await self._process.failed()

    async def close(self) -> None:
        """End SGLang's processes."""
        await self._process.close()


def _check(output: OutputPlan, model_type: str) -> None:
    """Raise `InvalidRequestError` for vectors that SGLang would make in another way."""
    own = capabilities.POOLS.get(model_type)
    if own is None:
        raise InvalidRequestError(
            "SGLang makes vectors here with models of type "
            f"{', '.join(sorted(capabilities.POOLS))}; this one is "
            f"{model_type!r}"
        )
    if output.select != (own,):
        raise InvalidRequestError(
            f"SGLang pools models of type {model_type!r} by {own!r}; this one wants "
            f"{' and '.join(output.select or ())}",
            param="pooling",
        )
    if output.head or output.finish != "normalize":
        wants = "Dense layers" if output.head else "vectors of any length"
        raise InvalidRequestError(
            f"SGLang gives vectors length 1 and nothing else; this model has {wants}"
        )
