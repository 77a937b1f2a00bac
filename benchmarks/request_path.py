"""Files of inlay that one streamed request enters, from the app to the router and back.

A file is entered when one of its functions is called, or first run as a coroutine, by a function of
another file; a return to the caller is no entry, nor is waking up. The way in ends where
`Router.send` begins. A request before warms caches. The worker answers four tokens in process.

    python -m benchmarks.request_path [completions|chat]
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.models import tiny

import inlay
from benchmarks._options import parser_of
from benchmarks.frontend_streams import BODIES, PacedWorker, exchange, wait_ready
from inlay.api import build_app
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve
from inlay.messages.digest import Secret
from inlay.router import Router

ROOT = f"{Path(inlay.__file__).parent}/"
PORT = 8241
SHARED = ("base/", "messages/")
"""Types and helpers of all rooms, shown apart."""


class Trace:
    """Entries of files, while `ways` is not empty."""

    def __init__(self) -> None:
        self.ways: list[Counter[str]] = []
        self._known: dict[int, FrameType] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event != "call" or not file.startswith(ROOT) or self._known.get(id(frame)) is frame:
            return
        self._known[id(frame)] = frame
        if name == "App.__call__" and len(self.ways) < 1:
            self.ways.append(Counter())
        if not self.ways:
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != file:
            self.ways[-1][file.removeprefix(ROOT)] += 1
        if name == "Router.send":
            self.ways.append(Counter())


async def traced(name: str, port: int = PORT) -> list[Counter[str]]:
    """Send a request twice; return the ways in and out of the second."""
    path, fields = BODIES[name]
    body = json.dumps({**fields, "max_tokens": 4, "stream": True, "ignore_eos": True}).encode()
    settings = EngineSettings.of(model=str(tiny("llama")), served_model_name=["m"], engine="echo")
    secret, frontend = Secret.random(), FrontendSettings(port=port)
    engine = EchoEngine(settings, secret)
    await engine.start()
    app = build_app(Router(PacedWorker(engine.card)), frontend, secret=secret)
    serving = asyncio.create_task(serve(app, frontend))
    await wait_ready(port)
    await exchange(port, path, body)
    trace = Trace()
    before = sys.getprofile()
    sys.setprofile(trace)
    await exchange(port, path, body)
    sys.setprofile(before)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return trace.ways


def own_files(way: Counter[str]) -> list[str]:
    """Return the files of a way that are not shared by all rooms, most entered first."""
    return [file for file, _ in way.most_common() if not file.startswith(SHARED)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", choices=[*BODIES], nargs="?", default="completions")
    for title, way in zip(
        ("in", "out"), asyncio.run(traced(parser.parse_args().name)), strict=True
    ):
        own = own_files(way)
        twice = sum(count > 2 for file, count in way.items() if file in own)
        print(f"{title}: {len(own)} files and {len(way) - len(own)} shared, "
              f"{way.total()} entries, {twice} files entered more than twice")  # fmt: skip
        for file, count in way.most_common():
            print(f"  {count:3} {file}")


if __name__ == "__main__":
    main()
