import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import inlay.demo
from inlay.demo import examples, model_dir, soft_prompt_path, soft_prompt_peft_dir
from tests.commands import run

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


def test_all_files_are_there_and_weigh_less_than_eight_megabytes() -> None:
    for name in MODEL_FILES:
        assert (model_dir() / name).is_file(), name
    package = soft_prompt_path().parent
    files = [
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sum(path.stat().st_size for path in files) < 8_000_000


def test_the_demo_package_does_not_import_torch() -> None:
    code = (
        "import sys; from inlay.demo import examples, vision_examples; examples(); "
        "vision_examples(); sys.exit('torch' in sys.modules)"
    )
    run(sys.executable, "-c", code)


def test_examples_that_do_not_match_their_type_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            b'{"chats": [{"messages": [], "answers": "x"}]}', type=inlay.demo.Examples
        )


@pytest.mark.thorough
@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_bytes_emoji_and_rare_scripts_survive_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "\x00\t\r\n  two  spaces \U0001f98a ქართული 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 عربى 12345 don't"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_held_out_inputs_are_disjoint_from_those_the_soft_prompt_was_made_with() -> None:
    task = examples().soft_prompt
    parts = [{item.input for item in part} for part in (task.tuning, task.choosing, task.held_out)]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert {item.answer for item in task.held_out} == set(task.answers)


def test_there_are_two_hundred_different_text_prompts_each_with_a_place_for_the_input() -> None:
    templates = {prompt.template for prompt in examples().soft_prompt.text_prompts}
    assert len(templates) == 200
    assert all("{s}" in template for template in templates)


def test_the_soft_prompt_is_one_float32_tensor_and_its_peft_form_holds_the_same_rows() -> None:
    alone = load_file(soft_prompt_path())
    adapter = load_file(soft_prompt_peft_dir() / "adapter_model.safetensors")
    config = msgspec.json.decode((soft_prompt_peft_dir() / "adapter_config.json").read_bytes())
    hidden = msgspec.json.decode((model_dir() / "config.json").read_bytes())["hidden_size"]
    assert list(alone) == ["embeddings"]
    assert list(adapter) == ["prompt_embeddings"]
    assert alone["embeddings"].dtype == "float32"
    assert alone["embeddings"].shape == (config["num_virtual_tokens"], hidden)
    assert (alone["embeddings"] == adapter["prompt_embeddings"]).all()
    assert config["peft_type"] == "PROMPT_TUNING"
