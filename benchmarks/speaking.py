"""What is left of spoken answers whose readers leave.

    python -m benchmarks.speaking [--aborted N] [--without-prefix-cache]

A tiny model of Qwen2.5-Omni's family as three stages behind one frontend, each a process. Chats with
sound and `/v1/audio/speech`, as events and as a bare body, are left after a random time. Printed are
the payloads that the stages keep 5 s later, the bytes of requests in the frontend, and the resident
memory of each process before, half way and after.
"""

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from tests.omni_models import omni
from tests.serving import Served, serving

_GRAPH = {
    "name": "omni",
    "stages": {
        "thinker": {"kind": "generate"},
        "talker": {"kind": "talk", "max_tokens": 400},
        "vocoder": {"kind": "vocode", "speech": {"chunk": 4}},
    },
    "edges": ["thinker.states -> talker.states", "talker.codes -> vocoder.codes"],
    "inputs": {"prompt": "thinker.prompt"},
    "outputs": {"text": "thinker.text", "audio": "vocoder.audio"},
}
_LEFT = {
    "payloads": "inlay:held_payloads",
    "bytes of payloads": "inlay:held_payload_bytes",
    "bytes in the frontend": "inlay:held_bytes",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
_AT_A_TIME = 6
_LONGEST = 1.0
"""Seconds after which a reader leaves, at most."""


def _ask(served: Served, number: int, seconds: float) -> str:
    """Ask for a sound, read for so long, and leave; return how it ended."""
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"say number {number}"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "max_tokens": 400,
        "logit_bias": {"2": -100},
        "stream": True,
    }
    speech = {"input": f"this is number {number}", "response_format": "pcm"}
    route, fields = (
        ("chat/completions", chat),
        ("audio/speech", speech),
        ("audio/speech", speech | {"stream_format": "sse"}),
    )[number % 3]
    until = time.monotonic() + seconds
    try:
        with httpx.stream(
            "POST", f"{served.v1}/{route}", json={"model": "omni"} | fields, timeout=seconds
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                return str(answer.status_code)
            for _ in answer.iter_bytes():
                if time.monotonic() > until:
                    return "left"
            return "answered"
    except httpx.TimeoutException:
        return "left"


def _some(served: Served, first: int, count: int) -> Counter[str]:
    chance = random.Random(first)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return Counter(
            pool.map(
                lambda number: _ask(served, number, chance.uniform(0.01, _LONGEST)),
                range(first, first + count),
            )
        )


def _left(served: Served) -> dict[str, float]:
    page = httpx.get(served.url + "/metrics").text
    found = {
        what: re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.M)
        for what, name in _LEFT.items()
    }
    return {what: sum(map(float, values)) for what, values in found.items() if values}


def _resident(served: Served) -> list[int]:
    first = psutil.Process(served.process.pid)
    return [one.memory_info().rss for one in (first, *first.children(recursive=True))]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborted", type=int, default=1000)
    parser.add_argument("--without-prefix-cache", action="store_true")
    given = parser.parse_args()
    cache = ["--no-enable-prefix-caching"] if given.without_prefix_cache else []
    graph: Any = _GRAPH
    for stage in graph["stages"].values():
        stage["model"] = str(omni())
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "omni.yaml"
        path.write_text(yaml.safe_dump(graph))
        with serving(path, "--dtype", "float32", *cache) as served:
            _some(served, 0, 100)
            time.sleep(5)
            resident, ends = [_resident(served)], Counter[str]()
            for half in range(2):
                count = given.aborted // 2
                ends += _some(served, 100 + half * count, count)
                time.sleep(5)
                resident.append(_resident(served))
            left = _left(served)
    print(f"{given.aborted} answers: {', '.join(f'{n} {end}' for end, n in ends.items())}")
    print("5 s later: " + ", ".join(f"{value:g} {what}" for what, value in left.items()))
    each = (
        " -> ".join(f"{size / 1e6:.0f}" for size in sizes) for sizes in zip(*resident, strict=True)
    )
    print(f"resident MB before, half way and after: {', '.join(each)}")


if __name__ == "__main__":
    main()
