"""Frontends that hear of each other's load agree on it, whatever is lost, and forget who is gone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.messages.routing import FrontendLoad, WorkerLoad
from inlay.router.index import Keys, KvIndex, keys_of
from inlay.router.member import PoolMember
from inlay.router.peers import FORGOTTEN_SECONDS, WHOLE_SECONDS, PeerLoads
from tests.router.standing import Standing

WORKERS = ("w0", "w1", "w2")
IDLE = WorkerLoad()


class Frontend:
    """One frontend: its knowledge and its messages."""

    def __init__(self, name: str, group: "Group") -> None:
        self.learned: dict[str, WorkerLoad] = {}
        self.routed: list[tuple[str, list[int]]] = []
        self.peers = PeerLoads(
            group.published.append, self._learn, self._route, name=name, clock=group.time
        )
        self.members = {id_: PoolMember(Standing(id_), KvIndex()) for id_ in WORKERS}
        for seat, member in enumerate(self.members.values()):
            member.seat = seat
            self.peers.watch(member)

    def _learn(self, worker_id: str, load: WorkerLoad) -> None:
        self.learned[worker_id] = load

    def _route(self, worker_id: str, keys: Keys) -> None:
        self.routed.append((worker_id, keys.tolist()))


class Group:
    """Frontends on a wire that may lose what is said."""

    def __init__(self, *names: str) -> None:
        self.now = 100.0
        self.published: list[FrontendLoad] = []
        self.frontends = {name: Frontend(name, self) for name in names}

    def time(self) -> float:
        return self.now

    def tell(self, name: str, *, lost: bool = False, after: float = 0.3) -> list[FrontendLoad]:
        """Have a frontend say what it has to say."""
        self.now += after
        self.published.clear()
        self.frontends[name].peers.tell()
        said = list(self.published)
        for other in self.frontends.values():
            for message in said if not lost else ():
                other.peers.take(message)
        return said


def _as_tuple(load: WorkerLoad) -> tuple[int, int, int]:
    return load.requests, load.prefill, load.decode


steps = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from(WORKERS),
    st.integers(0, 5),
    st.integers(0, 500),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=30))
def test_once_everybody_has_said_everything_all_agree(
    taken: list[tuple[str, str, int, int, bool]],
) -> None:
    group = Group("a", "b", "c")
    for name, worker, requests, prefill, lost in taken:
        group.frontends[name].members[worker].own = WorkerLoad(requests, prefill, 0)
        group.tell(name, lost=lost)
    for name in "abcabc":
        group.tell(name, after=WHOLE_SECONDS / 2 + 0.1)
    for name, frontend in group.frontends.items():
        for id_ in WORKERS:
            others = [
                _as_tuple(other.members[id_].own)
                for other_name, other in group.frontends.items()
                if other_name != name
            ]
            expected = WorkerLoad(*map(sum, zip(*others, strict=True)))
            assert frontend.peers.load(id_) == frontend.learned.get(id_, IDLE) == expected


def test_only_changes_are_said_until_it_is_time_for_everything() -> None:
    group = Group("a", "b")
    a = group.frontends["a"]
    a.members["w0"].own = a.members["w1"].own = WorkerLoad(1, 10, 0)
    (first,) = group.tell("a")
    assert first.whole
    assert set(first.loads) == {"w0", "w1"}
    group.tell("b")
    assert group.tell("a")[0].whole  # b is new to it
    a.members["w1"].own = IDLE
    (change,) = group.tell("a")
    assert not change.whole
    assert change.loads == {"w1": IDLE}
    assert group.tell("a") == []
    assert group.tell("a", after=WHOLE_SECONDS)[0].whole


def test_a_new_frontend_is_told_everything_at_once() -> None:
    group = Group("a", "b")
    group.frontends["a"].members["w0"].own = WorkerLoad(3, 0, 70)
    group.tell("a", lost=True)
    assert group.frontends["b"].peers.load("w0") == IDLE
    group.tell("b")
    group.tell("a")
    assert group.frontends["b"].peers.load("w0") == WorkerLoad(3, 0, 70)


def test_who_leaves_or_is_long_silent_has_nothing_under_way() -> None:
    group = Group("a", "b", "c")
    for name in "ab":
        group.frontends[name].members["w0"].own = WorkerLoad(1, 5, 0)
        group.tell(name)
    c = group.frontends["c"]
    assert c.learned["w0"] == WorkerLoad(2, 10, 0)
    c.peers.take(FrontendLoad(frontend="a", sequence=99, leaving=True))
    assert c.learned["w0"] == WorkerLoad(1, 5, 0)
    group.tell("c", after=FORGOTTEN_SECONDS + 1)
    assert c.learned["w0"] == IDLE


def test_what_is_older_than_what_is_known_is_no_news() -> None:
    group = Group("a")
    peers = group.frontends["a"].peers
    peers.take(FrontendLoad(frontend="x", sequence=5, loads={"w0": WorkerLoad(2, 0, 0)}))
    peers.take(FrontendLoad(frontend="x", sequence=4, loads={"w0": WorkerLoad(9, 0, 0)}))
    assert peers.load("w0") == WorkerLoad(2, 0, 0)


def test_others_hear_what_was_sent_to_workers_that_do_not_tell_themselves() -> None:
    group = Group("a", "b")
    a, b = group.frontends["a"], group.frontends["b"]
    keys = keys_of(bytes(range(40)))
    a.peers.sent(a.members["w2"], keys)
    group.tell("a")
    assert b.routed == [("w2", keys.tolist())]
    group.tell("a")
    assert len(b.routed) == 1
