"""Fuzz the readers of embeddings: bytes are refused with an `EmbeddingsError`, or are a tensor within its limits.

    python -m tests.fuzz.fuzz_tensors --executions 1000000 [--seed 1] [--corpus tests/fuzz/corpus/tensors]
    python -m tests.fuzz.fuzz_tensors --atheris tests/fuzz/corpus/tensors -runs=10000000

The first needs nothing: it mutates the corpus at random, keeping what reached lines not seen before (from Python 3.12 on, where
watching lines is cheap). The second is guided by coverage, needs `atheris`, and takes libFuzzer's options.
`--make-corpus` writes the corpus again.
"""

import argparse
import importlib
import random
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from inlay.errors import EmbeddingsError
from inlay.prompt import DTYPE_SIZES
from inlay.tensors import ReadLimits, Tensor, prompts_of, read, to_rows

CORPUS = Path(__file__).parent / "corpus" / "tensors"
LIMITS = ReadLimits(max_bytes=1 << 20)
_TARGETS = ("bfloat16", "float16", "float32")
_INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 63,
    (1 << 64) - 1,
)
_WORDS = (
    b"PK\1\2",
    b"PK\3\4",
    b"PK\5\6",
    b"PK\6\6",
    b"PK\6\7",
    b"PK\7\x08",
    b"archive/data.pkl",
    b"archive/data/0",
    b"ctorch\nFloatStorage\n",
    b"ctorch\nDoubleStorage\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ccollections\nOrderedDict\n",
    b"cos\nsystem\n",
    b"\x8a\x08",
    b"tQ",
    b"tR",
    b'"data_offsets":[0,64]',
    b'"shape":[4,4]',
    b'"__metadata__":{}',
    b"'fortran_order': True",
    b"'descr': '<f8'",
    b"'shape': (4, 4)",
)


def check(data: bytes) -> Tensor | None:
    """Read `data` as a server would.

    Returns:
        The tensor, if there is one.

    Raises:
        AssertionError: it was accepted and should not have been.
        Exception: anything but an `EmbeddingsError` came out of the reader.
    """
    try:
        tensor = read(data, limits=LIMITS)
    except EmbeddingsError as refusal:
        _check_message(refusal)
        return None
    assert 100 <= len(data) <= LIMITS.max_bytes
    assert prod(tensor.shape) * DTYPE_SIZES[tensor.dtype] == len(tensor.data) <= len(data)
    for dtype in _TARGETS:
        try:
            for prompt in prompts_of(tensor):
                rows = to_rows(
                    prompt, hidden_size=prompt.shape[1], dtype=dtype, max_abs=1e4, table_id="a-table"
                )
                assert rows.shape == prompt.shape
        except EmbeddingsError as refusal:
            _check_message(refusal)
    return tensor


def _check_message(refusal: EmbeddingsError) -> None:
    if len(refusal.message) >= 1000 or not refusal.message.isprintable():
        raise AssertionError(f"a message of {len(refusal.message)} characters: {refusal.message[:1000]!r}")


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """`data` with a few random changes: bits, numbers, words, pieces cut, doubled or taken from `others`."""
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 2:
                size = rng.choice((1, 2, 4, 8))
                value = rng.choice(_INTERESTING) + rng.randrange(-2, 3)
                changed[at : at + size] = (value % (1 << 8 * size)).to_bytes(
                    size, rng.choice(("little", "big"))
                )
            case 3:
                word = rng.choice(_WORDS)
                changed[at : at + len(word) * rng.randrange(2)] = word
            case 4:
                del changed[at : at + rng.randrange(1, 33)]
            case 5:
                piece = changed[at : at + rng.randrange(1, 65)]
                to = rng.randrange(len(changed) + 1)
                changed[to:to] = piece
            case 6:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                size = rng.randrange(1, 129)
                changed[at : at + size * rng.randrange(2)] = other[start : start + size]
            case _ if at < len(changed):
                step = rng.choice((-1, 1, 2, -2, 16, -16))
                changed[at] = (changed[at] + step) % 256
    return bytes(changed)


class _Lines:
    """Notes lines of `inlay.tensors` that run for the first time; each costs once only. Needs Python 3.12."""

    def __init__(self) -> None:
        self.found = 0
        monitoring = getattr(sys, "monitoring", None)
        self.available = monitoring is not None
        if monitoring is None:
            return

        def on_line(code: object, _line: int) -> object:
            if "inlay/tensors" in getattr(code, "co_filename", ""):
                self.found += 1
            return monitoring.DISABLE

        monitoring.use_tool_id(monitoring.COVERAGE_ID, "fuzz")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, on_line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def fuzz(executions: int, seed: int, corpus: Path) -> tuple[int, int]:
    """Check `executions` mutations of the files in `corpus`.

    Returns:
        How many were accepted, and how many were kept because they reached something new.
    """
    rng = random.Random(seed)
    inputs = [path.read_bytes() for path in sorted(corpus.iterdir())]
    for data in inputs:
        check(data)
    lines = _Lines()
    accepted, kept = 0, 0
    for _ in range(executions):
        data = mutated(rng.choice(inputs), inputs, rng)
        before = lines.found
        try:
            accepted += check(data) is not None
        except BaseException:
            Path("crash.bin").write_bytes(data)
            raise
        if lines.found > before:
            inputs.append(data)
            kept += 1
    return accepted, kept


def _guided(arguments: list[str]) -> None:
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["inlay.tensors"], enable_loader_override=False):
        for module in [name for name in sys.modules if name.startswith("inlay.tensors")]:
            del sys.modules[module]
        import inlay.tensors as instrumented

    globals().update(read=instrumented.read, prompts_of=instrumented.prompts_of, to_rows=instrumented.to_rows)

    def one(data: bytes) -> None:
        check(data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def corpus_files() -> Iterator[tuple[str, bytes]]:
    """Small valid files of every kind, and the hostile ones under 4 KB: where mutation starts."""
    import torch

    from inlay.tensors import write
    from tests.tensors.hostile import hostile_files, saved

    rows = torch.arange(32.0).reshape(4, 8) / 8
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        name = str(dtype).removeprefix("torch.")
        yield f"torch-{name}", saved(rows.to(dtype))
        tensor = read(saved(rows.to(dtype)))
        yield f"written-{name}", write(tensor.array, "torch", table_id="a-table")
        yield f"safetensors-{name}", write(tensor.array, "safetensors", table_id="a-table")
        if dtype in (torch.float64, torch.float32, torch.float16):
            yield f"npy-{name}", write(tensor.array, "npy")
    yield "torch-protocol-5", saved(rows, pickle_protocol=5)
    yield "torch-view", saved(rows.t()[1:, ::2])
    yield "torch-parameter", saved(torch.nn.Parameter(rows))
    yield "torch-buffer", saved(torch.nn.Buffer(rows))
    yield "torch-batch", saved(rows.reshape(2, 2, 8))
    for title, (make, _) in hostile_files().items():
        data = make()
        if 100 <= len(data) < 4096:
            yield "hostile-" + "".join(c if c.isalnum() else "-" for c in title), data


def _make_corpus(folder: Path) -> None:
    import warnings

    warnings.simplefilter("ignore", UserWarning)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in corpus_files():
        (folder / name).write_bytes(data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description="Fuzz the readers of embeddings.")
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--make-corpus", action="store_true")
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="libFuzzer's arguments")
    options = parser.parse_args(arguments)
    if options.make_corpus:
        _make_corpus(options.corpus)
    elif options.atheris is not None:
        _guided(options.atheris)
    else:
        accepted, kept = fuzz(options.executions, options.seed, options.corpus)
        print(f"{options.executions} executions, {accepted} accepted, {kept} kept for new lines")


if __name__ == "__main__":
    main()
