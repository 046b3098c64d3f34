"""Short chat templates for formats whose models' own templates are in no package: they write calls as those do."""

from __future__ import annotations

FUNCTION_GEMMA = """\
{%- macro value(given) -%}
    {%- if given is string -%}<escape>{{ given }}<escape>
    {%- elif given is boolean -%}{{ 'true' if given else 'false' }}
    {%- elif given is mapping -%}
        {%- for key, each in given | dictsort -%}
            {{ '{' if loop.first else ',' }}{{ key }}:{{ value(each) }}
        {%- else -%}{{ '{' }}{%- endfor -%}{{ '}' }}
    {%- elif given is iterable -%}
        [{%- for each in given -%}{{ ',' if not loop.first }}{{ value(each) }}{%- endfor -%}]
    {%- else -%}{{ given }}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- if tools or messages[0].role == 'system' -%}
    {{ '<start_of_turn>developer\\n' }}{{ messages[0].content if messages[0].role == 'system' }}
    {%- for tool in tools or [] -%}
        <start_function_declaration>declaration:{{ tool.function.name }}{{ value(tool.function) }}
        {{- '<end_function_declaration>' }}
    {%- endfor -%}
    {{ '<end_of_turn>\\n' }}
{%- endif -%}
{%- set ns = namespace(before='') -%}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'tool' -%}
        {{ '<start_function_response>' if ns.before != 'call' }}response:{{ message.name }}
        {{- '{value:' }}{{ value(message.content) }}{{ '}<end_function_response>' }}
    {%- else -%}
        {%- if ns.before != 'tool' -%}
            {{ '<start_of_turn>' }}{{ 'model' if message.role == 'assistant' else message.role }}{{ '\\n' }}
        {%- endif -%}
        {{ message.content | trim }}
        {%- for call in message.tool_calls or [] -%}
            <start_function_call>call:{{ call.function.name }}{{ value(call.function.arguments) }}
            {{- '<end_function_call>' }}
        {%- endfor -%}
        {{ '<start_function_response>' if message.tool_calls else '<end_of_turn>\\n' }}
    {%- endif -%}
    {%- set ns.before = 'call' if message.tool_calls else message.role -%}
{%- endfor -%}
{{ '<start_of_turn>model\\n' if add_generation_prompt and ns.before != 'tool' }}"""

OLMO = """\
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\n<functions>' + (tools | tojson) + '</functions>' }}
    {{- '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {{ '<|im_start|>' + ('environment' if message.role == 'tool' else message.role) + '\\n' + message.content }}
    {%- if message.role == 'system' and tools -%}{{ '<functions>' + (tools | tojson) + '</functions>' }}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{ '<function_calls>' if loop.first else '\\n' }}{{ call.function.name }}(
        {%- for key, value in call.function.arguments.items() -%}
            {{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}
        {%- endfor -%})
        {{- '</function_calls>' if loop.last }}
    {%- endfor -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""

CALL_TEMPLATES = {"function gemma": FUNCTION_GEMMA, "olmo": OLMO}
