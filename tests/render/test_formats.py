"""Which forms chat templates show.

The templates are the telling lines of those the models are published with.
"""

from typing import get_args

import pytest

from inlay.http import FrontendSettings
from inlay.render.formats import REASONING_FORMS, TOOL_FORMS, reasoning_form_of, tool_form_of

QWEN3 = """{%- if tools %}... return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>
{%- set content = (message.content.split('</think>')|last).lstrip('\\n') %}"""
CODER = "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>"
GLM = "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value></tool_call><think></think>"
LLAMA31 = """{{- "<|python_tag|>" + tool_call.name + ".call(" }} <|start_header_id|> {{- '"parameters": ' }}"""
LLAMA32 = """<|start_header_id|> Respond in the format {"name": function name, "parameters": dictionary of argument name}"""
LLAMA3 = "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}"
MISTRAL = '{{- "[TOOL_CALLS][" }}{%- for tool_call in message.tool_calls %}'
MAGISTRAL = MISTRAL + "[THINK]{{ block['thinking'] }}[/THINK]"
R1 = (
    "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}"
    "{% set content = content.split('</think>')[-1] %}"
)
GPT_OSS = '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}'


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (QWEN3, "hermes", "qwen3"),
        (CODER, "qwen3_coder", None),
        (GLM, None, "qwen3"),
        (LLAMA31, "llama3_json", None),
        (LLAMA32, "llama3_json", None),
        (LLAMA3, None, None),
        (MISTRAL, "mistral", None),
        (MAGISTRAL, "mistral", "mistral"),
        (R1, "deepseek_v3", "deepseek_r1"),
        (GPT_OSS, "openai", "openai_gptoss"),
        ("{{ messages[0].content }}", None, None),
    ],
)
def test_a_template_shows_its_forms(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    assert (tool_form_of((template,)), reasoning_form_of((template,))) == (tools, reasoning)


def test_a_template_for_tools_is_looked_at_too() -> None:
    assert tool_form_of((LLAMA3, QWEN3)) == "hermes"
    assert tool_form_of(()) is None


def test_the_flags_name_every_form() -> None:
    for field, forms in (("tool_call_parser", TOOL_FORMS), ("reasoning_parser", REASONING_FORMS)):
        assert set(get_args(FrontendSettings.model_fields[field].annotation)) == {
            "auto",
            "none",
            *forms,
        }
