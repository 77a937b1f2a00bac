"""Fuzz the readers of embeddings.

Bytes are refused with an `EmbeddingsError`, or are a tensor within its limits.

    python -m tests.fuzz.fuzz_tensors --executions 1000000 [--seed 1] [--corpus
    tests/fuzz/corpus/tensors]

It mutates the corpus at random, keeping what reached lines not seen before (from Python 3.12 on,
where watching lines is cheap); `fuzz_readers` is guided by coverage and needs `atheris` for that.
`--make-corpus` writes the corpus again.
"""

import argparse
import io
import random
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors

from inlay.base.errors import EmbeddingsError
from inlay.messages.prompt import DTYPE_SIZES
from inlay.tensors import ReadLimits, Tensor, prompts_of, read, to_rows
from inlay.tensors.converting import write_tensors
from inlay.tensors.safetensors_file import NAMES
from inlay.tensors.state_dict import StateTensor, state_tensors
from inlay.tensors.tensor import ELEMENT_SIZES
from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).parent / "corpus" / "tensors"
LIMITS = ReadLimits(max_bytes=1 << 20)
_TARGETS = ("bfloat16", "float16", "float32")
WORDS = (
    b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08", b"archive/data.pkl", b"archive/data/0", b"constants.pkl", b"byteorder",
    b"big", b".npy", b"ctorch\nFloatStorage\n", b"ctorch\nDoubleStorage\n", b"ctorch\nHalfStorage\n", b"ctorch\nBFloat16Storage\n",
    b"ctorch\nLongStorage\n", b"ctorch.storage\nUntypedStorage\n", b"ctorch\nfloat8_e4m3fn\n", b"ctorch\nint64\n", b"ctorch\nTensor\n", b"ctorch\nBoolStorage\n", b"X\5\0\0\0model", b"b", b"X\x0c\0\0\0__metadata__", b"\x8a\x08\0\0\0\0\0\0\0\x40",
    b"ctorch.nn.parameter\nParameter\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_tensor_v3\n",
    b"ctorch._utils\n_rebuild_parameter\n", b"ctorch._utils\n_rebuild_parameter_with_state\n", b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ctorch._utils\n_rebuild_sparse_tensor\n", b"ctorch.nested._internal\nf\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n",
    b"\x8a\x08", b"\x8a\x01\x08", b"tQ", b"tR", b"(", b")", b"]", b"}", b"N", b"K\1", b"M\1\1", b"J\1\1\1\1", b"G\x3f\xf0\0\0\0\0\0\0", b"\x8c\1a",
    b"X\1\0\0\0a", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"q\0", b"r\0\0\0\0", b"\x94", b"h\0", b"j\0\0\0\0", b"\x93", b"\x95", b"\x88",
    b'"data_offsets":[0,64]', b'"shape":[4,4]', b'"dtype":"F64"', b'"BF16"', b'"__metadata__":{}', b'"embedding_table_id":"a-table"', b"1.5", b"NaN",
    b"'fortran_order': True", b"'descr': '<f8'", b"'shape': (4, 4)", b"'>f4'", b"'<f2'",
)  # fmt: skip


def check(data: bytes) -> Tensor | None:
    """Read `data` as a server would.

    Returns:
        The tensor, if there is one.

    Raises:
        AssertionError: it was accepted and should not have been.
        Exception: anything but an `EmbeddingsError` came out of the reader.
    """
    if data.startswith(b"PK"):
        check_state_dict(data)
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
                    prompt,
                    hidden_size=prompt.shape[1],
                    dtype=dtype,
                    max_abs=1e4,
                    table_id="a-table",
                )
                assert rows.shape == prompt.shape
        except EmbeddingsError as refusal:
            _check_message(refusal)
    return tensor


def check_state_dict(data: bytes) -> bool:
    """Convert `data` as `inlay convert` would, which takes tensors of any kind.

    Returns:
        True if it is a state dict.

    Raises:
        AssertionError: it was accepted and should not have been, or safetensors reads something
            else of what was written.
        Exception: anything but an `EmbeddingsError` came out of reader or writer.
    """
    try:
        tensors = state_tensors(memoryview(data))
    except EmbeddingsError as refusal:
        _check_message(refusal)
        return False
    assert tensors
    assert sum(tensor.nbytes for tensor in tensors) <= 8 * len(data)
    written = io.BytesIO()
    write_tensors(written, tensors)
    deserialize: Any = safetensors.deserialize
    found = dict(deserialize(written.getvalue()))
    assert len(found) == len(tensors)
    for tensor in tensors:
        own = found[tensor.name]
        assert (own["dtype"], tuple(own["shape"])) == (NAMES[tensor.dtype], tensor.shape)
        assert len(own["data"]) == tensor.nbytes == prod(tensor.shape) * _size(tensor)
        assert own["data"] == tensor.read().view
    return True


def _size(tensor: StateTensor) -> int:
    return ELEMENT_SIZES[tensor.dtype]


def _check_message(refusal: EmbeddingsError) -> None:
    if len(refusal.message) >= 1000 or not refusal.message.isprintable():
        raise AssertionError(
            f"a message of {len(refusal.message)} characters: {refusal.message[:1000]!r}"
        )


class _Lines:
    """Notes lines of `inlay.tensors` that run for the first time; each costs once only.

    Needs Python 3.12.
    """

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
        data = mutated(rng.choice(inputs), inputs, WORDS, rng)
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


def corpus_files() -> Iterator[tuple[str, bytes]]:
    """Small valid files of every kind, and hostile ones under 4 KB that get further than those before: where mutation starts."""
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
    layer = torch.nn.BatchNorm1d(8)
    yield "hostile-state-dict", saved(layer.state_dict())
    yield "hostile-state-dict-wrapped", saved({"model": {"a": rows, "b": rows.t()}, "epoch": 1})
    yield "hostile-state-dict-integers", saved({"a": rows.bool(), "b": rows.short()[1:]})
    reached: set[object] = set()
    for title, (make, _) in hostile_files().items():
        data = make()
        steps = _steps(data) if 100 <= len(data) < 4096 else set()
        if not steps <= reached:
            reached |= steps
            yield "hostile-" + "".join(c if c.isalnum() else "-" for c in title), data


def _steps(data: bytes) -> set[object]:
    """The pairs of lines of `inlay.tensors` that run one after the other when `data` is checked."""
    steps: set[object] = set()
    last: dict[object, int] = {}

    def trace(frame: FrameType, _event: str, _argument: object) -> Any:
        if "inlay/tensors" not in frame.f_code.co_filename:
            return None
        steps.add((frame.f_code, last.get(frame), frame.f_lineno))
        last[frame] = frame.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check(data)
    finally:
        sys.settrace(before)
    return steps


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
    options = parser.parse_args(arguments)
    if options.make_corpus:
        _make_corpus(options.corpus)
    else:
        accepted, kept = fuzz(options.executions, options.seed, options.corpus)
        print(f"{options.executions} executions, {accepted} accepted, {kept} kept for new lines")


if __name__ == "__main__":
    main()
