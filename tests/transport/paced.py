"""An echo engine that takes its time, as a worker of a fleet in a process of its own that can be killed and frozen.

python -m tests.transport.paced URL NAMESPACE MODEL
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import uvloop

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.transport.nats.settings import NatsSettings
from tests.transport.fleet import SECRET, FleetWorker

ROOT = Path(__file__).resolve().parent.parent.parent
STEP_SECONDS = 0.004


class PacedEngine(EchoEngine):
    """One token for every request under way each `STEP_SECONDS`."""

    def _schedule(self) -> None:
        if self._stepping is None and self._shell:
            self._stepping = asyncio.get_running_loop().call_later(STEP_SECONDS, self._step)


def paced_settings(model: str) -> EngineSettings:
    """Of an engine that serves the model as "m"."""
    return EngineSettings.of(model=model, engine="echo", served_model_name=["m"])


async def _serve(url: str, namespace: str, model: str) -> None:
    engine = PacedEngine(paced_settings(model), SECRET)
    await engine.start()
    worker = await FleetWorker.start(engine, NatsSettings(nats=[url], namespace=namespace))  # type: ignore[list-item]
    print(worker.worker.id, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await worker.close()


class PacedWorker:
    """Such a process."""

    def __init__(self, url: str, namespace: str, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.paced", url, namespace, model],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT)))),
            },
        )
        assert self._process.stdout is not None
        self.id = self._process.stdout.readline().decode().strip()

    def send(self, number: signal.Signals) -> None:
        """Signal it."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Make sure it is gone."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(*sys.argv[1:4]))
