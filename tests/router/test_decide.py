"""Properties of a choice of workers, whatever is known of them."""

from random import Random

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.messages.card import EMBEDS_OFF, Adapter, Address, Limits, ModelCard
from inlay.messages.routing import WorkerLoad
from inlay.router.decide import Ask, Decision, Placement, Refuse, Wait, decide, eligible
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool, Snapshot
from tests.router.standing import CARD, Standing
from tests.router.test_pool import blocks

ADAPTER = Adapter(name="a", content_id="0" * 32, path="a")
LENGTH = 16 * 60


class Spec(msgspec.Struct, frozen=True):
    """One worker of a view: its card, what it has to do, and how much of the prompt it has."""

    number: int
    phase: str
    room: str
    asleep: bool
    gone: bool
    adapter: bool
    rows: bool
    bounded: bool
    requests: int
    prefill: int
    decode: int
    cached: int

    @property
    def card(self) -> ModelCard:
        phase = "decode" if self.room and self.phase == "both" else self.phase
        return msgspec.structs.replace(
            CARD,
            phase=phase,
            kv_rooms=self.room,
            kv_layout="" if self.room else "l",
            bootstrap=("h", self.number + 1),
            address=Address("h", self.number + 1, b"f"),
            asleep=int(self.asleep),
            adapters=(ADAPTER,) if self.adapter else (),
            prompt_embeds=None if self.rows else EMBEDS_OFF,
            limits=Limits(
                max_model_len=99_999,
                max_num_seqs=4,
                max_num_queued_tokens=2000 if self.bounded else None,
            ),
        )

    @property
    def has_room(self) -> bool:
        positions = not self.bounded or not self.prefill or self.prefill + LENGTH <= 2000
        return self.requests < 4 and positions


rarely = st.sampled_from([False, False, False, True])
specs = st.lists(
    st.builds(
        Spec,
        st.just(0),
        st.sampled_from(["both", "prefill", "decode"]),
        st.sampled_from(["", "", "f", "g"]),
        rarely,
        rarely,
        st.sampled_from([True, True, False]),
        st.sampled_from([True, True, False]),
        rarely,
        st.integers(0, 5),
        st.sampled_from([0, 16, 900, 1500, 5000]),
        st.sampled_from([0, 100, 3000]),
        st.sampled_from([0, 20, 60]),
    ),
    min_size=1,
    max_size=7,
).map(
    lambda found: [msgspec.structs.replace(one, number=number) for number, one in enumerate(found)]
)
policies = st.sampled_from(["kv", "kv", "least-loaded"])
asks = st.builds(
    lambda adapter, rows, client, divisible: Ask(
        LENGTH,
        blocks(1, 60),
        adapter="a" if adapter else None,
        rows=rows,
        client=client,
        divisible=divisible,
    ),
    st.booleans(),
    rarely,
    st.sampled_from(["new", "full"]),
    st.booleans(),
)


def view_of(found: list[Spec], policy: str = "kv", interference: float = 0.25) -> Snapshot:
    routing = RouterSettings.model_validate(
        {
            "router_policy": policy,
            "router_worker_backlog": 0,
            "router_interference_weight": interference,
            "router_fetch_weight": 0.05,
        }
    )
    pool = Pool(routing, Random(1))
    pool.take([Standing(f"w{one.number}", one.card) for one in found], lambda _: WorkerLoad())
    for member, one in zip(pool.seated, found, strict=True):
        # One client has all of a worker's requests.
        pool.change(member, one.requests, one.prefill, one.decode, client="full")
        pool.sent(member, blocks(1, one.cached))
        if one.gone:
            pool.set_gone(member)
    return pool.view()._replace(draw=0.0)


def may(one: Spec, ask: Ask) -> bool:
    """True if a worker could have the request, had it room."""
    able = not (one.asleep or one.gone) and (one.adapter or ask.adapter is None)
    return able and (one.rows or not ask.rows)


def parts(decision: Decision) -> list[int]:
    if not isinstance(decision, Placement):
        return []
    found = [decision.part, *([decision.prompt] if decision.prompt else [])]
    return [one.seat for one in found]


@settings(deadline=None)
@given(specs, policies, asks)
def test_nobody_is_chosen_who_cannot_have_it_and_both_ends_of_a_pair_are_of_one_form(
    found: list[Spec], policy: str, ask: Ask
) -> None:
    decision = decide(view_of(found, policy), ask)
    for seat in parts(decision):
        assert may(found[seat], ask)
    if isinstance(decision, Placement) and decision.prompt is not None:
        make, compute = found[decision.part.seat], found[decision.prompt.seat]
        assert make.room == compute.room
        assert decision.together == bool(make.room)
        assert compute.card.phase == "prefill"
        assert make.card.phase != "prefill"
    elif isinstance(decision, Placement):
        assert not found[decision.part.seat].room


@settings(deadline=None)
@given(specs, policies, asks)
def test_a_request_waits_only_where_nobody_who_may_have_it_has_room(
    found: list[Spec], policy: str, ask: Ask
) -> None:
    decision = decide(view_of(found, policy), ask)
    free = [one for one in found if may(one, ask) and one.has_room]
    whole = [one for one in free if not one.room]
    pairs = {one.room for one in free if one.card.phase == "decode"}
    pairs &= {one.room for one in free if one.card.phase == "prefill"}
    if whole or pairs - {""}:
        assert isinstance(decision, Placement)
    if isinstance(decision, Placement) and ask.client == "full":
        # It has its share already, and more, of whoever is full.
        assert all(found[seat] in free for seat in parts(decision))


@settings(deadline=None)
@given(specs, policies, asks)
def test_a_refusal_does_not_depend_on_loads(found: list[Spec], policy: str, ask: Ask) -> None:
    idle = [
        msgspec.structs.replace(one, requests=0, prefill=0, decode=0, cached=0) for one in found
    ]
    loaded, unloaded = decide(view_of(found, policy), ask), decide(view_of(idle, policy), ask)
    assert isinstance(loaded, Refuse) == isinstance(unloaded, Refuse)
    if isinstance(loaded, Refuse):
        assert loaded == unloaded
        assert (loaded.why == "asleep") == all(one.asleep for one in found)
    assert not isinstance(unloaded, Wait)


@settings(deadline=None)
@given(specs, policies, asks, st.randoms(use_true_random=False))
def test_the_order_of_the_workers_decides_between_equals_alone(
    found: list[Spec], policy: str, ask: Ask, random: Random
) -> None:
    # Each has other positions to decode, none of which outweighs one to compute.
    distinct = [
        msgspec.structs.replace(one, decode=one.number, bounded=False, phase="both", room="")
        for one in found
    ]
    mixed = random.sample(distinct, len(distinct))
    one, other = decide(view_of(distinct, policy), ask), decide(view_of(mixed, policy), ask)
    assert type(one) is type(other)
    numbers = [distinct[seat].number for seat in parts(one)]
    assert numbers == [mixed[seat].number for seat in parts(other)]


@settings(deadline=None)
@given(specs, asks)
def test_where_no_roles_are_nobody_who_is_free_would_cost_less(found: list[Spec], ask: Ask) -> None:
    plain = [msgspec.structs.replace(one, phase="both", room="") for one in found]
    view = view_of(plain)
    decision = decide(view, ask)
    if not isinstance(decision, Placement):
        return
    most = max((one.cached for one in plain if not (one.asleep or one.gone)), default=0)

    def cost(one: Spec) -> float:
        """Positions to compute first, of this prompt too, and a part of those that run."""
        fetched = int(0.95 * 16 * max(most - one.cached, 0))
        return one.prefill + LENGTH - 16 * one.cached - fetched + 0.05 * one.decode

    free = [one for one in plain if may(one, ask) and one.has_room]
    chosen = plain[decision.part.seat]
    assert decision.prompt is None
    if free:
        assert cost(chosen) <= min(map(cost, free)) + 1e-6


@settings(deadline=None)
@given(specs, asks)
def test_a_choice_changes_nothing(found: list[Spec], ask: Ask) -> None:
    view = view_of(found)
    before = [np.copy(one) for one in view if isinstance(one, np.ndarray)]
    assert decide(view, ask) == decide(view, ask)
    after = [one for one in view if isinstance(one, np.ndarray)]
    assert all(map(np.array_equal, before, after))


@settings(deadline=None)
@given(specs, st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6)))
def test_of_those_named_only_and_of_those_to_avoid_where_there_is_no_other(
    found: list[Spec], only: set[int], avoid: set[int]
) -> None:
    plain = [msgspec.structs.replace(one, room="") for one in found]
    ask = Ask(LENGTH, only=[f"w{one}" for one in only], avoid=[f"w{one}" for one in avoid])
    seats = set(eligible(view_of(plain), ask).tolist())
    named = {one.number for one in plain if may(one, ask)} & only
    assert seats == ((named - avoid) or named)
