"""Requests, and parts of cards, as bytes: other releases read them, so they stay as they are."""

from hashlib import blake2b

import pytest
from msgspec import Struct

from inlay.base.address import Address
from inlay.messages.card import AudioCard, ImageCard
from inlay.messages.edges import Feed, Fetch, PayloadLease, Window
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Input, Payload, Pooling, Request, Sampling, Task
from inlay.stages.graph import Graph, Stage, StageCard
from inlay.transport.frames import Decoder, encode
from inlay_stages.params import Diffusion, Speech

_PROMPT = Prompt((Tokens((1, 887)), Rows(Buffer(bytes(8)), "bfloat16", (1, 4))))
_ADDRESS = Address("a", 1, b"f" * 32)
_PAYLOAD = Payload("embeds", "float32", (1, 2), Buffer(bytes(8)))
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
    "stage": (StageCard(_GRAPH, "decoder"), "b99dbd155203044770410c7b4244e52e"),
    "image of a card": (
        ImageCard(width=64, height=64, multiple=8, max_pixels=4096, steps=4, max_steps=9),
        "a1bbbecb81256467cb29f90588d8c2a5",
    ),
    "sound of a card": (
        AudioCard(voices=("Chelsie",), sample_rate=24000, samples_per_code=480),
        "bee96ea576c2edff70acdb19cc26dc71",
    ),
}
"""A message or a part of one, and the digest of its bytes."""


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_bytes_it_has_always_had(name: str) -> None:
    message, digest = MESSAGES[name]
    header, buffers = encode(message)
    assert blake2b(header, digest_size=16).hexdigest() == digest
    assert Decoder[Struct](type(message)).decode(header, buffers) == message
