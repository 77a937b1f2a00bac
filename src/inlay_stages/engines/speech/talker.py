"""The talker: codes of sound, one after another, of what the thinker reads and says.

As `Qwen2_5OmniForConditionalGeneration.generate` of transformers has it. Sizes: P positions of the
thinker's prompt, E of a thinker's state.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.torch.self_check.judgement import MOST_NOISE
from inlay.engine.torch.self_check.parts import CheckedPart
from inlay.engine.torch.self_check.reference import centred
from inlay.media.positions import rope_positions
from inlay.messages.prompt import Buffer, Prompt, Segment, Tokens
from inlay.messages.request import Input, Payload
from inlay_stages.engines.speech.job import TurnPayloads, tensor_of
from inlay_stages.params import Speech

CODES = "codes"
"""Port of what is made: int32 [number]."""


class TextRows(NamedTuple):
    """Rows [E] of the thinker's embedding table.

    Attributes:
        starts: of the token before what each voice says.
        end: of the token behind the text.
        pad: of the token for each code after that.
    """

    starts: Mapping[str, Tensor]
    end: Tensor
    pad: Tensor


class Talker:
    """A talker that has its weights.

    Args:
        model: transformers' `Qwen2_5OmniTalkerForConditionalGeneration`.
        rows: of the thinker's table.
    """

    def __init__(self, model: Any, rows: TextRows) -> None:
        self.rows = rows
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.width: int = model.config.embedding_size
        self.max_length: int = model.config.max_position_embeddings
        self._model = model
        config = model.config
        self.start, self.pad = config.tts_codec_start_token_id, config.tts_codec_pad_token_id
        self.mask = config.tts_codec_mask_token_id
        self.ends = frozenset({self.pad, config.tts_codec_end_token_id})

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices."""
        return tuple(self.rows.starts)

    def begin(self, params: Speech) -> "Talk":
        """Return the state of a request, which has heard nothing yet.

        Raises:
            InvalidRequestError: too long a prompt.
        """
        room = self.max_length - params.prompt_tokens - 2
        if params.prompt_tokens < 1 or room < 1:
            raise InvalidRequestError(
                f"the talker takes a prompt of 1 to {self.max_length - 3} positions; this has "
                f"{params.prompt_tokens}"
            )
        return Talk(self, params, min(room, params.max_tokens))

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return embeddings [ids, E] of codes."""
        found: Tensor = self._model.get_input_embeddings()(
            torch.tensor(ids, dtype=torch.int64, device=self.device)
        )
        return found

    def logits(self, rows: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Compute the logits [1, codes] of the code behind `rows`, as `every_logits`."""
        return self.every_logits(rows, positions, cache)[-1:]

    @torch.inference_mode()
    def every_logits(self, rows: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Compute the logits [N, codes], float32, behind each of `rows` [N, E] and `cache`.

        `positions` [3, N] are those of the rows in time, height and width.
        """
        states = self._model.model(
            inputs_embeds=self._model.thinker_to_talker_proj(rows[None]),
            position_ids=positions.to(self.device)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = self._model.codec_head(states)[0]
        return logits.float()

    def parts(self) -> dict[str, CheckedPart]:
        """Return what is compared with float32: the logits behind codes that were said."""
        said = list(self.rows.starts.values())[:1] + [self.rows.end] + [self.rows.pad] * 14

        def run() -> Sequence[Tensor]:
            rows = torch.stack(said) + self.embed(range(len(said)))
            positions = torch.arange(len(said)).expand(3, -1)
            return [centred(self.every_logits(rows, positions, DynamicCache()))]

        return {"talker": CheckedPart([self._model], run, MOST_NOISE)}

    def probe(self) -> None:
        """Compute two codes of nothing."""
        talk = self.begin(Speech(voice=self.voices[0], prompt_tokens=1, max_tokens=2))
        zeros = torch.zeros(2, self.width, dtype=self.dtype, device=self.device)
        talk.heard.extend(zeros)
        while not talk.advance([], ended=True).done:
            pass


class Talk:
    """One request of a talker.

    Attributes:
        heard: states [E] that are not used yet: of the prompt, then of each token of the text but
            the last.
        codes: chosen so far.
    """

    def __init__(self, talker: Talker, params: Speech, room: int) -> None:
        self._talker = talker
        self._params = params
        self._room = room
        self._layers: dict[int, deque[Tensor]] = {}
        self._positions, self._delta = _positions(params)
        self._unheard = {
            position for start, run in params.media for position in range(start, start + len(run))
        }
        self.heard: deque[Tensor] = deque()
        self.codes: list[int] = []
        self.num_heard = 0
        self._over = False
        self._cache: DynamicCache | None = None
        self._generator = torch.Generator().manual_seed(params.seed)
        processors: list[Any] = []
        if params.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        processors.append(SuppressTokensLogitsProcessor([talker.start], talker.device))
        if params.temperature > 0:
            processors.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                processors.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                processors.append(TopPLogitsWarper(params.top_p))
        self._processors = LogitsProcessorList(processors)

    @property
    def ready(self) -> bool:
        """True if enough has been heard for the next code."""
        wanted = 1 if self._cache is not None else self._params.prompt_tokens + 1
        return self._over or len(self.heard) >= wanted

    def advance(self, inputs: Sequence[Input], *, ended: bool) -> TurnPayloads:
        """Hear inputs, and choose the next code if that can be.

        Args:
            inputs: of each step of the thinker, states [positions, E] of its first layer's input
                and of its last layer, whose ports end with the layers' numbers.
            ended: nothing follows.
        """
        self._hear(inputs)
        if ended and not self._over:
            self._over = True
            if self._cache is None and len(self.heard) <= self._params.prompt_tokens:
                return TurnPayloads((), done=True)  # the thinker has said nothing
            self.heard.append(self._talker.rows.end.to(self._talker.device, self._talker.dtype))
        if not self.ready:
            return TurnPayloads((), done=False)
        code = self._choose(self._next_rows())
        if code in self._talker.ends:
            return TurnPayloads((), done=True)
        self.codes.append(code)
        full = len(self.codes) >= self._room
        return TurnPayloads((_payload([code], last=full),), done=full, limited=full, made=1)

    def _hear(self, inputs: Sequence[Input]) -> None:
        talker = self._talker
        for given in inputs:
            states = tensor_of(given.value)
            if states.ndim != 2 or states.shape[1] != talker.width:
                raise EngineError(
                    f"the talker hears states of {talker.width} elements; it was given "
                    f"{tuple(states.shape)}"
                )
            layer = int(given.port.rpartition(".")[2])
            self._layers.setdefault(layer, deque()).extend(states)
        if len(self._layers) > 1:
            first, last = (self._layers[layer] for layer in sorted(self._layers))
            for _ in range(min(len(first), len(last))):
                row, state = first.popleft(), last.popleft()
                # Of media it hears what the thinker made of them, not what it read.
                both = state if self.num_heard in self._unheard else row + state
                self.heard.append(both.to(talker.device, talker.dtype))
                self.num_heard += 1

    def _next_rows(self) -> Tensor:
        """Return the rows [N, E] of the next code; after the text each has that of the padding."""
        talker = self._talker
        if self._cache is not None:
            text = (
                self.heard.popleft()
                if self.heard
                else talker.rows.pad.to(talker.device, talker.dtype)
            )
            return talker.embed([self.codes[-1]]) + text
        self._cache = DynamicCache(config=talker._model.config)
        prompt = torch.stack([self.heard.popleft() for _ in range(self._params.prompt_tokens)])
        start = talker.rows.starts[self._params.voice].to(talker.device, talker.dtype)
        begun = torch.stack([start, self.heard.popleft()]) + talker.embed(
            [talker.pad, talker.start]
        )
        return torch.cat([prompt, begun])

    def _between(self, start: int, stop: int) -> Tensor:
        """Return the positions [3, stop - start] of rows `start` to `stop`."""
        if start < self._positions.shape[1]:
            return self._positions[:, start:stop]
        return torch.arange(start, stop).expand(3, -1) + self._delta

    def _choose(self, rows: Tensor) -> int:
        if self._cache is None:
            raise EngineError("the talker has no cache")
        start = self._cache.get_seq_length()
        logits = self._talker.logits(rows, self._between(start, start + len(rows)), self._cache)
        talker = self._talker
        before = [talker.mask] * self._params.prompt_tokens + [talker.pad, talker.start]
        ids = torch.tensor([before + self.codes], device=talker.device)
        with torch.inference_mode():
            scores = self._processors(ids, logits)[0]
            if not torch.isfinite(scores).any() or torch.isnan(scores).any():
                raise EngineError("the talker's output is not finite")
            if self._params.temperature <= 0:
                return int(scores.argmax())
            chances = F.softmax(scores, dim=-1).cpu()
            return int(torch.multinomial(chances, 1, generator=self._generator))


def _positions(params: Speech) -> tuple[Tensor, int]:
    """Return positions [3, prompt and the two rows behind it], and what later ones have besides."""
    segments: list[Segment] = []
    at = 0
    for start, run in params.media:
        segments += [Tokens([0] * (start - at)), run]
        at = start + len(run)
    segments.append(Tokens([0] * (params.prompt_tokens + 2 - at)))
    found, delta = rope_positions(Prompt.of(*segments))
    return torch.from_numpy(found).to(torch.int64), delta


def _payload(codes: list[int], *, last: bool) -> Payload:
    data = torch.tensor(codes, dtype=torch.int32).numpy().tobytes()
    return Payload(CODES, "int32", (len(codes),), Buffer(data), last)
