"""Which models take rows, as vLLM was started."""

from types import SimpleNamespace
from typing import Any

import pytest

from inlay.engine.vllm.capabilities import (
    ADAPTED_TABLE,
    NOT_ENABLED,
    UNGUARDED,
    WINDOWED,
    rows_refused,
)


def config(
    *,
    dtype: str = "bfloat16",
    enabled: bool = True,
    lora: Any = None,
    drafts: Any = None,
    second: bool = False,
    window: int | None = None,
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            enable_prompt_embeds=enabled, dtype=f"torch.{dtype}", get_sliding_window=lambda: window
        ),
        lora_config=lora,
        speculative_config=drafts,
        use_v2_model_runner=second,
    )


@pytest.mark.parametrize(
    ("started", "reason"),
    [
        (config(), None),
        (config(enabled=False), NOT_ENABLED),
        (config(lora=SimpleNamespace(target_modules=None)), ADAPTED_TABLE),
        (config(lora=SimpleNamespace(target_modules=["q_proj"])), None),
        (config(dtype="float16"), None),
        (config(drafts="mtp"), None),
        (config(dtype="float16", drafts="mtp"), None),
        (config(dtype="float16", second=True), None),
        (config(drafts="mtp", second=True), None),
        (config(dtype="float16", drafts="mtp", second=True), UNGUARDED),
        (config(window=4096), None),
        (config(dtype="float16", window=4096), WINDOWED),
    ],
)
def test_rows_are_refused_where_they_could_harm(started: Any, reason: str | None) -> None:
    assert rows_refused(started, {"model_type": "llama"}) == reason


def test_a_model_that_rows_do_not_say_all_of_is_named() -> None:
    assert "'gemma3n'" in str(rows_refused(config(), {"model_type": "gemma3n"}))
