"""The bundled demo: a small model, a soft prompt for it, and questions with known answers.

Everything here is made by `scripts/train_demo.py`; `README.md` beside this file is the model card.
A second model answers questions about pictures; `scripts/train_vision_demo.py` makes it, and its
card is `vision/README.md`. Nothing here needs torch.
"""

from functools import cache
from pathlib import Path

import msgspec

_HERE = Path(__file__).parent


class DemoMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chat message, as OpenAI writes it."""

    role: str
    content: str


class ChatExample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation and the answer greedy decoding gives to it."""

    messages: tuple[DemoMessage, ...]
    answer: str


class CompletionExample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plain prompt and its greedy continuation, up to the end of text."""

    prompt: str
    answer: str


class MixedExample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user message in three parts, the middle one meant to be sent as embeddings.

    Attributes:
        before: text part.
        document: the text whose embeddings stand in the middle; every answer is in it and nowhere
            else.
        after: text part with the question.
        answer: what greedy decoding gives.
    """

    before: str
    document: str
    after: str
    answer: str


class Labelled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input of the soft prompt's task and its right answer."""

    input: str
    answer: str


class MeasuredTextPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text prompt for the soft prompt's task.

    Attributes:
        template: the user's message, `{s}` where the input stands.
        accuracy: share of held-out inputs answered right.
    """

    template: str
    accuracy: float

    def fill(self, name: str) -> str:
        """The user's message for the input `name`."""
        return self.template.replace("{s}", name)


class SoftPromptTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Task of the soft prompt, and its accuracy beside text prompts.

    The user's message is the soft prompt's rows followed by the input.

    Attributes:
        description: the task in words.
        answers: all possible answers.
        tuning: inputs the rows were trained on.
        choosing: inputs the best rows were chosen by.
        held_out: inputs used only to measure.
        accuracy: share of `held_out` answered right behind the rows.
        text_prompts: the text prompts it is measured against, best first.
    """

    description: str
    answers: tuple[str, ...]
    tuning: tuple[Labelled, ...]
    choosing: tuple[Labelled, ...]
    held_out: tuple[Labelled, ...]
    accuracy: float
    text_prompts: tuple[MeasuredTextPrompt, ...]


class Examples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the demo can show, with the answers to check it by.

    Attributes:
        chats: questions about remembered facts, small tasks and passages.
        completions: plain prompts.
        mixed: messages meant to mix text and embeddings.
        soft_prompt: the soft prompt's task.
        report: accuracy by kind of question, over all facts and over freshly drawn passages and
            tasks.
    """

    chats: tuple[ChatExample, ...]
    completions: tuple[CompletionExample, ...]
    mixed: tuple[MixedExample, ...]
    soft_prompt: SoftPromptTask
    report: dict[str, float]


class DigitPicture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A picture of a handwritten digit that the model was not trained by.

    Attributes:
        name: of its files.
        digit: 0 to 9.
        colour: in a word.
    """

    name: str
    digit: int
    colour: str

    @property
    def path(self) -> Path:
        """The PNG file."""
        return _HERE / "pictures" / f"{self.name}.png"

    @property
    def rows_path(self) -> Path:
        """A safetensors file with one tensor `embeddings`: its rows, (rows, hidden) float32."""
        return self.path.with_suffix(".safetensors")


class VisionExample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question about one or two pictures and the answer greedy decoding gives to it."""

    pictures: tuple[str, ...]
    question: str
    answer: str


class VisionExamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the demo with images can show.

    Attributes:
        pictures: one of each colour.
        examples: every question about each picture, and about a pair both ways round.
        report: accuracy by question, over digits that were held out.
    """

    pictures: tuple[DigitPicture, ...]
    examples: tuple[VisionExample, ...]
    report: dict[str, float]

    def picture(self, name: str) -> DigitPicture:
        return next(picture for picture in self.pictures if picture.name == name)


class DemoImage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question to the pipeline that draws.

    Attributes:
        question: text.
        answer: the caption that greedy decoding gives.
        digit: 0 to 9.
        colour: in a word.
    """

    question: str
    answer: str
    digit: int
    colour: str


class DrawnExamples(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the pipeline that draws can show.

    Attributes:
        examples: one of each colour.
        steps: of the denoiser, with which it was measured.
        guidance: scale of guidance, likewise.
        report: shares of right captions and pictures.
    """

    examples: tuple[DemoImage, ...]
    steps: int
    guidance: float
    report: dict[str, float]


def model_dir() -> Path:
    """The model directory: config, bfloat16 safetensors, tokenizer with chat template."""
    return _HERE / "model"


def vision_dir() -> Path:
    """Directory of the model with images, as `model_dir`, with its image processor."""
    return _HERE / "vision"


def pipeline_dir() -> Path:
    """Directory of the pipeline that draws: `graph.yaml`, and a folder for each model."""
    return _HERE / "pipeline"


def soft_prompt_path() -> Path:
    """A safetensors file with one tensor `embeddings`: (rows, hidden) float32, after the scale."""
    return _HERE / "soft_prompt.safetensors"


def soft_prompt_peft_dir() -> Path:
    """The same rows as a PEFT prompt-tuning checkpoint."""
    return _HERE / "soft_prompt_peft"


@cache
def examples() -> Examples:
    """The examples in `tasks.json`.

    Raises:
        msgspec.ValidationError: the file is not what `Examples` says.
    """
    return msgspec.json.decode((_HERE / "tasks.json").read_bytes(), type=Examples)


@cache
def vision_examples() -> VisionExamples:
    """The examples in `vision.json`.

    Raises:
        msgspec.ValidationError: the file is not what `VisionExamples` says.
    """
    return msgspec.json.decode((_HERE / "vision.json").read_bytes(), type=VisionExamples)


@cache
def drawn_examples() -> DrawnExamples:
    """The examples of the pipeline that draws.

    Raises:
        msgspec.ValidationError: the file is not what `DrawnExamples` says.
    """
    path = pipeline_dir() / "examples.json"
    return msgspec.json.decode(path.read_bytes(), type=DrawnExamples)


def texts_path() -> Path:
    """File of 300 questions as `inlay embeds audit --texts` takes them, with names and answers.

    `scripts/demo_training/audit_texts.py` makes them.
    """
    return _HERE / "texts.jsonl"
