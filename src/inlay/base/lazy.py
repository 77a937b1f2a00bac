"""Packages whose names are imported when they are first used.

Every command reads settings; the packages that they configure take long to import.
"""

from collections.abc import Callable, Mapping
from importlib import import_module


def exported(package: str, found_in: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` (PEP 562) of `package`.

    Its names, by the module of it that each is found in.
    """

    def get(name: str) -> object:
        if name not in found_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{found_in[name]}"), name)

    return get
