"""Small chat templates with the habits of published families, in words of their own."""

from collections.abc import Callable
from typing import NamedTuple

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

QWEN25 = """\
{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}
<|im_start|>assistant{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{% for c in m.tool_calls %}{% set f = c.function if c.function is defined else c %}
<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>
{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>{{ '\\n' + m.content + '\\n' }}</tool_response><|im_end|>
{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
{% endif %}{% endfor %}"""

QWEN3 = """\
{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}{% set content = m.content if m.content is string else '' %}\
{% if m.role == 'assistant' %}{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{{ '<|im_start|>assistant\\n' }}{% if loop.index0 > ns.last and thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n' }}{% endif %}{{ content.lstrip('\\n') }}
{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' }}
{% endif %}{% endfor %}"""

QWEN_CODER = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable and m.tool_calls | length > 0 %}
{% if m.content is defined and m.content is string and m.content | trim | length > 0 %}{{ m.content | trim }}{% endif %}
{% for c in m.tool_calls %}<tool_call><function={{ c.function.name }}>{% for key, value in c.function.arguments | items %}
<parameter={{ key }}>{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function></tool_call>{% endfor %}
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}"""

MISTRAL = """\
{% set ns = namespace(turn=0) %}{% for m in messages %}\
{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}\
{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('user and assistant must take turns') }}{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}\
{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}\
{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS] [\
{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}\
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>\
{% elif m.role == 'assistant' %}{% if m.content == '' %}{{ raise_exception('an assistant says something') }}{% endif %}{{ ' ' + m.content | trim + '</s>' }}\
{% elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content | string }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]\
{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""

MAGISTRAL = """\
{% macro body(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}\
{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]\
{% else %}{{ raise_exception('only text and thinking') }}{% endif %}{% endfor %}{% endif %}{% endmacro %}\
{% for m in messages %}{% if m.role == 'user' %}[INST]{{ body(m.content) }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ body(m.content) }}[/TOOL_RESULTS]\
{% else %}{{ body(m.content) }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"""

LLAMA3 = """\
{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|eot_id|>\
{% elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}\
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>\
{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"""

DEEPSEEK_R1 = """\
{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}\
{% if m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name }}
{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}\
{% if m.role == 'assistant' and m.content is not none %}{% set content = m.content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}\
{% if m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"""

HARMONY = """\
{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}\
{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('content or thinking beside calls, not both') }}{% endif %}\
{% if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}\
{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>\
{% elif loop.last and not add_generation_prompt %}{% if 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>\
{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% set last.name = none %}{% endif %}\
{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>\
{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"""

GEMMA = """\
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and model must take turns') }}{% endif %}\
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}"""

REASONING = """\
{% for m in messages %}<{{ m.role }}>{% if m.reasoning is defined and m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}\
{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}</call>{% endfor %}{% endfor %}"""


class Family(NamedTuple):
    """A template with its habits.

    Attributes:
        thoughts: reasoning that it writes: of all turns, of those after the last user's, beside
            calls alone, or none.
        text_after_calls: it gets text before calls in the answer behind them.
        refuses: returns True for a turn that it refuses in its own words, given its text, the
            number of its calls, and True if an answer follows their results.
    """

    template: str
    thoughts: str = "none"
    text_after_calls: bool = False
    refuses: Callable[[str, int, bool], bool] = lambda text, calls, answered: False


FAMILIES = {
    "chatml": Family(CHATML),
    "qwen2.5": Family(QWEN25),
    "qwen3": Family(QWEN3, "last"),
    "qwen-coder": Family(QWEN_CODER),
    # Text beside calls would be a message before the answer, and turns must be taken.
    "mistral": Family(MISTRAL, text_after_calls=True),
    "magistral": Family(MAGISTRAL, "all"),
    "llama3": Family(LLAMA3),
    "deepseek-r1": Family(DEEPSEEK_R1),
    "harmony": Family(HARMONY, "calls"),
    "gemma": Family(GEMMA, refuses=lambda text, calls, answered: calls > 0),
    "reasoning": Family(REASONING, "all"),
}
