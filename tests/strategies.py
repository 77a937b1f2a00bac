"""Hypothesis strategies for the shared types."""

from hypothesis import strategies as st

from inlay.prompt import DTYPE_SIZES, Buffer, Field, Media, Prompt, Rows, Segment, Tokens

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(Tokens)


@st.composite
def rows(draw: st.DrawFn, *, hidden: int | None = None, plain: bool = False) -> Rows:
    dtype = draw(st.sampled_from(sorted(DTYPE_SIZES)))
    num, width = draw(st.integers(1, 20)), hidden or draw(st.integers(1, 8))
    size = num * width * DTYPE_SIZES[dtype]
    data = Buffer(draw(st.binary(min_size=size, max_size=size)))
    bundle: tuple[Field, ...] = ()
    if not plain and draw(st.booleans()):
        bundle = (
            Field(
                "positions",
                Buffer(draw(st.binary(min_size=12 * num, max_size=12 * num))),
                "int32",
                (num, 3),
            ),
        )
    return Rows(data, dtype, (num, width), bundle, not plain and draw(st.booleans()))


media = st.builds(
    lambda digest, positions: Media("image", digest, positions, Buffer(digest)),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 12),
)

segments: st.SearchStrategy[Segment] = st.one_of(tokens, rows(), media)

prompts = st.lists(segments, max_size=6).map(lambda parts: Prompt.of(*parts))
