"""Words after -- that reach SGLang, and how it schedules by them."""

from pathlib import Path
from typing import Any

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from tests.engine.conformance import make_request, run
from tests.engines.sglang.serving import FLAGS
from tests.engines.starting import started

NAMES = (
    "schedule_policy",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "retraction_policy",
)


def settings_of(directory: Path, *words: str) -> EngineSettings:
    given = [*FLAGS["engine_arguments"], *words]
    return EngineSettings.of(model=str(directory), **FLAGS | {"engine_arguments": given})


def scheduling(directory: Path, *words: str) -> tuple[Any, ...]:
    from inlay.engine.sglang.arguments import server_args

    found = server_args(settings_of(directory, *words), directory)
    return tuple(getattr(found, name) for name in NAMES)


def test_batches_come_after_all_others_where_the_policy_knows_priorities(directory: Path) -> None:
    for policy in ("fcfs", "lof"):
        expected = (policy, True, True, True, "priority")
        assert scheduling(directory, "--schedule-policy", policy) == expected
        assert scheduling(directory, f"--schedule-policy={policy}") == expected
    assert scheduling(directory) == ("fcfs", True, True, True, "priority")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--schedule-policy", "lpm"), ("lpm", False, False, False, "length")),
        (("--schedule-policy=lpm",), ("lpm", False, False, False, "length")),
        (("--enable-priority-scheduling",), ("fcfs", True, False, False, "length")),
        (("--retraction-policy=length",), ("fcfs", False, False, False, "length")),
        (("--disable-priority-preemption",), ("fcfs", False, False, True, "length")),
        (("--schedule-low-priority-values-first",), ("fcfs", False, True, False, "length")),
    ],
)
def test_scheduling_that_is_chosen_after_the_dashes_is_left_as_it_is(
    directory: Path, words: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    assert scheduling(directory, *words) == expected


def test_a_policy_in_another_spelling_is_refused_as_sglang_knows_none(directory: Path) -> None:
    with pytest.raises(InvalidRequestError, match="unrecognized arguments: --schedule_policy"):
        scheduling(directory, "--schedule_policy", "lpm")


async def test_an_sglang_of_another_policy_is_told_no_priorities(directory: Path) -> None:
    # It ends a request that has one.
    words = ("--schedule-policy", "lpm", "--abort-on-priority-when-disabled")
    async with started(settings_of(directory, *words)) as engine:
        (answer,) = await run(engine, make_request("r", Prompt.of(Tokens([5, 6])), 2))
        assert answer.last.finish_reason == "length"
