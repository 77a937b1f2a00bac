"""What is left of spoken answers whose readers leave, or of images with previews.

    python -m benchmarks.speaking [--aborted N] [--without-prefix-cache] [--images]

A tiny model of Qwen2.5-Omni's family as three stages behind one frontend, each a process. Chats with
sound and `/v1/audio/speech`, as events and as a bare body, are left after a random time. Or the
demo's painter as three stages, whose streams of a preview for every 5 steps are left. Printed are
the payloads that the stages keep 5 s later, the bytes of requests in the frontend, and the resident
memory of each process before, half way and after.
"""

import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from tests.omni_models import omni
from tests.serving import Served, serving

from benchmarks._options import parser_of
from inlay import demo

_PAINTER = {
    "name": "painter",
    "stages": {
        "reader": {"kind": "encode"},
        "denoiser": {"kind": "denoise"},
        "decoder": {"kind": "decode"},
    },
    "edges": ["reader.embeds -> denoiser.embeds", "denoiser.latents -> decoder.latents"],
    "inputs": {"prompt": "reader.prompt"},
    "outputs": {"image": "decoder.image", "preview": "decoder.preview"},
}
_OMNI = {
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


Body = tuple[str, dict[str, Any]]
"""A route and the fields of a request to it."""


def _image(number: int) -> Body:
    fields = {"prompt": "red four", "stream": True, "partial_images": 3, "seed": number}
    return "images/generations", {"model": "painter", "num_inference_steps": 20} | fields


def _sound(number: int) -> Body:
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
    return route, {"model": "omni"} | fields


def _ask(served: Served, body: Body, seconds: float) -> str:
    """Ask, read for so long, and leave; return how it ended."""
    route, fields = body
    until = time.monotonic() + seconds
    try:
        with httpx.stream("POST", f"{served.v1}/{route}", json=fields, timeout=seconds) as answer:
            if answer.status_code != httpx.codes.OK:
                return str(answer.status_code)
            for _ in answer.iter_bytes():
                if time.monotonic() > until:
                    return "left"
            return "answered"
    except httpx.TimeoutException:
        return "left"


def _some(served: Served, make: Callable[[int], Body], first: int, count: int) -> Counter[str]:
    chance = random.Random(first)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return Counter(
            pool.map(
                lambda number: _ask(served, make(number), chance.uniform(0.01, _LONGEST)),
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
    parser = parser_of(__doc__)
    parser.add_argument("--aborted", type=int, default=1000)
    parser.add_argument("--without-prefix-cache", action="store_true")
    parser.add_argument("--images", action="store_true")
    given = parser.parse_args()
    cache = ["--no-enable-prefix-caching"] if given.without_prefix_cache else []
    graph: Any = _PAINTER if given.images else _OMNI
    make = _image if given.images else _sound
    model = demo.pipeline_dir() / "painter" if given.images else omni()
    for stage in graph["stages"].values():
        stage["model"] = str(model)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "graph.yaml"
        path.write_text(yaml.safe_dump(graph))
        with serving(path, "--dtype", "float32", *cache) as served:
            _some(served, make, 0, 100)
            time.sleep(5)
            resident, ends = [_resident(served)], Counter[str]()
            for half in range(2):
                count = given.aborted // 2
                ends += _some(served, make, 100 + half * count, count)
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
