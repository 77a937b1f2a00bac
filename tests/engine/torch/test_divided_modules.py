"""Replaced modules of a model over two ranks are compared with the whole model's, share by share.

The ranks are threads of one process, so that a fault can be put into either.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inlay.engine.settings import EngineSettings
from inlay.engine.torch import model as model_module
from inlay.engine.torch import threads
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check.judgement import Judgement
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.tensor_parallel import sharding
from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.engine.torch.weights import checkpoint
from tests.lifelike import lifelike
from tests.models import tiny

RANKS = range(2)


@pytest.fixture(autouse=True)
def only_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the whole model, for which ranks wait for commands; cores as they are."""
    monkeypatch.setattr(model_module, "judge", lambda *_: Judgement({"text": 0.5}, (), 0.01))
    monkeypatch.setattr(model_module, "shadow_of", lambda *_, **__: None)
    monkeypatch.setattr(threads, "bind", lambda *_: 2)
    read, alone = checkpoint.load, threading.Lock()

    def one_by_one(*given: Any, **named: Any) -> Any:
        # transformers changes torch's defaults as it reads.
        with alone:
            return read(*given, **named)

    monkeypatch.setattr(model_module, "load", one_by_one)


_here = threading.local()


def load(family: str, folder: Path) -> list[CausalModel]:
    """The ranks of a model, which is compared in full."""
    settings = EngineSettings.of(
        model=str(lifelike(tiny(family))), device="cpu", num_threads=1, dtype="bfloat16",
        self_check="full", tensor_parallel_size=2,
    )  # fmt: skip

    def rank(number: int) -> CausalModel:
        _here.rank = number
        group = TensorParallelGroup.connect(settings, number, folder / "store")
        return CausalModel.load(settings, group)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, RANKS))


def swapped(found: Tensor) -> Tensor:
    return torch.cat([found[..., 1:2], found[..., :1], found[..., 2:]], -1)


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "two outputs swapped": swapped,
    "the last 16 wrong": lambda found: torch.cat([found[..., :-16], found[..., -16:].flip(-1)], -1),
    "an output missing": lambda found: torch.cat([found[..., :-1], 0 * found[..., -1:]], -1),
    "1.5% too large": lambda found: found * 1.015,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_a_fault_of_one_module_of_one_rank_is_seen(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ModuleCheck.agrees
    seen: dict[str, int] = {}
    missed: list[tuple[str, int, str]] = []

    def agrees(
        check: ModuleCheck, paths: Sequence[str], size: int, like: Tensor, found: Any,
        expected: Any, **named: Any,
    ) -> bool:  # fmt: skip
        name = named.get("whole") or paths[0]
        for faulty in RANKS:
            for fault, change in FAULTS.items():
                computed = found
                if faulty == _here.rank:
                    computed = lambda x, change=change: change(found(x).clone())  # noqa: E731
                same = usual(check, paths, size, like, computed, expected, **named)
                if _here.rank == 0 and same:
                    missed.append((name, faulty, fault))
        check.left_out.clear()
        if _here.rank == 0:
            seen[name] = seen.get(name, 0) + 1
        return usual(check, paths, size, like, found, expected, **named)

    monkeypatch.setattr(ModuleCheck, "agrees", agrees)
    first, second = load(family, tmp_path)
    assert missed == []
    assert first.self_check is not None
    assert first.self_check.left_out == ()
    assert second.self_check is None
    assert len(seen) >= 4 * len(first.decoder_layers)
    assert {name.rpartition(".")[2] for name in seen} >= {"q_proj", "share", "norm"}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_share_that_is_another_ranks_is_seen_in_each_product(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, divided = sharding._keep, set[str]()

    class Other:
        rank, size = 0, 2

    def keep(linear: Any, dimension: int, group: Any, path: str) -> None:
        if group.rank == 1 and path != "lm_head":
            divided.add(path)
            # Its bias is added once all the same.
            linear.bias = linear.bias if dimension == 0 else None
            group = Other
        usual(linear, dimension, group, path)

    monkeypatch.setattr(sharding, "_keep", keep)
    first, _ = load(family, tmp_path)
    assert first.self_check is not None
    named = " ".join(first.self_check.left_out)
    assert {path for path in divided if path.endswith("_proj")} == divided
    for path in divided:
        layer, name = path.rsplit(".", 1)
        assert layer in named, path
        assert name in named, path
