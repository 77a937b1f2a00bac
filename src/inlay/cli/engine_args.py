"""Engine arguments beside the settings.

The words after `--`, and what other flags mean for it.
"""

from collections.abc import Sequence

from inlay.cli.command import UsageError
from inlay.engine.ranks import with_ranks
from inlay.engine.settings import EngineSettings


def with_engine_args(
    engine: EngineSettings, extra_args: Sequence[str], *meant: str
) -> EngineSettings:
    """Settings with all engine arguments.

    Args:
        engine: as it was set.
        extra_args: the words after `--`.
        meant: words that other flags mean for vLLM, each a flag or a flag with its value
            ("--scheduling-policy priority"); one that was given stays as it was given.

    Raises:
        UsageError: words for an engine that takes none.
        InvalidRequestError: what they say of data-parallel ranks cannot be.
    """
    if engine.model.engine in ("sglang", "vllm-omni"):
        return engine.replace(engine_arguments=[*engine.library.engine_arguments, *extra_args])
    if engine.model.engine != "vllm":
        if extra_args:
            raise UsageError(
                f"the {engine.model.engine} engine takes no further arguments, "
                f"got {' '.join(extra_args)!r} after --"
            )
        return engine
    words = [*engine.library.engine_arguments, *extra_args]
    given = {word.partition("=")[0].replace("--no-", "--") for word in words}
    for meaning in meant:
        flag, *value = meaning.split()
        if flag not in given:
            words += (flag, *value)
    return with_ranks(engine.replace(engine_arguments=words))
