"""Memory that a process does not get: every allocation of a tensor on the CPU fails, for real.

torch asks `posix_memalign` for the memory of tensors, and hardly anything else does. A library that
is loaded before it refuses while a file is there; the error is then torch's own.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_FILE = "TESTS_NO_MEMORY_FILE"
_SOURCE = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

int posix_memalign(void **memory, size_t alignment, size_t size) {{
    static int (*next)(void **, size_t, size_t);
    const char *file = getenv("{_FILE}");
    if (file != NULL && access(file, F_OK) == 0)
        return ENOMEM;
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "posix_memalign");
    return next(memory, alignment, size);
}}
"""
COMPILER = shutil.which("cc")


class Memory:
    """The memory of some processes, by name. Needs `COMPILER`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "no_memory.so"
        assert COMPILER is not None
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", self._library, "-ldl"],
            input=_SOURCE,
            text=True,
            check=True,
            timeout=120,
        )

    @property
    def preloaded(self) -> Mapping[str, str]:
        """Variables that all of them have at their start."""
        return {"LD_PRELOAD": str(self._library)}

    def variables(self, name: str) -> Mapping[str, str]:
        """The environment of a process that is called so."""
        return {**self.preloaded, _FILE: str(self._file(name))}

    @contextmanager
    def none(self, name: str) -> Iterator[None]:
        """Give the process of that name no memory for tensors until the block ends."""
        self._file(name).touch()
        try:
            yield
        finally:
            self._file(name).unlink()

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.none"
