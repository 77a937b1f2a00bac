"""vLLM's own parser takes the words of every recipe of `deploy/recipes` that names vLLM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inlay.engine.settings import EngineSettings
from tests.deepseek import published

RECIPES = Path(__file__).parents[3] / "deploy" / "recipes"


def pools() -> Iterator[Any]:
    for path in sorted(RECIPES.glob("*.yaml")):
        for pool in yaml.safe_load(path.read_text(encoding="utf-8"))["workers"]:
            if pool.get("config", {}).get("engine") == "vllm":
                yield pytest.param(pool, id=f"{path.stem}-{pool['name']}")


@pytest.mark.parametrize("pool", list(pools()))
def test_vllm_takes_the_words_of_a_recipe(pool: dict[str, Any], tmp_path: Path) -> None:
    from inlay.engine.vllm.arguments import engine_args

    (tmp_path / "config.json").write_text(json.dumps(published()))
    config = pool["config"]
    nodes = pool.get("nodes", 1)
    # As the chart adds where there are several nodes.
    more = ["--data-parallel-address", "leader.example"] if nodes > 1 else []
    found = engine_args(
        EngineSettings.of(
            model=str(tmp_path),
            engine="vllm",
            engine_arguments=[*pool["engineArguments"], *more],
            max_model_len=config["max-model-len"],
            enable_sleep_mode=config.get("enable-sleep-mode", False),
        ),
        tmp_path,
    )
    gpus = found.tensor_parallel_size * pool.get("ranks", 1)
    assert gpus == pool["gpus"]["count"]
    assert found.max_model_len == config["max-model-len"]
    if "r1" in pool["name"]:
        assert found.enable_expert_parallel
        assert found.quantization is None
    if nodes > 1:
        assert found.data_parallel_address == "leader.example"
        assert found.data_parallel_rpc_port == 13345
