"""Counts calls of functions of inlay in each process and thread, between two signals.

With this folder on PYTHONPATH, every Python process imports it as it starts. SIGUSR1 begins to
count; SIGUSR2 ends, and writes `<pid>.json` into the folder `HOUSE_TRACE`: the calls by file and
function. `HOUSE_ROOT` is the folder whose files count.
"""

import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

_ROOT = os.environ["HOUSE_ROOT"]
_by_thread: dict[int, Counter[CodeType]] = {}
_counting = False


def _count(frame: FrameType, event: str, _: object) -> None:
    if _counting and event == "call":
        _by_thread.setdefault(threading.get_ident(), Counter())[frame.f_code] += 1


def _begin(*_: object) -> None:
    global _counting
    _by_thread.clear()
    _counting = True


def _end(*_: object) -> None:
    global _counting
    _counting = False
    found: Counter[str] = Counter()
    for counts in list(_by_thread.values()):
        for code, count in counts.items():
            file = code.co_filename
            if file.startswith(_ROOT):
                found[f"{file.removeprefix(_ROOT)}:{code.co_qualname}"] += count
    path = Path(os.environ["HOUSE_TRACE"]) / f"{os.getpid()}.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"argv": sys.orig_argv, "calls": found}), encoding="utf-8")
    partial.rename(path)


signal.signal(signal.SIGUSR1, _begin)
signal.signal(signal.SIGUSR2, _end)
threading.setprofile(_count)
sys.setprofile(_count)
