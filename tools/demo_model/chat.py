"""The chat format: the template that ships with the model, and the same in plain Python."""

from __future__ import annotations

import json

END = "<|im_end|>"
START = "<|im_start|>"
STOP = "<|endoftext|>"
SPECIAL = (STOP, START, END)
MARKS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
)

TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type != 'text' -%}
{{- raise_exception('This model reads text only, not ' ~ part.type ~ '.') -}}
{%- endif -%}
{{- part.text -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro declare(tool) -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{- function.name ~ '(' -}}
{%- if function.parameters and function.parameters.properties -%}
{%- for name, schema in function.parameters.properties.items() -%}
{{- (', ' if not loop.first else '') ~ name -}}
{%- if schema.type is defined and schema.type is string -%}
{{- ': ' ~ schema.type -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- ')' ~ (': ' ~ function.description if function.description else '') -}}
{%- endmacro -%}
{%- set opening = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools or opening -%}
{{- '<|im_start|>system\\n' -}}
{%- if opening -%}
{{- text(messages[0].content) -}}
{%- endif -%}
{%- if tools -%}
{{- ('\\n\\n' if opening else '') ~ '<tools>\\n' -}}
{%- for tool in tools -%}
{{- declare(tool) ~ '\\n' -}}
{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
{%- if not loop.first -%}
{{- '<|im_start|>system\\n' ~ text(message.content) ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- elif message.role == 'user' -%}
{{- '<|im_start|>user\\n' ~ text(message.content) ~ '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>tool\\n<tool_response>\\n' ~ text(message.content) -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set said = text(message.content) -%}
{{- '<|im_start|>assistant\\n' ~ said -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function is defined else call -%}
{{- ('\\n' if said or not loop.first else '') ~ '<tool_call>\\n{"name": "' ~ function.name -}}
{{- '", "arguments": ' -}}
{%- if function.arguments is string -%}
{{- function.arguments -}}
{%- else -%}
{{- function.arguments | tojson -}}
{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- raise_exception('Unknown role: ' ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def call_text(call: dict) -> str:
    """How the model writes a tool call."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def declare(tool: dict) -> str:
    """One tool as a line of the system turn."""
    function = tool["function"]
    properties = function["parameters"]["properties"]
    parameters = ", ".join(f"{name}: {schema['type']}" for name, schema in properties.items())
    about = f": {function['description']}" if function["description"] else ""
    return f"{function['name']}({parameters}){about}"


def segments(messages: list[dict], tools: list[dict] | None = None) -> list[tuple[str, bool]]:
    """The rendered conversation in pieces, each with whether the model is to learn it."""
    opening = messages[0]["role"] == "system"
    pieces: list[tuple[str, bool]] = []
    head = messages[0]["content"] if opening else ""
    if tools:
        head += "\n\n" if opening else ""
        head += "<tools>\n" + "".join(declare(tool) + "\n" for tool in tools) + "</tools>"
    if head:
        pieces.append((f"{START}system\n{head}{END}\n", False))
    for message in messages[1 if opening else 0 :]:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if role == "assistant":
            pieces += [(f"{START}assistant\n", False), (f"{content}{END}", True), ("\n", False)]
        else:
            pieces.append((f"{START}{role}\n{content}{END}\n", False))
    return pieces


def render(messages: list[dict], tools: list[dict] | None = None) -> str:
    """The prompt up to where the model is to speak."""
    text = "".join(piece for piece, _ in segments(messages, tools))
    return f"{text}{START}assistant\n"
