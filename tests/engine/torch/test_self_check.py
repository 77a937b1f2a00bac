"""A model that computes other numbers than its own code is not served as it is."""

import logging
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import inlay
from inlay.base.errors import EngineError
from inlay.engine import references
from inlay.engine.embed import encoder
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.gelu import fuse_gelu
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import model
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import Projection
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import kernels
from inlay.engine.torch.self_check import fingerprint, judgement, reference, start
from inlay.engine.torch.self_check.fingerprint import Fingerprint
from inlay.engine.torch.self_check.judgement import BOUND, Judgement, judge, mean_ratio
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.self_check.prompts import (
    COUNT,
    CheckPrompt,
    scattered_pages,
    spread_positions,
)
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.weights.linear import RMSNorm
from tests.embedding_models import tiny_embedding
from tests.models import make, tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's references are kept."""
    monkeypatch.setattr(references, "_path", lambda key: tmp_path / "kept" / f"{key}.msgpack")
    return tmp_path / "kept"


def load(family: str = "qwen3", mode: Any = "start", **settings: Any) -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(
            model=str(tiny(family)),
            device="cpu",
            num_threads=1,
            dtype="bfloat16",
            self_check=mode,
            **settings,
        )
    )


@pytest.fixture
def no_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No small model is compared first, which would have the same fault."""
    monkeypatch.setattr(model, "shadow_of", lambda *_, **__: None)


def needs_kernels() -> None:
    native = kernels()
    if native is None or not native.serve(torch.bfloat16):
        pytest.skip("no native kernels for bfloat16 here")


def test_the_result_says_what_was_compared_with_what() -> None:
    found = load().self_check
    assert found is not None
    assert found.result == "passed"
    assert found.reference.startswith("transformers ")
    assert found.reference.endswith("sdpa bfloat16")
    assert set(found.distances) == {
        "random, chunks", "random, decoding", "text, chunks", "text, rows", "text, decoding",
    }  # fmt: skip
    assert 0 < found.distance == max(found.distances.values()) <= found.bound == BOUND
    assert len(found.layers) == len(load(mode="off").decoder_layers)
    assert found.num_modules > 10
    assert found.left_out == ()


def test_off_compares_nothing(own_cache: Path) -> None:
    assert load(mode="off").self_check is None
    assert not own_cache.exists()


def test_off_leaves_out_what_an_earlier_start_did(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.delattr(ModuleCheck, "_rows")
    assert load(mode="off").self_check is None
    with pytest.raises(AttributeError, match="_rows"):
        load(mode="off", batch_invariant=False)


@pytest.mark.usefixtures("no_shadow")
def test_one_module_that_differs_is_left_as_it_is_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual, made = RMSNorm.forward, []

    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        if self not in made:
            made.append(self)
        found = usual(self, x)
        return -found if made.index(self) == 4 else found

    monkeypatch.setattr(RMSNorm, "forward", forward)
    with caplog.at_level(logging.WARNING):
        found = load().self_check
    assert found is not None
    assert found.result == "reduced"
    assert len(found.left_out) == 1
    assert "norm" in found.left_out[0]
    assert f"{found.left_out[0]} is left as it is" in caplog.text
    assert found.distance <= BOUND


def test_strict_refuses_a_module_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: torch.zeros_like(x))
    with pytest.raises(EngineError, match=r"--self-check strict: .*norm.* differ"):
        load(mode="strict")


def _exchanged_heads(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(self: Any, layer: int, projection: Projection, scoring: Any) -> Tensor:
        found = usual(self, layer, projection, scoring)
        return found.flip(1) if layer == 1 else found

    return attend


@pytest.mark.usefixtures("no_shadow")
def test_what_is_wrong_between_modules_is_served_without_faster_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs_kernels()
    usual = NativeAttention.attend_projected
    monkeypatch.setattr(NativeAttention, "attend_projected", _exchanged_heads(usual))
    with caplog.at_level(logging.WARNING):
        found = load().self_check
    assert found is not None
    assert found.result == "plain"
    assert found.distance <= BOUND
    assert "wrong with faster modules" in caplog.text
    assert "layer 1 by" in caplog.text
    with pytest.raises(EngineError, match="not those of its own code"):
        load(mode="strict")


def test_what_is_wrong_without_them_too_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = CausalModel.logits

    def shifted(self: CausalModel, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return usual(self, hidden, out).roll(1, -1)

    monkeypatch.setattr(CausalModel, "logits", shifted)
    with pytest.raises(EngineError, match=r"not those of its own code \(transformers .*logits \("):
        load()


@pytest.mark.parametrize("wrong", range(start.DRAWS + 1))
def test_what_differs_with_some_prompts_alone_is_chance(
    wrong: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rolled = CausalModel.logits
    drawn: list[tuple[CheckPrompt, ...]] = []

    def judged(served: CausalModel, reference: Reference) -> Judgement:
        drawn.append(reference.prompts)
        with monkeypatch.context() as patch:
            if len(drawn) <= wrong:
                patch.setattr(CausalModel, "logits", lambda *given: rolled(*given).roll(1, -1))
            return judge(served, reference)

    monkeypatch.setattr(model, "judge", judged)
    monkeypatch.setattr(model, "shadow_of", lambda *_, **__: None)
    caplog.set_level(logging.INFO)
    if wrong == start.DRAWS:
        with pytest.raises(EngineError, match="not those of its own code"):
            load(mode="strict")
    else:
        found = load(mode="strict").self_check
        assert found is not None
        assert found.result == "passed"
    assert len(set(drawn)) == len(drawn) == min(wrong + 1, start.DRAWS)
    assert caplog.text.count("compared with other prompts") == min(wrong, start.DRAWS - 1)


def test_numbers_that_are_not_finite_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = CausalModel.hidden

    def broken(self: CausalModel, *given: Any, **named: Any) -> Tensor:
        found = usual(self, *given, **named).clone()
        found[-1] = torch.nan
        return found

    monkeypatch.setattr(CausalModel, "hidden", broken)
    with pytest.raises(EngineError, match="not finite"):
        load()


def _raise(*_: object, **__: object) -> Reference:
    raise AssertionError("the model's own code ran")


def test_a_later_start_runs_no_code_but_ours(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    first = load().self_check
    assert len(list(own_cache.iterdir())) == 2
    monkeypatch.setattr(Reference, "of", _raise)
    later = load().self_check
    assert first is not None
    assert later is not None
    assert later.reference == f"{first.reference}, kept"
    assert later.distances == first.distances
    assert later.num_modules == first.num_modules
    full = load(mode="full").self_check
    assert full is not None
    assert full.result == "partial"


def test_a_model_whose_own_code_does_not_run_is_compared_by_module(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Reference, "of", _raise)
    found = load().self_check
    assert found is not None
    assert found.result == "partial"
    assert found.num_modules > 10
    assert "the model's own code ran" in caplog.text
    with pytest.raises(EngineError, match="own code does not run here: the model's own code ran"):
        load(mode="strict")


def test_other_code_compares_its_modules_with_made_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = load().self_check
    monkeypatch.setattr(Reference, "of", _raise)
    monkeypatch.setattr("inlay.__version__", "another")
    later = load().self_check
    assert first is not None
    assert later is not None
    assert later.num_modules == first.num_modules


def test_a_later_start_that_is_wrong_is_compared_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_kernels()
    load()
    usual = NativeAttention.attend_projected
    monkeypatch.setattr(NativeAttention, "attend_projected", _exchanged_heads(usual))
    found = load().self_check
    assert found is not None
    assert found.result == "plain"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:99], lambda data: b"", lambda data: b"\xff" * 64]
)
def test_a_damaged_file_is_not_used(damage: Callable[[bytes], bytes], own_cache: Path) -> None:
    load()
    for path in own_cache.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    found = load().self_check
    assert found is not None
    assert not found.reference.endswith("kept")


def _kept(**changes: Any) -> Fingerprint:
    ids = np.zeros(COUNT, np.int32)
    values = np.ones(COUNT, np.float32).tobytes()
    given: dict[str, Any] = {
        "by": "", "prompts": (("text", (1,) * COUNT, (), tuple(range(COUNT))),),
        "ids": ids.tobytes(), "logits": values, "noise": values,
        "routed": False, "pooled": b"", "compared_by": "", "num_modules": 0, "left_out": (),
    }  # fmt: skip
    return Fingerprint(**given | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": bytes(4)},
        {"noise": np.full(COUNT, np.nan, np.float32).tobytes()},
        {"ids": np.full(COUNT, 50, np.int32).tobytes()},
        {"ids": np.full(COUNT, -1, np.int32).tobytes()},
        {"ids": b""},
        {"prompts": ()},
        {"prompts": (("text", (50,) * COUNT, (), tuple(range(COUNT))),)},
        {"prompts": (("text", (1,) * 3, (), tuple(range(3))),)},
        {"logits": bytes(4)},
    ],
)
def test_a_kept_reference_that_does_not_go_with_the_model_is_refused(
    changes: dict[str, Any],
) -> None:
    cpu = torch.device("cpu")
    _kept().reference(cpu, 50, 50)
    with pytest.raises(ValueError, match=r"it has ids|its parts|reshape|buffer"):
        _kept(**changes).reference(cpu, 50, 50)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_families_pass_in_both_dtypes(family: str) -> None:
    for dtype in ("float32", "bfloat16"):
        settings = EngineSettings.of(
            model=str(tiny(family)), device="cpu", num_threads=1, dtype=dtype, self_check="strict"
        )
        found = CausalModel.load(settings).self_check
        assert found is not None
        assert found.result == "passed"


def test_adapters_and_a_smaller_context_are_compared_too() -> None:
    found = load(enable_lora=True, max_model_len=64).self_check
    assert found is not None
    assert found.result == "passed"


def test_an_embedder_with_another_activation_is_not_served_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def embedder(**more: Any) -> Encoder:
        path = tiny_embedding("bert")
        settings = EngineSettings.of(model=str(path), task="embed", dtype="bfloat16", **more)
        return Encoder.load(settings)

    first = embedder().self_check
    assert first is not None
    assert (first.result, set(first.distances)) == ("passed", {"random", "text", "pair"})
    usual = fuse_gelu

    def wrong(model: Any, place: Any) -> None:
        usual(model, place)
        for module in model.modules():
            if type(module).__name__.endswith(place[0]):
                setattr(module, place[1], torch.nn.ReLU())

    monkeypatch.setattr(encoder, "fuse_gelu", wrong)
    monkeypatch.setattr(encoder, "fastest", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        found = embedder(self_check="full").self_check
    assert found is not None
    assert found.result == "plain"
    assert "wrong with faster modules" in caplog.text


@given(st.integers(1, 1 << 21))
def test_positions_grow_from_zero_to_the_last_of_the_context(length: int) -> None:
    found = spread_positions(length)
    assert len(found) == COUNT
    assert found[:4] == (0, 1, 2, 3)
    assert all(before < after for before, after in pairwise(found))
    assert found[-1] == max(length, COUNT) - 1


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_pages_are_each_ones_own(sequences: int, groups: int, each: int) -> None:
    found = [
        page for own in scattered_pages(sequences, groups, each) for run in own for page in run
    ]
    assert sorted(found) == list(range(1, 1 + sequences * groups * each))


def test_one_position_where_experts_are_chosen_moves_a_distance_little() -> None:
    noise = torch.full((16,), 0.02)
    error = noise.clone()
    error[5] = 1.0
    assert mean_ratio(error, noise, 1e-3, routed=True) == pytest.approx(1.0)
    assert mean_ratio(error, noise, 1e-3) > 1.2
    assert mean_ratio(10 * noise, noise, 1e-3, routed=True) > BOUND
    error[5] = torch.nan
    assert not mean_ratio(error, noise, 1e-3, routed=True) <= BOUND


def test_what_is_noise_itself_is_served_with_a_warning_and_refused_by_strict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "MOST_NOISE", 1e-9)
    usual = CausalModel.logits
    monkeypatch.setattr(
        CausalModel, "logits", lambda self, hidden, out=None: usual(self, hidden, out).roll(1, -1)
    )
    found = load().self_check
    assert found is not None
    assert found.result == "noise"
    assert "are noise of" in caplog.text
    with pytest.raises(EngineError, match="strict"):
        load(mode="strict")


@pytest.mark.parametrize("sizes", [{"moe_intermediate_size": 20}, {"hidden_size": 36}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_of_a_size_that_grouped_products_refuse_pass_too(
    sizes: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    directory = make("qwen3_moe", tmp_path / "model", **sizes)
    found = CausalModel.load(
        EngineSettings.of(model=str(directory), device="cpu", dtype=dtype, self_check="strict")
    )
    assert found.self_check is not None
    assert found.self_check.result == "passed"


def test_layers_are_compared_one_after_another_and_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, seen = reference.relative, list[weakref.ref[Tensor]]()

    def relative(found: Tensor, expected: Tensor, size: Tensor) -> Tensor:
        # Of a layer its output comes first, then its heads.
        seen.append(weakref.ref(found))
        alive = [kept.shape[1:] for each in seen if (kept := each()) is not None]
        assert len(alive) <= 1 + (found.dim() == 3), alive
        return usual(found, expected, size)

    monkeypatch.setattr(judgement, "relative", relative)
    layers = len(load(mode="full").decoder_layers)
    assert len(seen) >= 2 * layers


def test_a_change_anywhere_in_the_engine_asks_for_a_new_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in rooms within rooms, as of the check itself and of quantised weights."""
    rooms = ("torch/weights/quantised", "torch/self_check", "torch", "embed")
    for room in rooms:
        (tmp_path / "engine" / room).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(inlay, "__file__", str(tmp_path / "__init__.py"))
    found = set()
    for number, room in enumerate(rooms):
        (tmp_path / "engine" / room / "a.py").write_text(f"a = {number}", encoding="utf-8")
        found.add(fingerprint._sources())
    assert len(found) == len(rooms)
