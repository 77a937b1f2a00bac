"""The bundled soft prompt as an adapter.

A model of its own, whose rows stand before every prompt.
"""

import pytest

from inlay import demo
from inlay.client import SoftPrompt
from tests.live import fleet
from tests.payloads import post


@pytest.mark.slow
def test_it_loads_as_a_model_and_says_what_its_rows_before_the_text_do() -> None:
    soft = SoftPrompt.from_peft(demo.soft_prompt_peft_dir())
    modules = [f"trained={demo.soft_prompt_peft_dir()}"]
    options = {
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    with fleet(demo.model_dir(), dtype="float32", lora_modules=modules) as running:
        url = running.serve(enable_prompt_embeds=True)
        for example in demo.examples().soft_prompt.held_out[:3]:
            text = {"type": "text", "text": example.input}
            ours = post(
                url, "/v1/completions", {"model": "trained", "prompt": [text], **options}
            ).json()
            sent = [{"type": "prompt_embeds", "data": soft.to_base64()}, text]
            theirs = post(
                url, "/v1/completions", {"model": "tiny", "prompt": sent, **options}
            ).json()
            assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
            assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
