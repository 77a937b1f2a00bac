"""What transformers may ask of an attention that replaces its own.

Whatever would change the result is refused, never dropped.
"""

from collections.abc import Collection, Mapping

from torch import nn

from inlay.errors import EngineError


def check_options(
    module: nn.Module, options: Mapping[str, object], without_effect: Collection[str]
) -> None:
    """Refuse what is asked and not done.

    Args:
        module: the layer that asks.
        options: what it asks for by keyword; None is nothing.
        without_effect: names that do not change the result.

    Raises:
        EngineError: names them.
    """
    asked = sorted(
        name
        for name, option in options.items()
        if option is not None and name not in without_effect
    )
    if asked:
        raise EngineError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which this attention does not do"
        )


__all__ = ["check_options"]
