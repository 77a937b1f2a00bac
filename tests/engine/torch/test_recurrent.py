"""Models with recurrent layers: what their states in pages must hold beyond other families."""

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention import recurrent
from inlay.engine.torch.attention.layers import least_page_size
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.recurrent import RecurrentStates
from inlay.engine.torch.attention.shape import RECURRENT_WINDOW, LayerShape
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.kv_layout import EngineLimits, PageGroup
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.checks import check_settings
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.grammar.masks import Masks
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.loading import card_of, core_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native.recurrent import DeltaRule, delta_step
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Output, Request, Sampling
from tests.engine import reference
from tests.engine.torch.test_speculation import EvenCosts, Oracle
from tests.model_configs import config_of
from tests.models import VOCAB_SIZE, make, tiny

SECRET = Secret(bytes(32))
PAGE = 16


@cache
def model() -> CausalModel:
    settings = EngineSettings.of(model=str(tiny("qwen3_5_text")), device="cpu", num_threads=1)
    return CausalModel.load(settings)


def core(
    num_pages: int = 64, *, overlap: bool = False, speculator: Speculator | None = None
) -> Core:
    bounds = EngineLimits(
        max_model_len=150,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        page_size=PAGE,
        num_pages=num_pages,
    )
    return Core(model(), bounds, SECRET, overlap=overlap, speculator=speculator)


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def ask(
    engine: Core, prompt: list[int], new: int, grammar: GrammarState | None = None
) -> tuple[list[int], int]:
    """The output for a prompt, and how many of its positions were cached."""
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    request = Request(id="one", prompts=(Prompt.of(Tokens(prompt)),), params=sampling)
    outputs: list[Output] = engine.admit(request, grammar=grammar)
    while len(engine):
        outputs += engine.step()
    usage = outputs[-1].usage
    assert usage is not None
    return [id_ for output in outputs for id_ in output.token_ids], usage.cached_tokens


@cache
def truth(prompt: tuple[int, ...], new: int) -> list[int]:
    return reference.greedy(tiny("qwen3_5_text"), Prompt.of(Tokens(list(prompt))), new)


def test_a_sequence_begins_with_no_state_in_pages_that_others_have_left() -> None:
    engine = core()
    for seed in range(3):
        ask(engine, ids(seed, 100), 20)
    engine.reset_prefix_cache()
    for first in range(3, 9):
        assert ask(engine, [first], 6)[0] == truth((first,), 6)


def test_a_prefix_goes_on_at_the_last_end_of_a_page_it_shares() -> None:
    engine, prompt = core(), ids(1, 70)
    for shared, cached in ((70, 0), (70, 64), (69, 64), (64, 48), (50, 48), (33, 32), (10, 0)):
        own = prompt[:shared] + ids(2, 70 - shared if shared < 64 else 0)
        found, hits = ask(engine, own, 8)
        assert (found, hits) == (truth(tuple(own), 8), cached), shared
        engine = core()
        ask(engine, prompt, 1)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])
def test_a_conversation_goes_on_wherever_its_last_answer_ended(overlap: bool) -> None:
    """One more step may be launched than a sequence has positions; it must not be in its state."""
    prompt = ids(3, 21)
    for new in range(8, 13):
        engine = core(overlap=overlap)
        answer, _ = ask(engine, prompt, new)
        more = [*prompt, *answer, *ids(4, 9)]
        found, cached = ask(engine, more, 8)
        assert found == truth(tuple(more), 8)
        assert cached == (len(prompt) + new - 1) // PAGE * PAGE


@pytest.mark.thorough
@pytest.mark.parametrize("native", [True, False], ids=["native", "by torch"])
def test_only_accepted_drafts_are_in_the_states_that_others_go_on_with(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of drafts end before, at and behind the ends of pages."""
    if not native:
        monkeypatch.setattr(recurrent, "delta_step", lambda: None)
    prompt = ids(3, 21)
    for new in range(24, 30):
        oracle = Oracle({"one": truth(tuple(prompt), new)})
        engine = core(speculator=EvenCosts(oracle, 12))
        answer, _ = ask(engine, prompt, new)
        assert answer == truth(tuple(prompt), new)
        assert engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens
        more = [*prompt, *answer, *ids(4, 9)]
        oracle.expected = {"one": []}
        assert ask(engine, more, 4) == (truth(tuple(more), 4), (20 + new) // PAGE * PAGE)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])
def test_a_position_whose_mask_was_late_is_in_the_state_once(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, found, late, turn = ids(3, 21), [], Masks.late, count()

    def sometimes(masks: Masks, sequences: Any, *until: float | None) -> Any:
        bound = [one for one in sequences if one.grammar is not None]
        told = late(masks, sequences, *until)
        return told | {one: None for one in bound if next(turn) % 3 == 2}

    grammars = Grammars(Path(model().path), model().vocab_size, model().eos_token_ids)
    try:
        for method in (late, sometimes):
            monkeypatch.setattr(Masks, "late", method)
            engine = core(overlap=overlap)
            state = grammars.start(Grammar("regex", "[a-z ]{40,60}"), (), ()).state.result(60)
            found.append(ask(engine, prompt, 27, state)[0])
        assert next(turn) > 27
        assert found[0] == found[1]
        more = [*prompt, *found[0], *ids(4, 9)]
        assert ask(engine, more, 4) == (truth(tuple(more), 4), 32)
    finally:
        grammars.close()


def test_states_that_were_evicted_are_computed_again() -> None:
    engine = core(num_pages=44)
    prompts = [ids(seed, 90) for seed in range(4)]
    for _ in range(2):
        for prompt in prompts:
            assert ask(engine, prompt, 8)[0] == truth(tuple(prompt), 8)
    assert engine.scheduler.table.used == 0


def test_layers_with_states_are_groups_with_a_window_of_two_positions() -> None:
    attention, *states = sorted(model().page_groups, key=lambda group: group.window or 0)
    assert attention == PageGroup(None, (2,))
    assert states == [PageGroup(2, (0,)), PageGroup(2, (1,)), PageGroup(2, (3,))]


def test_pages_are_as_large_as_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make("qwen3_5_text", tmp_path, linear_key_head_dim=32, linear_value_head_dim=32)
    settings = EngineSettings.of(model=str(directory), device="cpu", num_threads=1, block_size=16)
    large = CausalModel.load(settings)
    # 4 heads of 32 x 32, and 3 columns of 2 * 2 * 32 + 4 * 32; 2 x 2 x 16 elements a position.
    state = 4 * 32 * 32 + 3 * (2 * 2 * 32 + 4 * 32)
    assert large.least_page_size == -(-state // 64 // 16) * 16 == 80
    assert least_page_size(large.layers, torch.bfloat16) == 160
    with caplog.at_level("INFO"):
        engine = core_of(settings, large, SECRET, CacheEventQueue(settings, SECRET))
    assert "pages have 80 positions, not 16" in caplog.text
    assert card_of(settings, engine, SECRET).block_size == 80
    prompt = ids(5, 170)
    for cached in (0, 160):
        expected = reference.greedy(directory, Prompt.of(Tokens(prompt)), 8)
        assert ask(engine, prompt, 8) == (expected, cached)


@pytest.mark.skipif(delta_step() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "value", "heads"), [(8, 8, 2), (24, 80, 3), (16, 128, 1)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_native_step_is_that_of_transformers(
    kind: str, dtype: torch.dtype, key: int, value: int, heads: int, drafts: int
) -> None:
    """Also where the state of a head is in two tensors, or in two heads of pages.

    Of drafts 1, 0, all and 2 are kept: in one page, none, in the next page, and in both.
    """
    sizes = {"linear_key_head_dim": key, "linear_value_head_dim": value}
    layer: Any = AutoModelForCausalLM.from_config(config_of(kind, **sizes)).model.layers[0]
    module = layer.linear_attn.to(dtype)
    shape = LayerShape(RECURRENT_WINDOW, heads, 16, 24, state_size=DeltaRule.of(module).state_size)
    size = least_page_size([shape], dtype)
    generator = torch.Generator().manual_seed(7)

    def computed(native: bool) -> tuple[Tensor, Tensor]:
        pages = Pages(
            [shape], [PageGroup(RECURRENT_WINDOW, (0,))],
            num_pages=9, page_size=size, dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        generator.manual_seed(8)
        states = torch.randn(9, shape.state_size, generator=generator)
        pages.write_states(0, torch.arange(1, 10), states)
        # The first position, one in a page, the first of a page, the last but one of one.
        starts, runs = (0, 5, size, 2 * size - 2), ((1,), (2,), (3, 4), (5, 6, 7))
        items = [
            BatchItem(
                [(at, Tokens([1] * (1 + drafts)))], at, 1 + drafts, [PageRun(run)], 1,
                uncertain=drafts,
            )
            for at, run in zip(starts, runs, strict=True)
        ]  # fmt: skip
        batch = Batch.pack(items, size)
        rows = len(batch.positions)
        hidden = torch.randn(1, rows + 2, 64, generator=generator).to(dtype)
        with torch.inference_mode():
            layers = RecurrentStates(batch, pages, native=native)
            out = layers.compute(module, hidden)
            if drafts:
                layers.commit_recurrent_state([1, 0, 3, 2])
        return out.float(), pages.read_states(0, torch.arange(1, 10))

    ours, theirs = computed(True), computed(False)
    bound = 1e-5 if dtype is torch.float32 else 0.05
    for found, expected in zip(ours, theirs, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < bound
    assert not ours[0][0, -2:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "4 value heads of recurrent layers are no multiple of"),
        ({"hidden_act": "gelu"}, "have the activation silu; got gelu"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            r"states of \[448\] elements are not divided by 5 key and value heads",
        ),
    ],
)
def test_rules_of_another_kind_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = make("qwen3_5_text", tmp_path, **changes)
    with pytest.raises(InvalidRequestError, match=message):
        CausalModel.load(EngineSettings.of(model=str(directory), device="cpu", num_threads=1))


def test_pages_that_are_too_small_for_a_state_are_refused() -> None:
    shape = LayerShape(RECURRENT_WINDOW, 2, 16, 16, state_size=1026)
    with pytest.raises(EngineError, match="pages of 16 positions do not hold 1026 float32"):
        Pages(
            [shape], [PageGroup(RECURRENT_WINDOW, (0,))],
            num_pages=4, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: "),
    ],
)
def test_what_states_do_not_go_with_is_refused_before_loading(
    settings: dict[str, Any], message: str
) -> None:
    directory = tiny("qwen3_5_text")
    asked = EngineSettings.of(model=str(directory), device="cpu", **settings)
    with pytest.raises(InvalidRequestError, match=message):
        check_settings(asked, directory)
