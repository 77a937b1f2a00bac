"""Hypothesis strategies for the shared types."""

from hypothesis import strategies as st

from inlay.messages.prompt import (
    DTYPE_SIZES,
    Buffer,
    Media,
    Prompt,
    RowField,
    Rows,
    Segment,
    Tokens,
)

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(Tokens)


@st.composite
def rows(draw: st.DrawFn, *, hidden: int | None = None, plain: bool = False) -> Rows:
    dtype = draw(st.sampled_from(sorted(DTYPE_SIZES)))
    num, width = draw(st.integers(1, 20)), hidden or draw(st.integers(1, 8))
    size = num * width * DTYPE_SIZES[dtype]
    data = Buffer(draw(st.binary(min_size=size, max_size=size)))
    bundle: tuple[RowField, ...] = ()
    if not plain and draw(st.booleans()):
        bundle = (
            RowField(
                "positions",
                Buffer(draw(st.binary(min_size=12 * num, max_size=12 * num))),
                "int32",
                (num, 3),
            ),
        )
    return Rows(data, dtype, (num, width), bundle, not plain and draw(st.booleans()))


@st.composite
def _media(draw: st.DrawFn) -> Media:
    """A run of an item's rows; the first one alone has the bytes."""
    positions, start = draw(st.integers(1, 12)), draw(st.sampled_from([0, 0, 3]))
    digest = draw(st.binary(min_size=16, max_size=16))
    return Media(
        draw(st.sampled_from(["image", "audio", "video"])),
        digest,
        positions,
        None if start else Buffer(digest),
        grid=draw(st.sampled_from([None, (1, 4, 6)])),
        atomic=draw(st.booleans()),
        start=start,
        total=start + positions + draw(st.integers(0, 3)),
        detail=draw(st.sampled_from([None, "low"])),
        interval=draw(st.sampled_from([1.0, 0.5])),
    )


media = _media()

segments: st.SearchStrategy[Segment] = st.one_of(tokens, rows(), media)

prompts = st.lists(segments, max_size=6).map(lambda parts: Prompt.of(*parts))
