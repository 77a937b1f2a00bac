"""Errors of requests whose computation has failed."""

import torch

from inlay.base.errors import OUT_OF_MEMORY, EngineError, InlayError, OverloadedError


def is_out_of_memory(error: Exception) -> bool:
    """Return True if memory could not be allocated, on whatever device.

    Libraries may have made another error of it, as transformers' tokenizers do.
    """
    found: BaseException | None = error
    while found is not None:
        # The allocator of the CPU has no error of its own.
        if isinstance(found, MemoryError | torch.OutOfMemoryError) or (
            "can't allocate memory" in str(found)
        ):
            return True
        found = found.__cause__ or found.__context__
    return False


def memory_too_small(what: str) -> EngineError:
    """Return the error of a request whose `what` there is no memory for."""
    return EngineError(f"the worker's memory is too small for {what}", reason=OUT_OF_MEMORY)


def model_failed(error: Exception) -> EngineError:
    """Return the error of the requests that a part of a model has failed at; others go on."""
    if is_out_of_memory(error):
        return memory_too_small("this request")
    return EngineError(f"the model failed: {type(error).__name__}: {error}")


def engine_failed(error: Exception) -> InlayError:
    """Return the error of all requests of an engine that cannot go on.

    Without memory it is as one whose process the system has ended: requests go on elsewhere.
    """
    if is_out_of_memory(error):
        return OverloadedError("the worker is out of memory", retry_after=1)
    return EngineError(f"the engine failed: {type(error).__name__}: {error}")
