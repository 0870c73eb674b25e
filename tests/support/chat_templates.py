"""Made-up chat templates of the kinds that models are published with, and conversations to walk them with."""

# ruff: noqa: E501 - templates are read by machines

from __future__ import annotations

from typing import Any

_NEXT = "{% if add_generation_prompt %}"
_ARGUMENTS = "{{ call.function.arguments | tojson }}"

TEMPLATES = {
    # Every role, anywhere.
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + _NEXT
    + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    # Three roles; others are passed over in silence.
    "zephyr": "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + eos_token }}{% elif m['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + m['content'] + eos_token }}{% endif %}\n{% endfor %}" + _NEXT + "<|assistant|>{% endif %}",
    # The system prompt in the first question, strictly in turns.
    "llama 2": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set head = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set head = false %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and head %}{% set said = '<<SYS>>\n' + head + '\n<</SYS>>\n\n' + m.content %}{% else %}"
    "{% set said = m.content %}{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + said.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    # No system prompt at all, strictly in turns.
    "gemma 2": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate user/assistant') }}{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    + _NEXT
    + "<start_of_turn>model\n{% endif %}",
    # The system prompt before the first question; parts or text.
    "gemma 3": "{{ bos_token }}{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ prefix if loop.first }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
    "{% endif %}<end_of_turn>\n{% endfor %}" + _NEXT + "<start_of_turn>model\n{% endif %}",
    # Tools in the first question; one call at a time, and no text beside it; asks whether there is a list of calls.
    "llama 3": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set head = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set head = '' %}{% endif %}<|system|>{{ head }}<|eot|>"
    "{% if tools %}{% set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}<|user|>"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{{ first }}<|eot|>{% endif %}{% for m in messages %}"
    "{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}<|{{ m.role }}|>"
    "{{ m['content'] | trim }}<|eot|>{% elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('only single calls') }}{% endif %}{% set call = m.tool_calls[0] %}"
    '<|assistant|>{"name": "{{ call.function.name }}", "parameters": ' + _ARGUMENTS + "}<|eot|>"
    "{% else %}<|ipython|>{% if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "<|eot|>{% endif %}{% endfor %}" + _NEXT + "<|assistant|>{% endif %}",
    # Ids of nine letters, no text beside a call, the system prompt with the last question, turns.
    "nemo": "{% if messages[0]['role'] == 'system' %}{% set head = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(i=0) %}{% for m in rest %}{% if not (m.role == 'tool' or (m.tool_calls is defined and "
    "m.tool_calls is not none)) %}{% if (m['role'] == 'user') != (ns.i % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}"
    "{% endif %}{% endfor %}{{ bos_token }}{% for m in rest %}{% if m['role'] == 'user' %}"
    "{% if tools is not none and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and head is defined %}{{ head + '\n\n' + m['content'] }}{% else %}{{ m['content'] }}{% endif %}"
    "[/INST]{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids are of length 9') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": '
    + _ARGUMENTS
    + ', "id": "{{ call.id }}"}{% endfor %}]{{ eos_token }}'
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% elif m['role'] == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('ids are of length 9') }}"
    "{% endif %}[TOOL_RESULTS]{{ m.content }}, {{ m.tool_call_id }}[/TOOL_RESULTS]{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}",
    # A system prompt of its own, tools, results that follow each other as one turn.
    "qwen 2.5": "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are made up.{% endif %}{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% else %}"
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' "
    "and not m.tool_calls) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant{% if m.content %}\n{{ m.content }}{% endif %}{% for call in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": ' + _ARGUMENTS + "}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or messages[loop.index0 + 1].role "
    "!= 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}" + _NEXT + "<|im_start|>assistant\n{% endif %}",
    # Looks from the end for the last question; thinking of old answers is left out; later system prompts too.
    "qwen 3": "{% set ns = namespace(last=messages | length - 1, found=false) %}{% for m in messages[::-1] %}{% if not "
    "ns.found and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith("
    "'</tool_response>')) %}{% set ns.found = true %}{% set ns.last = messages | length - loop.index %}{% endif %}"
    "{% endfor %}{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' }}{{ tools | "
    "tojson }}<|im_end|>\n{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content %}{% set thought = '' %}{% if m.reasoning_content %}"
    "{% set thought = m.reasoning_content %}{% elif '</think>' in said %}{% set thought = said.split('</think>')[0]"
    ".split('<think>')[-1] %}{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}{% for call in m.tool_calls or [] "
    '%}\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": ' + _ARGUMENTS + "}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}" + _NEXT + "<|im_start|>assistant\n{% endif %}",
    # All system prompts at the front; calls only where there is no content; arguments joined as text.
    "deepseek": "{% set ns = namespace(head='', tool=false) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.head = ns.head + ('\n\n' if ns.head else '') + m.content %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.head }}"
    "{% if tools %}{% for t in tools %}\n### {{ t.function.name }}: {{ t.function.description }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}{% if m.role == 'assistant' and "
    "m.content is none %}<|Assistant|>{% for call in m.tool_calls %}{{ '<|call|>' + call.function.name + '\n' + "
    "call.function.arguments + '<|end|>' }}{% endfor %}{% endif %}{% if m.role == 'assistant' and m.content is not none %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% if m.role == 'tool' %}<|output|>"
    "{{ m.content }}<|/output|>{% endif %}{% endfor %}" + _NEXT + "<|Assistant|><think>\n{% endif %}",
    # Tools only as a field of the system message.
    "phi 4": "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}<|system|>"
    "{{ m.content }}<|tool|>{{ m['tools'] }}<|/tool|><|end|>{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}" + _NEXT + "<|assistant|>{% endif %}",
    # Turns, a system prompt that stands first, no other roles.
    "vicuna": "{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}USER: {{ m.content }}\n{% else %}"
    "ASSISTANT: {{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}" + _NEXT + "ASSISTANT:{% endif %}",
    "alpaca": "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content | trim }}\n\n{% elif m.role == "
    "'assistant' %}### Response:\n{{ m.content | trim }}\n\n{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% endfor %}" + _NEXT + "### Response:\n{% endif %}",
    # Results by the call that they answer; calls of an answer are its only content.
    "command r": "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}<|SYSTEM|>{{ head }}{% if tools %}"
    "{{ tools | tojson }}{% endif %}<|END|>{% for m in rest %}{% if m.role == 'user' %}<|USER|>{{ m.content }}<|END|>"
    "{% elif m.role == 'assistant' or m.role == 'chatbot' %}<|CHATBOT|>{% if m.tool_calls %}<|PLAN|>{{ m.tool_plan }}"
    '<|/PLAN|>{% for call in m.tool_calls %}{"tool_name": "{{ call.function.name }}", "parameters": ' + _ARGUMENTS + "}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|END|>{% elif m.role == 'tool' %}<|SYSTEM|>{{ m.content }}<|END|>"
    "{% endif %}{% endfor %}" + _NEXT + "<|CHATBOT|>{% endif %}",
    "granite": "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set loop_messages = messages[1:] "
    "%}{% else %}{% set head = 'Made up.' %}{% set loop_messages = messages %}{% endif %}<|system|>{{ head }}{% if tools %}"
    "<|tools|>{{ tools | tojson(indent=4) }}{% endif %}<|end|>{% for m in loop_messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    + _NEXT
    + "<|assistant|>{% endif %}",
    # The system prompt as the developer's; channels; one call, whose text is a comment; a result after its call.
    "harmony": "{% if messages[0].role in ['system', 'developer'] %}{% set head = messages[0].content %}{% set rest = "
    "messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}<|start|>system<|message|>Made up."
    "<|end|>{% if head or tools %}<|start|>developer<|message|>{{ head }}{% for t in tools or [] %}\n// {{ "
    "t.function.description }}\ntype {{ t.function.name }}{% endfor %}<|end|>{% endif %}{% set ns = namespace(call=none) %}"
    "{% for m in rest %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}{% if m.content and m.thinking %}"
    "{{ raise_exception('both thinking and content beside a call') }}{% elif m.content %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.content }}<|end|>{% endif %}{% set call = m.tool_calls[0] %}{% set ns.call = "
    "call.function.name %}<|start|>assistant to=functions.{{ call.function.name }}<|message|>" + _ARGUMENTS + "<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set ns.call = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('a result without a call before it') }}{% endif %}"
    "<|start|>functions.{{ ns.call }} to=assistant<|message|>{{ m.content | tojson }}<|end|>{% elif m.role == 'user' %}"
    "<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}" + _NEXT + "<|start|>assistant{% endif %}",
    "lfm 2": "{{ bos_token }}{% set ns = namespace(head='') %}{% if messages[0].role == 'system' %}{% set ns.head = "
    "messages[0].content %}{% set messages = messages[1:] %}{% endif %}{% if tools %}{% set ns.head = ns.head + "
    "('\n' if ns.head else '') + 'List of tools: [' %}{% for t in tools %}{% set ns.head = ns.head + (t | tojson) %}"
    "{% endfor %}{% set ns.head = ns.head + ']' %}{% endif %}{% if ns.head %}<|im_start|>system\n{{ ns.head }}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not string %}{{ m.content | tojson }}"
    "{% elif m.role == 'tool' %}<|tool_response_start|>{{ m.content }}<|tool_response_end|>{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}" + _NEXT + "<|im_start|>assistant\n{% endif %}",
    # A frame around the system prompt, a switch in it; later ones are left out.
    "smollm 3": "{% set head = messages[0].content if messages[0].role == 'system' else '' %}{% if '/no_think' in head %}"
    "{% set mode = 'no' %}{% else %}{% set mode = 'yes' %}{% endif %}<|im_start|>system\n## Mode: {{ mode }}\n"
    "{{ head.replace('/no_think', '').rstrip() }}{% if tools %}\n{{ tools | string }}{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% set said = m.content if m.content is string else '' %}{% if m.role == 'user' %}"
    "<|im_start|>user\n{{ said }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ said.lstrip('\n') }}"
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n{{ said }}<|im_end|>\n{% endif %}{% endfor %}"
    + _NEXT
    + "<|im_start|>assistant\n{% endif %}",
    "glm": "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% macro shown(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ shown(m.content) }}{% elif m.role == 'assistant' %}"
    "<|assistant|>{% if m.content | trim %}\n{{ m.content | trim }}{% endif %}{% for call in m.tool_calls or [] %}\n"
    "<tool_call>{{ call.function.name }}{% for k, v in call.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.role == 'system' %}<|system|>\n"
    "{{ shown(m.content) }}{% endif %}{% endfor %}" + _NEXT + "<|assistant|>\n{% endif %}",
    "kimi": "{% if tools %}<|im_system|>tools<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
    "<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{% if m.role == 'assistant' and m.tool_calls %}{{ m.content }}"
    "<|calls|>{% for call in m.tool_calls %}{{ call.id }}: {% if call.function.arguments is string %}"
    "{{ call.function.arguments }}{% else %}"
    + _ARGUMENTS
    + "{% endif %}{% endfor %}<|/calls|>{% elif m.role == 'tool' %}"
    "## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    + _NEXT
    + "<|im_assistant|>assistant<|im_middle|>{% endif %}",
    # Contents as lists of parts only.
    "vision": "{% for m in messages %}{{ m.role | capitalize }}:{% for p in m.content %}{% if p.type == 'text' %} "
    "{{ p.text }}{% else %}<image>{% endif %}{% endfor %}<end>\n{% endfor %}" + _NEXT + "Assistant:{% endif %}",
    # Only the first of the system prompts.
    "first system": "{% for m in messages %}{% if m.role == 'system' and loop.first %}<s>{{ m.content }}</s>{% elif m.role "
    "== 'user' %}<u>{{ m.content }}</u>{% elif m.role == 'assistant' %}<a>{{ m.content }}</a>{% elif m.role == 'tool' "
    "and tools %}<t>{{ m.content }}</t>{% endif %}{% endfor %}" + _NEXT + "<a>{% endif %}",
}


def _call(name: str = "look", id: str = "call_1f3a", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {"place": "Oslo"}}}


S, S2 = {"role": "system", "content": "Answer in rhymes."}, {"role": "system", "content": "The user likes herons."}
U, U2 = {"role": "user", "content": "Where is it cold?"}, {"role": "user", "content": "And where warm, pray?"}
A, A2 = {"role": "assistant", "content": "Up north, of old."}, {"role": "assistant", "content": "Down south, they say."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [_call()]}
RESULT = {"role": "tool", "tool_call_id": "call_1f3a", "name": "look", "content": "minus seven degrees"}
TWO_CALLS = CALLS | {"tool_calls": [_call(), _call(id="call_2b", place="Rome")]}
RESULT_2 = RESULT | {"tool_call_id": "call_2b", "content": "plus thirty degrees"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a question": [U],
    "a system prompt": [S, U],
    "two system prompts": [S, S2, U],
    "a system prompt behind": [U, S],
    "a system prompt between": [S, U, A, S2, U2],
    "turns": [S, U, A, U2],
    "two questions": [S, U, U2],
    "two answers": [U, A, A2, U2],
    "an answer first": [A, U],
    "an answer last": [U, A],
    "an empty answer": [U, A | {"content": ""}, U2],
    "no answer": [U, A | {"content": None}, U2],
    "no calls": [U, A | {"tool_calls": []}, U2],
    "only thoughts": [U, {"role": "assistant", "content": None, "reasoning_content": "Hm, north."}, U2],
    "thoughts": [U, A | {"reasoning_content": "Hm, north."}, U2],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "Where is"}, {"type": "text", "text": " it cold?"}]},
        A,
        {"role": "user", "content": [{"type": "text", "text": "And where warm?"}]},
    ],
    "a call": [S, U, CALLS, RESULT],
    "a call and what follows": [S, U, CALLS, RESULT, A, U2],
    "a call beside a text": [U, CALLS | {"content": "Let me look it up."}, RESULT, A, U2],
    "two calls": [U, TWO_CALLS, RESULT, RESULT_2],
    "calls one after the other": [U, CALLS, RESULT, CALLS, RESULT, A, U2],
    "a call without ids": [
        U,
        CALLS | {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "minus seven degrees"},
    ],
    "a call and a note": [S, U, CALLS, RESULT, S2, U2],
    "unicode": [U | {"content": "Hvor er det kaldt? ❄️ 北 \U0001f427 'q\" \\n"}, A, U2],
    "long": [S, *[U, A] * 60, U2],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Reads a thermometer.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
