"""Sleep of an engine whose thread runs one part of a pipeline."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from inlay.engine.compute_thread import ComputeThread
from inlay.engine.torch.sleep import TAGS, Restorable, SleepState

M = TypeVar("M", bound=Restorable)


class StageSleep(Generic[M]):
    """Releases the part, and brings it back, as `inlay.engine.api.SleepingEngine`.

    Args:
        thread: of the engine.
        load: loads the part from its files.
        rest: stops the engine and returns the part, to which it keeps no reference; raises
            `EngineError` if it is not running or has requests.
        begin: has the engine run with a part.
    """

    def __init__(
        self,
        thread: ComputeThread,
        load: Callable[[], M],
        rest: Callable[[], Awaitable[M]],
        begin: Callable[[M], None],
    ) -> None:
        self._thread = thread
        self._load = load
        self._rest = rest
        self._begin = begin
        self._state: SleepState[M] | None = None

    @property
    def asleep(self) -> bool:
        """True until all of the part is restored."""
        return self._state is not None

    async def sleep(self, level: int, weights_id: str) -> None:
        """Release the memory of the part, of that identity.

        Level 1 keeps the weights of a GPU in host memory. Raises as `rest`.
        """
        models: list[M | None] = [None]
        if self._state is None:
            models = [await self._rest()]
            self._state = SleepState(self._load, weights_id)
        elif level == 1:
            return
        await self._thread.run(partial(self._state.offload, models, level))

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Restore the part; True once all of `TAGS` were asked for.

        Raises:
            InvalidRequestError: the files have changed; the engine stays asleep.
            EngineError: they cannot be loaded any more; the engine stays asleep.
        """
        state = self._state
        if state is None:
            return True
        if not await self._thread.run(partial(state.restore, tags or TAGS)):
            return False
        self._state = None
        self._begin(state.model())
        return True
