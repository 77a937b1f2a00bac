"""Layers with sliding windows give up the pages behind their windows, and nothing else changes.

Greedy output in float32 is
that of `transformers.generate`, contexts being several windows long.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inlay.base.errors import EmbeddingsError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits, pages_for
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.engine.torch.windows import size_of
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests.engine import reference
from tests.models import make

pytestmark = pytest.mark.usefixtures("overlap")

PAGE = 16
NEW = 12

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers of 24": ("mistral", {}),
    "all layers of 40": ("mistral", {"sliding_window": 40}),
    "one full layer among windows": (
        "qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


class Loaded(NamedTuple):
    """A model, where it is, and the greedy output of each prompt."""

    model: CausalModel
    directory: Path
    prompts: dict[str, Prompt]
    truth: dict[str, list[int]]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    family, options = MODELS[request.param]
    directory = make(family, tmp_path_factory.mktemp("model"), **options)
    model = CausalModel.load(EngineSettings.of(model=str(directory), device="cpu", num_threads=1))
    long, short, tail = ids(1, 200), ids(2, 21), ids(3, 40)
    soft = 0.5 * torch.randn(30, model.hidden_size, generator=torch.Generator().manual_seed(4))
    rows = reference.rows_of(reference.look_up(directory, long[50:130]))
    prompts = {
        "text": Prompt.of(Tokens(long)),
        "mixed": Prompt.of(Tokens(long[:50]), rows, Tokens(long[130:])),
        "short": Prompt.of(Tokens(short)),
        "soft": Prompt.of(Tokens(long[:100]), reference.rows_of(soft), Tokens(tail)),
        "atomic": Prompt.of(Tokens(tail), reference.rows_of(soft, atomic=True), Tokens(long[:90])),
    }
    truth = {name: reference.greedy(directory, prompt, NEW) for name, prompt in prompts.items()}
    assert truth["text"] == truth["mixed"]
    return Loaded(model, directory, prompts, truth)


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


def core(model: CausalModel, *, prefix_caching: bool = True, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "page_size": PAGE,
        "num_pages": 200,
    }
    return Core(
        model, EngineLimits(**(values | changes)), Secret(bytes(32)), prefix_caching=prefix_caching
    )


def make_request(name: str, prompt: Prompt, max_tokens: int = NEW) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id=name, prompts=(prompt,), params=sampling)


def steps(engine: Core, *requests: Request) -> Iterator[list[Output]]:
    """The outputs of each step until all have ended; then no page is in use."""
    for one in requests:
        assert engine.admit(one) == []
    while len(engine):
        yield engine.step()
    assert engine.stats().blocks_used == 0


def run(engine: Core, *requests: Request) -> dict[str, list[Output]]:
    outputs = [output for step in steps(engine, *requests) for output in step]
    return {
        one.id: [output for output in outputs if output.request_id == one.id] for one in requests
    }


def output(outputs: list[Output]) -> list[int]:
    return [id_ for output in outputs for id_ in output.token_ids]


def cached(outputs: list[Output]) -> int:
    assert outputs[-1].usage is not None
    return outputs[-1].usage.cached_tokens


def outputs(found: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: output(outputs) for name, outputs in found.items()}


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("budget", [512, 40], ids=["whole", "chunked"])
def test_each_prompt_alone_decodes_as_transformers_does(
    loaded: Loaded, budget: int, prefix_caching: bool
) -> None:
    engine = core(loaded.model, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    for name, prompt in loaded.prompts.items():
        assert output(run(engine, make_request(name, prompt))[name]) == loaded.truth[name], name


def test_a_prompt_in_chunks_of_a_page_decodes_as_transformers_does(loaded: Loaded) -> None:
    engine = core(loaded.model, max_num_batched_tokens=PAGE)
    assert (
        output(run(engine, make_request("soft", loaded.prompts["soft"]))["soft"])
        == loaded.truth["soft"]
    )


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
def test_together_and_preempted_they_decode_as_transformers_does(
    loaded: Loaded, prefix_caching: bool
) -> None:
    pages = core(loaded.model).bounds.most_pages(212, 64) + 3
    engine = core(loaded.model, num_pages=pages, prefix_caching=prefix_caching)
    found = run(engine, *(make_request(name, prompt) for name, prompt in loaded.prompts.items()))
    assert outputs(found) == loaded.truth


def test_preempted_requests_go_on_as_if_nothing_had_happened(loaded: Loaded) -> None:
    prompts = {str(seed): Prompt.of(Tokens(ids(seed, 20))) for seed in (5, 6, 7)}
    expected = {
        name: reference.greedy(loaded.directory, prompt, 60) for name, prompt in prompts.items()
    }
    engine = core(loaded.model, num_pages=core(loaded.model).bounds.most_pages(80, 64) + 2)
    assert (
        outputs(run(engine, *(make_request(name, prompt, 60) for name, prompt in prompts.items())))
        == expected
    )
    assert engine.stats().preemptions > 0


def test_what_a_window_has_passed_is_found_again_while_there_is_room(loaded: Loaded) -> None:
    engine = core(loaded.model)
    run(engine, make_request("first", loaded.prompts["text"]))
    for name, hit in (("text", 192), ("mixed", 48), ("mixed", 192), ("soft", 96)):
        found = run(engine, make_request(name, loaded.prompts[name]))[name]
        assert cached(found) == hit
        assert output(found) == loaded.truth[name]


def test_a_long_sequence_holds_of_each_window_no_more_than_the_window_and_its_chunk(
    loaded: Loaded,
) -> None:
    engine = core(loaded.model)
    bounds = engine.bounds
    most = 0
    for _ in steps(engine, make_request("long", Prompt.of(Tokens(ids(8, 380))), 100)):
        most = max(most, engine.stats().blocks_used)
    every = pages_for(480, PAGE)
    windows = [size for window in bounds.windows if (size := size_of(window)) is not None]
    full = len(bounds.windows) - len(windows)
    assert most <= full * every + sum((window - 1 + 64) // PAGE + 2 for window in windows)
    assert most < len(bounds.windows) * every
    decoding = core(loaded.model)
    held = [
        decoding.stats().blocks_used
        for _ in steps(decoding, make_request("long", Prompt.of(Tokens(ids(8, 20))), 400))
    ]
    # After a step, before the last one.
    assert max(held) <= full * pages_for(420, PAGE) + sum(window // PAGE + 2 for window in windows)
    assert sum(held[200:300]) / 100 < full * pages_for(320, PAGE) + sum(
        window / PAGE + 1 for window in windows
    )


def test_more_long_sequences_run_at_once_than_their_positions_have_pages(loaded: Loaded) -> None:
    bounds = core(loaded.model).bounds
    engine = core(loaded.model, num_pages=2 * bounds.most_pages(480, 64))
    prompts = {str(seed): Prompt.of(Tokens(ids(seed, 400))) for seed in (11, 12)}
    assert 2 * len(bounds.windows) * pages_for(402, PAGE) > engine.bounds.num_pages
    for step, _ in enumerate(
        steps(engine, *(make_request(name, prompt, 2) for name, prompt in prompts.items()))
    ):
        if step == 1:
            assert engine.stats().running == 2
    assert engine.stats().preemptions == 0


def bad_rows(model: CausalModel, count: int) -> Rows:
    return reference.rows_of(torch.full((count, model.hidden_size), math.nan))


def test_a_request_whose_output_is_not_finite_fails_alone_and_its_pages_are_dropped(
    loaded: Loaded,
) -> None:
    engine = core(loaded.model, max_num_batched_tokens=32)
    for pages in (*engine.pages.keys, *engine.pages.values):
        pages.fill_(0.0)
    bad = Prompt.of(Tokens(ids(1, 32)), bad_rows(loaded.model, 70), Tokens([5]))
    good = {name: prompt for name, prompt in loaded.prompts.items() if name in ("text", "short")}
    found = run(
        engine,
        make_request("bad", bad),
        *(make_request(name, prompt) for name, prompt in good.items()),
    )
    (error,) = found.pop("bad")
    assert error.error is not None
    assert isinstance(error.error.to_error(), EmbeddingsError)
    assert outputs(found) == {name: loaded.truth[name] for name in good}
    run(engine, make_request("next", loaded.prompts["short"]))
    assert not any(
        bool(pages.isnan().any()) for pages in (*engine.pages.keys, *engine.pages.values)
    )


def test_what_pages_held_before_has_no_effect(loaded: Loaded) -> None:
    engine = core(loaded.model, num_pages=60)
    for pages in (*engine.pages.keys, *engine.pages.values):
        pages.fill_(math.nan)
    found = run(engine, *(make_request(name, prompt) for name, prompt in loaded.prompts.items()))
    assert outputs(found) == loaded.truth


def test_an_abort_frees_the_pages_of_all_groups_at_once(loaded: Loaded) -> None:
    engine = core(loaded.model, prefix_caching=False)
    engine.admit(make_request("goes", loaded.prompts["text"]))
    for _ in range(5):
        engine.step()
    assert engine.stats().blocks_used > len(engine.bounds.windows)
    (last,) = engine.abort("goes")
    assert last.finish_reason == "abort"
    assert engine.stats().blocks_used == 0
    # What is unread of it is scrubbed before the next step.
    assert engine.scheduler.table.free + engine.scheduler.table.dirty == engine.bounds.num_pages
