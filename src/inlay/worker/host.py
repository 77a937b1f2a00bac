"""What stands between a plane and an engine in a worker process."""

import logging
from collections.abc import Callable, Sequence

import msgspec

from inlay.errors import EngineError, ErrorFrame, InlayError, InvalidRequestError, OverloadedError
from inlay.prompt import Buffer
from inlay.protocol.embedding import Embeds, EmbedWork, EmitVectors, Vectors
from inlay.protocol.work import Command, Delta, Emit, Engine, Generates, ModelCard, Reply, Work

log = logging.getLogger(__name__)


class Host:
    """`inlay.protocol.work.WorkHandler` around an engine: refusals become error deltas, commands become calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._draining = False
        self._announce: Callable[[ModelCard], None] | None = None

    def watch(self, announce: Callable[[ModelCard], None]) -> None:
        """Tell `announce` of the card, now and whenever it has changed."""
        self._announce = announce
        announce(self._engine.card)

    def generate(self, work: Work, emit: Emit) -> None:
        """Admit `work`, or emit the one delta that says why not."""
        try:
            if self._draining:
                raise OverloadedError("the worker is draining", retry_after=1)
            if not isinstance(self._engine, Generates):
                raise InvalidRequestError(f"the model `{self._engine.card.name}` does not generate text")
            self._engine.generate(work, emit)
        except InlayError as error:
            emit(_refusal(work, error))
        except Exception:
            # The engine must not take the plane down with it: the caller hears of it, the log keeps the trace.
            log.exception("work %s was not admitted", work.id)
            emit(_refusal(work, EngineError("the engine failed to admit the request")))

    def embed(self, work: EmbedWork, emit: EmitVectors) -> None:
        """Admit `work`, or emit the answer that says why not."""
        try:
            if self._draining:
                raise OverloadedError("the worker is draining", retry_after=1)
            if not isinstance(self._engine, Embeds):
                raise InvalidRequestError(f"the model `{self._engine.card.name}` does not make embeddings")
            self._engine.embed(work, emit)
        except InlayError as error:
            emit(_no_vectors(work, error))
        except Exception:
            log.exception("work %s was not admitted", work.id)
            emit(_no_vectors(work, EngineError("the engine failed to admit the request")))

    def abort(self, work_id: str) -> None:
        """Stop a work."""
        self._engine.abort(work_id)

    async def call(self, command: Command) -> Reply:
        """Run a command."""
        try:
            return Reply(await self._run(command))
        except InlayError as error:
            return Reply(error=ErrorFrame.of(error))

    async def restore(self, commands: Sequence[Command]) -> None:
        """Run commands that an earlier worker had followed. One that fails now is only logged: the rest can be served."""
        for command in commands:
            reply = await self.call(command)
            if reply.error is not None:
                log.error("%s %s: %s", command.name, command.arguments, reply.error.message)

    async def _run(self, command: Command) -> dict[str, str | int | float | bool | None]:
        match command.name:
            case "reset_prefix_cache":
                blocks = await self._engine.reset_prefix_cache() if isinstance(self._engine, Generates) else 0
                return {"blocks": blocks}
            case "probe":
                return {"seconds": await self._engine.probe()}
            case "stats":
                stats: dict[str, str | int | float | bool | None] = msgspec.structs.asdict(
                    self._engine.stats()
                )
                return stats
            case "drain":
                self._draining = True
                return {}
            case unknown:
                raise InvalidRequestError(f"a worker knows no command {unknown!r}")


def _refusal(work: Work, error: InlayError) -> Delta:
    return Delta(
        work.id, work.attempt, len(work.prior_output), finish_reason="error", error=ErrorFrame.of(error)
    )


def _no_vectors(work: EmbedWork, error: InlayError) -> Vectors:
    return Vectors(work.id, work.attempt, Buffer(b""), error=ErrorFrame.of(error))
