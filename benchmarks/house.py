"""Measures of the structure: what one must know to follow a request, a step, a change.

Counts do not depend on how busy the machine is; times do, and are the least of several.

    python -m benchmarks.house                   all
    python -m benchmarks.house trace weight      some of trace, step, waiting, weight
    python -m benchmarks.house trace --list      and each file with its calls
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks import _house_step, _house_weight, waiting
from benchmarks._environment import ensure
from benchmarks._house_trace import ROOT, files, traced_chat
from benchmarks._options import parser_of

EXTENSIONS = "inlay_"
MEDIA = ("/media/", "/image", "/audio", "/pictures", "/sounds", "/speech", "stage", "models_before")
"""Parts of the names of files that a text chat has no use for."""


def line(name: str, value: str, bound: str = "") -> None:
    """Print a row of the table."""
    print(f"{name:<58} {value:>24} {bound:>16}")


def trace(*, listed: bool) -> None:
    """Files and calls of a streamed chat of two tokens."""
    found = traced_chat()
    for part, calls, bound in (
        ("frontend", found.frontend, "45 / 450"),
        ("worker", found.worker, "40 / 700"),
    ):
        entered = files(calls)
        line(f"text chat, {part}: files / calls", f"{len(entered)} / {calls.total()}", bound)
        if listed:
            for file, count in entered.most_common():
                print(f"    {count:4} {file}")
    both = files(found.frontend + found.worker)
    alien = sorted(
        file for file in both if any(part in file for part in MEDIA) or file.startswith(EXTENSIONS)
    )
    line("  of images, sound, stages, extensions", str(len(alien)), "0")
    for file in alien:
        print(f"    {file}")
    routing = Counter(
        {file: count for file, count in files(found.frontend).items() if "/router/" in file}
    )
    line("  router: files / calls", f"{len(routing)} / {routing.total()}", "7 / 60")


def step(*, listed: bool) -> None:
    """Calls and host time of a decode step."""
    model = _house_step.loaded()
    for name, drafts, bound in (
        ("without drafts", False, "230 + 40"),
        ("n-gram drafts", True, "250 + 45 (aim)"),
    ):
        one, further = _house_step.calls(model, drafts=drafts)
        line(f"decode step, {name}: calls of one + each", f"{one:.0f} + {further:.0f}", bound)
    for sequences, aim in ((1, "15%"), (8, "17%"), (32, "20%")):
        milliseconds, host = _house_step.times(model, sequences)
        value = f"{host:.0%} of {milliseconds:.2f} ms"
        line(f"  host share of CPU time, {sequences} sequences", value, f"{aim} (aim)")


def waits(*, listed: bool) -> None:
    """Time of a plan beside waiting sequences."""
    first, rest = waiting.measure(63, 32768, 50, 63)
    value = f"{sorted(rest)[len(rest) // 2]:.2f} ms, first {first:.0f}"
    line("schedule(), 63 waiting of 63 clients, 32k cached", value, "2 ms")


def weight(*, listed: bool) -> None:
    """Lines, names, imports, words."""
    everything = _house_weight.modules(ROOT / "src")
    packages: dict[str, list[_house_weight.Module]] = {}
    for module in everything:
        packages.setdefault(module.name.partition(".")[0], []).append(module)
    for name, found in packages.items():
        all_, said, blank = _house_weight.summed(found)
        line(f"lines of {name}: all / docstrings, comments / blank", f"{all_} / {said} / {blank}")
    if listed:
        rooms: dict[str, list[_house_weight.Module]] = {}
        for module in packages["inlay"]:
            rooms.setdefault(".".join(module.name.split(".")[:2]), []).append(module)
        for name, found in sorted(rooms.items()):
            print(f"    {_house_weight.summed(found).all:6} {name}")
    core = packages["inlay"]
    foreign = {
        module.name: sorted(named)
        for module in core
        if (named := _house_weight.imports(module, {m.name for m in everything}))
        and (named := {name for name in named if name.startswith(EXTENSIONS)})
    }
    line("modules of the core that import an extension", str(len(foreign)), "0")
    circles = _house_weight.circles(everything)
    line("circles of imports", str(len(circles)), "0")
    for each in [*map(", ".join, circles), *foreign] if listed else ():
        print(f"    {each}")
    for name, count in _house_weight.shapes(everything).items():
        line(name, str(count))
    pages = [ROOT / "README.md", ROOT / "docs", ROOT / "deploy"]
    line("words of docs", str(_house_weight.words([path for path in pages if path.exists()])))


PARTS: dict[str, Callable[..., None]] = {
    "trace": trace,
    "step": step,
    "waiting": waits,
    "weight": weight,
}


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    line("measure", "here", "must")
    for name in given.parts or PARTS:
        PARTS[name](listed=given.list)


if __name__ == "__main__":
    ensure(f"benchmarks.{Path(__file__).stem}")
    main()
