"""A soft prompt that PEFT has trained, served for a base model, and checked against PEFT.

    inlay serve MODEL --served-model-name base --enable-prompt-embeds --dtype float32
    python examples/peft_prompt.py MODEL ADAPTER "dungeon crawl game"

ADAPTER is the directory that `save_pretrained` of PEFT wrote for prompt tuning; one with a pickle
becomes safetensors by `inlay convert ADAPTER`. PEFT puts the rows before all tokens, also the begin
token, and so does this request: the rows, then the token ids of the text. For each text it prints
the first token of PEFT's model and of the server; PEFT's own `generate` may differ from the second
token on.
"""

import argparse
from pathlib import Path

import torch
from openai import OpenAI
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from inlay.client import SoftPrompt, Uploader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of the base model")
    parser.add_argument("adapter", type=Path, help="directory that PEFT wrote")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--name", default="base", help="served name of the model")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    trained = PeftModel.from_pretrained(base, given.adapter).eval()
    client = OpenAI(base_url=given.base_url, api_key="unused")
    # Stored once; each request then names the rows by a reference.
    uploader = Uploader(given.base_url, upload_from=0)
    part = SoftPrompt.from_peft(given.adapter).chat_part(uploader=uploader)
    print(f"rows: {part['ref']}")
    same = 0
    for text in given.texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            theirs = tokenizer.decode(int(trained(input_ids=ids).logits[0, -1].argmax()))
        tokens = {"type": "token_ids", "token_ids": ids[0].tolist()}
        answer = client.completions.create(
            model=given.name,
            prompt=None,
            extra_body={"prompt": [part, tokens]},
            max_tokens=1,
            temperature=0,
        )
        ours = answer.choices[0].text
        same += ours == theirs
        print(f"{text!r}: PEFT {theirs!r}, server {ours!r}")
    print(f"{same} of {len(given.texts)} the same")


if __name__ == "__main__":
    main()
