"""`inlay doctor`: what this machine has, and what a server here would lack.

Starts no engine, and imports one only to compare a model with its own code. A finding is `ok`,
`note` (slower or smaller than it could be) or `fails`; with a failure the exit status is 1.
"""

import asyncio
import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

import inlay
from inlay.base import extras
from inlay.base.errors import InlayError, why_unusable
from inlay.cli.process import Console
from inlay.extension import FLAG, extensions, installed
from inlay_tools.settings import DoctorSettings

State = Literal["ok", "note", "fails"]

_LIBRARIES = ("torch", "transformers", "vllm", "vllm-omni", "sglang", "nats-py", "cryptography")
_SECONDS = 5.0
_FEW_FILES = 4096
_SMALL_SHM = 1 << 30
_SOON = 14 * 86400
_UNSYNCHRONISED = 5
"""adjtimex's answer where no time service keeps the clock."""
_LEVELS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512"}


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    state: State
    what: str
    said: str


def run(settings: DoctorSettings) -> int:
    """Print all findings; return 1 if one of them is a failure, else 0."""
    console = Console(sys.stdout, sys.stderr)
    found = list(findings(settings))
    if settings.output_json or settings.output_format == "json":
        console.out(json.dumps(msgspec.to_builtins(found)) + "\n")
    else:
        console.out("".join(f"{one.state:5}  {one.what:12}  {one.said}\n" for one in found))
    return int(any(one.state == "fails" for one in found))


def findings(settings: DoctorSettings) -> Iterator[Finding]:
    """Look at one thing after another; those that settings name only where they do."""
    yield from (
        _versions(),
        _extensions(),
        _processor(),
        _memory(),
        _compiler(),
        _gpu(),
        _files(),
        _shared(),
    )
    yield _clock()
    yield from _nats(settings)
    for peer in settings.reach:
        yield _reached(peer)
    for port in settings.free_ports:
        yield _free(port)
    if settings.ssl_certfile is not None:
        yield _certificate(settings.ssl_certfile, settings.ssl_keyfile)
    if settings.model is not None:
        yield from _model(settings.model, settings)


def _versions() -> Finding:
    found = [f"inlay {inlay.__version__}", f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding("ok", "versions", ", ".join(found))


def _extensions() -> Finding:
    loaded = [each.name for each in extensions()]
    beside = [
        f"{name} of {' and '.join(distributions)}, not loaded: {FLAG} does not name it"
        for name, distributions in sorted(installed().items())
        if name not in loaded
    ]
    return Finding("ok", "extensions", "; ".join([", ".join(loaded), *beside]))


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    flags = set(_read("/proc/cpuinfo").split())
    level = next((name for flag, name in _LEVELS.items() if flag in flags), "no AVX-512")
    said = f"{cores} cores, {platform.machine()}, {level}"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if quota and quota[0] != "max":
        share = int(quota[0]) / int(quota[1])
        return Finding("note", "processor", f"{said}; limited to {share:g}: steps are throttled")
    return Finding("ok", "processor", said)


def _memory() -> Finding:
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(lines.get(name, "0").split()[0]) for name in ("MemTotal", "MemAvailable"))
    said = f"{total >> 20} GiB, {free >> 20} available"
    bound = _read("/sys/fs/cgroup/memory.max").strip()
    return Finding(
        "ok", "memory", f"{said}; limit {int(bound) >> 30} GiB" if bound.isdigit() else said
    )


def _compiler() -> Finding:
    found = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    kernels = list((Path(sys.prefix) / "lib" / "inlay-kernels").glob("*.so"))
    if kernels:
        return Finding("ok", "kernels", f"{len(kernels)} compiled beforehand")
    if found is not None:
        return Finding("ok", "kernels", f"compiled at the first start with {found}")
    return Finding("note", "kernels", "no C++ compiler: the torch engine is slower on a CPU")


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("ok", "GPU", "none (no nvidia-smi)")
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("fails", "GPU", f"nvidia-smi does not answer: {error}")
    said = "; ".join(done.stdout.split("\n")).strip("; ")
    return Finding("fails" if done.returncode else "ok", "GPU", said or done.stderr.strip())


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{soft} open files, at most {hard}"
    if soft < _FEW_FILES:
        return Finding("note", "limits", f"{said}: a frontend needs one for each connection")
    return Finding("ok", "limits", said)


def _shared() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return Finding("note", "/dev/shm", f"not there: {error.strerror}")
    said = f"{size / (1 << 30):.1f} GiB"
    if size < _SMALL_SHM:
        return Finding("note", "/dev/shm", f"{said}: too small for vLLM's tensor parallelism")
    return Finding("ok", "/dev/shm", said)


def _clock() -> Finding:
    if sys.platform != "linux":
        return Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    # Zeroes ask and set nothing; struct timex has 208 bytes.
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if state == _UNSYNCHRONISED:
        return Finding("note", "clock", f"{now}, kept by no time service")
    return Finding("ok", "clock", now)


def _nats(settings: DoctorSettings) -> Iterator[Finding]:
    if not settings.fleet.nats:
        return
    try:
        from inlay.transport.nats.member import Member
    except ImportError:
        yield Finding("fails", "NATS", f"its client is missing: {extras.install('nats')}")
        return

    async def join() -> None:
        member = await Member.join(settings.fleet, "frontend")
        await member.leave()

    yield _tried("NATS", settings.fleet.shown_urls, lambda: asyncio.run(join()))


def _tried(what: str, said: str, act: Callable[[], object]) -> Finding:
    start = time.monotonic()
    try:
        act()
    except InlayError as error:
        return Finding("fails", what, " ".join(error.message.split()))
    except OSError as error:
        return Finding("fails", what, f"{said}: {error.strerror or error}")
    return Finding("ok", what, f"{said}, {(time.monotonic() - start) * 1000:.0f} ms")


def _reached(peer: str) -> Finding:
    host, _, port = peer.rpartition(":")
    if not port.isdigit() or not host:
        return Finding("fails", "reach", f"{peer} is not HOST:PORT")
    address = (host.strip("[]"), int(port))
    return _tried("reach", peer, lambda: socket.create_connection(address, _SECONDS).close())


def _free(port: int) -> Finding:
    def bind() -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))

    return _tried("port", str(port), bind)


def _certificate(certificate: Path, key: Path | None) -> Finding:
    from inlay.http.tls import expiry

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        left = expiry(certificate.read_text("ascii")) - time.time()
    except (OSError, ValueError) as error:
        return Finding("fails", "certificate", f"{certificate}: {why_unusable(error)}")
    said = f"{certificate}: {left / 86400:.0f} days left"
    return Finding("fails" if left <= 0 else "note" if left < _SOON else "ok", "certificate", said)


def _model(name: str, settings: DoctorSettings) -> Iterator[Finding]:
    """Compare a model with its own code; a line for each distance, 1 being its own rounding."""
    try:
        from inlay.tensors.gguf_model import types_in
        from inlay.tensors.hub import local_directory
        from inlay_tools.model_check import self_check_of

        found = self_check_of(name, settings.dtype, settings.device, settings.quantization)
    except ImportError as error:
        yield Finding("fails", "model", f"the torch engine cannot be imported: {error}")
        return
    except InlayError as error:
        yield Finding("fails", "model", " ".join(error.message.split()))
        return
    state: State = "ok" if found.result == "passed" else "note"
    if types := types_in(local_directory(name) or Path(name)):
        how = "stays in its blocks on a CPU, unless --activations exact; dequantised elsewhere"
        yield Finding("ok", "model", f"GGUF, of {', '.join(types)}: {how}")
    yield Finding(state, "model", f"{found.result} against {found.reference}")
    for place, distance in found.distances.items():
        yield Finding(state, "distance", f"{distance:.2f} of {found.bound:g}  {place}")
    for part, distance in found.parts.items():
        yield Finding(state, "part", f"{distance:.2g} from float32  {part}")
    if found.layers:
        worst = max(range(len(found.layers)), key=found.layers.__getitem__)
        said = f"{len(found.layers)} compared; the largest distance is {found.layers[worst]:.2f}"
        yield Finding(state, "layers", f"{said}, of layer {worst}")
    if settings.quality is not None:
        yield _quality(name, settings.quality, settings)
    if not found.distances:
        return
    said = f"{found.num_modules} compared, {len(found.left_out)} left as they were"
    yield Finding(state, "modules", ": ".join(filter(None, (said, ", ".join(found.left_out)))))


def _quality(name: str, file: Path, settings: DoctorSettings) -> Finding:
    from inlay.engine.settings import EngineSettings
    from inlay.engine.torch.quality import quality_of
    from inlay_tools.model_check import WINDOW, windows_of

    given = EngineSettings.of(
        model=name, dtype=settings.dtype, device=settings.device, self_check="off",
        quantization=settings.quantization, max_model_len=512,
    )  # fmt: skip
    try:
        windows = windows_of(name, file.read_text(encoding="utf-8"))
        if not windows:
            return Finding("fails", "quality", f"{file} has fewer than {WINDOW} tokens, the fewest")
        found = quality_of(given, windows)
    except (OSError, UnicodeDecodeError) as error:
        return Finding("fails", "quality", f"{file} cannot be read: {why_unusable(error)}")
    except InlayError as error:
        return Finding("fails", "quality", " ".join(error.message.split()))
    said = (
        f"{found.rounding}: perplexity {found.rounded:.3f}, {found.rounded / found.exact - 1:+.2%} "
        f"of {found.exact:.3f}; KL {found.divergence:.4f} nats a token; same likeliest token "
        f"{found.same:.1%}, {found.tokens} tokens"
    )
    return Finding("ok", "quality", said)


def _read(path: str) -> str:
    """The text of a file of the system; empty where there is none."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
