"""Graphs: what is read, and one line that names the place of what is wrong."""

import re
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from inlay import demo as bundled
from inlay.base.errors import InvalidRequestError
from inlay_stages.graph import Graph, check
from inlay_stages.kinds import KINDS
from inlay_stages.pipeline import Deployment, read_deployment, read_graph, stage_settings

PAINTER: dict[str, Any] = {
    "name": "painter",
    "stages": {
        "writer": {"kind": "generate", "model": "writer"},
        "encoder": {"kind": "encode", "model": "sd"},
        "painter": {"kind": "denoise", "model": "sd"},
        "decoder": {"kind": "decode", "model": "sd"},
    },
    "edges": [
        "writer.text -> encoder.prompt",
        "encoder.embeds -> painter.embeds",
        "painter.latents -> decoder.latents",
    ],
    "inputs": {"prompt": "writer.prompt"},
    "outputs": {"text": "writer.text", "image": "decoder.image"},
}

DRAWER: dict[str, Any] = {
    "name": "drawer",
    "stages": {"painter": {"kind": "image", "model": "sd"}},
    "edges": [],
    "inputs": {"prompt": "painter.prompt"},
    "outputs": {"image": "painter.image"},
}


def write(tmp_path: Path, graph: object) -> Path:
    path = tmp_path / "graph.yaml"
    path.write_text(yaml.safe_dump(graph, sort_keys=False))
    return path


def changed(*path: str, to: object) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(PAINTER))
    *way, last = path
    inner = found
    for one in way:
        inner = inner[one]
    inner[last] = to
    return found


def test_a_graph_is_read_and_its_models_found_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sd").mkdir()
    graph = read_graph(write(tmp_path, PAINTER))
    assert graph.stages["painter"].model == str(tmp_path / "sd")
    assert graph.stages["writer"].model == "writer"
    assert graph.text_stage == "writer"
    assert graph.served_name("writer") == "painter"
    assert graph.served_name("decoder") == "painter/decoder"
    assert graph.needed(["image"]) == ["writer", "encoder", "painter", "decoder"]
    assert graph.needed(["text"]) == ["writer"]
    assert graph.missing({"painter", "painter/encoder", "painter/decoder"}) == {
        "painter": "painter/painter"
    }
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(graph), type=Graph) == graph


def test_the_deployment_chooses_engines_and_never_models(tmp_path: Path) -> None:
    graph = read_graph(write(tmp_path, PAINTER))
    path = tmp_path / "deploy.yaml"
    deployed = {"painter": {"dtype": "bfloat16", "workers": 2}, "writer": {"engine": "vllm"}}
    path.write_text(yaml.safe_dump({"stages": deployed}))
    deployment = read_deployment(path)
    assert (deployment.workers("painter"), deployment.workers("writer")) == (2, 1)
    found = stage_settings(graph, deployment, {"max_num_seqs": 3, "dtype": "float32"})
    assert found["painter"].given() == {
        "engine": "diffusers",
        "part": "denoiser",
        "dtype": "bfloat16",
        "model": "sd",
        "max_num_seqs": 3,
        "served_model_name": ["painter/painter"],
    }
    assert (found["writer"].model.engine, found["writer"].model.dtype) == ("vllm", "float32")
    assert read_deployment(None) == Deployment()
    drawer = read_graph(write(tmp_path, DRAWER))
    placed = Deployment({"painter": {"engine": "vllm-omni", "max_num_seqs": 2}})
    assert stage_settings(drawer, placed, {})["painter"].model.engine == "vllm-omni"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"decoder": {"engine": "torch"}}, "'torch' runs no stage of kind decode; allowed: diff"),
        ({"nobody": {}}, "stages.nobody: the graph has no such stage; it has writer, encoder"),
        ({"writer": {"model": "other"}}, "stages.writer.model: is the graph's to say"),
        ({"writer": {"colour": 1}}, "stages.writer.colour: is no setting of an engine"),
        ({"writer": {"workers": 0}}, "stages.writer.workers: 0; allowed: 1 to 64"),
        ({"writer": {"max_num_seqs": "many"}}, "stages.writer: 1 validation error"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_wrong_deployment_is_refused_in_one_line(
    tmp_path: Path, stages: object, said: str
) -> None:
    graph = read_graph(write(tmp_path, PAINTER))
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump({"stages": stages}))
    with pytest.raises(InvalidRequestError) as refused:
        stage_settings(graph, read_deployment(path), {})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ([], "Expected `object`, got `array`"),
        (changed("name", to="a/b"), "name: 'a/b' must not be empty or hold a slash"),
        (changed("stages", to={}), "stages: there are 0; allowed: 1 to 16"),
        (changed("stages", "writer", "kind", to="sing"), "stages.writer.kind: 'sing' is unknown"),
        (changed("stages", "writer", "colour", to=1), "colour"),
        (changed("stages", "a b", to={"kind": "decode", "model": "m"}), "stages.a b: a stage's"),
        (changed("edges", to=["writer.text"]), "edges[0]: 'writer.text' must be STAGE.PORT ->"),
        (changed("edges", to=["writer -> encoder.prompt"]), "edges[0]: 'writer' must be STAGE"),
        (changed("edges", to=["who.text -> encoder.prompt"]), "edges[0]: there is no stage 'who'"),
        (
            changed("edges", to=["writer.song -> encoder.prompt"]),
            "edges[0]: writer.song is not among the outputs of a stage of kind generate: text",
        ),
        (
            changed("edges", to=["writer.text -> decoder.latents"]),
            "edges[0]: writer.text is Text, decoder.latents takes Latents",
        ),
        (
            changed("edges", to=[*PAINTER["edges"], "writer.text -> encoder.prompt"]),
            "edges[3]: encoder.prompt is fed by writer.text already",
        ),
        (changed("edges", to=PAINTER["edges"][:2]), "stages.decoder: nothing feeds it"),
        (
            changed("edges", to=["encoder.embeds -> painter.embeds", PAINTER["edges"][2]]),
            "stages.encoder: nothing feeds it; allowed: exactly one of encoder.prompt",
        ),
        (changed("inputs", to={"sound": "writer.prompt"}), "inputs.sound: unknown"),
        (changed("inputs", to={}), "inputs: prompt is missing"),
        (changed("outputs", to={}), "outputs: there are none"),
        (
            changed("outputs", to={"text": "decoder.image"}),
            "outputs.text: decoder.image is Image; allowed: text of type Text, image of type Image, pre",
        ),
        (
            changed("outputs", to={"image": "decoder.preview"}),
            "outputs.image: decoder.preview is ImageStream; allowed: text of type Text",
        ),
        (
            changed("outputs", to=PAINTER["outputs"] | {"preview": "painter.preview"}),
            "outputs.preview: painter.preview is not among the outputs of a stage of kind denoise",
        ),
        (
            changed("outputs", to={"text": "writer.text", "preview": "decoder.preview"}),
            "outputs.preview: decoder.preview; outputs.image must be of the same stage",
        ),
        (changed("outputs", to={"text": "writer.text"}), "stages.decoder: no output needs it"),
    ],
)
def test_a_wrong_graph_is_refused_in_one_line(tmp_path: Path, graph: Any, said: str) -> None:
    path = write(tmp_path, graph)
    with pytest.raises(InvalidRequestError) as refused:
        read_graph(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_page_of_pipelines_has_the_ports_of_every_kind_and_their_types() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    for name, kind in KINDS.items():
        takes, gives = (
            [f"`{port}` ({type_})" for port, type_ in ports.items()]
            for ports in (kind.inputs, kind.outputs)
        )
        assert f"\n| `{name}` | {' or '.join(takes)} | {', '.join(gives)} | " in page


def test_the_page_has_a_graph_for_every_kind_of_stage_and_all_of_them_load(tmp_path: Path) -> None:
    """Each is run by a test of its own: `documented` of tests/cli, and the demo."""
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    blocks = re.findall(r"^    # [a-z]+\.yaml\n((?:    .*\n)+)", page, re.MULTILINE)
    save_file({"0.weight": np.zeros((4, 4), np.float32)}, tmp_path / "projector.safetensors")
    graphs = [yaml.safe_load(textwrap.dedent(block)) for block in blocks]
    graphs = [graph for graph in graphs if "edges" in graph]
    kinds = [
        stage.kind
        for graph in graphs
        for stage in read_graph(write(tmp_path, graph)).stages.values()
    ]
    assert set(kinds) == set(KINDS)
    assert yaml.safe_load((bundled.pipeline_dir() / "graph.yaml").read_text()) in graphs


def test_parts_of_unlike_pipelines_do_not_meet(tmp_path: Path) -> None:
    for name, pipeline in (("sd", "StableDiffusionPipeline"), ("flux", "FluxPipeline")):
        (tmp_path / name).mkdir()
        index = msgspec.json.encode({"_class_name": pipeline})
        (tmp_path / name / "model_index.json").write_bytes(index)
    assert read_graph(write(tmp_path, PAINTER)).name == "painter"
    for stage, port in (("encoder", "painter.model: a Stable"), ("decoder", "decoder.model: a F")):
        with pytest.raises(InvalidRequestError) as refused:
            read_graph(write(tmp_path, changed("stages", stage, "model", to="flux")))
        assert f"stages.{port}" in str(refused.value)
        assert "than " in str(refused.value)


def test_a_cycle_is_named(tmp_path: Path) -> None:
    graph = {
        "name": "loop",
        "stages": {name: {"kind": "generate", "model": "m"} for name in ("a", "b", "c")},
        "edges": ["b.text -> c.prompt", "c.text -> b.prompt"],
        "inputs": {"prompt": "a.prompt"},
        "outputs": {"text": "c.text"},
    }
    with pytest.raises(InvalidRequestError, match=r"edges: a cycle: . <- . <- ."):
        read_graph(write(tmp_path, graph))


def test_language_models_stand_in_a_row(tmp_path: Path) -> None:
    graph = {
        "name": "row",
        "stages": {name: {"kind": "generate", "model": name} for name in ("a", "b", "c")},
        "edges": ["b.hidden -> c.hidden", "a.text -> b.prompt"],
        "inputs": {"prompt": "a.prompt"},
        "outputs": {"text": "c.text"},
    }
    found = read_graph(write(tmp_path, graph))
    assert (found.before_text, found.served_name("c")) == (["a", "b"], "row")
    assert [name for name in "abc" if found.gives_hidden(name)] == ["b"]
    assert [found.fed_on(name) for name in "abc"] == [None, "prompt", "hidden"]
    deployment = Deployment(stages={"b": {"engine": "vllm"}})
    with pytest.raises(InvalidRequestError, match="'vllm' gives no hidden states; allowed: torch"):
        stage_settings(found, deployment, {})
    graph["stages"]["c"]["max_tokens"] = 4  # type: ignore[index]
    with pytest.raises(InvalidRequestError, match=r"stages\.c\.max_tokens: 4; allowed"):
        read_graph(write(tmp_path, graph))


SPEAKER: dict[str, Any] = {
    "name": "speaker",
    "stages": {
        name: {"kind": kind, "model": "m"}
        for name, kind in (("thinker", "generate"), ("talker", "talk"), ("vocoder", "vocode"))
    },
    "edges": ["thinker.states -> talker.states", "talker.codes -> vocoder.codes"],
    "inputs": {"prompt": "thinker.prompt"},
    "outputs": {"audio": "vocoder.audio"},
}


@pytest.mark.parametrize("port", ["audio", "sound", "file"])
def test_sound_leaves_as_a_stream_whole_or_as_a_file(tmp_path: Path, port: str) -> None:
    outputs = {"audio": f"vocoder.{port}"}
    found = read_graph(write(tmp_path, SPEAKER | {"outputs": outputs}))
    assert found.output_port("audio") == ("vocoder", port)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (
            {"audio": "talker.codes"},
            "of type ImageStream, audio of type AudioStream or AudioPcm or Blob",
        ),
        ({"text": "thinker.tokens"}, "outputs.text: thinker.tokens is TokenIds; allowed: text"),
        ({"image": "vocoder.file"}, "outputs.image: vocoder.file is Blob; allowed: text"),
        ({"text": "vocoder.sound"}, "outputs.text: vocoder.sound is AudioPcm; allowed: text"),
    ],
)
def test_an_output_of_another_type_is_refused_by_its_name(
    tmp_path: Path, outputs: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_graph(write(tmp_path, SPEAKER | {"outputs": outputs}))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("edge", "said"),
    [
        ("a.tokens -> b.prompt", "edges[0]: a.tokens is TokenIds, b.prompt takes Text"),
        ("a.text -> b.tokens", "edges[0]: a.text is Text, b.tokens takes TokenIds"),
        ("a.hidden -> b.tokens", "edges[0]: a.hidden is HiddenStates, b.tokens takes TokenIds"),
    ],
)
def test_ids_go_to_ids_alone(tmp_path: Path, edge: str, said: str) -> None:
    graph = {
        "name": "row",
        "stages": {name: {"kind": "generate", "model": name} for name in "ab"},
        "edges": [edge],
        "inputs": {"prompt": "a.prompt"},
        "outputs": {"text": "b.text"},
    }
    with pytest.raises(InvalidRequestError) as refused:
        read_graph(write(tmp_path, graph))
    assert said in str(refused.value)
    found = read_graph(write(tmp_path, graph | {"edges": ["a.tokens -> b.tokens"]}))
    assert (found.fed_on("a"), found.fed_on("b")) == (None, "tokens")


@pytest.mark.parametrize("text", ["a: [", "\t- x", "name: !!python/object:os.system {}"])
def test_what_is_no_yaml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_graph(path)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_graph(tmp_path / "absent.yaml")


names = st.sampled_from(["a", "b", "c", "d", "e"])
ports = st.sampled_from(
    sorted({port for kind in KINDS.values() for port in (*kind.inputs, *kind.outputs)})
)
where = st.builds("{}.{}".format, names, ports)
graphs = st.builds(
    Graph,
    name=st.just("g"),
    stages=st.dictionaries(
        names,
        st.builds(dict, kind=st.sampled_from([*KINDS, "other"]), model=st.just("m")),
        max_size=5,
    ).map(lambda found: msgspec.convert(found, dict[str, Any])),
    edges=st.lists(st.builds("{} -> {}".format, where, where), max_size=6),
    inputs=st.dictionaries(st.just("prompt"), where, max_size=1),
    outputs=st.dictionaries(
        st.sampled_from(["text", "image", "preview", "audio"]), where, max_size=3
    ),
)


@given(graphs)
def test_a_graph_that_passes_has_an_order_in_which_each_stage_is_fed(graph: Graph) -> None:
    graph = msgspec.convert(msgspec.to_builtins(graph), Graph)
    try:
        check(graph)
    except InvalidRequestError:
        return
    done: set[str] = set()
    for name in graph.needed(graph.outputs):
        feeds = graph.sources(name)
        assert all(start.stage in done for start, _ in feeds)
        assert len(feeds) + (graph.inputs["prompt"] == f"{name}.prompt") == 1
        done.add(name)
    assert done == set(graph.stages)
