"""Processor time of an image by stages in processes of their own, beside one process.

    python -m benchmarks.pipeline [--model DIRECTORY] [--size N] [--steps N] [--images N] [--rounds N]

Three servers of one directory in diffusers' format, on this machine: whole; text encoder beside the
rest; and text encoder, denoiser and VAE apart. Requests go one after another, servers take turns.
Printed is the median processor time of an image, of all processes of a server, and its ratio to
that of the server in one process. A server that is not asked costs what it costs idle; that is
printed too.
"""

import base64
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from tests.serving import Served, serving

from benchmarks._options import parser_of
from inlay import demo

_IDLE_SECONDS = 10.0
_ENCODE = {"kind": "encode"}
_GRAPHS: dict[str, dict[str, Any]] = {
    "two processes": {
        "stages": {"reader": _ENCODE, "painter": {"kind": "image"}},
        "edges": ["reader.embeds -> painter.embeds"],
        "outputs": {"image": "painter.image"},
    },
    "three processes": {
        "stages": {"reader": _ENCODE, "denoiser": {"kind": "denoise"}, "decoder": {"kind": "decode"}},
        "edges": ["reader.embeds -> denoiser.embeds", "denoiser.latents -> decoder.latents"],
        "outputs": {"image": "decoder.image"},
    },
}  # fmt: skip


def graph_file(folder: Path, name: str, model: Path) -> Path:
    """Return the file of one of the graphs, of the stages of `model`."""
    graph = _GRAPHS[name]
    stages = {stage: {**kind, "model": str(model)} for stage, kind in graph["stages"].items()}
    path = folder / f"{name.split()[0]}.yaml"
    inputs = {"prompt": "reader.prompt"}
    path.write_text(yaml.safe_dump({**graph, "name": "m", "stages": stages, "inputs": inputs}))
    return path


def cpu_seconds(served: Served) -> float:
    """Processor time that all processes of a server have used so far."""
    first = psutil.Process(served.process.pid)
    times = [process.cpu_times() for process in (first, *first.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def draw(served: Served, body: dict[str, object], images: int) -> tuple[float, bytes]:
    """Return the processor time of an image, of so many, and the last one's file."""
    before = cpu_seconds(served)
    for _ in range(images):
        answer = httpx.post(f"{served.v1}/images/generations", json=body, timeout=600)
        answer.raise_for_status()
    file = base64.b64decode(answer.json()["data"][0]["b64_json"])
    return (cpu_seconds(served) - before) / images, file


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=demo.pipeline_dir() / "painter")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    body = {
        "model": "m", "prompt": "red four", "size": f"{given.size}x{given.size}",
        "num_inference_steps": given.steps, "seed": 7,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        paths = {"one process": given.model}
        paths |= {name: graph_file(Path(folder), name, given.model) for name in _GRAPHS}
        servers = {
            name: undo.enter_context(
                serving(path, "--served-model-name", "m", "--dtype", "float32")
            )
            if name == "one process"
            else undo.enter_context(serving(path, "--dtype", "float32"))
            for name, path in paths.items()
        }
        took: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(given.rounds + 1):
            files = set()
            for name, served in servers.items():
                seconds, file = draw(served, body, given.images)
                files.add(file)
                if number:
                    took[name].append(seconds)
            if len(files) != 1:
                raise RuntimeError("the servers' images differ")
        before = {name: cpu_seconds(served) for name, served in servers.items()}
        time.sleep(_IDLE_SECONDS)
        idle = {
            name: 1e3 * (cpu_seconds(served) - before[name]) / _IDLE_SECONDS
            for name, served in servers.items()
        }
    one = statistics.median(took["one process"])
    for name, times in took.items():
        middle = statistics.median(times)
        print(
            json.dumps({
                "server": name, "ms of processor an image": round(1e3 * middle, 1),
                "ratio": round(middle / one, 3), "idle ms a second": round(idle[name], 1),
            })
        )  # fmt: skip


if __name__ == "__main__":
    main()
