"""The one graph of each pipeline: workers that say another are asked nothing."""

from msgspec.structs import replace

from inlay.transport.api import Worker
from inlay_stages.cards import StageCard
from inlay_stages.fleet import Graphs
from tests.router.scripted_stages import GRAPH
from tests.router.standing import CARD, Standing

ELSEWHERE = replace(
    GRAPH, stages={name: replace(one, model="/srv/m") for name, one in GRAPH.stages.items()}
)
UNLIKE = replace(
    GRAPH, stages={name: replace(one, model="other") for name, one in GRAPH.stages.items()}
)


def stage(id_: str, name: str, graph: object = GRAPH, since: float = 0.0) -> Standing:
    assert isinstance(graph, type(GRAPH))
    rollout = replace(CARD.rollout, since=since)
    return Standing(id_, replace(CARD, name=name, stage=StageCard(graph, name), rollout=rollout))


def alike(graphs: Graphs, *workers: Standing) -> list[Worker]:
    """Return those that are asked, where all that are announced are reached."""
    return graphs.accept(workers, [worker.card for worker in workers])


def test_a_worker_that_comes_with_another_graph_is_left_out_while_one_of_the_first_is_there() -> (
    None
):
    graphs, model = Graphs(), Standing("model")
    first = stage("a", "reader", since=1.0)
    late = [stage(id_, "reader", UNLIKE, since=2.0) for id_ in "bc"]
    assert alike(graphs, model, first) == [model, first]
    assert alike(graphs, *late, model, first) == [model, first]
    assert sorted(graphs.refused) == ["b", "c"]
    assert "`painter`" in graphs.refused["b"]
    assert alike(graphs, *late, model) == [*late, model]
    assert not graphs.refused


def test_every_frontend_takes_the_same_graph_whatever_it_saw_first_and_reaches() -> None:
    first = stage("a", "reader", since=1.0)
    late = [stage(id_, "reader", UNLIKE, since=2.0) for id_ in "bc"]
    one, other, apart = Graphs(), Graphs(), Graphs()
    assert alike(one, first) == [first]
    assert alike(other, *late) == late
    assert alike(one, first, *late) == alike(other, *late, first) == [first]
    announced = [worker.card for worker in (*late, first)]
    # Until it reaches the first it has nobody to ask, as others would ask the first.
    assert apart.accept(late, announced) == []
    assert sorted(apart.refused) == ["b", "c"]


def test_of_graphs_that_are_as_old_that_of_most_workers_is_taken() -> None:
    workers = [stage("a", "reader", UNLIKE), stage("b", "reader"), stage("c", "denoiser")]
    graphs = Graphs()
    assert alike(graphs, *workers) == workers[1:]
    assert list(graphs.refused) == ["a"]


def test_one_graph_read_from_unlike_directories_is_one_graph() -> None:
    workers = [stage("a", "reader"), stage("b", "denoiser", ELSEWHERE)]
    assert alike(Graphs(), *workers) == workers
