"""Background sequences give way to all others in the scheduler."""

from inlay.engine.torch.plan import BACKGROUND_EVERY, BACKGROUND_EVERY_PROMPT
from inlay.messages.priority import BACKGROUND
from inlay.messages.prompt import Tokens
from tests.engine.torch.simulation import Simulation, bounds


def test_one_step_in_a_few_has_background_sequences_beside_others() -> None:
    simulation = Simulation(bounds(max_num_seqs=8))
    work = [simulation.admit(Tokens([1, n]), max_tokens=14, priority=BACKGROUND) for n in (1, 2)]
    simulation.step()
    other = simulation.admit(Tokens([1] * 3), max_tokens=8)
    with_work = 0
    while other in simulation.live:
        planned = {chunk.sequence for chunk in simulation.step().chunks}
        assert other in planned
        with_work += bool(planned & set(work))
    assert 8 // BACKGROUND_EVERY <= with_work <= 8 // BACKGROUND_EVERY + 1
    # Alone again they are in every step.
    assert {chunk.sequence for chunk in simulation.step().chunks} == set(work)
    simulation.drain()


def test_prompts_of_others_are_computed_almost_alone_and_starve_no_background_sequence() -> None:
    simulation = Simulation(bounds(max_num_seqs=8, num_pages=64))
    work = simulation.admit(Tokens([1, 1]), max_tokens=60, priority=BACKGROUND)
    simulation.step()
    steps = with_work = 0
    while steps < 2 * BACKGROUND_EVERY_PROMPT:
        other = simulation.admit(Tokens([2, steps]), max_tokens=1)
        while other in simulation.live:
            planned = {chunk.sequence for chunk in simulation.step().chunks}
            steps += 1
            assert other in planned
            with_work += work in planned
    assert 1 <= with_work <= 1 + steps // BACKGROUND_EVERY_PROMPT


def test_a_background_sequence_gives_its_place_to_any_other_and_never_takes_one() -> None:
    simulation = Simulation(bounds(max_num_seqs=2))
    work = [simulation.admit(Tokens([1, n]), max_tokens=20, priority=BACKGROUND) for n in (1, 2)]
    simulation.step()
    others = [simulation.admit(Tokens([2, n]), max_tokens=6, client="a") for n in (1, 2)]
    planned = {chunk.sequence for chunk in simulation.step().chunks}
    assert planned == set(others)
    while set(others) & set(simulation.live):
        planned = {chunk.sequence for chunk in simulation.step().chunks}
        assert not planned & set(work)
    simulation.drain()
    assert set(work) <= set(simulation.ended)


def test_a_background_prompt_takes_what_others_leave_of_a_step() -> None:
    simulation = Simulation(bounds(max_num_seqs=4, num_pages=64))
    work = simulation.admit(Tokens([1] * 200), priority=BACKGROUND, client="a/batch")
    other = simulation.admit(Tokens([2] * 90), client="a")
    for _ in range(2 * BACKGROUND_EVERY):
        if other not in simulation.live:
            break
        chunks = {chunk.sequence: chunk.count for chunk in simulation.step().chunks}
        whole = simulation.bounds.max_num_batched_tokens
        left = whole - chunks.get(other, 0)
        assert chunks.get(other, 0) == whole or other not in simulation.live
        assert chunks.get(work, 0) <= left
    assert other not in simulation.live
    simulation.drain()
