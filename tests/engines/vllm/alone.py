"""What vLLM alone does, in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Alone:
    """Results of vLLM alone: its answer to each thing, and if it died of the last."""

    told: dict[str, Any] = field(default_factory=dict)
    died: bool = False
    output: str = ""


def alone(*words: object, module: str = "bare") -> Alone:
    """Run `tests.engines.vllm.MODULE WORDS...`."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engines.vllm.{module}", *map(str, words)],
        env={
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = Alone(died="EngineDeadError" in done.stdout + done.stderr and done.returncode != 0)
    for line in done.stdout.splitlines():
        if line.startswith("TOLD "):
            found.told |= json.loads(line.removeprefix("TOLD "))
    found.output = done.stdout + done.stderr
    return found
