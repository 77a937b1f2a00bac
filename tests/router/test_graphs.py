"""The one graph of each pipeline: workers that say another are asked nothing."""

from msgspec.structs import replace

from inlay.router.graphs import Graphs
from inlay.stages.graph import StageCard
from tests.router.scripted_stages import GRAPH
from tests.router.standing import CARD, Standing

ELSEWHERE = replace(
    GRAPH, stages={name: replace(one, model="/srv/m") for name, one in GRAPH.stages.items()}
)
UNLIKE = replace(
    GRAPH, stages={name: replace(one, model="other") for name, one in GRAPH.stages.items()}
)


def stage(id_: str, name: str, graph: object = GRAPH) -> Standing:
    assert isinstance(graph, type(GRAPH))
    return Standing(id_, replace(CARD, name=name, stage=StageCard(graph, name)))


def test_a_worker_that_comes_with_another_graph_is_left_out_while_one_of_the_first_is_there() -> (
    None
):
    graphs, model = Graphs(), Standing("model")
    first, late = stage("a", "reader"), [stage(id_, "reader", UNLIKE) for id_ in "bc"]
    assert graphs.alike([model, first]) == [model, first]
    assert graphs.alike([*late, model, first]) == [model, first]
    assert sorted(graphs.refused) == ["b", "c"]
    assert "`painter`" in graphs.refused["b"]
    assert graphs.alike([*late, model]) == [*late, model]
    assert not graphs.refused


def test_of_unlike_graphs_at_the_beginning_that_of_most_workers_is_taken() -> None:
    workers = [stage("a", "reader", UNLIKE), stage("b", "reader"), stage("c", "denoiser")]
    graphs = Graphs()
    assert graphs.alike(workers) == workers[1:]
    assert list(graphs.refused) == ["a"]


def test_one_graph_read_from_unlike_directories_is_one_graph() -> None:
    workers = [stage("a", "reader"), stage("b", "denoiser", ELSEWHERE)]
    assert Graphs().alike(workers) == workers
