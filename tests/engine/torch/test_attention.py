"""Attention over scattered pages equals attention over each sequence alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.torch.attention import gathered as gathered_attention
from inlay.engine.torch.attention.choice import attention
from inlay.engine.torch.attention.cuda import CudaAttention
from inlay.engine.torch.attention.gathered import GatheredAttention
from inlay.engine.torch.attention.layers import observe
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import IMPLEMENTATION, PagedAttention, Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.batch import Batch, BatchItem, Workspace
from inlay.engine.torch.cache.kv_layout import PageGroup, first_page
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.native import kernels
from inlay.engine.torch.windows import Chunk, Window, first_seen
from inlay.messages.prompt import Tokens
from tests.engine.torch import cuda_kernel
from tests.models import tiny

CPU = torch.device("cpu")
SIZE = 8
PAGE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Scene:
    """Some sequences with computed positions, in pages full of NaN elsewhere, and their next step.

    Of two layers in groups of their own, the second is the one that is asked; with a `window`, it
    has no earlier pages. Steps of up to `decoding` positions decode.
    """

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        heads: int = 2,
        group: int = 2,
        dtype: torch.dtype = torch.float32,
        window: Window = None,
        size: int = SIZE,
        value_size: int = SIZE,
        seed: int = 0,
        decoding: int = 1,
        page: int = PAGE,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-(start + count) // page) for start, count in spans]
        self.pages = Pages(
            [LayerShape(None, heads, size, value_size)] * 2,
            [PageGroup(None, (0,)), PageGroup(window, (1,))],
            num_pages=2 * sum(needed) + 3,
            page_size=page,
            dtype=dtype,
            device=CPU,
        )
        for tensor in (*self.pages.keys, *self.pages.values):
            tensor.fill_(float("nan"))
        free = iter((1 + torch.randperm(2 * sum(needed) + 3, generator=generator)).tolist())
        stretches = []
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.runs: list[list[PageRun]] = []
        self.spans = spans
        for (start, count), pages in zip(spans, needed, strict=True):
            runs = [PageRun(next(free) for _ in range(pages)) for _ in range(2)]
            own, first = runs[1].pages, first_page(window, start, page)
            runs[1].pages, runs[1].first = own[first:], first
            self.runs.append(runs)
            stretches.append(
                BatchItem(
                    [(start, Tokens([1] * count))],
                    start,
                    count,
                    runs,
                    True,
                    decoding=count <= decoding,
                )
            )
            self.queries.append(
                torch.randn(heads * group, count, size, generator=generator).to(dtype)
            )
            self.keys.append(torch.randn(heads, start + count, size, generator=generator).to(dtype))
            self.values.append(
                torch.randn(heads, start + count, value_size, generator=generator).to(dtype)
            )
            slots = torch.tensor(
                [own[at // page] * page + at % page for at in range(first * page, start)],
                dtype=torch.int64,
            )
            held = slice(first * page, start)
            self.pages.write(1, slots, self.keys[-1][:, held], self.values[-1][:, held])
        self.batch = Batch.pack(stretches, page)

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the positions that are due, packed."""
        due = [slice(start, start + count) for start, count in self.spans]
        return (
            torch.cat(self.queries, 1),
            torch.cat([keys[:, part] for keys, part in zip(self.keys, due, strict=True)], 1),
            torch.cat([values[:, part] for values, part in zip(self.values, due, strict=True)], 1),
        )

    def expected(self, scaling: float, window: Window, **options: Any) -> Tensor:
        """Each query alone, in float64."""
        scoring = Scoring(scaling, window, **options)
        out = []
        for (start, count), queries, keys, values in zip(
            self.spans, self.queries, self.keys, self.values, strict=True
        ):
            group = queries.shape[0] // keys.shape[0]
            wide = (
                keys.double().repeat_interleave(group, 0),
                values.double().repeat_interleave(group, 0),
            )
            for index in range(count):
                stop = start + index + 1
                low = first_seen(window, stop - 1)
                scores = (
                    torch.einsum("hd,htd->ht", queries[:, index].double(), wide[0][:, low:stop])
                    * scaling
                )
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
                weights = scores.softmax(-1)[:, : stop - low]
                out.append(torch.einsum("ht,htd->hd", weights, wide[1][:, low:stop]))
        return torch.stack(out)


def on_cpu(scene: Scene, *, native: bool = True, float32_scores: bool = False) -> PagedAttention:
    """The attention of a scene by the native kernels, or by products over gathered pages."""
    if not native:
        return GatheredAttention(
            scene.batch, scene.pages, Workspace(), float32_scores=float32_scores
        )
    compiled = kernels()
    assert compiled is not None, "these tests need a C++ compiler"
    return NativeAttention(scene.batch, scene.pages, Workspace(), compiled)


spans = st.lists(
    st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 60))), min_size=1, max_size=7
)


@given(
    spans=spans,
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 7, 16, 40, Chunk(16), Chunk(23)]),
    native=st.booleans(),
    decoding=st.sampled_from([1, 6]),
    page=st.sampled_from([16, 48, 256]),
)
def test_paged_attention_equals_dense_attention_of_each_sequence(
    spans: list[tuple[int, int]],
    group: int,
    window: Window,
    native: bool,
    decoding: int,
    page: int,
) -> None:
    scene = Scene(spans, group=group, window=window, decoding=decoding, page=page)
    found = on_cpu(scene, native=native).attend(1, *scene.step(), Scoring(0.3, window))
    torch.testing.assert_close(found.double(), scene.expected(0.3, window), atol=1e-5, rtol=1e-5)


@given(
    spans=spans,
    float32_scores=st.booleans(),
    native=st.booleans(),
    decoding=st.sampled_from([1, 6]),
)
def test_bfloat16_attention_is_near_the_exact_one(
    spans: list[tuple[int, int]], float32_scores: bool, native: bool, decoding: int
) -> None:
    scene = Scene(spans, dtype=torch.bfloat16, decoding=decoding)
    paged = on_cpu(scene, native=native, float32_scores=float32_scores)
    found = paged.attend(1, *scene.step(), Scoring(0.3))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), scene.expected(0.3, None), atol=3e-2, rtol=3e-2)


@given(
    spans=spans,
    group=st.sampled_from([1, 2]),
    window=st.sampled_from([None, 7, 40, Chunk(16)]),
    softcap=st.sampled_from([None, 1.5]),
    sunk=st.booleans(),
    value_size=st.sampled_from([SIZE, 4, 12]),
    dtype=st.sampled_from(list(TOLERANCE)),
    decoding=st.sampled_from([1, 6]),
    float32_scores=st.booleans(),
    native=st.booleans(),
    head_by_head=st.booleans(),
)
def test_soft_caps_sinks_and_value_sizes_count_in_every_combination(
    spans: list[tuple[int, int]],
    group: int,
    window: Window,
    softcap: float | None,
    sunk: bool,
    value_size: int,
    dtype: torch.dtype,
    decoding: int,
    float32_scores: bool,
    native: bool,
    head_by_head: bool,
) -> None:
    scene = Scene(spans, group=group, dtype=dtype, value_size=value_size, decoding=decoding)
    sinks = torch.tensor([2.0, -1.0, 0.5, 4.0][: 2 * group], dtype=dtype) if sunk else None
    paged = on_cpu(scene, native=native, float32_scores=float32_scores)
    # As long prompts are attended to, of which this would take too many.
    with pytest.MonkeyPatch.context() as patch:
        if head_by_head:
            patch.setattr(gathered_attention, "_SCORE_BYTES", 1)
            patch.setattr(gathered_attention, "_BLOCK_BYTES", 1)
        found = paged.attend(1, *scene.step(), Scoring(0.3, window, softcap, sinks))
    assert found.dtype == dtype
    expected = scene.expected(0.3, window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(
        found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("native", [True, False])
def test_padding_after_the_batch_is_neither_stored_nor_seen(native: bool) -> None:
    scene = Scene([(20, 1), (3, 2)])
    pages = (1 + scene.pages.num_pages) * PAGE
    query, key, value = (
        torch.nn.functional.pad(tensor, (0, 0, 0, 2), value=9.0) for tensor in scene.step()
    )
    paged = on_cpu(scene, native=native)
    found = paged.attend(1, query, key, value, Scoring(0.3))
    torch.testing.assert_close(found[:3].double(), scene.expected(0.3, None), atol=1e-5, rtol=1e-5)
    assert not found[3:].any()
    assert int(scene.pages.keys[1].isfinite().all(-1).sum()) == 2 * (21 + 5)
    assert int(scene.pages.keys[1].isnan().all(-1).sum()) == 2 * (pages - 21 - 5)


def test_a_long_prompt_is_cut_into_blocks_and_equals_the_dense_one() -> None:
    scene = Scene([(700, 600), (3, 500)])
    for window in (None, 300):
        found = attention(scene.batch, scene.pages, Workspace()).attend(
            1, *scene.step(), Scoring(0.3, window)
        )
        torch.testing.assert_close(
            found.double(), scene.expected(0.3, window), atol=1e-5, rtol=1e-5
        )


def test_scores_in_the_hundreds_keep_their_differences_in_float32_scores() -> None:
    scene = Scene([(40, 1)], heads=1, group=1, dtype=torch.bfloat16)
    scene.keys[0][:] = 1
    scene.keys[0][..., 0] = torch.arange(41) / 8
    scene.queries[0][:] = 64
    slots = (
        scene.batch.block_table[1, 0].long()[torch.arange(40) // PAGE] * PAGE
        + torch.arange(40) % PAGE
    )
    scene.pages.write(1, slots, scene.keys[0][:, :40], scene.values[0][:, :40])
    expected = scene.expected(1.0, None)
    found = GatheredAttention(scene.batch, scene.pages, Workspace(), float32_scores=True).attend(
        1, *scene.step(), Scoring(1.0)
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)


def test_a_workspace_serves_batches_of_any_size_one_after_another() -> None:
    workspace = Workspace()
    for spans in ([(0, 5)], [(300, 1), (2, 1)], [(0, 1)], [(10, 90)]):
        for dtype in (torch.float32, torch.bfloat16):
            scene = Scene(spans, dtype=dtype)
            found = attention(scene.batch, scene.pages, workspace).attend(
                1, *scene.step(), Scoring(0.3)
            )
            torch.testing.assert_close(
                found.double(), scene.expected(0.3, None), atol=3e-2, rtol=3e-2
            )


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group", [1, 2])
def test_what_the_kernel_on_cuda_is_called_with_means_the_same_attention(
    window: Window, group: int
) -> None:
    scene = Scene([(40, 1), (0, 30), (17, 20)], group=group, value_size=12)
    sinks = torch.tensor([2.0, -1.0, 0.5, 4.0][: 2 * group])
    for options in ({}, {"sinks": sinks}, {"softcap": 2.0}):
        found = CudaAttention(scene.batch, scene.pages, cuda_kernel.KERNELS).attend(
            1, *scene.step(), Scoring(0.3, window, **options)
        )
        expected = scene.expected(0.3, window, **options)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_runs_that_see_themselves_and_padding_reach_the_kernel_on_cuda() -> None:
    scene = Scene([(40, 1), (16, 30), (17, 20)])
    batch = scene.batch._replace(atomic_spans=((1, 20, 33), (2, 17, 19)))
    steps = [torch.cat((tensor, tensor[:, :2]), 1) for tensor in scene.step()]
    for window in (None, 9):
        found, expected = (
            paged.attend(1, steps[0], steps[1], steps[2], Scoring(0.3, window))
            for paged in (
                CudaAttention(batch, scene.pages, cuda_kernel.KERNELS),
                GatheredAttention(batch, scene.pages, Workspace()),
            )
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class Layer(nn.Module):
    layer_idx = 1


def call(**options: Any) -> Tensor:
    scene = Scene([(0, 3)])
    query, key, value = (tensor[None] for tensor in scene.step())
    paged = attention(scene.batch, scene.pages, Workspace())
    found: Tensor = AttentionInterface()[IMPLEMENTATION](
        Layer(), query, key, value, options.pop("mask", None), scaling=0.3, paged=paged, **options
    )[0]
    return found


def test_transformers_finds_the_attention_by_name() -> None:
    assert call(position_ids=torch.arange(3), dropout=0.0).shape == (1, 3, 4, SIZE)


@pytest.mark.parametrize("option", ["position_bias", "chunk_size", "something_new"])
def test_an_option_it_does_not_know_is_an_error_and_not_dropped(option: str) -> None:
    with pytest.raises(EngineError, match=option):
        call(**{option: 30.0})


def test_a_mask_is_an_error() -> None:
    with pytest.raises(EngineError, match="attention_mask"):
        call(mask=torch.zeros(1))


def test_outside_the_engine_it_is_an_error() -> None:
    with pytest.raises(EngineError, match="inside the torch engine"):
        AttentionInterface()[IMPLEMENTATION](
            nn.Module(), torch.zeros(1), torch.zeros(1), torch.zeros(1), None, scaling=1.0
        )


@pytest.mark.parametrize("scaling", [0.0, -0.3])
def test_a_model_whose_scores_are_not_scaled_by_more_than_0_is_refused(scaling: float) -> None:
    model = AutoModel.from_pretrained(tiny("llama"), attn_implementation=IMPLEMENTATION)
    assert len(observe(model)) == len(model.layers)
    model.layers[1].self_attn.scaling = scaling
    with pytest.raises(InvalidRequestError, match=f"layer 1 scales scores by {scaling}"):
        observe(model)
