"""The built-in engine's model as an `EmbeddingModel`: an `Encoder` in a thread of its own."""

import asyncio
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from inlay import __version__
from inlay.base.errors import EngineError
from inlay.embedding.cache import Bundle
from inlay.engine.compute_thread import ComputeThread
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.vector_model import EmbedInput, LoadedEmbeddingModel
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.loading import encoder_of
from inlay.messages.card import Limits, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.request import Task


class LocalModel:
    """An `Encoder` in a thread of its own."""

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._encoder: Encoder | None = None
        self._media: TowerEncoder | None = None
        self._thread = ComputeThread()

    async def start(self) -> LoadedEmbeddingModel:
        """Load the model. Raises `InvalidRequestError` if it, or a setting, is not supported."""
        encoder = self._encoder = await self._thread.run(partial(Encoder.load, self._settings))
        media = self._media = await self._thread.run(partial(encoder_of, self._settings, encoder))
        card = _card(self._settings, encoder, self._secret)
        if media is not None:
            card = replace(card, media=media.spec, self_check=media.self_check)
        return LoadedEmbeddingModel(card, self._settings.batch.max_num_batched_tokens, media=media)

    async def outputs(self, batch: Sequence[EmbedInput]) -> Sequence[Bundle]:
        if self._encoder is None:
            raise EngineError("the engine is not started")
        return await self._thread.run(partial(self._encoder.outputs, batch))

    async def failed(self) -> EngineError:
        """Never return: an error in this process ends one batch, or the process."""
        never: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """Stop the threads and release the model."""
        if self._media is not None:
            await self._media.close()
        await asyncio.to_thread(self._thread.close)
        self._encoder = None


def _card(settings: EngineSettings, encoder: Encoder, secret: Secret) -> ModelCard:
    names = settings.model.names
    max_abs = settings.limits.max_prompt_embeds_abs
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=encoder.path,
        weights_id=encoder.weights_id,
        dtype=str(encoder.dtype).removeprefix("torch."),
        vocab_size=encoder.vocab_size,
        hidden_size=encoder.hidden_size,
        limits=Limits(
            max_model_len=encoder.max_model_len,
            max_num_seqs=settings.batch.max_num_seqs,
            max_num_queued_tokens=settings.pooling.max_num_queued_tokens,
            max_prompt_embeds_abs=100 * encoder.embedding_abs_max if max_abs is None else max_abs,
        ),
        engine="torch",
        engine_version=__version__,
        tasks=(Task.SCORE if encoder.scores else Task.EMBED,),
        embedding_table_id=encoder.embedding_table_id,
        embedding_abs_max=encoder.embedding_abs_max,
        prompt_embeds=encoder.refuses_rows,
        secret_fingerprint=secret.fingerprint,
        embedding=encoder.card,
        self_check=encoder.self_check,
    )
