"""What is sent is what arrives, and rows are not copied on the way."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import EmbeddingsError, EngineError, ErrorFrame, InlayError
from inlay.messages.digest import Secret, with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows
from inlay.messages.request import EngineUsage, Grammar, Output, Request, Sampling, TokenLogprobs
from inlay.transport import frames
from tests.strategies import prompts, rows

work_decoder = frames.Decoder[Request](Request)


@given(prompts, st.lists(st.integers(0, 1000)), st.floats(0, 2), st.none() | st.text(max_size=5))
def test_a_request_arrives_as_it_was_sent(
    prompt: Prompt, prior: list[int], temperature: float, salt: str | None
) -> None:
    request = Request(
        id="w",
        prompts=(with_digests(prompt, Secret(bytes(32))),),
        prior_output=tuple(prior),
        params=Sampling(
            max_tokens=5,
            temperature=temperature,
            logit_bias={3: -100.0},
            grammar=Grammar("regex", "a+", (7,)),
        ),
        salt=salt,
    )
    header, buffers = frames.encode(request)
    assert work_decoder.decode(header, buffers) == request


@given(rows())
def test_rows_travel_beside_the_header_without_a_copy(segment: Rows) -> None:
    header, buffers = frames.encode(Prompt.of(segment, segment))
    assert buffers[0] is segment.data
    assert len(buffers) == 1 + len(segment.bundle), "the same buffer twice is carried once"
    arrived = frames.Decoder[Prompt](Prompt).decode(header, buffers)
    first = arrived.segments[0]
    assert isinstance(first, Rows)
    assert first.data is segment.data


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_but_a_decode_error(data: bytes) -> None:
    try:
        work_decoder.decode(data, [])
    except msgspec.DecodeError:
        return


def test_a_buffer_that_is_not_there_is_a_decode_error() -> None:
    header, _ = frames.encode(Prompt.of(Rows(Buffer(bytes(4)), "float32", (1, 1))))
    with pytest.raises(msgspec.DecodeError, match="buffer 0 of 0"):
        frames.Decoder[Prompt](Prompt).decode(header, [])


def test_a_field_this_version_does_not_know_is_ignored() -> None:
    request = {
        "id": "w",
        "prompts": [[[["tokens", [1]]]]],
        "params": {"type": "sampling", "max_tokens": 1, "new": 1},
        "from_the_future": {},
    }
    assert work_decoder.decode(msgspec.msgpack.encode(request)).id == "w"
    output = [*msgspec.to_builtins(Output("w", 0, 0, (1,))), "from the future"]
    assert frames.Decoder[Output](Output).decode(msgspec.msgpack.encode(output)).token_ids == (1,)


def test_a_output_keeps_logprobs_and_usage() -> None:
    output = Output(
        "w",
        1,
        4,
        (7,),
        (TokenLogprobs(-0.5, ((7, -0.5), (8, -1.0))),),
        "stop",
        7,
        EngineUsage(3, 5, 2),
    )
    header, buffers = frames.encode(output)
    assert frames.Decoder[Output](Output).decode(header, buffers) == output


@pytest.mark.parametrize(
    "error", [EmbeddingsError("bad rows"), EngineError("broken", code="x", retry_after=2)]
)
def test_an_error_crosses_as_itself(error: InlayError) -> None:
    header, _ = frames.encode(ErrorFrame.of(error))
    arrived = frames.Decoder[ErrorFrame](ErrorFrame).decode(header).to_error()
    assert type(arrived) is type(error)
    assert (arrived.body(), arrived.status, arrived.retry_after) == (
        error.body(),
        error.status,
        error.retry_after,
    )


def test_an_error_of_an_unknown_kind_is_the_engines() -> None:
    assert isinstance(ErrorFrame("FutureError", "from a newer worker").to_error(), EngineError)
