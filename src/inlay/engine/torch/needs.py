"""Needs: sequences wait for them before anything more is computed, and providers bring them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from inlay.base.errors import InlayError
from inlay.engine.torch.grammar.state import GrammarState
from inlay.messages.prompt import Media, Rows
from inlay.messages.request import Request

Kind: TypeAlias = Literal["rows", "pages", "grammar", "prefix"]


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a sequence waits for.

    Attributes:
        kind: "rows" of an item of media; "pages" that other workers or tiers keep; the state of its
            "grammar"; a page of its "prefix" that a sequence before it computes.
        key: which: digest of the item or page; of pages `AGAIN` where it had them before.
        item: of rows, a run of the item.
    """

    kind: Kind
    key: bytes = b""
    item: Media | None = field(default=None, compare=False)


AGAIN = b"again"
GRAMMAR = Need("grammar")
PAGES = Need("pages")
PAGES_AGAIN = Need("pages", AGAIN)

Result: TypeAlias = Rows | GrammarState | InlayError | None
"""Answer of a provider. Of pages None: those that came are in the cache."""


class Provider(Protocol):
    """Brings what requests of one event loop wait for."""

    def start(
        self, request: Request, need: Need, done: Callable[[Result], object]
    ) -> Callable[[], object]:
        """Begin to bring it; return what stops that.

        `done` is called once with the result, later and on the event loop, unless it was stopped.
        Raises `InlayError` if it cannot be begun.
        """
        ...


class Needs:
    """The needs of the requests of one event loop that are not met yet.

    Args:
        met: called with a request's id, its need and the result; never after `stop`.

    Attributes:
        providers: who brings what, by its kind.
        unmet: by request and need, what stops bringing it.
    """

    def __init__(self, met: Callable[[str, Need, Result], object]) -> None:
        self.providers: dict[Kind, Provider] = {}
        self._met = met
        self.unmet: dict[str, dict[Need, Callable[[], object]]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.unmet

    def ask(self, request: Request, need: Need) -> None:
        """Have it brought."""

        def done(result: Result) -> None:
            stops = self.unmet.get(request.id, {})
            if stops.get(need) is stop:
                del stops[need]
                if not stops:
                    del self.unmet[request.id]
                self._met(request.id, need, result)

        try:
            stop = self.providers[need.kind].start(request, need, done)
        except InlayError as error:
            self._met(request.id, need, error)
        else:
            self.unmet.setdefault(request.id, {})[need] = stop

    def stop(self, request_id: str) -> None:
        """Bring nothing more for a request, which has ended."""
        for stop in self.unmet.pop(request_id, {}).values():
            stop()

    def stop_all(self) -> None:
        """Bring nothing more for any."""
        for request_id in tuple(self.unmet):
            self.stop(request_id)
