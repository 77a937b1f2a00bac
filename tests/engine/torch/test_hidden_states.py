"""Hidden states equal those of plain transformers, however the positions were computed."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.loading import admission_of, card_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.projector import Projector
from inlay.engine.torch.step import Core
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request
from inlay.messages.resuming import non_resumable_features
from tests import lifelike
from tests.engine import reference
from tests.engine.torch.test_step import SECRET, Outcome, core, ids, make_request, noise, run
from tests.equality.reference import model_of
from tests.models import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("overlap")

TOLERANCE = 2e-4


def told(outcome: Outcome) -> dict[int, np.ndarray]:
    """[positions, C] by layer; the last piece of each is marked, and no other."""
    pieces = [payload for output in outcome.deltas for payload in output.payloads]
    found: dict[int, np.ndarray] = {}
    for port in dict.fromkeys(piece.port for piece in pieces):
        own = [piece for piece in pieces if piece.port == port]
        assert [piece.last for piece in own] == [False] * (len(own) - 1) + [True]
        found[int(port.removeprefix("hidden_states."))] = np.concatenate(
            [np.frombuffer(piece.data.view, np.float32).reshape(piece.shape) for piece in own]
        )
    return found


def assert_right(
    outcome: Outcome,
    request: Request,
    family: str | Path = "llama",
    output: Sequence[int] | None = None,
) -> None:
    directory = family if isinstance(family, Path) else tiny(family)
    asked = request.sampling.hidden_states
    assert asked is not None
    shown = outcome.output if output is None else list(output)
    whole = model_of(directory)
    computed = Prompt(
        (*request.prompt.segments, Tokens(shown)) if shown else request.prompt.segments
    )
    with torch.no_grad():
        states = whole(
            inputs_embeds=reference.embedded(directory, computed), output_hidden_states=True
        ).hidden_states
    positions = asked.positions(len(request.prompt), len(shown))
    found = told(outcome)
    assert sorted(found) == sorted(asked.layers)
    for layer, rows in found.items():
        expected = states[layer][0, positions.start : positions.stop].numpy()
        assert rows.shape == expected.shape
        assert np.abs(rows - expected).max() < TOLERANCE * max(1, np.abs(expected).max())


def asking(name: str, text: Prompt, max_tokens: int = 4, /, **fields: object) -> Request:
    asked = msgspec.convert({"layers": [0, 1, 2]} | fields, HiddenStates)
    return make_request(name, text, max_tokens, hidden_states=asked)


def text(seed: int, count: int) -> Prompt:
    return Prompt.of(Tokens(ids(seed, count)))


@cache
def load(family: str) -> CausalModel:
    return CausalModel.load(EngineSettings.of(model=str(tiny(family)), device="cpu", num_threads=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_as_transformers_has_it(family: str) -> None:
    bounds = EngineLimits(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=33, page_size=16, num_pages=64
    )
    model = load(family)
    engine = Core(model, bounds, SECRET)
    layers = list(range(len(model.decoder_layers) + 1))
    request = asking("one", text(1, 70), layers=layers, prompt=-1, output=True)
    found = run(engine, request)["one"]
    assert_right(found, request, family)
    assert found.output == reference.greedy(tiny(family), request.prompt, 4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_layers_of_a_lifelike_model_are_as_transformers_has_them_in_company(family: str) -> None:
    directory = lifelike.text(family, loud=family in lifelike.LOUD)
    settings = EngineSettings.of(model=str(directory), device="cpu", num_threads=1, dtype="float32")
    bounds = EngineLimits(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=33, page_size=16, num_pages=64
    )
    model = CausalModel.load(settings)
    layers = list(range(len(model.decoder_layers) + 1))
    requests = [
        asking(f"one-{seed}", text(seed, 40 + 9 * seed), layers=layers, prompt=-1, output=True)
        for seed in range(3)
    ]
    found = run(Core(model, bounds, SECRET), *requests)
    for request in requests:
        assert_right(found[request.id], request, directory)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": -1},
        {"prompt": 3},
        {"prompt": 500},
        {"output": True},
        {"prompt": 2, "output": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [128, 5])
def test_any_run_of_positions_comes_after_any_cut(fields: dict[str, object], budget: int) -> None:
    engine = core(max_num_batched_tokens=budget)
    request = asking("one", text(2, 41), **fields)
    assert_right(run(engine, request)["one"], request)


def test_what_is_cached_is_computed_again_where_its_states_are_asked_for() -> None:
    engine = core()
    first = run(engine, make_request("first", text(3, 70)))["first"]
    for name, fields, cached in (
        ("all", {"prompt": -1}, 0),
        ("end", {"prompt": 20}, 48),
        ("output", {"output": True}, 64),
    ):
        request = asking(name, text(3, 70), 12, **fields)
        found = run(engine, request)[name]
        assert found.cached == cached
        assert found.output == first.output
        assert_right(found, request)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_neighbours_of_all_kinds_and_preemption_change_no_state(seed: int) -> None:
    dice = random.Random(seed)
    engine = core(
        num_pages=9,
        max_model_len=140,
        max_num_seqs=dice.choice([3, 8]),
        max_num_batched_tokens=dice.choice([20, 100]),
    )
    requests = [
        asking(
            f"asks-{n}",
            text(n, dice.randrange(2, 70)),
            60,
            layers=dice.choice([[2], [0, 1], [2, 0]]),
            prompt=dice.choice([-1, 1, 9]),
            output=dice.choice([True, False]),
        )
        for n in range(5)
    ]
    rows = Prompt.of(noise("llama", 4, 9), Tokens(ids(8, 30)))
    requests += [asking("rows", rows, 60, prompt=-1, output=True), make_request("plain", rows, 60)]
    dice.shuffle(requests)
    found = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for one in requests:
        if one.sampling.hidden_states is not None:
            assert_right(found[one.id], one)
        assert found[one.id].output == reference.greedy(tiny("llama"), one.prompt, 60), one.id


def test_a_projector_makes_rows_of_any_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(48, 7), torch.nn.GELU(), torch.nn.Linear(7, 9))
    file = tmp_path / "projector.safetensors"
    save_file(layers.state_dict(), file)
    settings = EngineSettings.of(
        model=str(tiny("llama")), device="cpu", num_threads=1, hidden_projector=str(file)
    )
    bounds = EngineLimits(
        max_model_len=512, max_num_seqs=8, max_num_batched_tokens=33, page_size=16, num_pages=64
    )
    request = asking("one", text(5, 50), layers=[2], prompt=-1)
    plain = told(run(core(), request)["one"])[2]
    found = told(run(Core(CausalModel.load(settings), bounds, SECRET), request)["one"])[2]
    with torch.no_grad():
        expected = layers(torch.tensor(plain)).numpy()
    assert found.shape == (50, 9)
    assert np.abs(found - expected).max() < TOLERANCE
    engine = Core(CausalModel.load(settings), bounds, SECRET)
    raw = asking("raw", text(5, 50), layers=[2], prompt=-1, projected=False)
    both = run(engine, request, raw)
    assert np.abs(told(both["one"])[2] - expected).max() < TOLERANCE
    assert np.abs(told(both["raw"])[2] - plain).max() < TOLERANCE
    assert card_of(settings, engine, SECRET).projected_size == 9
    admission = admission_of(settings.limits, engine)
    monkeypatch.setattr("inlay.engine.admission.MAX_HIDDEN_STATES", 50 * 9 * 4)
    admission.check(asking("one", text(5, 50), 0, layers=[2], prompt=-1))
    with pytest.raises(InvalidRequestError, match=f"may take {50 * 48 * 4} bytes"):
        admission.check(asking("raw", text(5, 50), 0, layers=[2], prompt=-1, projected=False))
    with pytest.raises(InvalidRequestError, match="takes 32 elements; the model's hidden states"):
        Projector(_saved(tmp_path, 32), 48, torch.float32, torch.device("cpu"))


def _saved(folder: Path, width: int) -> Path:
    save_file({"weight": torch.zeros(4, width)}, folder / "other.safetensors")
    return folder / "other.safetensors"


def test_a_request_without_output_ends_when_its_states_are_told() -> None:
    request = asking("one", text(6, 100), 0, prompt=-1)
    found = run(core(max_num_batched_tokens=32), request)["one"]
    assert_right(found, request)
    assert (found.output, found.last.finish_reason) == ([], "length")
    assert len(found.deltas) > 1


def test_a_resumed_request_goes_on_behind_what_was_given() -> None:
    request = asking("one", text(7, 40), 8, prompt=5, output=True)
    whole = run(core(), request)["one"]
    parts = whole.deltas[:4]
    given = sum(payload.shape[0] for one in parts for payload in one.payloads) // 3
    shown = tuple(id_ for one in parts for id_ in one.token_ids)
    sampling = request.sampling
    assert sampling.hidden_states is not None
    again = msgspec.structs.replace(
        request,
        prior_output=shown,
        attempt=1,
        params=msgspec.structs.replace(
            sampling, hidden_states=msgspec.structs.replace(sampling.hidden_states, given=given)
        ),
    )
    rest = run(core(), again)["one"]
    assert_right(rest, again, output=whole.output)
    assert [*shown, *rest.output] == whole.output


def test_an_output_that_ends_early_marks_its_last_states() -> None:
    prompt = text(9, 20)
    output = reference.greedy(tiny("llama"), prompt, 8)
    stop = output[5]
    request = asking("one", prompt, 60, output=True, layers=[1])
    params = msgspec.structs.replace(request.sampling, stop_token_ids=(stop,))
    request = msgspec.structs.replace(request, params=params)
    found = run(core(), request)["one"]
    assert found.output == output[: output.index(stop) + 1]
    assert_right(found, request)


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core()
    settings = EngineSettings.of(model=str(tiny("llama")), device="cpu")
    admission = admission_of(settings.limits, engine)
    card = card_of(settings, engine, SECRET)
    prompt = text(1, 10)
    assert card.hidden_layers == 2
    assert not non_resumable_features(asking("one", prompt, output=True), card)
    admission.check(asking("one", prompt, output=True))
    for fields, said in (
        ({"layers": [3], "prompt": -1}, "allowed: at least one of 0 to 2, each once"),
        ({"layers": [], "prompt": -1}, "layers are []"),
        ({"layers": [1, 1], "prompt": -1}, "layers are [1, 1]"),
        ({}, "prompt is 0 without output"),
        ({"prompt": -2, "output": True}, "prompt is -2 and given 0"),
    ):
        with pytest.raises(InvalidRequestError, match="hidden_states: ") as error:
            admission.check(asking("one", prompt, **fields))
        assert said in error.value.message
    size = 13 * 3 * card.hidden_size * 4
    monkeypatch.setattr("inlay.engine.admission.MAX_HIDDEN_STATES", size)
    admission.check(asking("one", prompt, 4, prompt=-1, output=True))
    with pytest.raises(InvalidRequestError, match=f"14 positions of 3 layers .* allowed: {size}"):
        admission.check(asking("one", prompt, 5, prompt=-1, output=True))
