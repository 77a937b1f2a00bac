"""Speculative decoding: guessed tokens change the number of steps, never the output."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.engine.options import check_options
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import SpeculativeConfig, speculative_config
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.speculation.draft_model import DraftModel
from inlay.engine.torch.speculation.ngram import NO_ID, NgramDrafter, TokenHistory, lookup, text_of
from inlay.engine.torch.step import Core
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Sampling
from tests.engine.conformance import run as run_in
from tests.engine.torch.sequences import sequence_of
from tests.engine.torch.test_overlap import KINDS, outcomes
from tests.engine.torch.test_overlap import core as plain
from tests.engine.torch.test_step import SECRET, load, make_request, noise, run
from tests.models import VOCAB_SIZE, make, tiny

CONFIG = SpeculativeConfig(method="ngram")


class Oracle:
    """Guesses what is known to come, with a wrong token now and then."""

    def __init__(self, expected: Mapping[str, list[int]]) -> None:
        self.expected = expected
        self.random = random.Random(5)
        self.found: dict[Sequence, list[int]] = {}

    def available(self, sequence: Sequence, limit: int) -> int:
        at = len(sequence.output)
        count = min(limit, self.random.randrange(12))
        drafts = self.expected[sequence.request.id][at : at + count]
        if drafts and self.random.random() < 0.6:
            # Any id, ends and ids that a grammar refuses among them.
            drafts[self.random.randrange(len(drafts))] = self.random.randrange(300)
        self.found[sequence] = drafts
        return len(drafts)

    def draft(self, counts: Mapping[Sequence, int], room: int) -> dict[Sequence, tuple[int, ...]]:
        return {sequence: tuple(self.found[sequence][:count]) for sequence, count in counts.items()}

    def forget(self, sequence: Sequence) -> None:
        self.found.pop(sequence, None)


class EvenCosts(Speculator):
    """Takes all steps for equally long, so that the load of a machine decides nothing."""

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        super().timed(chunks, 0.001)


def core(speculator: Speculator, model: str = "llama", /, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "num_pages": 64,
    }
    return Core(load(model), EngineLimits(**(values | changes)), SECRET, speculator=speculator)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_pages": 14, "max_num_batched_tokens": 24}),
        ("qwen3_5_text", {"num_pages": 130}),
        ("qwen3_5_text", {"num_pages": 44, "max_num_batched_tokens": 24}),
    ],
    ids=["roomy", "tight", "states", "tight with states"],
)
def test_every_setting_gives_what_it_gives_one_token_at_a_time(
    name: str, changes: dict[str, int]
) -> None:
    model = load(name)
    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    try:
        expected = outcomes(plain(name, overlap=False, **changes), grammars, name)
        oracle = Oracle({name: of[0] for name, of in expected.items()})
        # Costs by which every draft pays.
        engine = core(EvenCosts(oracle, 12), name, **changes)
        found = outcomes(engine, grammars, name)
    finally:
        grammars.close()
    assert {name: of[:2] for name, of in found.items()} == {
        name: of[:2] for name, of in expected.items()
    }
    for name, (_, _, logprobs) in expected.items():
        for told, other in zip(logprobs, found[name][2], strict=True):
            assert told.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert len(told.top) == len(other.top) == KINDS[name.split(", ")[0]]["logprobs"]
    stats = engine.stats()
    assert stats.num_drafts < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.blocks_used == 0


def test_a_repetition_takes_fewer_steps_and_rows_are_never_drafted() -> None:
    # A bias makes the model repeat two tokens in turn.
    bias = {11: 1000.0}
    engine = core(EvenCosts(NgramDrafter(CONFIG), 8))
    text = Prompt.of(Tokens([5, 6, 7]))
    found = run(engine, make_request("a", text, 60, logit_bias=bias))["a"]
    assert found.output == [11] * 60
    assert engine.stats().steps < 30
    assert engine.stats().generated_tokens == 60
    soft = Prompt.of(noise("llama", 4, 20), Tokens([5]), noise("llama", 4, 20), Tokens([5]))
    run(engine, make_request("b", soft, 4))


def test_nothing_is_kept_of_a_request_that_ended() -> None:
    speculator = Speculator(NgramDrafter(CONFIG), 8)
    engine = core(speculator)
    run(engine, *(make_request(str(n), Prompt.of(Tokens([n, 6, n, 6, n])), 9) for n in range(3, 9)))
    assert len(speculator) == 0


# A draft model


class Checked(DraftModel):
    """A draft model whose guesses are compared with those of one that remembers nothing."""

    def __init__(self, name: str, num_pages: int) -> None:
        super().__init__(load(name), num_pages, 16, VOCAB_SIZE)
        self.afresh = DraftModel(load(name), num_pages, 16, VOCAB_SIZE)
        self.compared = 0

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        found = super().draft(counts, room)
        for sequence, drafts in found.items():
            self.afresh.forget(sequence)
            expected = self.afresh.draft({sequence: counts[sequence]}, sequence.length)
            assert drafts == expected[sequence]
            self.compared += len(drafts)
        return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_pages": 14, "max_num_batched_tokens": 24}),
        ("qwen3_next", {"num_pages": 44, "max_num_batched_tokens": 24}),
    ],
    ids=["roomy", "tight", "states"],
)
@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_a_draft_model_changes_no_output(draft: str, name: str, changes: dict[str, int]) -> None:
    model = load(name)
    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    drafter = Checked(draft, changes.get("num_pages", 64))
    try:
        expected = outcomes(plain(name, overlap=False, **changes), grammars, name)
        engine = core(EvenCosts(drafter, 5), name, **changes)
        found = outcomes(engine, grammars, name)
    finally:
        grammars.close()
    assert {name: of[:2] for name, of in found.items()} == {
        name: of[:2] for name, of in expected.items()
    }
    stats = engine.stats()
    guessed = stats.num_draft_tokens - stats.num_forced_draft_tokens
    assert drafter.compared >= guessed > 10
    assert stats.blocks_used == 0
    assert not drafter._read


def test_what_the_model_itself_drafts_is_accepted_and_rows_have_no_drafts() -> None:
    engine = core(EvenCosts(DraftModel(load("llama"), 64, 16, VOCAB_SIZE), 4))
    text = Prompt.of(Tokens(list(range(5, 105))))
    (expected,) = run(
        core(Speculator(NgramDrafter(CONFIG), 0)), make_request("a", text, 40)
    ).values()
    found = run(engine, make_request("a", text, 40))["a"]
    assert found.output == expected.output
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    # A prompt that the model has cached is read by the draft model again, within the budget.
    again = run(engine, make_request("b", text, 40))["b"]
    assert again.output == expected.output
    soft = Prompt.of(noise("llama", 4, 20), Tokens([5]))
    before = engine.stats().num_draft_tokens
    run(engine, make_request("c", soft, 20))
    assert engine.stats().num_draft_tokens == before


def test_a_long_prompt_is_read_by_the_draft_model_in_parts_of_what_a_step_has_left() -> None:
    drafter = DraftModel(load("llama"), 64, 16, VOCAB_SIZE)
    sequence = sequence_of(Sampling(max_tokens=9), prompt=list(range(5, 75)))
    sequence.pages[0].pages[:] = range(1, 7)
    rooms = []
    while not (found := drafter.draft({sequence: 3}, 20)):
        rooms.append(drafter._read[sequence].length)
    assert rooms == [21, 42, 63]
    assert len(found[sequence]) == 3


def test_ids_that_the_draft_model_does_not_have_only_make_its_guesses_worse(
    tmp_path: Path,
) -> None:
    smaller = make("llama", tmp_path / "smaller", vocab_size=VOCAB_SIZE // 2)
    settings = EngineSettings.of(model=str(smaller), device="cpu", num_threads=1)
    drafter = DraftModel(CausalModel.load(settings), 64, 16, VOCAB_SIZE)
    request = make_request("a", Prompt.of(Tokens([5, VOCAB_SIZE - 1, 6])), 40)
    engine = core(EvenCosts(drafter, 4))
    found = run(engine, request)["a"]
    assert found.output == run(core(Speculator(NgramDrafter(CONFIG), 0)), request)["a"].output
    assert max(found.output) >= VOCAB_SIZE // 2
    assert engine.stats().num_draft_tokens > 10


def with_draft(model: str, draft: str) -> TorchEngine:
    text = json.dumps({"model": draft, "num_speculative_tokens": 3})
    return TorchEngine(
        EngineSettings.of(
            model=model, device="cpu", num_threads=1, speculative_config=text,
            kv_cache_memory_bytes=8 << 20, enable_sleep_mode=True,
        ),
        SECRET,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.usefixtures("even_steps")
async def test_a_draft_model_is_loaded_with_the_engine_and_again_after_sleep() -> None:
    path = str(tiny("llama"))
    engine = with_draft(path, path)
    await engine.start()
    blocks = engine.card.num_blocks
    try:
        for _ in range(2):
            before = engine.stats().num_accepted_tokens
            (receiver,) = await run_in(engine, make_request("a", Prompt.of(Tokens([5, 6, 7])), 40))
            assert receiver.last.error is None
            assert engine.stats().num_accepted_tokens > before + 20
            await engine.sleep(2)
            assert await engine.wake_up(())
    finally:
        await engine.close()
    # Its keys and values are in the same memory.
    alone = TorchEngine(
        EngineSettings.of(model=path, device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20),
        SECRET,
    )
    await alone.start()
    await alone.close()
    assert abs(alone.card.num_blocks - 2 * blocks) <= 1


@pytest.mark.parametrize(
    ("model", "draft", "said"),
    [
        ("llama", "mistral", "the draft model has layers with a window"),
        ("mistral", "llama", "every layer of the model has a window"),
        ("llama", "qwen3_next", "the draft model has layers with a window or a state"),
        ("llama", "/nowhere", "/nowhere"),
    ],
)
async def test_a_draft_model_that_does_not_fit_is_refused(
    model: str, draft: str, said: str
) -> None:
    engine = with_draft(str(tiny(model)), draft if draft[0] == "/" else str(tiny(draft)))
    with pytest.raises(InvalidRequestError, match=said):
        await engine.start()
    await engine.close()


# Look-up

ids = st.lists(st.integers(-1, 3), max_size=40)


def reference(ids: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The same by its definition: each place is compared in full."""
    places = len(ids) - shortest
    best: tuple[int, int] | None = None
    starts = [
        at
        for at in range(places)
        if ids[at : at + shortest] == ids[places:] and -1 not in ids[places:]
    ]
    for at in starts:
        more = 0
        while (
            more < longest - shortest
            and at - more > 0
            and ids[at - more - 1] == ids[places - more - 1] != -1
        ):
            more += 1
        if best is None or (more, at) > best:
            best = more, at
    if best is None:
        return []
    known = list(ids)
    found: list[int] = []
    for at in range(best[1] + shortest, best[1] + shortest + count):
        if known[at] < 0:
            break
        found.append(known[at])
        known.append(known[at])
    return found


@given(ids, st.integers(0, 12), st.integers(1, 3), st.integers(0, 3))
@example([2, 1, 1], 3, 1, 1)
def test_a_draft_is_what_followed_the_longest_equal_run(
    ids: list[int], count: int, shortest: int, more: int
) -> None:
    text = "".join(NO_ID if id_ < 0 else chr(id_) for id_ in ids)
    found = lookup(text, count, shortest, shortest + more)
    assert found == reference(ids, count, shortest, shortest + more)


def test_a_history_has_no_ids_where_rows_stand_and_grows_with_the_output() -> None:
    sequence = sequence_of(Sampling(max_tokens=200), prompt=[4, 5])
    history = TokenHistory(sequence)
    assert (history.read(9), history.text) == (2, text_of([4, 5]))
    for id_ in range(100):
        sequence.append(id_)
    assert (history.read(3), history.text) == (3, text_of([4, 5, 0, 1, 2]))
    assert (history.read(200), history.text) == (97, text_of([4, 5, *range(100)]))
    mixed = Prompt.of(Tokens([1, 2]), noise("llama", 1, 3), Tokens([3]))
    request = make_request("a", mixed)
    sequence = Sequence(request, arrival=0)
    sequence.append(9)
    history = TokenHistory(sequence)
    while len(history.text) < sequence.length:
        assert history.read(4) > 0
    assert history.text == text_of([1, 2]) + 3 * NO_ID + text_of([3, 9])


# Settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        (
            '{"method": "eagle"}',
            "method: Input should be 'ngram', 'draft_model', 'eagle3', 'mtp', 'grammar' or 'none'",
        ),
        ('{"method": "deepseek_mtp", "model": "x"}', "mtp has no model of its own"),
        ('{"method": "eagle3"}', "eagle3 needs model"),
        ('{"num_speculative_tokens": 3}', "draft_model needs model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: "),
        ('{"method": "ngram", "model": "x"}', "ngram has no model of its own"),
        ('{"method": "none", "model": "x"}', "none has no model of its own"),
        ('{"model": "x", "quantization": "x"}', "quantization: Extra inputs are not permitted"),
        (
            '{"method": "ngram", "prompt_lookup_min": 6}',
            "prompt_lookup_min (6) is more than prompt_lookup_max (5)",
        ),
    ],
)
def test_other_settings_are_refused_before_anything_is_loaded(text: str, said: str) -> None:
    settings = EngineSettings.of(model="m", speculative_config=text)
    with pytest.raises(InvalidRequestError) as refused:
        check_options(settings)
    assert refused.value.message.startswith("--speculative-config: ")
    assert said in refused.value.message


def test_the_setting_is_read_and_other_engines_refuse_it() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    found = speculative_config(EngineSettings.of(model="m", speculative_config=text))
    assert found is not None
    assert (found.num_speculative_tokens, found.prompt_lookup_min) == (3, 2)
    with pytest.raises(InvalidRequestError, match="--speculative-config is for the torch and vllm"):
        check_options(EngineSettings.of(model="m", engine="echo", speculative_config=text))
