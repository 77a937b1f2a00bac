"""The walk through a pipeline's stages: each stage's request, in the order of its plan."""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from inlay.card import ModelCard
from inlay.errors import LEASE_LOST, InvalidRequestError, NotFoundError, OverloadedError
from inlay.request import Input, Output, Payload, Request, Usage
from inlay.router.resume import ResumingStream
from inlay.router.router import Router
from inlay.stages.graph import Graph

log = logging.getLogger(__name__)

MAX_LOST = 3
"""Times in a walk that inputs of a step are made again."""


class Step(NamedTuple):
    """One stage of a plan.

    Attributes:
        model: name under which its workers are served.
        feeds: for each of its ports that is fed, the stage it is fed by, and that one's port; None
            and the name of what the request brings, for what comes from there.
        last: its outputs are outputs of the plan.
        stage: its name in the graph; None of a model without one.
    """

    model: str
    feeds: tuple[tuple[str, str | None, str], ...]
    last: bool
    stage: str | None = None


@dataclass
class StageOutput:
    """Payloads of outputs of a plan, as they come.

    Attributes:
        model: name under which the stage is served.
        payloads: on the stage's own ports.
        output: the output that brought them.
        usages: of the stages that have ended so far, in the order of the plan.
    """

    model: str
    output: Output
    payloads: Sequence[Payload] = field(default=())
    usages: Mapping[str | None, Usage] = field(default_factory=dict)


def plan(
    router: Router, card: ModelCard, output: str, *, text: bool = False, embeds: bool = False
) -> list[Step]:
    """Return the steps that make `output` from a prompt; one for a model without a graph.

    Args:
        router: knows the workers.
        card: of the stage that clients see.
        output: of the graph.
        text: the text of the answer is known already, and is where the steps begin.
        embeds: the request brings all that text encoders would make: the steps begin behind them.

    Raises:
        InvalidRequestError: the pipeline does not make it, or a language model stands before it.
        OverloadedError: a stage has no worker that is ready.
    """
    if card.stage is None:
        return [Step(card.name, _GIVEN, last=True)]
    graph = card.stage.graph
    if output not in graph.outputs:
        raise InvalidRequestError(
            f"the pipeline `{graph.name}` makes no {output}; it makes {', '.join(graph.outputs)}"
        )
    known = {*graph.before_text, graph.text_stage} if text else set()
    names = [name for name in graph.needed([output]) if name not in known]
    reader = graph.embeds_stage(output)
    if embeds and reader is not None:
        names = names[names.index(reader) :]
    for name in names:
        if graph.stages[name].kind == "generate":
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
    steps = [_step(graph, name, last=name == names[-1]) for name in names]
    if embeds:
        steps[0] = steps[0]._replace(feeds=_GIVEN)
    return steps


_GIVEN = (("prompt", None, "prompt"), ("embeds", None, "embeds"))
"""Feeds of the step that reads the prompt: text, embeddings ("embeds.NAME"), or both."""


def admitted(
    router: Router, steps: Sequence[Step], client: str | None
) -> AbstractContextManager[None]:
    """Take a place at every stage of a plan until the block ends, before any has worked.

    Raises:
        RateLimitedError: one of them is full.
    """
    return router.admit([step.model for step in steps], client)


def _step(graph: Graph, name: str, *, last: bool) -> Step:
    if graph.inputs.get("prompt", "").startswith(f"{name}."):
        return Step(graph.served_name(name), _GIVEN, last, name)
    feeds = [
        (port, graph.served_name(start.stage), start.name) for start, port in graph.sources(name)
    ]
    return Step(graph.served_name(name), tuple(feeds), last, name)


async def walk(
    router: Router,
    steps: Sequence[Step],
    given: Mapping[str | None, Sequence[Payload]],
    make: Callable[[str, tuple[Input, ...]], Request],
) -> AsyncGenerator[StageOutput, None]:
    """Send the request of each step once the step before has made its payloads.

    Within a block of `admitted`.

    Payloads stay with the worker that made them, which the next asks for them, until the next step
    has ended. A step whose worker is lost is sent again, by `Router`; one whose inputs are lost,
    after those were made again. What is under way is cancelled, and what is kept is freed, where
    the iterator is closed.

    Args:
        router: sends them.
        steps: of `plan`.
        given: payloads that are there, by the model that made them; None for the request itself.
        make: returns the request of a model from its inputs.

    Yields:
        Outputs of the last step in their order, each payload once.

    Raises:
        InlayError: no worker of a stage has room, or one failed.
    """
    walking = _Walk(router, steps, given, make)
    try:
        async with aclosing(walking.outputs(steps[-1])) as outputs:
            async for output in outputs:
                yield StageOutput(steps[-1].model, output, output.payloads, walking.usages(steps))
    finally:
        await walking.release()


class _Made:
    """The payloads of a step, and its stream while the worker keeps them.

    Attributes:
        payloads: leased where there is a stream.
        stream: ends the leases where it is cancelled.
        outputs: of the stream: while this is there, so is the load that the request adds.
    """

    __slots__ = ("outputs", "payloads", "stream")

    def __init__(
        self,
        payloads: Sequence[Payload],
        stream: ResumingStream | None = None,
        outputs: AsyncGenerator[Sequence[Output], None] | None = None,
    ) -> None:
        self.payloads = payloads
        self.stream = stream
        self.outputs = outputs

    async def release(self) -> None:
        if self.stream is not None:
            self.stream.cancel()
        if self.outputs is not None:
            await self.outputs.aclose()


class _Walk:
    """One walk: what its steps have made so far. Arguments as of `walk`."""

    def __init__(
        self,
        router: Router,
        steps: Sequence[Step],
        given: Mapping[str | None, Sequence[Payload]],
        make: Callable[[str, tuple[Input, ...]], Request],
    ) -> None:
        self._router = router
        self._steps = {step.model: step for step in steps}
        self._made = {model: _Made(payloads) for model, payloads in given.items()}
        self._given = frozenset(given)
        self._make = make
        self._usages: dict[str, Usage] = {}
        self._sent = 0
        self._lost = 0

    def usages(self, steps: Sequence[Step]) -> dict[str | None, Usage]:
        """Usage of each step that has ended, each counted once however often it was sent."""
        return {
            step.stage: self._usages[step.model] for step in steps if step.model in self._usages
        }

    async def outputs(self, step: Step) -> AsyncGenerator[Output, None]:
        """Outputs of a step that keeps nothing; steps before are made first. Raises as `walk`."""
        shown: Counter[str] = Counter()
        while True:
            inputs = await self._inputs(step)
            attempt, passed = 0, shown.copy()
            try:
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
        while self._made:
            await self._made.popitem()[1].release()

    async def _inputs(self, step: Step) -> tuple[Input, ...]:
        found = []
        for port, stage, other in step.feeds:
            for payload in await self._payloads(stage):
                name = _renamed(payload.port, other, port)
                if name is not None:
                    found.append(Input(name, payload))
        return tuple(found)

    async def _payloads(self, model: str | None) -> Sequence[Payload]:
        """Return what a step has made, or makes now."""
        while model is not None and model not in self._made:
            step = self._steps[model]
            inputs = await self._inputs(step)
            try:
                self._made[model] = await self._keep(step, inputs)
            except NotFoundError as error:
                await self._drop_lost(step, error)
            else:
                await self._drop_inputs(step)
        return self._made[model].payloads

    async def _keep(self, step: Step, inputs: tuple[Input, ...]) -> _Made:
        """Return what a step makes, which stays with its worker if others can reach that."""
        found: list[Payload] = []
        attempt = 0
        stream = await self._stream(step, inputs, hold=True)
        outputs = aiter(stream)
        made: _Made | None = None
        try:
            async for batch in outputs:
                for output in batch:
                    _check(output)
                    if output.attempt != attempt:
                        attempt, found = output.attempt, []
                    found += output.payloads
                    self._count(step, output)
                    if output.held:
                        made = _Made(found, stream, outputs)
                        return made
            return _Made(found)
        finally:
            if made is None:
                stream.cancel()
                await outputs.aclose()

    def _count(self, step: Step, output: Output) -> None:
        if output.usage is not None:
            self._usages[step.model] = output.usage

    async def _send(self, step: Step, inputs: tuple[Input, ...]) -> AsyncGenerator[Output, None]:
        stream = await self._stream(step, inputs, hold=False)
        try:
            async for outputs in stream:
                for output in outputs:
                    _check(output)
                    yield output
        finally:
            stream.cancel()

    async def _stream(self, step: Step, inputs: tuple[Input, ...], *, hold: bool) -> ResumingStream:
        request = self._make(step.model, inputs)
        # One that is made again must not be taken for the first, which may be ending still.
        id_ = f"{request.id}.{self._sent}"
        self._sent += 1
        request = msgspec.structs.replace(request, id=id_, hold=hold)
        (stream,) = await self._router.send(step.model, [request], admitted=True)
        return stream

    async def _drop_inputs(self, step: Step) -> None:
        """Free the inputs of a step that has ended; a stage feeds one other in a plan."""
        for _, stage, _ in step.feeds:
            if stage not in self._given and (made := self._made.pop(stage, None)) is not None:
                await made.release()

    async def _drop_lost(self, step: Step, error: NotFoundError) -> None:
        """Have the inputs of a step made again. Raises where that is no help, or not any more."""
        if error.code != LEASE_LOST:
            raise error
        self._lost += 1
        if self._lost > MAX_LOST:
            raise OverloadedError(
                f"the inputs of the stage `{step.model}` were lost {self._lost} times: "
                f"{error.message}",
                retry_after=1,
            ) from error
        log.warning("the inputs of `%s` are made again: %s", step.model, error.message)
        await self._drop_inputs(step)


def _check(output: Output) -> None:
    """Raise the error that an output carries."""
    if output.error is not None:
        raise output.error.to_error()
    if output.finish_reason == "abort":
        raise OverloadedError("the worker aborted the request", retry_after=1)


def _renamed(port: str, other: str, own: str) -> str | None:
    """Return the name of a payload on the port that it feeds; None if it is of another port."""
    if port == other:
        return own
    return own + port[len(other) :] if port.startswith(f"{other}.") else None


__all__ = ["StageOutput", "Step", "admitted", "plan", "walk"]
