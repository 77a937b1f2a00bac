"""The walk through a pipeline's stages: each stage's request, in the order of its plan."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from inlay.card import ModelCard
from inlay.errors import InvalidRequestError, NotFoundError, OverloadedError
from inlay.request import Input, Output, Payload, Request
from inlay.router.router import Router
from inlay.stages.graph import Graph


class Step(NamedTuple):
    """One stage of a plan.

    Attributes:
        model: name under which its workers are served.
        feeds: for each of its ports that is fed, the stage it is fed by, and that one's port; None
            and the name of what the request brings, for what comes from there.
        last: its outputs are outputs of the plan.
    """

    model: str
    feeds: tuple[tuple[str, str | None, str], ...]
    last: bool


@dataclass
class StageOutput:
    """Payloads of outputs of a plan, as they come.

    Attributes:
        model: name under which the stage is served.
        payloads: on the stage's own ports.
        output: the output that brought them.
    """

    model: str
    output: Output
    payloads: Sequence[Payload] = field(default=())


def plan(router: Router, card: ModelCard, output: str, *, text: bool = False) -> list[Step]:
    """Return the steps that make `output` from a prompt; one for a model without a graph.

    Args:
        router: knows the workers.
        card: of the stage that clients see.
        output: of the graph.
        text: the text of the answer is known already, and is where the steps begin.

    Raises:
        InvalidRequestError: the pipeline does not make it, or a language model stands before it.
        OverloadedError: a stage has no worker that is ready.
    """
    if card.stage is None:
        return [Step(card.name, (("prompt", None, "prompt"),), last=True)]
    graph = card.stage.graph
    if output not in graph.outputs:
        raise InvalidRequestError(
            f"the pipeline `{graph.name}` makes no {output}; it makes {', '.join(graph.outputs)}"
        )
    names = [name for name in graph.needed([output]) if not (text and name == graph.text_stage)]
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
    return [_step(graph, name, last=name == names[-1]) for name in names]


def _step(graph: Graph, name: str, *, last: bool) -> Step:
    feeds: list[tuple[str, str | None, str]] = [
        (port, start.stage, start.name) for start, port in graph.sources(name)
    ]
    prompt = graph.inputs.get("prompt", "")
    if prompt.startswith(f"{name}."):
        feeds.append((prompt.partition(".")[2], None, "prompt"))
    return Step(
        graph.served_name(name),
        tuple((port, stage and graph.served_name(stage), other) for port, stage, other in feeds),
        last,
    )


async def walk(
    router: Router,
    steps: Sequence[Step],
    given: Mapping[str | None, list[Payload]],
    make: Callable[[str, tuple[Input, ...]], Request],
) -> AsyncGenerator[StageOutput, None]:
    """Send the request of each step once the step before has ended.

    What is under way is cancelled where the iterator is closed.

    Args:
        router: sends them.
        steps: of `plan`.
        given: payloads that are there, by the model that made them; None for the request itself.
        make: returns the request of a model from its inputs.

    Yields:
        Outputs of the last step, errors included, in their order.

    Raises:
        InlayError: no worker of a stage has room, or one failed.
    """
    made = dict(given)
    for step in steps:
        inputs = tuple(
            Input(name, payload)
            for port, stage, other in step.feeds
            for payload in made[stage]
            if (name := _renamed(payload.port, other, port)) is not None
        )
        found: list[Payload] = []
        async with aclosing(_run(router, step.model, make(step.model, inputs))) as outputs:
            async for output in outputs:
                if step.last:
                    yield StageOutput(step.model, output, output.payloads)
                else:
                    found += output.payloads
        made[step.model] = found


async def _run(router: Router, model: str, request: Request) -> AsyncGenerator[Output, None]:
    (stream,) = await router.send(model, [request])
    try:
        async for outputs in stream:
            for output in outputs:
                if output.error is not None:
                    raise output.error.to_error()
                if output.finish_reason == "abort":
                    raise OverloadedError("the worker aborted the request", retry_after=1)
                yield output
    finally:
        stream.cancel()


def _renamed(port: str, other: str, own: str) -> str | None:
    """Return the name of a payload on the port that it feeds; None if it is of another port."""
    if port == other:
        return own
    return own + port[len(other) :] if port.startswith(f"{other}.") else None


__all__ = ["StageOutput", "Step", "plan", "walk"]
