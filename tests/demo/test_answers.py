from pathlib import Path

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file
from scripts.demo_training.corpus import Exchange, chat_document
from scripts.demo_training.tokenizer import MAX_POSITIONS
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from inlay.demo import (
    ChatExample,
    CompletionExample,
    Labelled,
    MixedExample,
    examples,
    model_dir,
    soft_prompt_path,
    soft_prompt_peft_dir,
)

EXAMPLES = examples()
TASK = EXAMPLES.soft_prompt


class Demo:
    """The bundled model under plain transformers, in float32."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(directory)
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        )
        self.model.eval()

    @property
    def table(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    def render(self, messages: list[dict[str, str]]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def continue_text(self, prompt: str) -> str:
        return self.continue_rows(self.table[self.ids(prompt)])

    def continue_rows(self, rows: Tensor) -> str:
        output = self.model.generate(
            inputs_embeds=rows[None],
            attention_mask=torch.ones(1, len(rows), dtype=torch.long),
            max_new_tokens=80,
        )
        text: str = self.tokenizer.decode(output[0], skip_special_tokens=True)
        return text

    def answer(self, user: str) -> str:
        return self.continue_text(self.render([{"role": "user", "content": user}]))

    def answer_behind(self, soft_prompt: Tensor, name: str) -> str:
        before, after = self.render([{"role": "user", "content": f"\0{name}"}]).split("\0")
        return self.continue_rows(
            torch.cat([self.table[self.ids(before)], soft_prompt, self.table[self.ids(after)]])
        )


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(model_dir())


@pytest.fixture(scope="module")
def soft_prompt() -> Tensor:
    rows: Tensor = load_file(soft_prompt_path())["embeddings"]
    return rows


@pytest.mark.parametrize(
    "example", EXAMPLES.chats, ids=lambda example: example.messages[-1].content
)
def test_a_chat_example_gets_its_answer(demo: Demo, example: ChatExample) -> None:
    messages = [{"role": message.role, "content": message.content} for message in example.messages]
    assert demo.continue_text(demo.render(messages)) == example.answer


@pytest.mark.parametrize("example", EXAMPLES.completions, ids=lambda example: example.prompt)
def test_a_plain_prompt_is_completed_as_the_example_says(
    demo: Demo, example: CompletionExample
) -> None:
    assert demo.continue_text(example.prompt) == example.answer


@pytest.mark.parametrize("example", EXAMPLES.mixed, ids=lambda example: example.after.strip())
def test_a_question_about_a_document_is_answered_whichever_way_the_document_comes(
    demo: Demo, example: MixedExample
) -> None:
    text = demo.render([{"role": "user", "content": example.before + "\0" + example.after}])
    before, after = text.split("\0")
    assert demo.continue_text(before + example.document + after) == example.answer
    rows = [demo.table[demo.ids(part)] for part in (before, example.document, after)]
    assert demo.continue_rows(torch.cat(rows)) == example.answer
    assert example.answer in example.document


def test_a_question_far_behind_other_turns_is_still_answered(demo: Demo) -> None:
    first, second = EXAMPLES.chats[0], EXAMPLES.chats[1]
    turn = [
        {"role": "user", "content": first.messages[-1].content},
        {"role": "assistant", "content": first.answer},
    ]
    turns = MAX_POSITIONS // 4 // len(demo.ids(demo.render(turn)))
    messages = turn * turns
    messages.append({"role": "user", "content": second.messages[-1].content})
    assert demo.continue_text(demo.render(messages)) == second.answer


def test_the_chat_template_renders_what_the_model_was_trained_on(demo: Demo) -> None:
    exchanges = (Exchange("Hello", "there"), Exchange("What is 2 plus 3?", "5"))
    document = "".join(piece.text for piece in chat_document(exchanges, "Answer briefly."))
    messages = [{"role": "system", "content": "Answer briefly."}]
    for exchange in exchanges:
        messages += [
            {"role": "user", "content": exchange.user},
            {"role": "assistant", "content": exchange.answer},
        ]
    assert demo.tokenizer.apply_chat_template(messages, tokenize=False) == document
    assert demo.render(messages) == document + "<|im_start|>assistant\n"


def test_the_chat_template_joins_text_parts(demo: Demo) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 plus 3?"}]
    text = demo.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n"


def test_the_report_says_that_facts_are_answered_in_wordings_seen_and_unseen() -> None:
    facts = [share for name, share in EXAMPLES.report.items() if name.startswith("facts, question")]
    assert min(facts) >= 0.95
    assert EXAMPLES.report["facts, wording never trained"] >= 0.9


def test_the_soft_prompt_answers_a_sample_of_held_out_inputs(
    demo: Demo, soft_prompt: Tensor
) -> None:
    assert _share_behind(demo, soft_prompt, TASK.held_out[::3]) >= 0.9


@pytest.mark.thorough
def test_the_best_text_prompts_do_not_answer_a_sample_of_held_out_inputs(demo: Demo) -> None:
    for prompt in TASK.text_prompts[:3]:
        sample = TASK.held_out[::3]
        right = sum(demo.answer(prompt.fill(item.input)) == item.answer for item in sample)
        assert right / len(sample) < 0.5, prompt.template


def test_rows_of_the_soft_prompt_have_the_magnitude_of_inputs(
    demo: Demo, soft_prompt: Tensor
) -> None:
    assert soft_prompt.isfinite().all()
    assert soft_prompt.abs().max() < 10 * demo.table.abs().max()


def test_the_peft_form_is_read_by_peft() -> None:
    config = PeftConfig.from_pretrained(str(soft_prompt_peft_dir()))
    assert config.peft_type == "PROMPT_TUNING"
    assert config.num_virtual_tokens == len(load_file(soft_prompt_path())["embeddings"])


@pytest.mark.slow
def test_the_soft_prompt_reaches_its_stated_accuracy_on_all_held_out_inputs(
    demo: Demo, soft_prompt: Tensor
) -> None:
    assert _share_behind(demo, soft_prompt, TASK.held_out) == pytest.approx(TASK.accuracy, abs=1e-3)
    assert TASK.accuracy >= 0.9


@pytest.mark.slow
def test_the_best_text_prompts_reach_what_is_stated_and_no_text_prompt_half(demo: Demo) -> None:
    for prompt in TASK.text_prompts[:6]:
        right = sum(demo.answer(prompt.fill(item.input)) == item.answer for item in TASK.held_out)
        assert right / len(TASK.held_out) == pytest.approx(prompt.accuracy, abs=1e-3), (
            prompt.template
        )
    assert len(TASK.text_prompts) == 200
    assert max(prompt.accuracy for prompt in TASK.text_prompts) < 0.5


def _share_behind(demo: Demo, rows: Tensor, inputs: tuple[Labelled, ...]) -> float:
    return sum(demo.answer_behind(rows, item.input) == item.answer for item in inputs) / len(inputs)
