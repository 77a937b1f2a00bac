"""Requests and cards as bytes: other releases read them, so they stay as they are."""

import os
import subprocess
import sys
from hashlib import blake2b

import msgspec
import pytest
from msgspec import Struct

from inlay.base.address import Address
from inlay.extension import VARIABLE
from inlay.messages.card import Limits, ModelCard
from inlay.messages.edges import Fetch, PayloadLease, Window
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Input, Payload, Pooling, Request, Sampling, Task
from inlay.transport.frames import Decoder, encode
from inlay.transport.messages import Boot, Ready
from inlay_stages.cards import AudioCard, ImageCard, StageCard
from inlay_stages.feeds import Feed
from inlay_stages.graph import Graph, Stage
from inlay_stages.params import Diffusion, Speech

_PROMPT = Prompt((Tokens((1, 887)), Rows(Buffer(bytes(8)), "bfloat16", (1, 4))))
_ADDRESS = Address("a", 1, b"f" * 32)
_PAYLOAD = Payload("embeds", "float32", (1, 2), Buffer(bytes(8)))
_LIMITS = Limits(max_model_len=1, max_num_seqs=1)
_GRAPH = Graph(
    name="painter",
    stages={
        "denoiser": Stage(kind="denoise", model="m"),
        "decoder": Stage(kind="decode", model="m"),
    },
    edges=["denoiser.latents -> decoder.latents"],
    inputs={"prompt": "denoiser.prompt"},
    outputs={"image": "decoder.image"},
)


_CARD = ModelCard(
    name="painter",
    path="p",
    weights_id="w",
    dtype="float32",
    vocab_size=0,
    hidden_size=0,
    limits=_LIMITS,
    engine="e",
    engine_version="1",
    stage=StageCard(_GRAPH, "decoder"),
    image=ImageCard(width=64, height=64, multiple=8, max_pixels=4096, steps=4, max_steps=9),
    audio=AudioCard(voices=("Chelsie",), sample_rate=24000, samples_per_code=480),
)

MESSAGES: dict[str, tuple[Struct, str]] = {
    "text": (
        Request(id="r", prompts=(_PROMPT,), params=Sampling(max_tokens=3, seed=7), client="c"),
        "82214854e32316826e980dd3abf40ea0",
    ),
    "vectors": (
        Request(id="r", prompts=(_PROMPT,), params=Pooling(), task=Task.EMBED),
        "85cb39180a80c3ef0ee1adf978afb465",
    ),
    "image": (
        Request(
            id="r",
            prompts=(),
            params=Diffusion(width=64, height=64, steps=4, guidance=2.5),
            task=Task.STAGE,
            inputs=(Input("embeds", _PAYLOAD),),
            feeds=(Feed(PayloadLease(_ADDRESS, b"k"), (("latents", "latents"),), Window()),),
            hold=Window(),
        ),
        "fb6d63e3dbc82c19793f1f26ed852f43",
    ),
    "speech": (
        Request(id="r", prompts=(), params=Speech(voice="Chelsie", seed=3), task=Task.STAGE),
        "369e31c790e02dac96995583139513a8",
    ),
    "fetch": (
        Request(id="r", prompts=(), params=Fetch(key=b"k"), task=Task.FETCH),
        "22d839ec2ce6fc6db547cc172d320624",
    ),
    "a card of a stage": (Ready(_CARD), "5429fd6163d4a24cc04376157572ca65"),
    "the start of a stage": (
        Boot("{}", b"s", stage=_CARD.stage),
        "78cae991f11898f7fbd6865aa1d50c4a",
    ),
}
"""A message, and the digest of its bytes."""


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_bytes_it_has_always_had(name: str) -> None:
    message, digest = MESSAGES[name]
    header, buffers = encode(message)
    assert blake2b(header, digest_size=16).hexdigest() == digest
    assert Decoder[Struct](type(message)).decode(header, buffers) == message


def test_a_card_of_an_extension_that_is_not_loaded_is_not_understood() -> None:
    decode = "import sys; from inlay.messages.card import ModelCard; import msgspec; "
    decode += "msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ModelCard)"
    without = subprocess.run(
        [sys.executable, "-c", decode],
        input=msgspec.msgpack.encode(_CARD),
        env={**os.environ, VARIABLE: ""},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert b"an extension that is not loaded here (--extensions) - at `$.stage`" in without.stderr
