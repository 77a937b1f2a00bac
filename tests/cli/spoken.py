"""Chats of a model that speaks: as a client sends them, and what the whole model says.

Words between items may be rows of the embedding table, and items rows of transformers' encoders.
"""

import asyncio
import base64
import io
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.media.positions import media_runs
from inlay.messages.digest import Secret
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Input, Output, Request, Sampling
from inlay.render import Renderer
from inlay_stages.engines.speech.loading import SYSTEM
from inlay_stages.params import Speech
from tests.engine.speech.test_speech import answer_to, codes_of, sounds, states, talker
from tests.engine.torch.vision_reference import (
    Clip,
    Item,
    Parts,
    Picture,
    Sound,
    ids_of,
    omni_inputs,
    prompt_of,
)
from tests.omni_models import MEDIA, omni, whole

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "what is the capital of the island?"}]
VOICE, SEED = "Ethan", 5
SPOKEN_CHAT: dict[str, Any] = {
    "model": "omni",
    "messages": CHAT,
    "modalities": ["text", "audio"],
    "audio": {"voice": VOICE, "format": "pcm16"},
    "temperature": 0,
    "max_tokens": 14,
    "seed": SEED,
}
"""A chat whose sound is `expected`."""
SPOKEN: dict[str, Any] = {"model": "omni", "voice": VOICE, "response_format": "wav"}
"""A text read aloud, but for its `input`."""
CASE = "qwen2_5_omni"
PICTURE, SOUND, CLIP = Picture(1, 40, 56), Sound(1, 18_003), Clip(2, 4, 70, 33, fps=1.5)
MIXTURES: dict[str, list[str | Item]] = {
    "image": ["what is ", PICTURE, "?"],
    "sound": [SOUND, "who says that?"],
    "video": ["look: ", CLIP],
    "all": ["a ", PICTURE, "the harbour", SOUND, CLIP, "b"],
}


def parts_of(content: str | Sequence[str | Item], system: str = "") -> Parts:
    """Ids and items of a chat with one message of texts and items, as transformers has them."""
    kinds = {Picture: "image", Sound: "audio", Clip: "video"}
    parts: Any = content
    if not isinstance(content, str):
        parts = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": kinds[type(each)]}
            for each in content
        ]
    messages = [{"role": "system", "content": system}] if system else []
    ids = AutoTokenizer.from_pretrained(omni()).apply_chat_template(
        [*messages, {"role": "user", "content": parts}],
        add_generation_prompt=True,
        return_dict=False,
    )
    items = iter([each for each in content if not isinstance(each, str)])
    found: list[list[int] | Item] = [[]]
    for id_ in ids:
        if id_ in MEDIA.values():
            found += [next(items), []]
        else:
            found[-1].append(id_)  # type: ignore[union-attr]
    return found


def sent(content: Sequence[str | Item], *, rows: bool = False) -> list[dict[str, Any]]:
    """The message's parts, with rows of the words between items, and of the items, if asked for."""
    return [
        sent_item(each, rows=rows)
        if not isinstance(each, str)
        else embedded(each)
        if each == "the harbour"
        else {"type": "text", "text": each}
        for each in content
    ]


def sent_item(item: Item, *, rows: bool) -> dict[str, Any]:
    if isinstance(item, Clip):
        frames = ",".join(base64.b64encode(each.data).decode() for each in item.pictures)
        url = f"data:video/jpeg;fps={item.fps};base64,{frames}"
        return {"type": "video_url", "video_url": {"url": url}}
    if rows:
        return encoded_item(item)
    data = base64.b64encode(item.data).decode()
    if isinstance(item, Sound):
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def encoded_item(item: Picture | Sound) -> dict[str, Any]:
    """Rows of an item, by transformers' encoders."""
    inputs = omni_inputs(CASE, [item])
    thinker = whole().thinker
    with torch.no_grad():
        if isinstance(item, Sound):
            found = thinker.get_audio_features(**inputs, return_dict=True).pooler_output
            return {"type": "audio_embeds", "audio_embeds": saved(found)}
        (found,) = thinker.get_image_features(**inputs, return_dict=True).pooler_output
    fields = {"image_embeds": saved(found), "image_grid_thw": inputs["image_grid_thw"][0].tolist()}
    return {"type": "image_embeds", "image_embeds": fields}


def saved(rows: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(rows.detach().clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def embedded(text: str) -> dict[str, str]:
    ids = Renderer.load(omni()).encode(text, add_special_tokens=False)
    rows = whole().thinker.get_input_embeddings()(torch.tensor(ids))
    return {"type": "prompt_embeds", "data": saved(rows)}


def expected(before: torch.Tensor | None = None) -> tuple[str, np.ndarray]:
    """Text and sound of transformers' thinker, and of the talker and the vocoder alone.

    With rows before the prompt, those of the same prompt behind them.
    """
    renderer = Renderer.load(omni())
    ids = list(renderer.chat(CHAT).token_ids())
    model = whole().thinker
    rows = model.get_input_embeddings()(torch.tensor([ids])).detach()
    if before is not None:
        rows = torch.cat([before[None], rows], dim=1)
    with torch.no_grad():
        found = model.generate(
            inputs_embeds=rows,
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=2,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    talk = talker().begin(
        Speech(voice=VOICE, prompt_tokens=rows.shape[1], temperature=0, max_tokens=40)
    )
    pieces = [
        talk.advance([states(0, each[0][0]), states(3, each[-1][0])], ended=False)
        for each in found.hidden_states
    ]
    while not pieces[-1].done:
        pieces.append(talk.advance([], ended=True))
    sound = torch.cat(list(sounds(codes_of(pieces), 4, SEED)))
    said = found.sequences[0].tolist()
    text = renderer.decode(said, skip_special_tokens=True)
    return text, np.round(32767 * sound.double().numpy()).astype(np.int16)


def samples_of(data: bytes) -> np.ndarray:
    return np.array(array("h", data), np.int16)


@cache
def answered(name: str) -> tuple[str, np.ndarray]:
    """Text and sound of transformers' whole model for a mixture."""
    parts = parts_of(MIXTURES[name])
    inputs = omni_inputs(CASE, [part for part in parts if not isinstance(part, list)])
    ids = ids_of(prompt_of(CASE, parts), rows=MEDIA)
    said, _, codes = answer_to(ids, VOICE, inputs, 40)
    text = Renderer.load(omni()).decode(said, skip_special_tokens=True)
    sound = torch.cat(list(sounds(codes.tolist(), 4, SEED)))
    return text, np.round(32767 * sound.double().numpy()).astype(np.int16)


LONG = Sound(1, 40_000).data
BAD_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "cut image": (
        {
            "type": "image_url",
            "image_url": "data:;base64," + base64.b64encode(PICTURE.data[:-90]).decode(),
        },
        "truncated",
    ),
    "long sound": (
        {"type": "audio_url", "audio_url": "data:;base64," + base64.b64encode(LONG).decode()},
        "this model hears at most 2 s of an item",
    ),
    "mp4": (
        {
            "type": "video_url",
            "video_url": "data:;base64,"
            + base64.b64encode(b"\0\0\0\x18ftypisom" + bytes(40)).decode(),
        },
        "a video is a malformed MP4: it has 0 moov boxes",
    ),
    "no grid": (
        {"type": "image_embeds", "image_embeds": saved(torch.zeros(4, 64))},
        "need image_grid_thw",
    ),
    "many rows": (
        {"type": "audio_embeds", "audio_embeds": saved(torch.zeros(90, 64))},
        "at most 50",
    ),
    "narrow": (
        {"type": "audio_embeds", "audio_embeds": saved(torch.zeros(4, 32))},
        "must be 64 wide",
    ),
}


def directly(instructions: str | Sequence[str | Item], text: str) -> np.ndarray:
    """The sound of a text, of the same parts in this process, one after another."""
    before = prompt_of(CASE, parts_of(instructions, SYSTEM))
    ids = Renderer.load(omni()).encode(text, add_special_tokens=False)
    heard = asyncio.run(thought(before + Prompt.of(Tokens(ids))))
    params = Speech(
        voice=VOICE,
        prompt_tokens=len(before),
        media=media_runs(before),
        temperature=0,
        max_tokens=40,
    )
    talk = talker().begin(params)
    pieces = [talk.advance(heard, ended=True)]
    while not pieces[-1].done:
        pieces.append(talk.advance([], ended=True))
    sound = torch.cat(list(sounds(codes_of(pieces), 4, SEED)))
    return np.round(32767 * sound.double().numpy()).astype(np.int16)


async def thought(prompt: Prompt) -> list[Input]:
    """What the thinker's first layer reads and its last gives at each position of a prompt."""
    settings = EngineSettings.of(model=str(omni()), dtype="float32")
    engine = TorchEngine(settings, Secret(bytes(32)))
    await engine.start()
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    states_ = HiddenStates(layers=(0, 3), prompt=-1)
    params = Sampling(max_tokens=0, hidden_states=states_)
    engine.submit(Request(id="r", prompts=(prompt,), params=params), outputs.put_nowait)
    found: list[Input] = []
    ended = False
    while not ended:
        output = await outputs.get()
        found += [Input(payload.port, payload) for payload in output.payloads]
        ended = output.finish_reason is not None
    await engine.close()
    return found
