"""Questions about one or two pictures, their answers, and the tokenizer that reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scripts.vision_demo.pictures import COLOURS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
IMAGE = "<image>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, IMAGE)
MAX_POSITIONS = 512
VOCABULARY_SIZE = 448

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- elif message['content'] is not none %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<image>\\n' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class Seen(NamedTuple):
    """A picture's contents."""

    digit: int
    colour: str


class Question(NamedTuple):
    """A question about `pictures` pictures.

    Attributes:
        text: the question's words.
        pictures: number of pictures it is about.
        answer: the right answer, from what they show.
    """

    text: str
    pictures: int
    answer: Callable[[list[Seen]], str]


def _larger(seen: list[Seen]) -> str:
    first, second = (each.digit for each in seen)
    return "neither" if first == second else "first" if first > second else "second"


QUESTIONS = {
    "digit": Question("What digit is it?", 1, lambda seen: str(seen[0].digit)),
    "colour": Question("What colour is it?", 1, lambda seen: seen[0].colour),
    "even": Question("Is it even?", 1, lambda seen: "no" if seen[0].digit % 2 else "yes"),
    "one more": Question("What is one more?", 1, lambda seen: str(seen[0].digit + 1)),
    "digits": Question("What digits are they?", 2, lambda s: f"{s[0].digit} {s[1].digit}"),
    "larger": Question("Which is larger?", 2, _larger),
    "sum": Question("What is the sum?", 2, lambda seen: str(seen[0].digit + seen[1].digit)),
}


def chat(question: Question, *, pictures_first: bool = True) -> str:
    """The prompt of a question, as the chat template renders it."""
    pictures = f"{IMAGE}\n" * question.pictures
    message = pictures + question.text if pictures_first else question.text + pictures
    return f"{TURN_START}user\n{message}{TURN_END}\n{TURN_START}assistant\n"


def train_tokenizer() -> Tokenizer:
    """A byte-level tokenizer in which every word of the questions and answers is one token."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+| ?\p{N}{1,2}|[\r\n]| ?[^\s\p{L}\p{N}]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [question.text for question in QUESTIONS.values()]
    texts += ["user", "assistant", "system", "yes", "no", "first", "second", "neither", *COLOURS]
    texts += [str(number) for number in range(19)] + [f"0 {digit}" for digit in range(10)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def id_of(tokenizer: Tokenizer, special: str) -> int:
    """The id of one of `SPECIAL_TOKENS`."""
    (found,) = tokenizer.encode(special).ids
    return int(found)


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template.

    The template has a file of its own, where transformers' processors look for it.
    """
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "image_token": IMAGE,
        "model_max_length": MAX_POSITIONS,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
