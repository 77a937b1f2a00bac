"""What the fuzz targets share of `atheris`, which is guided by coverage and takes libFuzzer's options."""

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import inlay

Mutation: TypeAlias = Callable[[bytes, random.Random], bytes]
"""Makes other bytes of an input; all chance comes from the generator."""


def instrumented(*modules: str, but: Sequence[str] = ()) -> AbstractContextManager[None]:
    """While it is entered, what is imported of `modules` and below, and not of `but`, tells the fuzzer which edges run.

    What is imported already stays as it is. Watching takes half of the time, so it should be no
    more than is to be covered.
    """
    source = Path(inlay.__file__).parents[1]
    packages = {module.partition(".")[0] for module in modules}
    names = [
        ".".join(path.relative_to(source).with_suffix("").parts)
        for package in packages
        for path in (source / package).rglob("*.py")
    ]
    # `include` goes by the first part of a name alone, and `exclude` by whole names.
    left_out = [
        name
        for name in (name.removesuffix(".__init__") for name in names)
        if _within(name, but) or not _within(name, modules)
    ]
    watch: AbstractContextManager[None] = importlib.import_module("atheris").instrument_imports(
        include=sorted(packages), exclude=left_out
    )
    return watch


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def run(
    check: Callable[[bytes], object],
    mutations: Sequence[Mutation],
    options: Sequence[str],
    folders: Sequence[Path],
) -> None:
    """Fuzz until libFuzzer's options say that it is enough. Does not return.

    Args:
        check: raises when something is wrong with what an input leads to.
        mutations: take turns with libFuzzer's own, by chance.
        options: libFuzzer's, and first the folder that receives what reaches something new.
        folders: with inputs to begin with.
    """
    atheris = importlib.import_module("atheris")
    rng: random.Random | None = None

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        nonlocal rng
        # Seeded once: a run is still the same for the same `-seed`, and seeding takes as long as a
        # change does.
        rng = rng or random.Random(seed)
        choice = seed % (len(mutations) + 1)
        if choice == len(mutations):
            own: bytes = atheris.Mutate(data, max_size)
            return own
        return mutations[choice](data, rng)[:max_size]

    atheris.Setup([sys.argv[0], *options, *map(str, folders)], check, custom_mutator=mutate)
    atheris.Fuzz()
