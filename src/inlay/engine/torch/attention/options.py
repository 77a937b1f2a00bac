"""Check of the options that transformers passes to a replaced attention.

Unsupported options that would change the result are refused, never ignored.
"""

from collections.abc import Collection, Mapping

from torch import nn

from inlay.errors import EngineError


def check_options(
    module: nn.Module, options: Mapping[str, object], without_effect: Collection[str]
) -> None:
    """Refuse unsupported options.

    Args:
        module: the calling layer.
        options: its keyword arguments; None means unset.
        without_effect: names that do not change the result.

    Raises:
        EngineError: lists the unsupported options.
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
