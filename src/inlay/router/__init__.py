"""Which worker gets a request."""

from typing import TYPE_CHECKING

from inlay.lazy import exported

if TYPE_CHECKING:
    from inlay.router.model import ServedModel
    from inlay.router.router import Router

__all__ = ["Router", "ServedModel"]

__getattr__ = exported(__name__, {"Router": "router", "ServedModel": "model"})
