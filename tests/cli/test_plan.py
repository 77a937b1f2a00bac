"""`inlay plan`: its fleets on paper beside real ones, and what it prints."""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inlay.cli import main
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Request, Sampling
from inlay.router import Router
from inlay_tools.plan.fleet import (
    WARM_UP,
    Asked,
    Demand,
    FleetTimes,
    PaperFleet,
    StepTimes,
    requests_of,
)
from inlay_tools.plan.measuring import Seen, fitted
from inlay_tools.plan.sizing import Sizing
from tests import virtual_time
from tests.router.sending import send
from tests.transport.direct import DirectPlane

pytestmark = pytest.mark.extensions("tools")

SECRET = Secret(bytes(32))
TIMES = StepTimes(0.04, 0.001, 0.0002, 0.0, max_num_seqs=16, max_num_batched_tokens=512)
DEMAND = Demand(rate=20.0, input_len=400, output_len=24, cached_share=0.5, spread=0.5)


class SteppingEcho(EchoEngine):
    """An echo engine whose steps take the times of `TIMES`; half of each prompt is cached."""

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        super().__init__(settings, secret)
        self._prompts: deque[str] = deque()
        self._left: dict[str, int] = {}
        self._ends: list[str] = []

    def submit(self, request: Request, emit: Emit) -> None:
        self._prompts.append(request.id)
        self._left[request.id] = max(round(len(request.prompt) * (1 - DEMAND.cached_share)), 1)
        super().submit(request, emit)

    def _schedule(self) -> None:
        if self._stepping is not None or not self._shell:
            return
        running = (job.request.id for job in self._shell)
        self._ends = [id_ for id_ in running if id_ not in self._left]
        decoded, room = len(self._ends), TIMES.max_num_batched_tokens
        while self._prompts and room:
            id_ = self._prompts[0]
            done = min(self._left[id_], room)
            room -= done
            self._left[id_] -= done
            if not self._left[id_]:
                self._ends.append(self._prompts.popleft())
                del self._left[id_]
        computed = TIMES.max_num_batched_tokens - room
        seconds = TIMES.step + TIMES.per_sequence * decoded + TIMES.per_position * computed
        self._stepping = asyncio.get_running_loop().call_later(seconds, self._step)

    def _step(self) -> None:
        self._stepping = None
        for id_ in self._ends:
            if (running := self._shell.get(id_)) is not None:
                self._emit_one(running)
        self._schedule()


async def served(settings: EngineSettings, workers: int, asked: Sequence[Asked]) -> FleetTimes:
    """What clients of a router before so many real workers see."""
    plane = await DirectPlane.around(*(SteppingEcho(settings, SECRET) for _ in range(workers)))
    clock = asyncio.get_running_loop().time
    router, began = Router(plane, clock=clock), clock()
    counts_from = asked[int(len(asked) * WARM_UP)].at
    first: list[float] = []
    gaps: list[float] = []

    async def client(number: int, one: Asked) -> None:
        await asyncio.sleep(began + one.at - clock())
        came = [clock()]
        request = Request(
            id=str(number),
            prompts=(Prompt.of(Tokens([1] * one.length)),),
            params=Sampling(max_tokens=one.tokens),
        )
        async for deltas in await send(router, request):
            came += [clock() for delta in deltas for _ in delta.token_ids]
        assert len(came) == one.tokens + 1
        if one.at >= counts_from:
            between = np.diff(came).tolist()
            first.append(between[0])
            gaps.extend(between[1:])

    await asyncio.gather(*(client(number, one) for number, one in enumerate(asked)))
    await plane.close()
    return FleetTimes(float(np.percentile(first, 95)), float(np.percentile(gaps, 95)), 0.0)


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 100000}'
    )
    return EngineSettings.of(
        model=str(tmp_path), engine="echo", served_model_name=["m"], max_num_seqs=16
    )


@pytest.mark.slow
def test_a_planned_fleet_keeps_its_targets_and_one_worker_fewer_does_not(
    settings: EngineSettings,
) -> None:
    """Real routers, workers and echo engines, in virtual time."""
    targets = {"ttft": 0.25, "itl": 0.11}
    sizing = Sizing(TIMES, targets, 0.0, requests=400, seed=3)
    found, fewer = sizing.least(DEMAND, divided=False)
    assert found.excess <= 1 < (fewer.excess if fewer is not None else 0)
    asked = requests_of(DEMAND, sizing.requests, sizing.seed)
    for tried in (found, fewer):
        assert tried is not None
        seen = virtual_time.run(served(settings, tried.layout.workers, asked))
        paper = tried.outcome
        print(f"{tried.layout.workers} workers: paper {paper}, real {seen}")
        assert seen.first == pytest.approx(paper.first, rel=0.1)
        assert seen.gap == pytest.approx(paper.gap, rel=0.1)


@pytest.mark.parametrize("limit", [16, 512])
def test_step_times_are_found_again_from_what_was_seen(limit: int) -> None:
    """Whatever the budget of a step, and with prompts of any length."""
    times = StepTimes(0.02, 0.0005, 0.0001, 0.007, max_num_seqs=8, max_num_batched_tokens=limit)

    def seen(positions: int, sequences: int) -> Seen:
        steps = -(-positions // limit)
        first = times.overhead + steps * times.step + positions * times.per_position
        return Seen(positions, first, times.step + sequences * times.per_sequence)

    found = fitted(seen(16, 1), seen(2048, 1), seen(16, 8), 8, limit)
    assert asdict(found) == pytest.approx(asdict(times))


def test_a_fleet_of_roles_has_no_prompt_between_two_tokens() -> None:
    asked = requests_of(DEMAND, 400, 1)
    both = PaperFleet(TIMES, 4).run(asked)
    apart = PaperFleet(TIMES, 2, 2, fetch_share=0.1).run(asked)
    assert apart.gap < both.gap
    assert apart.sequences > both.sequences


def test_more_spread_and_less_cache_need_no_fewer_workers() -> None:
    sizing = Sizing(TIMES, {"ttft": 0.25, "itl": 0.11}, 0.0, requests=400, seed=1)
    cold = Demand(20.0, 400, 24, cached_share=0.0, spread=0.5)
    (some, _), (more, _) = (sizing.least(one, divided=False) for one in (DEMAND, cold))
    assert some.layout < more.layout


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> Any:
    assert main(["plan", *words, "-o", "json"], {}) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def step_times(tmp_path: Path) -> str:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"step_times": asdict(TIMES)}))
    return str(path)


def test_each_rate_has_its_fleets(step_times: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--step-times", step_times, "--requests", "200", "--request-rate", "4", "20"]
    words += ["--input-len", "400", "--output-len", "24", "--targets", "itl:110"]
    shown = planned([*words, "--fetch-share", "0.1"], capsys)
    assert shown["step_times"] == asdict(TIMES)
    fleets = shown["fleets"]
    assert [one["request_rate"] for one in fleets] == [4, 4, 20, 20]
    assert [one["prefill_workers"] > 0 for one in fleets] == [False, True] * 2
    assert all(one["keeps_targets"] and one["p95_itl_ms"] <= 110 for one in fleets)
    assert fleets[2]["fewer"]["p95_itl_ms"] > 110
    assert main(["plan", *words], {}) == 0
    assert f"20 requests/s: {fleets[2]['workers']} workers: " in capsys.readouterr().out


def test_where_no_fleet_keeps_the_targets_the_status_says_so(
    step_times: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--step-times", step_times, "--requests", "200", "--targets", "itl:30"]
    (fleet,) = planned(words, capsys, status=1)["fleets"]
    assert not fleet["keeps_targets"]
    assert fleet["p95_itl_ms"] >= 41
    assert main(["plan", *words], {}) == 1
    assert "no fleet keeps the targets" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--targets", "e2el:5"], "--targets takes ttft, itl with milliseconds"),
        (["--targets"], "--targets"),
        (["--request-rate", "0"], "--request-rate"),
        (["--cached-share", "2"], "--cached-share"),
        (["--step-times", "/no/such"], "/no/such"),
        (["--step-times", __file__], "not what inlay plan -o json prints"),
    ],
)
def test_words_that_make_no_sense_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words], {}) == 2
    assert said in capsys.readouterr().err


def test_a_worker_is_measured_once_and_planned_with_often(
    echo_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--url", echo_url + "/v1", "--max-num-seqs", "4", "--requests", "100"]
    loose = ["--targets", "ttft:60000", "itl:60000", "--input-len", "8", "--output-len", "4"]
    shown = planned([*words, *loose], capsys)
    times = shown["step_times"]
    assert 0 < times["step"] + times["overhead"] < 60
    assert shown["fleets"][0]["workers"] == 1
    path = tmp_path / "times.json"
    path.write_text(json.dumps(shown))
    again = planned(["--step-times", str(path), "--requests", "100", *loose], capsys)
    assert again == shown
