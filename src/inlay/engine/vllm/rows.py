"""Which models vLLM takes rows for, and how it does. No vLLM."""

from typing import Any

from inlay.engine.vllm import capabilities


def ids_are_looked_up(config: Any) -> bool:
    """Return True if the ids in the place of rows must be a token's.

    vLLM's second model runner, which a GPU gets, looks all ids up before it puts rows over them. So
    does what drafts tokens by the model (multi-token prediction, EAGLE), which knows of no rows;
    and what finds drafts in the prompt proposes them as tokens.
    """
    return bool(config.use_v2_model_runner) or config.speculative_config is not None


def rows_refused(
    config: Any, model_config: dict[str, Any], *, takes_images: bool = False
) -> str | None:
    """Return the reason why this model, so started, takes no rows; None where it does.

    `takes_images`: rows are items of their own, for which vLLM needs no flag.
    """
    model_type = model_config.get("model_type")
    if model_type not in capabilities.ROWS_FROM and not takes_images:
        return capabilities.NOT_ALONE.format(model_type=model_type)
    if not takes_images and not config.model_config.enable_prompt_embeds:
        return capabilities.NOT_ENABLED
    targets = None if config.lora_config is None else config.lora_config.target_modules
    if config.lora_config is not None and (
        targets is None or any("embed" in name for name in targets)
    ):
        return capabilities.ADAPTED_TABLE
    half = str(config.model_config.dtype) == "torch.float16"
    if half and config.speculative_config is not None and config.use_v2_model_runner:
        return capabilities.UNGUARDED
    if half and config.model_config.get_sliding_window() is not None:
        return capabilities.WINDOWED
    return None
