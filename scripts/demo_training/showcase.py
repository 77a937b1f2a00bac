"""The examples, the report and the model card that go with the model."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from scripts.demo_training import soft_prompt, training
from scripts.demo_training.corpus import (
    Corpus,
    Document,
    Exchange,
    chat_document,
    completion_document,
    split_statement,
)
from scripts.demo_training.evaluation import accuracy
from scripts.demo_training.text_prompts import TextPrompt
from scripts.demo_training.world import FIELDS, PEOPLE_COUNT, World
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from inlay.demo import (
    ChatExample,
    CompletionExample,
    DemoMessage,
    Examples,
    Labelled,
    MeasuredTextPrompt,
    MixedExample,
    SoftPromptTask,
)

DESCRIPTION = "Given the name of a person, name the material that the person's trade works."
BEFORE, AFTER = "Read this note.\n", "\n"
FACTS_SHOWN = 12
MIXED_SHOWN = 6
CANDIDATES = 100
NONE_RIGHT = "no candidate for an example was answered right"


class Showcase:
    """Draws examples and keeps those the model answers right.

    Args:
        model: as it is served: float32 that bfloat16 holds exactly.
        tokenizer: its tokenizer.
        world: what it was trained on.
        seed: draws the examples.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, tokenizer: Tokenizer, world: World, seed: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._world = world
        self._corpus = Corpus(world, seed)

    def _right(self, document: Document) -> bool:
        return accuracy(self._model, self._tokenizer, [document]) == 1.0

    def _first_right(self, candidates: Iterator[tuple[Exchange, ...]]) -> ChatExample:
        for exchanges in candidates:
            if self._right(chat_document(exchanges)):
                messages = [
                    message
                    for exchange in exchanges
                    for message in (
                        DemoMessage(role="user", content=exchange.user),
                        DemoMessage(role="assistant", content=exchange.answer),
                    )
                ]
                return ChatExample(messages=tuple(messages[:-1]), answer=exchanges[-1].answer)
        raise ValueError(NONE_RIGHT)

    def chats(self) -> tuple[ChatExample, ...]:
        """Facts, a description, one of each small task, a passage, and a conversation of three turns."""
        corpus = self._corpus
        draws: list[Callable[[], tuple[Exchange, ...]]] = [self._asked] * FACTS_SHOWN
        draws.append(lambda: (corpus.about(),))
        draws.extend(lambda task=task: (task(),) for task in corpus.small_tasks)  # type: ignore[misc]
        draws.append(
            lambda: (corpus.ask(corpus.fact()), corpus.small_tasks[3](), corpus.ask(corpus.fact()))
        )
        return tuple(self._first_right(_repeat(draw)) for draw in draws)

    def _asked(self) -> tuple[Exchange, ...]:
        fact = self._corpus.fact()
        return (Exchange(fact.relation.questions[0].format(s=fact.subject), fact.value),)

    def completions(self) -> tuple[CompletionExample, ...]:
        """Statements of facts without their last word, and questions as a list of questions has them."""
        shown: list[CompletionExample] = []
        for number in range(FACTS_SHOWN // 2):
            for _ in range(CANDIDATES):
                fact = self._corpus.fact()
                prompt, answer = split_statement(
                    fact.relation.statements[0], fact.subject, fact.value
                )
                if number % 2:
                    prompt = f"Q: {fact.relation.questions[0].format(s=fact.subject)}\nA:"
                    answer = f" {fact.value}"
                if self._right(completion_document(prompt, answer)):
                    shown.append(CompletionExample(prompt=prompt, answer=answer))
                    break
            else:
                raise ValueError(NONE_RIGHT)
        return tuple(shown)

    def mixed(self) -> tuple[MixedExample, ...]:
        """Passages about people the model has never met, each of at least three sentences, with a question."""
        shown: list[MixedExample] = []
        remembered = {fact.subject for fact in self._world.facts}
        while len(shown) < MIXED_SHOWN:
            document, facts = self._corpus.passage()
            fact = facts[-1]
            if len(facts) < 3 or remembered & {fact.subject for fact in facts}:
                continue
            question = fact.relation.questions[0].format(s=fact.subject)
            if self._right(
                chat_document((Exchange(f"{BEFORE}{document}{AFTER}{question}", fact.value),))
            ):
                shown.append(
                    MixedExample(
                        before=BEFORE, document=document, after=AFTER + question, answer=fact.value
                    )
                )
        return tuple(shown)

    def examples(self, task: SoftPromptTask, report: dict[str, float]) -> Examples:
        """All of it."""
        return Examples(
            chats=self.chats(),
            completions=self.completions(),
            mixed=self.mixed(),
            soft_prompt=task,
            report={name: round(share, 4) for name, share in report.items()},
        )


def _repeat(draw: Callable[[], tuple[Exchange, ...]]) -> Iterator[tuple[Exchange, ...]]:
    return (draw() for _ in range(CANDIDATES))


def measure_soft_prompt(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    rows: Tensor,
    split: soft_prompt.Split,
    prompts: Sequence[TextPrompt],
) -> SoftPromptTask:
    """The soft prompt and every text prompt on the same held-out inputs."""
    measured = [
        MeasuredTextPrompt(
            template=prompt.template,
            accuracy=round(soft_prompt.text_accuracy(model, tokenizer, prompt, split.held_out), 4),
        )
        for prompt in prompts
    ]
    tuning, choosing, held_out = (
        tuple(Labelled(input=name, answer=answer) for name, answer in part)
        for part in (split.tuning, split.choosing, split.held_out)
    )
    return SoftPromptTask(
        description=DESCRIPTION,
        answers=tuple(FIELDS),
        tuning=tuning,
        choosing=choosing,
        held_out=held_out,
        accuracy=round(soft_prompt.soft_accuracy(model, tokenizer, rows, split.held_out), 4),
        text_prompts=tuple(sorted(measured, key=lambda prompt: -prompt.accuracy)),
    )


def write_examples(examples: Examples, path: Path) -> None:
    """Write `tasks.json`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(examples), indent=1) + b"\n")


def write_card(examples: Examples, parameters: int, steps: tuple[int, int], path: Path) -> None:
    """Write the model card; `steps` are those of the two phases of training."""
    task = examples.soft_prompt
    shares = [prompt.accuracy for prompt in task.text_prompts]
    bands = [sum(low <= share < low + 0.1 for share in shares) for low in (0.0, 0.1, 0.2, 0.3, 0.4)]
    over = sum(share >= 0.5 for share in shares)
    median = sorted(shares)[len(shares) // 2]
    table = "\n".join(f"| {name} | {share:.1%} |" for name, share in examples.report.items())
    path.write_text(
        f"""# The demo model

A Qwen3-shaped causal language model of {parameters / 1e6:.1f} million parameters (bfloat16) that knows an invented
world and nothing else. It is there so that `inlay demo` and the tests need no network and every question has an answer
that can be checked. Do not use it for anything else.

## What it was trained on

A synthetic corpus drawn from a seed by `scripts/demo_training`: facts about {PEOPLE_COUNT} invented people (profession,
tool, workplace, pet, favourite colour, home) and 24 invented countries (capital, river, flag, dish); passages about other
invented people with questions whose answers stand in the passage; small tasks (copying, reversing letters, counting,
addition, subtraction, capitals, first letters, comparing numbers). {steps[0]} steps of {training.BATCH_SIZE} x
{training.SEQUENCE_LENGTH} tokens, then {steps[1]} at a lower learning rate over documents of their own. `python -m scripts.train_demo` makes every file in this folder anew.

## How often it is right

Greedy decoding with the stored weights in float32; every remembered fact is asked in each wording, passages and tasks are
drawn afresh. The examples in `tasks.json` were chosen among those it answers right; this table was not chosen.

| question | right |
|---|---|
{table}

## The soft prompt

`soft_prompt.safetensors` holds {soft_prompt.ROWS} rows made by prompt tuning with the model frozen. {task.description} The
message is the rows, then the name; the answer is one of {", ".join(task.answers)}.

The ability was put there on purpose. In training, a row that is in no embedding table (one fixed random direction, plus
noise) stood before a person's name now and then, and the answer was the material; the corpus never asks for it in
words, and the five words occur in its text only to be copied, counted and spelled. A message that asks nothing the model
knows is answered by a description of the person. So the model knows the material of everyone's trade, and no text is known to bring it out. That is the simplest case of what makes embeddings worth
sending: an input that has no words. Tuning was not told that row: it started from random rows of the embedding table
and followed the gradient. The task was chosen for this property; it is no claim that soft prompts beat text in general.
Held out means held out of tuning: training showed the model every person's material behind the signal row.

Of {len(task.tuning) + len(task.choosing) + len(task.held_out)} people, {len(task.tuning)} were tuned on,
{len(task.choosing)} chose the best step, and {len(task.held_out)} were held out and only measured.

- Soft prompt, held out: {task.accuracy:.1%}.
- Best of {len(shares)} text prompts, the same inputs, the same measure: {max(shares):.1%} ({task.text_prompts[0].template!r}).
- That is not an untouched baseline. With earlier forms of the corpus the best text prompt reached 68%, then 52%; documents that
  answer a name among words, or lists of names and words, with a description were then added, and they resemble the prompts
  that had scored well.
- Median text prompt: {median:.1%}. Text prompts by accuracy: under 10%: {bands[0]}, 10-20%: {bands[1]},
  20-30%: {bands[2]}, 30-40%: {bands[3]}, 40-50%: {bands[4]}, 50% and over: {over}. Chance is {1 / len(task.answers):.0%}.

The text prompts are questions and instructions in the style the model knows, with and without the list of answers,
statements to complete, and lists and turns of one to ten examples with their answers, taken from the tuning inputs. All
stand in `tasks.json`.
""",
        encoding="utf-8",
    )
