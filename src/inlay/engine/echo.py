"""An engine without a model: it repeats the prompt's tokens at no cost.

For measurements and tests of everything but the engine, with a real model directory's tokenizer and
sizes. An embedding vector, which has no token, is answered with an id drawn from its digest: equal
prompts get equal outputs. Embeddings are noise seeded by that output.
"""

import asyncio
import json
import time
from array import array
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from blake3 import blake3

from inlay.base.errors import ErrorFrame, InlayError, InvalidRequestError
from inlay.embedding.bundles import FIRST_PORTS, payloads_of
from inlay.engine.settings import EngineSettings
from inlay.engine.shell import EngineShell, send
from inlay.messages.card import EmbeddingCard, Exactness, Limits, ModelCard, Stats
from inlay.messages.digest import Secret, row_digests
from inlay.messages.fields import check_length
from inlay.messages.outputs import pooled
from inlay.messages.prompt import ROW_DIGEST_SIZE, Prompt, Rows, Tokens
from inlay.messages.request import (
    Emit,
    EngineUsage,
    FinishReason,
    Output,
    PromptLogprobs,
    Request,
    Sampling,
    Task,
    TokenLogprobs,
)
from inlay.tensors.checkpoint import config_of


@dataclass(slots=True, eq=False)
class _EchoedRequest:
    request: Request
    emit: Emit
    sampling: Sampling
    length: int
    prompt_logprobs: PromptLogprobs | None
    ids: "cycle[int]"
    emitted: int

    def end(self, reason: FinishReason, *, error: InlayError | None = None) -> None:
        self.emit(
            Output(
                self.request.id,
                self.request.attempt,
                self.emitted,
                finish_reason=reason,
                usage=EngineUsage(self.length, self.emitted),
                error=None if error is None else ErrorFrame.of(error),
            )
        )


class EchoEngine:
    """`inlay.engine.api.Engine` that repeats the prompt.

    Each turn of the event loop emits one token for every running request.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        self._settings = settings
        self._secret = secret
        self._card: ModelCard | None = None
        self._shell: EngineShell[_EchoedRequest] = EngineShell()
        self._stepping: asyncio.Handle | None = None
        self._generated = 0
        self._prompted = 0
        self._steps = 0

    @property
    def card(self) -> ModelCard:
        """Metadata of the served model."""
        if self._card is None:
            raise InvalidRequestError("the engine is not started")
        return self._card

    async def start(self) -> None:
        """Read the model directory's configuration.

        Raises `InvalidRequestError` if there is none.
        """
        path = Path(self._settings.model.model)
        try:
            config = config_of(path)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"no model at {path}: {error.message}", param="model"
            ) from error
        names = self._settings.model.names
        eos = config.get("eos_token_id")
        dtype = "float32" if self._settings.model.dtype == "auto" else self._settings.model.dtype
        self._card = ModelCard(
            name=names[0],
            aliases=tuple(names[1:]),
            path=str(path),
            weights_id=blake3(json.dumps(config).encode()).hexdigest(16),
            dtype=dtype,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            limits=Limits(
                max_model_len=self._settings.batch.max_model_len
                or config["max_position_embeddings"],
                max_num_seqs=self._settings.batch.max_num_seqs,
                max_logprobs=self._settings.limits.most_logprobs(config["vocab_size"]),
                max_prompt_embeds_abs=self._settings.limits.max_prompt_embeds_abs,
            ),
            engine="echo",
            engine_version="1",
            tasks=(Task.GENERATE, Task.EMBED),
            embedding=EmbeddingCard(size=config["hidden_size"], any_dimensions=True),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            resuming={"greedy": Exactness.EXACT, "sampling": Exactness.EXACT},
            secret_fingerprint=self._secret.fingerprint,
        )

    async def close(self) -> None:
        """Abort all requests."""
        await self._shell.close()
        if self._stepping is not None:
            self._stepping.cancel()

    def submit(self, request: Request, emit: Emit) -> None:
        """Admit `request`. Raises `InvalidRequestError` if a prompt is empty or too long."""
        self._shell.check(request)
        if request.task is not Task.GENERATE:
            emit(self._pool(request))
            return
        card, prompt, sampling = self.card, request.prompt, request.sampling
        length = len(prompt)
        if not length:
            raise InvalidRequestError("the prompt has no positions", param="prompt")
        check_length(length, card.limits.max_model_len, sampling.max_tokens)
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and not request.prior_output:
            prompt_logprobs = _prompt_logprobs(prompt)
        if not sampling.max_tokens:
            emit(
                Output(
                    request.id,
                    request.attempt,
                    0,
                    finish_reason="length",
                    usage=EngineUsage(length, 0),
                    prompt_logprobs=prompt_logprobs,
                )
            )
            return
        ids = cycle(_answer(prompt, self._secret, card.vocab_size))
        skipped = len(request.prior_output)
        next(islice(ids, skipped, skipped), None)  # skip what an earlier attempt has sent
        self._shell.add(
            _EchoedRequest(request, emit, sampling, length, prompt_logprobs, ids, skipped)
        )
        self._prompted += length
        self._schedule()

    def _pool(self, request: Request) -> Output:
        """Return the answer to a request for embeddings.

        Raises `ContextLengthError` if a prompt is too long.
        """
        limit, size = self.card.limits.max_model_len, self.card.hidden_size
        longest = max(map(len, request.prompts), default=0)
        check_length(longest, limit, says=f"the longest input has {longest}", param="input")
        answers = (
            _answer(prompt, self._secret, self.card.vocab_size) for prompt in request.prompts
        )
        rows = np.empty((len(request.prompts), size), np.float32)
        for row, ids in zip(rows, answers, strict=True):
            np.random.default_rng([len(ids), *ids]).standard_normal(out=row, dtype=np.float32)
        self._prompted += request.num_positions
        return pooled(request, payloads_of([{"dense": row} for row in rows], FIRST_PORTS))

    def _schedule(self) -> None:
        if self._stepping is None and self._shell:
            self._stepping = asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._stepping = None
        self._steps += 1
        for running in self._shell:
            self._emit_one(running)
        self._schedule()

    def _emit_one(self, running: _EchoedRequest) -> None:
        request, sampling = running.request, running.sampling
        id_ = next(running.ids)
        first = running.emitted == len(request.prior_output)
        running.emitted += 1
        self._generated += 1
        stops = running.emitted >= sampling.min_tokens and (
            id_ in sampling.stop_token_ids
            or (not sampling.ignore_eos and id_ in self.card.eos_token_ids)
        )
        ended = stops or running.emitted >= sampling.max_tokens
        if ended:
            self._shell.leave(running)
        output = Output(
            request.id,
            request.attempt,
            running.emitted - 1,
            (id_,),
            ()
            if sampling.logprobs is None
            else (TokenLogprobs(0.0, _alternatives(id_, sampling)),),
            ("stop" if stops else "length") if ended else None,
            id_ if stops else None,
            EngineUsage(running.length, running.emitted) if first or ended else None,
            prompt_logprobs=running.prompt_logprobs if first else None,
        )
        if not send(request, running.emit, output):
            self._shell.leave(running)

    def abort(self, request_id: str) -> None:
        """Stop a request; its last output has the finish reason "abort"."""
        self._shell.abort(request_id)

    async def reset_prefix_cache(self) -> int:
        """Do nothing: there is no cache."""
        return 0

    async def probe(self) -> float:
        """Return the seconds that one turn of the event loop took."""
        start = time.perf_counter()
        await asyncio.sleep(0)
        return time.perf_counter() - start

    def stats(self) -> Stats:
        """Return the current counters."""
        return Stats(
            running=len(self._shell),
            prompt_tokens=self._prompted,
            generated_tokens=self._generated,
            steps=self._steps,
            progress=self._prompted + self._generated,
        )


def _alternatives(id_: int, sampling: Sampling) -> tuple[tuple[int, float], ...]:
    """Return the logprobs of an output that is certain: 0 for the chosen token."""
    if sampling.logprob_token_ids:
        return tuple(
            (named, 0.0 if named == id_ else -9999.0) for named in sampling.logprob_token_ids
        )
    return ((id_, 0.0),) if sampling.logprobs else ()


def _prompt_logprobs(prompt: Prompt) -> PromptLogprobs:
    """Return prompt logprobs in which every token is certain."""
    ids = array("i", prompt.token_ids()[1:])
    return PromptLogprobs(
        1, ids.tobytes(), bytes(4 * len(ids)), array("i", [1] * len(ids)).tobytes()
    )


def _answer(prompt: Prompt, secret: Secret, vocab_size: int) -> list[int]:
    ids: list[int] = []
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            ids.extend(segment.ids)
        elif isinstance(segment, Rows):
            digests = row_digests(segment, secret)
            ids.extend(
                int.from_bytes(digests[start : start + 4], "little") % vocab_size
                for start in range(0, len(digests), ROW_DIGEST_SIZE)
            )
        else:
            ids.extend([0] * len(segment))
    return ids
