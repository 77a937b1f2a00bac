"""Deltas put together, and tokens that are shown though special ones are skipped."""

from inlay.render import ContentDelta, ParsedOutput, ReasoningPiece, Renderer, ToolCallDelta
from tests.models import TURN, TURN_END, tiny


def test_outputs_are_put_together_by_what_they_are() -> None:
    output = ParsedOutput.of(
        [
            ReasoningPiece("h"),
            ContentDelta("a"),
            ReasoningPiece("m"),
            ToolCallDelta(0, "id0", "f", ""),
            ToolCallDelta(0, None, None, '{"a"'),
            ToolCallDelta(1, "id1", "g", "{}"),
            ToolCallDelta(0, None, None, ": 1}"),
            ContentDelta("b"),
        ]
    )
    assert output == ParsedOutput(
        "ab", "hm", [ToolCallDelta(0, "id0", "f", '{"a": 1}'), ToolCallDelta(1, "id1", "g", "{}")]
    )


def test_special_tokens_that_are_kept_are_shown_though_others_are_skipped() -> None:
    renderer = Renderer.load(tiny("llama"))
    ids = renderer.encode(f"{TURN}a{TURN_END}b", add_special_tokens=False)
    for skip, keep, expected in (
        (True, (), "ab"),
        (True, (TURN, "no token"), f"{TURN}ab"),
        (False, (TURN,), f"{TURN}a{TURN_END}b"),
    ):
        shown = renderer.detokenizer(skip_special_tokens=skip, keep=keep)
        assert shown.push(ids) + shown.flush() == expected
