"""A pool chooses only among those that may have a request, and knows what each was sent and has under way."""

from random import Random

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.messages.card import EMBEDS_OFF, Adapter, ModelCard
from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.routing import WorkerLoad
from inlay.router.decide import Ask, Decision, Part, Placement, decide
from inlay.router.index import Keys, keys_of
from inlay.router.member import BRIDGED_SECONDS, PoolMember
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool
from inlay.router.terms import prompt_at
from tests.router.standing import CARD, Standing

ADAPTER = Adapter(name="a", content_id="0" * 32, path="a")
IDLE = WorkerLoad()


class Made:
    """A pool of workers with such cards, and a clock."""

    def __init__(self, *cards: ModelCard, **routing: object) -> None:
        self.now = 0.0
        given = RouterSettings.model_validate(routing)
        self.pool = Pool(given, Random(1), lambda: self.now)
        self.workers = [Standing(f"w{n}", card) for n, card in enumerate(cards)]
        self.take()

    def take(self) -> list[PoolMember]:
        return self.pool.take(self.workers, lambda _: IDLE)

    def member(self, number: int) -> PoolMember:
        return self.pool.members[f"w{number}"]

    def decide(self, length: int = 160, keys: Keys | None = None, **how: object) -> Decision:
        return decide(self.pool.view(), Ask(length, keys, **how))  # type: ignore[arg-type]

    def placed(self, length: int = 160, keys: Keys | None = None, **how: object) -> Placement:
        decision = self.decide(length, keys, **how)
        assert isinstance(decision, Placement)
        return decision

    def chosen(self, length: int = 160, keys: Keys | None = None, **how: object) -> str | None:
        """The worker that makes the output, or None where none can take the request now."""
        decision = self.decide(length, keys, **how)
        if not isinstance(decision, Placement):
            return None
        self.pool.last = decision.part.seat
        return self.id_at(decision.part)

    def id_at(self, part: Part | None) -> str | None:
        return None if part is None else self.pool.seated[part.seat].id

    def cached(self, keys: Keys) -> list[int]:
        """Positions of a prompt that each worker has, by seat."""
        found = prompt_at(self.pool.view(), 0, keys).cached
        assert found is not None
        return [int(positions) for positions in found]


def card(**changes: object) -> ModelCard:
    return msgspec.structs.replace(CARD, **changes)


def blocks(seed: int, number: int = 10) -> Keys:
    return keys_of(np.random.default_rng(seed).bytes(8 * number))


cards = st.builds(
    lambda asleep, adapter, rows: card(
        asleep=asleep,
        adapters=(ADAPTER,) if adapter else (),
        prompt_embeds=None if rows else EMBEDS_OFF,
    ),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(cards, st.integers(0, 9)), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "s"]),
    st.sampled_from(["kv", "least-loaded", "power-of-two", "round-robin"]),
)
def test_nobody_is_chosen_who_sleeps_lacks_the_adapter_takes_no_rows_or_is_full(
    workers: list[tuple[ModelCard, int]],
    adapter: bool,
    rows: bool,
    session: str | None,
    policy: str,
) -> None:
    made = Made(*(one for one, _ in workers), router_policy=policy)
    for number, (_, requests) in enumerate(workers):
        made.pool.change(made.member(number), requests=requests)
    may = {
        f"w{number}"
        for number, (one, requests) in enumerate(workers)
        if not one.asleep
        and requests < 8
        and (not adapter or one.adapters)
        and (not rows or one.prompt_embeds is None)
    }
    name = "a" if adapter else None
    for seed in range(3):
        chosen = made.chosen(keys=blocks(seed), adapter=name, rows=rows, session=session)
        assert chosen in may if may else chosen is None


def test_of_those_named_only_and_never_those_to_avoid() -> None:
    made = Made(*[CARD] * 5)
    for _ in range(20):
        assert made.chosen(only=["w1", "w3", "gone"], avoid=["w3"]) == "w1"
    assert made.chosen(only=["gone"]) is None


def test_who_is_full_is_chosen_only_when_that_does_not_matter() -> None:
    made = Made(CARD, router_worker_backlog=0)
    made.pool.change(made.member(0), requests=4)
    assert made.chosen() is None
    assert made.chosen(full_too=True) == "w0"


def test_what_was_sent_is_known_until_its_time_is_over() -> None:
    made = Made(CARD, CARD, CARD, router_cache_ttl=100)
    keys = blocks(1)
    made.pool.sent(made.member(1), keys)
    assert made.chosen(keys=keys) == "w1"
    made.now = 99.0
    assert made.cached(keys) == [0, 160, 0]
    made.now = 101.0
    assert made.cached(keys) == [0, 0, 0]


def test_of_a_worker_that_tells_what_it_has_what_was_sent_is_believed_for_a_short_time() -> None:
    made = Made(card(kv_events=True), CARD)
    keys = blocks(1)
    made.pool.sent(made.member(0), keys)
    assert made.cached(keys) == [160, 0]
    made.now = BRIDGED_SECONDS + 0.1
    assert made.cached(keys) == [0, 0]
    made.pool.index.store(made.member(0).reported, keys[:4])
    made.now = 1000.0
    assert made.cached(keys) == [64, 0]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 30)), max_size=60))
def test_no_more_is_thought_cached_than_fits_and_the_last_that_was_sent_always_is(
    sent: list[tuple[int, int]],
) -> None:
    made = Made(card(num_blocks=128), CARD)
    member = made.member(0)
    for seed, number in sent:
        made.pool.sent(member, blocks(seed, number))
        assert made.cached(blocks(seed, number)) == [number * BLOCK_SIZE, 0]
    distinct = dict(sent)
    known = sum(
        made.cached(blocks(seed, number))[0] // BLOCK_SIZE for seed, number in distinct.items()
    )
    assert known <= 128 + 30


def test_who_falls_asleep_has_nothing_cached_when_it_wakes() -> None:
    made = Made(CARD, CARD)
    keys = blocks(1)
    made.pool.sent(made.member(0), keys)
    made.workers[0].card = card(asleep=1)
    made.take()
    made.workers[0].card = CARD
    made.take()
    assert made.cached(keys) == [0, 0]


def test_those_who_stay_keep_what_they_have_when_others_come_and_go() -> None:
    made = Made(CARD, CARD, CARD)
    keys = blocks(1)
    made.pool.sent(made.member(2), keys)
    made.pool.change(made.member(2), requests=1, prefill=160)
    gone = made.member(0)
    made.pool.change(gone, requests=1, decode=5)
    made.workers = [Standing("new"), *made.workers[1:]]
    assert [member.id for member in made.take()] == ["new"]
    assert made.cached(keys) == [0, 0, 160]
    assert made.member(2).load == WorkerLoad(1, 160, 0)
    made.pool.change(gone, requests=-1, decode=-5)  # its last request ends after it has left
    assert [member.load for member in made.pool.members.values()] == [
        IDLE,
        IDLE,
        WorkerLoad(1, 160, 0),
    ]


def test_other_frontends_requests_count() -> None:
    made = Made(CARD, CARD)
    made.pool.set_others(made.member(0), WorkerLoad(1, 1000, 0))
    assert all(made.chosen() == "w1" for _ in range(5))
    made.pool.set_others(made.member(0), WorkerLoad(8, 0, 0))
    made.pool.set_others(made.member(1), WorkerLoad(8, 0, 0))
    # All other frontends' clients count as one, so that one of this has half.
    for number in (0, 1):
        made.pool.change(made.member(number), requests=3, client="own")
        assert made.chosen(client="own") is not None
        made.pool.change(made.member(number), requests=1, client="own")
    assert made.chosen(client="own") is None
    assert made.chosen(client="new") is not None
    made.pool.change(made.member(0), requests=-4, client="own")
    made.pool.set_others(made.member(0), IDLE)
    assert made.chosen() == "w0"


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abcde"), st.integers(1, 9)), max_size=40
    ),
    st.sampled_from("abcdef"),
)
def test_where_all_are_full_a_client_is_let_in_up_to_its_share(
    given_works: list[tuple[int, str, int]], client: str
) -> None:
    made = Made(CARD, CARD, CARD)
    requests: list[dict[str, int]] = [{}, {}, {}]
    for number, name, count in given_works:
        made.pool.change(made.member(number), requests=count, client=name)
        requests[number][name] = requests[number].get(name, 0) + count
    free = {n for n in range(3) if sum(requests[n].values()) < 8}
    within = {
        n for n in range(3) if (requests[n].get(client, 0) + 1) * len({*requests[n], client}) <= 8
    }
    chosen = {made.chosen(client=client) for _ in range(5)} - {None}
    assert chosen <= {f"w{n}" for n in free or within}
    assert bool(chosen) == bool(free or within)
    for number, name, count in reversed(given_works):
        made.pool.change(made.member(number), requests=-count, client=name)
    assert not made.pool._requests_of
    assert not made.pool.view().clients.any()
