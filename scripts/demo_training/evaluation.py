"""How often greedy answers are right.

An answer is right when it and the end that follows it are, token for token, what greedy decoding
gives. That is read off one forward pass over prompt and answer: every token of the answer must be
the most likely one at its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scripts.demo_training.corpus import (
    Corpus,
    Document,
    Exchange,
    chat_document,
    completion_document,
    split_statement,
)
from scripts.demo_training.world import World
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

BATCH = 64
SAMPLE = 400


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of rows and the token ids of its right answer, its end included.

    Attributes:
        rows: (positions, hidden) float32.
        answer: token ids.
    """

    rows: Tensor
    answer: tuple[int, ...]


def are_right(model: Qwen3ForCausalLM, cases: Sequence[Case]) -> list[bool]:
    """For each case, whether greedy decoding gives exactly its answer."""
    right = [False] * len(cases)
    by_length = sorted(range(len(cases)), key=lambda index: len(cases[index].rows))
    for begin in range(0, len(cases), BATCH):
        indices = by_length[begin : begin + BATCH]
        group = [cases[index] for index in indices]
        with torch.inference_mode():
            chosen = answer_logits(model, group).argmax(-1)
        given = torch.split_with_sizes(chosen, [len(case.answer) for case in group])
        for index, case, tokens in zip(indices, group, given, strict=True):
            right[index] = tuple(tokens.tolist()) == case.answer
    return right


def answer_logits(model: Qwen3ForCausalLM, cases: Sequence[Case]) -> Tensor:
    """Logits (answer tokens of all cases, vocabulary) at the places that predict the answers, case after case."""
    hidden = model.model(inputs_embeds=stack(model, cases), use_cache=False).last_hidden_state
    places = [
        hidden[row, len(case.rows) - 1 :][: len(case.answer)] for row, case in enumerate(cases)
    ]
    logits: Tensor = model.lm_head(torch.cat(places))
    return logits


def stack(model: Qwen3ForCausalLM, cases: Sequence[Case]) -> Tensor:
    """Prompts and answers as (cases, longest, hidden), zeros on the right, where causal attention never looks back."""
    table = model.get_input_embeddings().weight
    return torch.nn.utils.rnn.pad_sequence(
        [torch.cat([case.rows, table[list(case.answer)]]) for case in cases], batch_first=True
    )


def text_case(model: Qwen3ForCausalLM, tokenizer: Tokenizer, document: Document) -> Case:
    """The case of a document whose last answer is asked for: everything before it is the prompt."""
    pieces = list(document)
    while not pieces[-1].learned:
        pieces.pop()
    prompt = tokenizer.encode("".join(piece.text for piece in pieces[:-1])).ids
    answer = tokenizer.encode(pieces[-1].text).ids
    return Case(model.get_input_embeddings().weight[prompt], tuple(answer))


def accuracy(model: Qwen3ForCausalLM, tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """Share of documents whose last answer greedy decoding gives."""
    right = are_right(model, [text_case(model, tokenizer, document) for document in documents])
    return sum(right) / len(right)


def evaluate_model(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, world: World, seed: int
) -> dict[str, float]:
    """Accuracy by kind of question.

    Facts are asked in every wording; passages and tasks are drawn from `seed`.
    """
    corpus = Corpus(world, seed)

    def asked(wording: int) -> list[Document]:
        return [
            chat_document(
                (Exchange(fact.relation.questions[wording].format(s=fact.subject), fact.value),)
            )
            for fact in world.facts
        ]

    report = {
        f"facts, question wording {w + 1}": accuracy(model, tokenizer, asked(w)) for w in range(5)
    }
    report["facts, wording never trained"] = accuracy(
        model,
        tokenizer,
        [
            chat_document(
                (Exchange(fact.relation.unseen_question.format(s=fact.subject), fact.value),)
            )
            for fact in world.facts
        ],
    )
    report["facts, plain completion"] = accuracy(
        model,
        tokenizer,
        [
            completion_document(
                *split_statement(fact.relation.statements[0], fact.subject, fact.value)
            )
            for fact in world.facts
        ],
    )
    passages = [corpus.passage() for _ in range(SAMPLE)]
    report["passages, chat"] = accuracy(
        model,
        tokenizer,
        [
            chat_document(
                (
                    Exchange(
                        f"{text}\n{facts[-1].relation.questions[0].format(s=facts[-1].subject)}",
                        facts[-1].value,
                    ),
                )
            )
            for text, facts in passages
        ],
    )
    report["passages, any layout and several turns"] = accuracy(
        model, tokenizer, [corpus.read_chat() for _ in range(SAMPLE)]
    )
    report["passages, plain completion"] = accuracy(
        model, tokenizer, [corpus.read_plain() for _ in range(SAMPLE)]
    )
    report["descriptions of a subject"] = accuracy(
        model, tokenizer, [chat_document((corpus.about(),)) for _ in range(SAMPLE // 4)]
    )
    for task in corpus.small_tasks:
        name = task.__name__.lstrip("_").replace("_", " ")
        report[f"task: {name}"] = accuracy(
            model, tokenizer, [chat_document((task(),)) for _ in range(SAMPLE // 4)]
        )
    return report
