"""Starting vLLM's asynchronous engine, and what its errors mean."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.vllm.stats import Counters


@contextmanager
def refused() -> Iterator[None]:
    """Raise `InvalidRequestError` for a model or settings that vLLM refuses inside."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise InvalidRequestError(
            f"vLLM refuses the model or its settings: {_said(error)}"
        ) from error


def launch(config: Any, counters: Counters) -> Any:
    """An `AsyncLLM`, its model loaded: blocks until then.

    Raises `EngineError` when it does not start.
    """
    try:
        return AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.ENGINE_CONTEXT,
            stat_loggers=[counters],
            disable_log_stats=True,
        )
    except InlayError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM did not start; its own output above says why: {type(error).__name__}: "
            f"{_said(error)}"
        ) from error


async def shut_down(llm: Any) -> None:
    """End vLLM's processes."""
    if llm.output_handler is not None:
        # Otherwise it takes the end of the core for its death.
        llm.output_handler.cancel()
    await asyncio.to_thread(llm.shutdown, 0.0)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())
