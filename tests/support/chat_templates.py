"""Chat templates of six kinds, written anew as far as the tests of rows need what distinguishes the kinds.

Each says in its comment which form of messages it takes, as the templates of released models of that kind do.
"""

# Content is text, all else is left out; arguments may be an object or text; tools' replies are a turn of the user.
QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ content }}{% for call in message.tool_calls or [] %}{% set call = call.function or call %}
<tool_call>
{"name": "{{ call.name }}", "arguments": \
{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Arguments are an object, since they are written as JSON; so is a tool's reply, be it text or an object.
LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

{{ system }}<|eot_id|>
{%- if tools %}<|start_header_id|>user<|end_header_id|>

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ messages[0]['content'] | trim }}<|eot_id|>{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{% if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}\
{% else %}{{ message.content }}{% endif %}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# Content is text or parts; there are no tools; turns alternate; a system message goes before the first user's turn.
GEMMA3 = """\
{{- bos_token }}
{%- set before = '' %}
{%- if messages[0].role == 'system' %}
{%- set before = (messages[0].content if messages[0].content is string else messages[0].content[0].text) + '\n\n' %}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ before if loop.first else '' }}
{%- if message.content is string %}{{ message.content | trim }}
{%- elif message.content is iterable %}{% for item in message.content %}
{%- if item.type == 'image' %}<start_of_image>{% elif item.type == 'text' %}{{ item.text | trim }}{% endif %}
{%- endfor %}
{%- else %}{{ raise_exception('invalid content') }}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Ids of calls have nine characters; tools stand before the last turn of the user; content is text.
MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]
{{- (system if loop.last else '') + message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of nine characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{"content": {{ message.content | tojson }}}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"""

# A turn of the assistant has a channel; calls are turns of their own; tools are described in a developer's message.
HARMONY = """\
<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- set instructions = '' %}
{%- if messages[0].role in ['system', 'developer'] %}
{%- set instructions = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- if instructions or tools %}<|start|>developer<|message|># Instructions

{{ instructions }}{% for tool in tools or [] %}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;{% endfor %}<|end|>{% endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content %}<|start|>assistant<|channel|>analysis<|message|>{{ message.content }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function or message.tool_calls[0] %}{% set last.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{%- if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}
{%- elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Arguments are text, which is joined to other text; a turn has calls only where its content is null.
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}{% endif %}{% endfor %}
{%- for tool in tools or [] %}
{{ tool['function'] | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}<Assistant><calls>
{%- for call in message['tool_calls'] %}
{{- '<call>' + call['function']['name'] + '\n' + call['function']['arguments'] + '</call>' }}{% endfor %}</calls></s>
{%- elif message['role'] == 'assistant' %}{{ '<Assistant>' + message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}{{ '<output>' + message['content'] + '</output>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<Assistant>{% endif %}"""

TEMPLATES = {
    "qwen3": QWEN3,
    "llama": LLAMA,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
}
