"""Removal of secrets from the process's arguments, which others can read, and its children's."""

import ctypes
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path

from inlay.cli.options import Options
from inlay.cli.reading import ParsedArgs

_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/PID/stat, counted from 0.

Where the process's arguments lie (proc_pid_stat(5)).
"""

_HIDDEN = b"*"


def scrub_argv(options: Options, words: ParsedArgs) -> None:
    """Forget secrets where others could find them.

    Among the process's arguments, and in the environment children get.

    On Linux the arguments are overwritten where the kernel reads them for `ps`; elsewhere they
    stay, as flags do.
    """
    secret = [option for option in options.by_name.values() if option.secret]
    for option in secret:
        os.environ.pop(option.variable, None)
    given = [words.given[option.name].value for option in secret if option.name in words.given]
    values = {
        str(value) for item in given for value in (item if isinstance(item, list) else [item])
    }
    if values and sys.platform == "linux":
        _overwrite({os.fsencode(value) for value in values if value})


def _overwrite(values: Collection[bytes]) -> None:
    try:
        stat = Path("/proc/self/stat").read_bytes()
    except OSError:
        return
    # The second field, a name in parentheses, may hold anything.
    fields = [b"", b"", *stat.rpartition(b")")[2].split()]
    if len(fields) <= _ARG_END:
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not 0 < start < end:
        return
    arguments = ctypes.string_at(start, end - start)
    for value in values:
        for found in re.finditer(rb"(?:^|\0|=)(" + re.escape(value) + rb")(?=\0|$)", arguments):
            ctypes.memset(start + found.start(1), _HIDDEN[0], len(value))
