from typing import Any

import pytest

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.engine.admission import Admission
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.messages.prompt import Buffer, Media, Prompt, RowField, Rows, Segment, Tokens
from inlay.messages.request import Request, Sampling


def admission(refuses_rows: str | None = None) -> Admission:
    return Admission(
        bounds=EngineLimits(
            max_model_len=100, max_num_seqs=4, max_num_batched_tokens=32, page_size=16, num_pages=16
        ),
        vocab_size=50,
        hidden_size=2,
        dtype="bfloat16",
        max_logprobs=5,
        refuses_rows=refuses_rows,
        grammars=(),
    )


def make_request(*segments: Segment, prior: tuple[int, ...] = (), **sampling: Any) -> Request:
    values: dict[str, Any] = {"max_tokens": 8, **sampling}
    return Request(
        id="x", prompts=(Prompt.of(*segments),), prior_output=prior, params=Sampling(**values)
    )


ROWS = Rows(Buffer(bytes(12)), "bfloat16", (3, 2))


def test_tokens_and_rows_are_admitted() -> None:
    admission().check(make_request(Tokens([0, 49]), ROWS, prior=(1,), logprobs=5))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Rows(Buffer(bytes(12)), "float16", (3, 2)), "dtype bfloat16 here, got float16"),
        (Rows(Buffer(bytes(12)), "bfloat16", (2, 3)), "size of tensor must match .* of 2, got 3"),
        (
            Rows(
                Buffer(bytes(12)),
                "bfloat16",
                (3, 2),
                (RowField("deep", Buffer(bytes(6)), "float16", (3, 1)),),
            ),
            "no further tensors with the rows, got deep",
        ),
    ],
)
def test_rows_the_model_does_not_take_are_refused(segment: Segment, message: str) -> None:
    with pytest.raises(EmbeddingsError, match=message):
        admission().check(make_request(Tokens([1]), segment))


def test_rows_are_refused_with_the_models_reason() -> None:
    with pytest.raises(EmbeddingsError, match="it reads ids at every layer"):
        admission("it reads ids at every layer").check(make_request(ROWS))
    admission("it reads ids at every layer").check(make_request(Tokens([1])))


def test_media_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot read image"):
        admission().check(make_request(Media("image", bytes(16), 4)))


@pytest.mark.parametrize("wrong", [-1, 50])
def test_ids_outside_the_vocabulary_are_refused_in_prompt_and_earlier_output(wrong: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"token id {wrong} is not in the vocabulary: ids are 0 to 49"
    ):
        admission().check(make_request(Tokens([3, wrong])))
    with pytest.raises(InvalidRequestError, match=f"token id {wrong}"):
        admission().check(make_request(Tokens([3]), prior=(wrong,)))


def test_more_earlier_output_than_may_be_made_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match="earlier output has 9 tokens, and max_tokens is 8"
    ):
        admission().check(make_request(Tokens([3]), prior=tuple(range(9))))


def test_settings_with_ids_the_vocabulary_lacks_are_refused() -> None:
    admission().check(make_request(Tokens([3]), logit_bias={49: 1.0}, stop_token_ids=(0,)))
    with pytest.raises(InvalidRequestError, match=r"logit_bias names token id 50; .* 0 to 49"):
        admission().check(make_request(Tokens([3]), logit_bias={50: 1.0}))
    with pytest.raises(InvalidRequestError, match="stop_token_ids names token id -1"):
        admission().check(make_request(Tokens([3]), stop_token_ids=(-1,)))
