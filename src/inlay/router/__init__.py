"""Which worker gets a work."""

from inlay.router.router import Router

__all__ = ["Router"]
