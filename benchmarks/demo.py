"""From the start of `inlay demo` to its first answer, and the memory it then uses.

python -m benchmarks.demo [--rounds N]
"""

import statistics
import subprocess
import sys
import time

from benchmarks._options import parser_of
from benchmarks._serving import Server, free_port


def once() -> tuple[float, float]:
    """(seconds to the first line that holds an answer, resident MB of all processes then)."""
    port = free_port()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "inlay.cli", "demo", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdout is None:
        raise RuntimeError("no standard output to read")
    try:
        served = Server("demo", port, (process.pid,))
        for line in process.stdout:
            if line.startswith("serving until"):
                raise RuntimeError("the demo showed no answer")
            if line.startswith("   < "):
                elapsed = time.perf_counter() - start
                return elapsed, served.resident_bytes() / 1e6
        raise RuntimeError(f"the demo ended with status {process.wait()}")
    finally:
        process.terminate()
        process.wait(20)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    runs = [once() for _ in range(parser.parse_args().rounds)]
    seconds, megabytes = zip(*runs, strict=True)
    print(f"start to first answer  {statistics.median(seconds):6.1f} s   (aim: under 15)")
    print(f"resident memory        {statistics.median(megabytes):6.0f} MB  (aim: under 1000)")


if __name__ == "__main__":
    main()
