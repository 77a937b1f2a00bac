"""The walk through a pipeline's stages: each stage's request, in the order of its plan."""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from inlay.base.errors import (
    LEASE_LOST,
    LOST,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from inlay.messages.card import ModelCard
from inlay.messages.edges import PayloadLease, Window
from inlay.messages.request import EngineUsage, Input, Output, Payload, Request
from inlay.router.resume import ResumingStream
from inlay.router.router import Router
from inlay_stages.cards import graph_of
from inlay_stages.feeds import NEWEST, Feed, Ports, renamed
from inlay_stages.graph import Graph
from inlay_stages.kinds import STREAMS, PortType
from inlay_stages.stage_result import RunningStage, StageResult, check

log = logging.getLogger(__name__)

_STATES = "hidden_states"
"""Port of the payloads that a language model's port `states` gives."""
MAX_LOST = 3
"""Times in a walk that inputs of a step are made again."""


class Edge(NamedTuple):
    """All that one stage gives another.

    Attributes:
        source: name under which the stage that gives is served; None for the request itself.
        ports: pairs of a port of that one, or a name of what the request brings, and the port that
            it feeds.
        window: if it is a stream: then the stage that is fed begins while the other works.
    """

    source: str | None
    ports: Ports
    window: Window | None = None


class Step(NamedTuple):
    """One stage of a plan.

    Attributes:
        model: name under which its workers are served.
        edges: that feed it, one for each stage that they come from.
        last: its outputs are outputs of the plan.
        stage: its name in the graph; None of a model without one.
    """

    model: str
    edges: tuple[Edge, ...]
    last: bool
    stage: str | None = None


@dataclass
class StageOutput:
    """Payloads of outputs of a plan, as they come.

    Attributes:
        model: name under which the stage is served.
        payloads: on the stage's own ports.
        output: the output that brought them.
        usages: of the stages that have ended so far, in the order of the plan; with the last
            output those of all.
        limited: stages that have ended because they had made as much as they may.
    """

    model: str
    output: Output
    payloads: Sequence[Payload] = field(default=())
    usages: Mapping[str | None, EngineUsage] = field(default_factory=dict)
    limited: frozenset[str | None] = frozenset()


def plan(
    router: Router,
    card: ModelCard,
    output: str,
    *,
    text: bool = False,
    embeds: bool = False,
    reader: str | None = None,
) -> list[Step]:
    """Return the steps that make `output` from a prompt; one for a model without a graph.

    Args:
        router: knows the workers.
        card: of the stage that clients see.
        output: of the graph. "preview" is the image, and what it is like on the way to it: where
            latents go to another stage, they are a stream of which the newest counts.
        text: the text of the answer is known already, and is where the steps begin.
        embeds: the request brings all that text encoders would make: the steps begin behind them.
        reader: a language model that reads a prompt of its own, and is where the steps begin.

    Raises:
        InvalidRequestError: the pipeline does not make it, or a language model stands before it.
        OverloadedError: a stage has no worker that is ready.
    """
    graph = graph_of(card)
    if graph is None:
        return [Step(card.name, (_GIVEN,), last=True)]
    if output not in graph.outputs:
        raise InvalidRequestError(
            f"the pipeline `{graph.name}` makes no {output}; it makes {', '.join(graph.outputs)}",
            param="partial_images" if output == "preview" else None,
        )
    known = {*graph.before_text, graph.text_stage} if text else set()
    names = [name for name in graph.needed([output]) if name not in known]
    first = graph.embeds_stage(output) if embeds else reader
    if first is not None:
        names = names[names.index(first) :]
    for name in names:
        if graph.stages[name].kind == "generate" and name != reader:
            raise InvalidRequestError(
                f"the {output} of the pipeline `{graph.name}` needs the text of its stage {name}: "
                'ask for it by /v1/chat/completions with modalities ["text", "image"]'
            )
        try:
            router.card(graph.served_name(name))
        except NotFoundError as error:
            raise OverloadedError(
                f"no worker of the stage {name} of `{graph.name}` is ready", retry_after=1
            ) from error
    streams = dict(STREAMS)
    if output == "preview":
        streams[PortType.LATENTS] = NEWEST
    steps = [_step(graph, name, streams, last=name == names[-1]) for name in names]
    if embeds:
        steps[0] = steps[0]._replace(edges=(_GIVEN,))
    elif reader is not None:
        steps[0] = steps[0]._replace(edges=())
    return steps


_GIVEN = Edge(None, (("prompt", "prompt"), ("embeds", "embeds")))
"""Edge of the step that reads the prompt: text, embeddings ("embeds.NAME"), or both."""


def admitted(
    router: Router, steps: Sequence[Step], client: str | None, count: int = 1
) -> AbstractContextManager[None]:
    """Take places at every stage of a plan until the block ends, before any has worked.

    Args:
        router: knows the workers.
        steps: of the plan.
        client: whose request it is.
        count: things that each stage makes for it, each of which takes a place.

    Raises:
        RateLimitedError: one of them is full.
    """
    return router.admit({step.model: count for step in steps}, client)


def _step(graph: Graph, name: str, streams: Mapping[PortType, Window], *, last: bool) -> Step:
    served = graph.served_name(name)
    if graph.inputs.get("prompt", "").startswith(f"{name}."):
        return Step(served, (_GIVEN,), last, name)
    edges: dict[str, Edge] = {}
    for start, port in graph.sources(name):
        window = streams.get(graph.stages[name].described.inputs[port])
        pair = (_STATES if start.name == "states" else start.name, port)
        edge = edges.get(start.stage, Edge(graph.served_name(start.stage), ()))
        edges[start.stage] = Edge(edge.source, (*edge.ports, pair), edge.window or window)
    return Step(served, tuple(edges.values()), last, name)


async def walk(
    router: Router,
    steps: Sequence[Step],
    given: Mapping[str | None, StageResult],
    make: Callable[[str, tuple[Input, ...]], Request],
    hold: Callable[[int], None],
) -> AsyncGenerator[StageOutput, None]:
    """Send the request of each step once the step before has made its payloads, or begins to.

    Within a block of `admitted`.

    Payloads stay with the worker that made them, which the next asks for them, until the next step
    has ended; those of a stream until the next asks for what follows them. A step whose worker is
    lost is sent again, by `Router`; one whose inputs are lost, after those were made again. What is
    under way is cancelled, and what is kept is freed, where the iterator is closed.

    Args:
        router: sends them.
        steps: of `plan`.
        given: what is made without the walk, by the model that makes it; None for the request
            itself.
        make: returns the request of a model from its inputs.
        hold: reserves bytes for payloads of workers that others cannot reach, as of `StageResult`.

    Yields:
        Outputs of the last step in their order, each payload once.

    Raises:
        InlayError: no worker of a stage has room, or one failed; or as `hold`.
    """
    walking = _Walk(router, steps, given, make, hold)
    try:
        async with aclosing(walking.outputs(steps[-1])) as outputs:
            async for output in outputs:
                if output.finish_reason is not None:
                    await walking.settled()
                yield StageOutput(
                    steps[-1].model,
                    output,
                    output.payloads,
                    walking.usages(steps),
                    walking.limited(steps),
                )
    finally:
        await walking.release()


class _Inputs(NamedTuple):
    """Inputs of a request of a step: values, and places where the worker finds others."""

    values: tuple[Input, ...] = ()
    feeds: tuple[Feed, ...] = ()


class _Walk:
    """One walk: the steps under way. Arguments as of `walk`."""

    def __init__(
        self,
        router: Router,
        steps: Sequence[Step],
        given: Mapping[str | None, StageResult],
        make: Callable[[str, tuple[Input, ...]], Request],
        hold: Callable[[int], None],
    ) -> None:
        self._router = router
        self._steps = {step.model: step for step in steps}
        self._windows = {edge.source: edge.window for step in steps for edge in step.edges}
        self._given = given
        self._running: dict[str, RunningStage] = {}
        self._make = make
        self._hold = hold
        self._usages: dict[str, EngineUsage] = {}
        self._limited: set[str] = set()
        self._sent = 0
        self._lost = 0
        self._failed_on: dict[str, set[str]] = {}
        self._used: dict[str | None, PayloadLease] = {}

    def usages(self, steps: Sequence[Step]) -> dict[str | None, EngineUsage]:
        """Usage of each step that has ended, each counted once however often it was sent."""
        return {
            step.stage: self._usages[step.model] for step in steps if step.model in self._usages
        }

    def limited(self, steps: Sequence[Step]) -> frozenset[str | None]:
        """Steps that have ended at their limit."""
        return frozenset(step.stage for step in steps if step.model in self._limited)

    async def settled(self) -> None:
        """Wait until the ends of all steps are known here: the last may be the first to tell."""
        for running in [*self._running.values()]:
            await running.ended()

    async def outputs(self, step: Step) -> AsyncGenerator[Output, None]:
        """Outputs of a step that keeps nothing. Raises as `walk`."""
        shown: Counter[str] = Counter()
        while True:
            attempt, passed = 0, shown.copy()
            try:
                inputs = await self._inputs(step)
                async with aclosing(self._send(step, inputs)) as outputs:
                    async for output in outputs:
                        if output.attempt != attempt:
                            attempt, passed = output.attempt, shown.copy()
                        new = []
                        for payload in output.payloads:
                            if passed[payload.port]:
                                passed[payload.port] -= 1
                            else:
                                shown[payload.port] += 1
                                new.append(payload)
                        self._count(step, output)
                        yield msgspec.structs.replace(output, payloads=tuple(new))
                return
            except NotFoundError as error:
                await self._drop_lost(step, error)

    async def release(self) -> None:
        """Free all that is kept."""
        # All at once: who waits here may be cancelled.
        for running in self._running.values():
            running.cancel()
        while self._running:
            await self._running.popitem()[1].release()

    async def _inputs(self, step: Step) -> _Inputs:
        """Return the inputs of a step; steps before are begun first, and made if they must be."""
        makings = [
            self._given.get(edge.source) or await self._begun(str(edge.source))
            for edge in step.edges
        ]
        values: list[Input] = []
        feeds: list[Feed] = []
        for edge, making in zip(step.edges, makings, strict=True):
            found = await making.inputs(streamed=edge.window is not None)
            if isinstance(found, PayloadLease):
                self._used[edge.source] = found
                feeds.append(Feed(found, edge.ports, edge.window))
            else:
                named = ((renamed(one.port, edge.ports), one) for one in found)
                values += [Input(name, one) for name, one in named if name is not None]
        return _Inputs(tuple(values), tuple(feeds))

    async def _begun(self, model: str) -> StageResult:
        """Return what a step makes, which stays with its worker if others can reach that."""
        if model not in self._running:
            step = self._steps[model]
            stream = await self._stream(step, await self._inputs(step), hold=True)
            newest = self._window(model).newest
            # One without edges is a language model, whose further attempts go on.
            making = StageResult(continues=not step.edges, newest=newest, hold=self._hold)
            self._running[model] = RunningStage(stream, making, partial(self._follow, step))
        return self._running[model].making

    def _window(self, model: str) -> Window:
        """Return how much of what a step makes is kept at a time."""
        return self._windows[model] or Window()

    def _follow(self, step: Step, output: Output) -> None:
        self._count(step, output)
        if output.held is None and output.finish_reason not in ("stop", "length"):
            return
        for edge in step.edges:
            # A stream may still have its end to tell.
            if edge.window is None and (before := self._running.pop(str(edge.source), None)):
                before.cancel()

    def _count(self, step: Step, output: Output) -> None:
        if output.usage is not None:
            self._usages[step.model] = output.usage
        if "length" in (output.held, output.finish_reason):
            self._limited.add(step.model)

    async def _send(self, step: Step, inputs: _Inputs) -> AsyncGenerator[Output, None]:
        stream = await self._stream(step, inputs, hold=False)
        try:
            async for outputs in stream:
                for output in outputs:
                    check(output)
                    yield output
        finally:
            stream.cancel()

    async def _stream(self, step: Step, inputs: _Inputs, *, hold: bool) -> ResumingStream:
        request = self._make(step.model, inputs.values)
        # One that is made again must not be taken for the first, which may be ending still.
        id_ = f"{request.id}.{self._sent}"
        self._sent += 1
        window = self._window(step.model) if hold else None
        request = msgspec.structs.replace(request, id=id_, feeds=inputs.feeds, hold=window)
        # A stage that is made again may be so because of a worker that fails at it each time.
        failed_on = self._failed_on.setdefault(step.model, set())
        (stream,) = await self._router.send(
            step.model, [request], admitted=True, failed_on=failed_on
        )
        return stream

    async def _drop_lost(self, step: Step, error: NotFoundError) -> None:
        """Have all that is lost made again. Raises where that is no help, or not any more."""
        if error.code != LEASE_LOST:
            raise error
        self._lost += 1
        if self._lost > MAX_LOST:
            raise OverloadedError(
                f"the inputs of the stage `{step.model}` were lost {self._lost} times: "
                f"{error.message}",
                retry_after=1,
                reason=LOST,
            ) from error
        log.warning("the inputs of `%s` are made again: %s", step.model, error.message)
        failed = [running.making.error for running in self._running.values()]
        await self.release()
        for other in failed:
            if other is not None and not _is_lost(other):
                raise other
        for source, making in self._given.items():
            if source in self._used:
                making.renew(self._used[source])


def _is_lost(error: Exception) -> bool:
    return isinstance(error, NotFoundError) and error.code == LEASE_LOST
