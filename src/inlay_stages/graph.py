"""A pipeline as data: stages, edges between their ports, inputs and outputs; and its checks."""

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePath
from typing import Literal, NamedTuple

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay_stages.kinds import KINDS, PortType, StageKind

MAX_STAGES = 16
UNLIKE_TOKENIZERS = (
    "the tokenizers are not equal, so that ids of one are other tokens of the other; text passes "
    "between any two: use .text -> .prompt"
)
"""Reason for which ids do not pass between two language models."""


class Port(NamedTuple):
    """A port of a stage."""

    stage: str
    name: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.name}"


class Hidden(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hidden states that a language model gives another as rows of its prompt.

    Attributes:
        layer: as transformers numbers its `hidden_states`: 0 is what the first layer reads, -1 what
            comes behind the last norm.
        positions: those of its whole prompt, or those from which its output was chosen.
        projector: safetensors file, relative to the graph's file, of the linear layers that make
            rows of them, or None.
    """

    layer: int = -1
    positions: Literal["prompt", "output"] = "prompt"
    projector: str | None = None


class Speaking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way a stage speaks.

    Attributes:
        temperature: of a talker; 0 is greedy.
        top_k: of a talker; 0: all.
        top_p: of a talker.
        repetition_penalty: of a talker.
        chunk: of a vocoder, codes of which it makes sound at a time; 0: of all at once.
    """

    temperature: float = 0.9
    top_k: int = 40
    top_p: float = 0.8
    repetition_penalty: float = 1.05
    chunk: int = 48


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a pipeline.

    Attributes:
        kind: one of `KINDS`.
        model: directory, relative to the graph's file, or a name on the hub.
        max_tokens: of what a language model writes for another stage, None: until it ends; of a
            talker, its codes.
        hidden: of a language model, what its port `hidden` gives.
        speech: of a talker or a vocoder.
    """

    kind: str
    model: str
    max_tokens: int | None = None
    hidden: Hidden = Hidden()
    speech: Speaking = Speaking()

    @property
    def described(self) -> StageKind:
        return KINDS[self.kind]


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pipeline. It is the same wherever its stages run.

    Attributes:
        name: what clients call it.
        stages: by name.
        edges: "stage.port -> stage.port".
        inputs: port that each thing of a request goes to; today "prompt" alone.
        outputs: port that each thing of an answer comes from: "text", "image", "preview",
            "audio". Previews come from the stage of the image; "audio" is a stream of sound, a
            whole sound or a file.
    """

    name: str
    stages: dict[str, Stage]
    inputs: dict[str, str]
    outputs: dict[str, str]
    edges: list[str] = []

    @property
    def links(self) -> tuple[tuple[Port, Port], ...]:
        """The edges, as (from, to)."""
        return tuple(_edge(edge) for edge in self.edges)

    @property
    def identity(self) -> bytes:
        """The graph without the directories of its files, which machines may differ in."""
        stages = {
            name: msgspec.structs.replace(
                stage,
                model=PurePath(stage.model).name,
                hidden=msgspec.structs.replace(
                    stage.hidden, projector=PurePath(stage.hidden.projector or "").name
                ),
            )
            for name, stage in self.stages.items()
        }
        same = msgspec.structs.replace(self, stages=stages)
        return msgspec.json.encode(same, order="deterministic")

    def served_name(self, stage: str) -> str:
        """Name under which the workers of a stage are served.

        The stage that makes the text of an answer, or else its image, has the pipeline's own name:
        chats and completions on it need no plan.
        """
        return self.name if stage == self.front else f"{self.name}/{stage}"

    @property
    def front(self) -> str:
        """The stage that clients see: that of the text, or else of another output."""
        return self.text_stage or _port(next(iter(self.outputs.values()))).stage

    @property
    def text_stage(self) -> str | None:
        """The stage that makes the text of an answer, or None."""
        return self.output_port("text").stage if "text" in self.outputs else None

    @property
    def before_text(self) -> list[str]:
        """The language models before the stage of the text, in their order."""
        return self.needed(["text"])[:-1] if self.text_stage else []

    def embeds_stage(self, output: str) -> str | None:
        """Return the stage that takes embeddings of a prompt on the way to an output, or None."""
        takes = [s for s in self.needed([output]) if "embeds" in self.stages[s].described.inputs]
        return takes[-1] if takes else None

    def gives_hidden(self, stage: str) -> bool:
        """Return True if a stage's hidden states go to another."""
        return any(start == (stage, "hidden") for start, _ in self.links)

    def gives_states(self, stage: str) -> bool:
        """Return True if what passes a stage's layers goes to another, which speaks."""
        return any(start == (stage, "states") for start, _ in self.links)

    def fed_on(self, stage: str) -> str | None:
        """Return the port on which another stage feeds this one; None if the request does."""
        return next((port for _, port in self.sources(stage)), None)

    def output_port(self, output: str) -> Port:
        """Return the port that an output comes from."""
        return _port(self.outputs[output])

    def missing(self, served: Collection[str]) -> dict[str, str]:
        """Return the stages that are not among the served names: the name of each."""
        names = {stage: self.served_name(stage) for stage in self.stages}
        return {stage: name for stage, name in names.items() if name not in served}

    def sources(self, stage: str) -> list[tuple[Port, str]]:
        """Return the ports that feed a stage, each with the name of its own port that is fed."""
        return [(start, end.name) for start, end in self.links if end.stage == stage]

    def needed(self, outputs: Iterable[str]) -> list[str]:
        """Return the stages that make some of the outputs, each after those it needs."""
        pending = [self.output_port(name).stage for name in outputs]
        wanted: set[str] = set()
        while pending:
            stage = pending.pop()
            if stage not in wanted:
                wanted.add(stage)
                pending += [start.stage for start, _ in self.sources(stage)]
        order = TopologicalSorter(
            {stage: [start.stage for start, _ in self.sources(stage)] for stage in wanted}
        )
        return list(order.static_order())


def check(graph: Graph) -> None:
    """Check a graph.

    Raises:
        InvalidRequestError: ports that are not there, types that do not match, a port that is fed
            twice or not at all, a cycle, or a stage that no output needs.
    """
    if not graph.name or "/" in graph.name:
        raise InvalidRequestError(f"name: {graph.name!r} must not be empty or hold a slash")
    if not 1 <= len(graph.stages) <= MAX_STAGES:
        raise InvalidRequestError(
            f"stages: there are {len(graph.stages)}; allowed: 1 to {MAX_STAGES}"
        )
    for name, stage in graph.stages.items():
        if not name.isidentifier():
            raise InvalidRequestError(
                f"stages.{name}: a stage's name is made of letters, digits and underscores"
            )
        if stage.kind not in KINDS:
            raise InvalidRequestError(
                f"stages.{name}.kind: {stage.kind!r} is unknown; allowed: {', '.join(KINDS)}"
            )
    fed = _feeds(graph)
    for name, stage in graph.stages.items():
        given = [str(port) for port in fed if port.stage == name]
        if len(given) != 1:
            ports = " or ".join(f"{name}.{port}" for port in stage.described.inputs)
            raise InvalidRequestError(
                f"stages.{name}: "
                + (f"{' and '.join(given)} are fed" if given else "nothing feeds it")
                + f"; allowed: exactly one of {ports}"
            )
    for name, where in graph.outputs.items():
        kind = _typed(graph, _port(where, f"outputs.{name}"), "outputs", f"outputs.{name}")
        if kind not in _OUTPUTS.get(name, ()):
            raise InvalidRequestError(
                f"outputs.{name}: {where} is {kind}; allowed: "
                + ", ".join(f"{known} of type {' or '.join(of)}" for known, of in _OUTPUTS.items())
            )
    if not graph.outputs:
        raise InvalidRequestError("outputs: there are none")
    preview, image = (graph.outputs.get(name) for name in ("preview", "image"))
    if preview and (image is None or _port(preview).stage != _port(image).stage):
        raise InvalidRequestError(
            f"outputs.preview: {preview}; outputs.image must be of the same stage"
        )
    _check_order(graph)
    for name in graph.stages:
        _check_options(graph, name)


def _check_options(graph: Graph, name: str) -> None:
    """Raise `InvalidRequestError` for fields of a stage that are not for it, or out of range."""
    stage = graph.stages[name]
    bounded = name in graph.before_text or stage.kind == "talk"
    if stage.max_tokens is not None and (stage.max_tokens < 1 or not bounded):
        raise InvalidRequestError(
            f"stages.{name}.max_tokens: {stage.max_tokens}; allowed: 1 and more, of a talker or a "
            "language model before the one that answers"
        )
    if stage.hidden != Hidden() and not graph.gives_hidden(name):
        raise InvalidRequestError(f"stages.{name}.hidden: no edge begins at {name}.hidden")
    if stage.speech != Speaking() and stage.kind not in ("talk", "vocode"):
        raise InvalidRequestError(
            f"stages.{name}.speech: a stage of kind {stage.kind} does not speak"
        )
    _check_speech(stage.speech, f"stages.{name}.speech")


def _check_speech(speech: Speaking, place: str) -> None:
    ranges = {
        "temperature": (0, 2),
        "top_k": (0, 1 << 20),
        "top_p": (1e-6, 1),
        "repetition_penalty": (1e-6, 10),
        "chunk": (0, 1 << 16),
    }
    for name, (least, most) in ranges.items():
        if not least <= getattr(speech, name) <= most:
            raise InvalidRequestError(
                f"{place}.{name}: {getattr(speech, name)}; allowed: {least} to {most}"
            )


_OUTPUTS: Mapping[str, tuple[PortType, ...]] = {
    "text": (PortType.TEXT,),
    "image": (PortType.IMAGE,),
    "preview": (PortType.IMAGES,),
    "audio": (PortType.AUDIO, PortType.PCM, PortType.BLOB),
}
"""Types of each thing that an answer may have."""


def _feeds(graph: Graph) -> dict[Port, str]:
    """Return the ports that are fed, and what feeds each. Raises `InvalidRequestError`."""
    fed: dict[Port, str] = {}

    def feed(end: Port, by: str, kind: PortType, place: str) -> None:
        takes = _typed(graph, end, "inputs", place)
        if takes is not kind:
            raise InvalidRequestError(f"{place}: {by} is {kind}, {end} takes {takes}")
        if end in fed:
            raise InvalidRequestError(f"{place}: {end} is fed by {fed[end]} already")
        fed[end] = by

    for index, edge in enumerate(graph.edges):
        place = f"edges[{index}]"
        start, end = _edge(edge, place)
        feed(end, str(start), _typed(graph, start, "outputs", place), place)
    for name, where in graph.inputs.items():
        if name != "prompt":
            raise InvalidRequestError(f"inputs.{name}: unknown; allowed: prompt")
        feed(_port(where, "inputs.prompt"), "the prompt", PortType.TEXT, "inputs.prompt")
    if not graph.inputs:
        raise InvalidRequestError("inputs: prompt is missing")
    return fed


def _check_order(graph: Graph) -> None:
    waits = {name: [start.stage for start, _ in graph.sources(name)] for name in graph.stages}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        raise InvalidRequestError(f"edges: a cycle: {' <- '.join(error.args[1])}") from error
    useless = set(graph.stages) - set(graph.needed(graph.outputs))
    if useless:
        raise InvalidRequestError(f"stages.{min(useless)}: no output needs it")


def _typed(graph: Graph, port: Port, side: str, place: str) -> PortType:
    """Return the type of a port on one side ("inputs", "outputs") of its stage."""
    stage = graph.stages.get(port.stage)
    if stage is None:
        raise InvalidRequestError(
            f"{place}: there is no stage {port.stage!r}; there are {', '.join(graph.stages)}"
        )
    ports: Mapping[str, PortType] = getattr(stage.described, side)
    if port.name not in ports:
        raise InvalidRequestError(
            f"{place}: {port} is not among the {side} of a stage of kind {stage.kind}: "
            + ", ".join(ports)
        )
    return ports[port.name]


def _port(text: str, place: str = "") -> Port:
    text = text.strip()
    stage, dot, name = text.partition(".")
    if not (stage and dot and name):
        raise InvalidRequestError(f"{place}: {text!r} must be STAGE.PORT")
    return Port(stage, name)


def _edge(text: str, place: str = "") -> tuple[Port, Port]:
    start, arrow, end = text.partition("->")
    if not arrow:
        raise InvalidRequestError(f"{place}: {text!r} must be STAGE.PORT -> STAGE.PORT")
    return _port(start, place), _port(end, place)
