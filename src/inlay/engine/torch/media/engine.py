"""`EncodeEngine`: the encoder of a model's images as an engine of its own (`--task encode`)."""

import asyncio
import time
from io import BytesIO

import numpy as np
import soundfile
from PIL import Image

from inlay import __version__
from inlay.base.errors import EngineError
from inlay.engine.admission import PromptAdmission
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.encode_requests import EncodeRequests
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.loading import LoadedTower, load_tower, media_encoder
from inlay.media.items import Item, audio_item, image_item
from inlay.media.spec import MediaSpec
from inlay.messages.card import Limits, ModelCard, Stats
from inlay.messages.digest import Secret
from inlay.messages.priority import FIRST
from inlay.messages.prompt import Buffer, Media
from inlay.messages.request import Emit, Request, Task

NO_ROWS = "it encodes media and has no language model"
"""Value of `ModelCard.prompt_embeds`."""

_PROBE_SIDE = 64
"""Pixels of a side of the image that probes encode."""
_PROBE_SAMPLES, _PROBE_RATE = 3200, 16000
"""Samples of the silence that probes encode where the model takes no images, and its rate in Hz."""


class EncodeEngine:
    """Tower and projector of a vision-language model, without its language model.

    Requests are of `Task.ENCODE`. Images of all requests share batches and one cache of rows.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._card: ModelCard | None = None
        self._requests: EncodeRequests | None = None

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model. Raises `EngineError` before the start."""
        if self._card is None:
            raise EngineError("the engine is not started")
        return self._card

    async def start(self) -> None:
        """Load the tower.

        Raises:
            InvalidRequestError: an unsupported model or setting.
            EngineError: it was started before.
        """
        if self._card is not None:
            raise EngineError("the engine was started before")
        loaded, encoder = await asyncio.to_thread(self._load)
        self._card = self._card_of(loaded, encoder)
        self._requests = EncodeRequests(encoder, PromptAdmission.of_prompts(self._card))

    def _load(self) -> tuple[LoadedTower, TowerEncoder]:
        loaded = load_tower(self._settings)
        encoder = media_encoder(
            self._settings,
            loaded.body,
            loaded.directory,
            loaded.hidden_size,
            loaded.weights_id,
            loaded.dtype,
        )
        return loaded, encoder

    def _card_of(self, loaded: LoadedTower, encoder: TowerEncoder) -> ModelCard:
        settings = self._settings
        names = settings.model.names
        return ModelCard(
            name=names[0],
            aliases=tuple(names[1:]),
            path=str(loaded.directory),
            weights_id=loaded.weights_id,
            dtype=encoder.dtype,
            vocab_size=loaded.vocab_size,
            hidden_size=loaded.hidden_size,
            limits=Limits(
                max_model_len=loaded.max_model_len, max_num_seqs=settings.batch.max_num_seqs
            ),
            engine="torch",
            engine_version=__version__,
            tasks=(Task.ENCODE,),
            prompt_embeds=NO_ROWS,
            secret_fingerprint=self._secret.fingerprint,
            media=encoder.spec,
            self_check=encoder.self_check,
        )

    async def close(self) -> None:
        """Abort all requests and stop the threads."""
        if self._requests is not None:
            await self._requests.shell.close()
            await self._requests.encoder.close()

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit a request; its answer has payloads as `inlay.messages.request.PORTS`.

        Raises:
            InvalidRequestError: a prompt is not one item that the model takes.
            EngineError: the engine is not started.
            OverloadedError: the engine is closing.
        """
        self._started.submit(request, emit)

    def abort(self, request_id: str) -> None:
        """End a request. Unknown ids are ignored."""
        self._started.shell.abort(request_id)

    async def probe(self) -> float:
        """Encode a small grey image, or silence, before all that wait; return the seconds it took.

        Raises:
            InlayError: the engine is not started, or failed.
        """
        started, encoder = time.monotonic(), self._started.encoder
        item = _probe_item(encoder.spec, self._secret)
        run = next(segment for segment in item.segments if isinstance(segment, Media))
        # Past the cache, which would answer from the second time on.
        await encoder.encode(run, None, FIRST)
        return time.monotonic() - started

    def stats(self) -> Stats:
        """Return the current counters; positions are rows."""
        requests = self._started
        return requests.encoder.counted(
            Stats(
                running=len(requests.shell),
                prompt_tokens=requests.num_rows,
                steps=requests.encoder.steps,
                progress=requests.num_rows,
            )
        )

    @property
    def _started(self) -> EncodeRequests:
        if self._requests is None:
            raise EngineError("the engine is not started")
        return self._requests


def _probe_item(spec: MediaSpec, secret: Secret) -> Item:
    file = BytesIO()
    if spec.takes("image"):
        Image.new("RGB", (_PROBE_SIDE, _PROBE_SIDE), "grey").save(file, "PNG")
        return image_item(spec, Buffer(file.getvalue()), secret)
    soundfile.write(file, np.zeros(_PROBE_SAMPLES), _PROBE_RATE, format="WAV")
    return audio_item(spec, Buffer(file.getvalue()), secret)
