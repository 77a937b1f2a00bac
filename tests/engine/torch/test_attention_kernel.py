"""The native attention kernel: the same bits in any chunk, NaN that stays, and every CPU's code."""

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inlay.engine.torch.attention.gathered import GatheredAttention
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.batch import Batch, BatchItem, Workspace
from inlay.engine.torch.native import Kernels, build, kernels, prebuilt, sources
from inlay.engine.torch.windows import Chunk
from inlay.messages.prompt import Tokens
from tests.engine.torch.test_attention import PAGE, SIZE, TOLERANCE, Scene, on_cpu

DTYPES = list(TOLERANCE)
SINKS = torch.tensor([2.0, -1.0, 0.5, 4.0])
SCORINGS = [
    Scoring(0.3),
    Scoring(0.3, 40),
    Scoring(0.3, softcap=1.5, sinks=SINKS),
    Scoring(0.3, 200, sinks=SINKS),
    Scoring(0.3, Chunk(60)),
]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def prompt(length: int, dtype: torch.dtype = torch.float32, **options: int) -> Scene:
    """One prompt, in which no step decodes."""
    return Scene([(0, length)], dtype=dtype, decoding=0, **options)


def in_chunks(
    scene: Scene,
    cuts: Sequence[int],
    scoring: Scoring,
    wholes: Sequence[tuple[int, int]] = (),
    decodes: Callable[[int], bool] = lambda count: False,
) -> Tensor:
    """Attention of a scene's prompt, one batch for each chunk between `cuts`."""
    query, key, value = scene.step()
    bounds = [0, *cuts, query.shape[1]]
    found = []
    for start, stop in pairwise(bounds):
        item = BatchItem(
            [(start, Tokens([1] * (stop - start)))], start, stop - start, scene.runs[0], 1,
            atomic_spans=[whole for whole in wholes if start <= whole[0] < stop],
            decoding=decodes(stop - start),
        )  # fmt: skip
        scene.batch = Batch.pack([item], scene.pages.page_size)
        part = slice(start, stop)
        found.append(on_cpu(scene).attend(1, query[:, part], key[:, part], value[:, part], scoring))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_prompt_has_the_same_bits_whole_and_in_any_chunks(
    dtype: torch.dtype, scoring: Scoring
) -> None:
    scene = prompt(300, dtype, group=2)
    whole = in_chunks(scene, [], scoring)
    for cuts in ([1], [299], [128, 256], [7, 8, 9, 130, 250], list(range(16, 300, 16))):
        assert torch.equal(in_chunks(scene, cuts, scoring), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    scene = Scene([(0, 200), (70, 90), (150, 1), (3, 17)], dtype=dtype)
    among = on_cpu(scene).attend(1, *scene.step(), Scoring(0.3))
    query, key, value = scene.step()
    at = 0
    for (start, count), runs in zip(scene.spans, scene.runs, strict=True):
        item = BatchItem([(start, Tokens([1] * count))], start, count, runs, 1, decoding=count == 1)
        scene.batch = Batch.pack([item], PAGE)
        part = slice(at, at + count)
        alone = on_cpu(scene).attend(1, query[:, part], key[:, part], value[:, part], Scoring(0.3))
        assert torch.equal(alone, among[part])
        at += count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "size", "value_size"), [(1, 8, 8), (2, 8, 8), (7, 8, 8), (2, 64, 32), (5, 32, 96)]
)
@pytest.mark.parametrize("scoring", [*SCORINGS[:2], Scoring(0.3, 1030, softcap=1.5)])
def test_a_position_that_decodes_has_the_bits_that_it_would_have_in_a_prompt(
    dtype: torch.dtype, group: int, size: int, value_size: int, scoring: Scoring
) -> None:
    native = kernels()
    if native is None or not native.attends(dtype):
        pytest.skip("no kernel of this dtype here")
    if dtype is torch.bfloat16 and not native.products.pairs:
        pytest.skip("no products of pairs of bfloat16 here")
    scene = prompt(2100, dtype, group=group, size=size, value_size=value_size)
    whole = in_chunks(scene, [], scoring)
    query, key, value = scene.step()
    for start, count in ((0, 1), (31, 1), (127, 2), (1022, 3), (1024, 1), (1700, 2), (2099, 1)):
        item = BatchItem(
            [(start, Tokens([1] * count))], start, count, scene.runs[0], 1, decoding=True
        )
        batch = Batch.pack([item], scene.pages.page_size)
        attention = NativeAttention(batch, scene.pages, Workspace(), native, invariant=True)
        part = slice(start, start + count)
        found = attention.attend(1, query[:, part], key[:, part], value[:, part], scoring)
        assert torch.equal(found, whole[part])


@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_threads_give_the_same_bits(dtype: torch.dtype, threads: int) -> None:
    scene = Scene([(0, 200), (1300, 1), (400, 1)], dtype=dtype)
    scoring = Scoring(0.3, softcap=20.0, sinks=SINKS)
    found = on_cpu(scene).attend(1, *scene.step(), scoring)
    torch.set_num_threads(1)
    alone = on_cpu(scene).attend(1, *scene.step(), scoring)
    assert torch.equal(found, alone)
    torch.testing.assert_close(
        found.double(),
        scene.expected(0.3, None, softcap=20.0, sinks=SINKS),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cuts", [[], [60], [140]])
def test_runs_that_see_themselves_whole_do_so_in_every_tile(
    window: int | None, cuts: list[int]
) -> None:
    wholes = [(2, 5), (60, 140), (150, 151)]
    scene = prompt(180)
    found = in_chunks(scene, cuts, Scoring(0.3, window), wholes)
    item = BatchItem([(0, Tokens([1] * 180))], 0, 180, scene.runs[0], 1, atomic_spans=wholes)
    reference = GatheredAttention(Batch.pack([item], PAGE), scene.pages, Workspace())
    expected = reference.attend(1, *scene.step(), Scoring(0.3, window))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, in_chunks(scene, cuts, Scoring(0.3, window)), atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("decoding", [0, 20])
def test_a_key_that_is_not_finite_is_seen_by_those_after_it_alone(
    dtype: torch.dtype, bad: float, decoding: int
) -> None:
    scene = Scene([(140, 20), (20, 30)], dtype=dtype, decoding=decoding)
    query, key, value = scene.step()
    query = query.abs() + 0.1
    clean = on_cpu(scene).attend(1, query, key, value, Scoring(0.3))
    key[:, 7] = bad
    found = on_cpu(scene).attend(1, query, key, value, Scoring(0.3))
    assert torch.equal(found[:7], clean[:7])
    assert found[7:20].isnan().all()
    assert torch.equal(found[20:], clean[20:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoding", [0, 1])
def test_a_value_and_a_query_that_are_not_numbers_stay_so_in_their_sequence(
    dtype: torch.dtype, decoding: int
) -> None:
    scene = Scene([(140, 1), (20, 1), (33, 1)], dtype=dtype, decoding=decoding)
    query, key, value = scene.step()
    query[:, 0] = float("nan")
    value[:, 1] = float("nan")
    found = on_cpu(scene).attend(1, query, key, value, Scoring(0.3))
    assert found[:2].isnan().all()
    assert found[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoding", [0, 1])
def test_scores_in_the_thousands_neither_overflow_nor_vanish(
    dtype: torch.dtype, decoding: int
) -> None:
    scene = Scene([(260, 1)], dtype=dtype, decoding=decoding)
    found = on_cpu(scene).attend(1, *scene.step(), Scoring(500.0))
    assert found.isfinite().all()
    torch.testing.assert_close(
        found.double(), scene.expected(500.0, None), atol=0.1, rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rise", [4.0, 20.0, 100.0])
def test_scores_that_rise_from_block_to_block_weigh_what_they_should(
    dtype: torch.dtype, rise: float
) -> None:
    scene = prompt(600, dtype)
    scene.queries[0].abs_().add_(0.5)
    scene.keys[0] += torch.linspace(0, rise / SIZE, 600).to(dtype)[:, None]
    found = in_chunks(scene, [599], Scoring(0.3), decodes=lambda count: count == 1)
    torch.testing.assert_close(
        found.double(), scene.expected(0.3, None), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def compiled_with(machine: tuple[str, ...], directory: Path) -> Kernels:
    """All kernels of this CPU, but attention as it is compiled with the flags `machine`."""
    path = directory / "attention.so"
    sources.compile_for("g++", sources.SOURCES / "attention.cpp", path, machine)
    others, products, adapters, quantised = (
        build.load(name) for name in ("kernels", "products", "adapters", "quantised")
    )
    assert others
    assert products
    assert adapters
    assert quantised
    return Kernels(others, products, adapters, quantised, ctypes.CDLL(str(path)))


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
NO_TILES = ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")


@X86
@pytest.mark.parametrize(
    ("machine", "optimised"),
    [
        pytest.param((*NO_TILES, "-mno-avx512bf16"), False, marks=pytest.mark.slow),
        pytest.param((*NO_TILES, "-DEMULATED_TILES"), False, marks=pytest.mark.slow),
        pytest.param(("-march=x86-64-v3",), True, marks=pytest.mark.slow),
        (("-march=x86-64",), False),
    ],
    ids=["no bfloat16", "loops in place of tiles", "AVX2", "SSE2"],
)
def test_what_other_cpus_run_is_the_same_attention(
    machine: tuple[str, ...], optimised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not optimised:
        # It compiles in a quarter of the time; one of the four is compiled as users' is.
        monkeypatch.setattr(sources, "FLAGS", ("-O1", *sources.FLAGS[1:]))
    native = compiled_with(machine, tmp_path)
    for dtype in DTYPES:
        if not native.attends(dtype):
            continue
        for scoring, size in product(SCORINGS, (8, 64)):
            # Tiles multiply four rows of 64.
            sizes = {"size": size, "value_size": size, "heads": 1, "group": 4}
            spans = [(0, 150), (200, 1), (130, 3), (5, 40)]
            scene = Scene(spans, dtype=dtype, decoding=3, **sizes)
            attention = NativeAttention(scene.batch, scene.pages, Workspace(), native)
            found = attention.attend(1, *scene.step(), scoring)
            expected = scene.expected(*scoring[:2], softcap=scoring.softcap, sinks=scoring.sinks)
            torch.testing.assert_close(
                found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )


@pytest.mark.thorough
@X86
def test_it_compiles_for_cpus_with_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags, _ = prebuilt.LEVELS["v4-amx"]
    # It is not run.
    monkeypatch.setattr(sources, "FLAGS", ("-O0", *sources.FLAGS[1:]))
    sources.compile_for("g++", sources.SOURCES / "attention.cpp", tmp_path / "tiles.so", flags)
    assert b"inlay_paged_attention_bfloat16" in (tmp_path / "tiles.so").read_bytes()
