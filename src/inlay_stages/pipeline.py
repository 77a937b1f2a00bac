"""Files of a pipeline: its graph, and the deployment of its stages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import BaseModel

from inlay.base.errors import InvalidRequestError
from inlay.engine.extension_options import section_of
from inlay.engine.settings import EngineSettings, sections
from inlay.engine.source import Served
from inlay.render.tokenizer import load_tokenizer
from inlay.render.vocabulary import Vocabulary
from inlay.tensors.checkpoint import config_of
from inlay.tensors.projector import projector_layers
from inlay_stages.cards import StageCard
from inlay_stages.engines.diffusers.facts import INDEX, is_pipeline, read_index
from inlay_stages.graph import UNLIKE_TOKENIZERS, Graph, Port, Stage, check
from inlay_stages.options import GraphOptions, OneStageOptions

MAX_WORKERS = 64
"""Workers of a stage on one machine."""


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Placement and settings of stages, which never change what they answer.

    Attributes:
        stages: by name, options of `EngineSettings`, and `workers`, how many `inlay serve` starts.
    """

    stages: dict[str, dict[str, Any]] = {}

    def workers(self, stage: str) -> int:
        """Number of workers of a stage."""
        return int(self.stages.get(stage, {}).get("workers", 1))


_OWN = frozenset({"model", "served_model_name", "part", "task", "hidden_projector"})
"""Settings that the graph decides."""


def is_graph(model: str) -> bool:
    """True if what is to be served is the file of a graph."""
    return model.endswith((".yaml", ".yml"))


def stage_engines(given: EngineSettings, deploy: Path | None) -> list[Served]:
    """Return the engines of all stages of the graph that `given.model` is.

    Args:
        given: what it sets is for all stages, over which the deployment goes.
        deploy: file of the deployment, or None.

    Raises:
        InvalidRequestError: of the graph or the deployment.
    """
    graph = read_graph(Path(given.model.model))
    deployment = read_deployment(deploy)
    fields = given.given()
    del fields["model"]
    return [
        Served(engine, StageCard(graph, name), deployment.workers(name))
        for name, engine in stage_settings(graph, deployment, fields).items()
    ]


def stage_engine(given: EngineSettings, deploy: Path | None, stage: str | None) -> Served:
    """Return the engine of the stage that is called `stage`. Arguments as `stage_engines`.

    Raises:
        InvalidRequestError: there is no such stage, or as `stage_engines`.
    """
    found = {one.stage.name: one for one in stage_engines(given, deploy) if one.stage is not None}
    names = ", ".join(found)
    if stage is None:
        raise InvalidRequestError(
            f"{given.model.model} is a graph, of which a worker is one stage: --stage must be one "
            f"of {names}"
        )
    if stage in found:
        return found[stage]
    raise InvalidRequestError(f"--stage is {stage!r}; {given.model.model} has {names}")


def read_graph(path: Path) -> Graph:
    """Read a graph and check it; models beside it become absolute paths.

    Raises:
        InvalidRequestError: it cannot be read, or is wrong; the message names the place.
    """
    try:
        graph = msgspec.convert(_read(path), Graph)
        check(graph)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    stages = {name: _found(stage, path.parent) for name, stage in graph.stages.items()}
    graph = msgspec.structs.replace(graph, stages=stages)
    try:
        for start, end in graph.links:
            if end.name == "tokens":
                _check_tokenizers(graph, start, end)
            elif end.name == "hidden":
                _check_widths(graph, start.stage, end.stage)
            elif end.name in _OF_ONE_PIPELINE:
                _check_pipelines(graph, start, end)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    return graph


def read_deployment(path: Path | None) -> Deployment:
    """Read a deployment; an empty one for None.

    Raises:
        InvalidRequestError: it cannot be read, or has a setting that is none or is the graph's.
    """
    if path is None:
        return Deployment()
    try:
        found = msgspec.convert(_read(path), Deployment)
        for name, fields in found.stages.items():
            _check_fields(f"stages.{name}", fields)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    return found


def stage_settings(
    graph: Graph, deployment: Deployment, given: Mapping[str, Any]
) -> dict[str, EngineSettings]:
    """Return the settings of the engine of each stage.

    Args:
        graph: checked.
        deployment: of its stages.
        given: options of `EngineSettings` for all stages, over which the deployment goes.

    Raises:
        InvalidRequestError: a stage that the graph has not, an engine that cannot run its kind, or
            a value out of range.
    """
    for name in deployment.stages:
        if name not in graph.stages:
            raise InvalidRequestError(
                f"stages.{name}: the graph has no such stage; it has {', '.join(graph.stages)}"
            )
    return {name: _settings_of(graph, name, deployment, given) for name in graph.stages}


def _settings_of(
    graph: Graph, name: str, deployment: Deployment, given: Mapping[str, Any]
) -> EngineSettings:
    stage = graph.stages[name]
    kind = stage.described
    own = {key: value for key, value in deployment.stages.get(name, {}).items() if key != "workers"}
    fields = {"engine": kind.engine, **given, **own}
    if fields["engine"] not in kind.engines:
        raise InvalidRequestError(
            f"stages.{name}.engine: {fields['engine']!r} runs no stage of kind {stage.kind}; "
            f"allowed: {', '.join(sorted(kind.engines))}"
        )
    fields |= {"model": stage.model, "served_model_name": [graph.served_name(name)]}
    if graph.gives_hidden(name) or graph.gives_states(name):
        if fields["engine"] != "torch":
            raise InvalidRequestError(
                f"stages.{name}.engine: {fields['engine']!r} gives no hidden states; allowed: torch"
            )
        fields["hidden_projector"] = stage.hidden.projector
    if kind.part != "pipeline":
        fields["part"] = kind.part
    try:
        return EngineSettings.of(**fields)
    except ValueError as error:
        raise InvalidRequestError(f"stages.{name}: {' '.join(str(error).split())}") from error


def _check_fields(place: str, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if key == "workers":
            if not isinstance(value, int) or not 1 <= value <= MAX_WORKERS:
                raise InvalidRequestError(
                    f"{place}.workers: {value!r}; allowed: 1 to {MAX_WORKERS}"
                )
        elif key in _OWN or key not in sections():
            why = "is the graph's to say" if key in _OWN else "is no setting of an engine"
            raise InvalidRequestError(f"{place}.{key}: {why}")


def _read(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read: {' '.join(str(error).split())}"
        ) from error


def _found(stage: Stage, folder: Path) -> Stage:
    """Return a stage whose files are named from here."""
    hidden = stage.hidden
    if hidden.projector is not None:
        file = str((folder / hidden.projector).resolve())
        hidden = msgspec.structs.replace(hidden, projector=file)
    return msgspec.structs.replace(stage, model=_model(stage.model, folder), hidden=hidden)


def _check_widths(graph: Graph, start: str, end: str) -> None:
    """Check what a model's hidden states are to another, as far as files here tell.

    Raises `InvalidRequestError` for a layer that is not there, or widths that do not fit.
    """
    asked = graph.stages[start].hidden
    place = f"stages.{start}.hidden"
    giver, taker = (_text_config(graph.stages[name].model) for name in (start, end))
    layers = giver.get("num_hidden_layers")
    if layers is not None and not -layers - 1 <= asked.layer <= layers:
        raise InvalidRequestError(
            f"{place}.layer: {asked.layer}; the model has {layers} layers: {-layers - 1} to "
            f"{layers}"
        )
    width = giver.get("hidden_size")
    if asked.projector is not None:
        projector = projector_layers(Path(asked.projector))
        if width not in (None, projector[0].width):
            raise InvalidRequestError(
                f"{place}.projector takes {projector[0].width} elements; {start} gives {width}"
            )
        width = projector[-1].size
    if width is not None and taker.get("hidden_size") not in (None, width):
        raise InvalidRequestError(
            f"{place}: {end} takes rows of {taker['hidden_size']} elements, and is given {width}"
            + ("; a projector makes others" if asked.projector is None else "")
        )


def _check_tokenizers(graph: Graph, start: Port, end: Port) -> None:
    """Raise `InvalidRequestError` where ids would be other tokens, as far as files here tell."""
    models = [Path(graph.stages[port.stage].model) for port in (start, end)]
    if all(model.is_dir() for model in models):
        ids = {Vocabulary(load_tokenizer(model).tokenizer).identity for model in models}
        if len(ids) > 1:
            raise InvalidRequestError(f"{start} -> {end}: {UNLIKE_TOKENIZERS}")


_OF_ONE_PIPELINE = ("embeds", "latents")
"""Ports whose tensors, by name and shape, are those of one class of pipelines."""


def _check_pipelines(graph: Graph, start: Port, end: Port) -> None:
    """Check that a stage is given the tensors it needs, as far as files here tell.

    Raises `InvalidRequestError` for parts of unlike pipelines.
    """
    gives, takes = (_pipeline_class(graph.stages[port.stage].model) for port in (start, end))
    if gives != takes and gives is not None and takes is not None:
        raise InvalidRequestError(
            f"stages.{end.stage}.model: a {takes} needs other {end.name} than {start}, of a "
            f"{gives}, gives"
        )


def _pipeline_class(model: str) -> str | None:
    """Return the class of a pipeline of diffusers; None if it is not on this machine."""
    directory = Path(model)
    return read_index(directory)[0] if is_pipeline(directory) else None


def _text_config(model: str) -> Mapping[str, Any]:
    """Return the configuration of a language model; empty if it is not on this machine."""
    if not Path(model).is_dir():
        return {}
    config = config_of(Path(model))
    return config.get("text_config") or config


def _model(name: str, folder: Path) -> str:
    return str((folder / name).resolve()) if (folder / name).is_dir() else name


class StageModels:
    """Graphs, and directories of diffusers, as `inlay.engine.source.ModelSource`."""

    def engine_of(self, model: str) -> str | None:
        return "diffusers" if is_pipeline(Path(model).expanduser()) else None

    def check(self, engine: EngineSettings, directory: Path | None) -> bool:
        if engine.model.engine not in ("diffusers", "vllm-omni"):
            return False
        if directory is not None and not is_pipeline(directory):
            raise InvalidRequestError(
                f"{directory} has no {INDEX}: it is no pipeline of diffusers", param="model"
            )
        return True

    def is_plan(self, model: str) -> bool:
        return is_graph(model)

    def plan(self, given: EngineSettings, command: BaseModel) -> list[Served]:
        return stage_engines(given, section_of(command, GraphOptions).deploy)

    def planned(self, given: EngineSettings, command: BaseModel) -> Served:
        asked = section_of(command, OneStageOptions)
        return stage_engine(given, asked.deploy, asked.stage)

    def check_model(self, command: BaseModel) -> None:
        given = section_of(command, GraphOptions)
        for option in ("stage", "deploy"):
            if getattr(given, option, None) is not None:
                raise InvalidRequestError(f"--{option} is for a graph, GRAPH.yaml, not for a model")


MODELS = StageModels()
