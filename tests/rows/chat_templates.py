"""Short chat templates in the formats of well-known models, written for the tests: the marks and the JSON are those of
the models, the instructions are shorter."""

from __future__ import annotations

_CHATML_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call functions. Their signatures are in <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nFor each call, return within <tool_call></tool_call>:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_CHATML_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
"""
_CHATML_ANSWER = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
"""

# Thinks unless it is told not to. Reasoning of earlier turns is left out.
QWEN3 = (
    _CHATML_TOOLS
    + """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
"""
    + _CHATML_CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + _CHATML_ANSWER
    + """\
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

HERMES = (
    _CHATML_TOOLS
    + """\
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + content }}
"""
    + _CHATML_CALLS
    + "{{- '<|im_end|>\\n' }}\n"
    + _CHATML_ANSWER
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- macro listed(tools) %}
{{- 'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endmacro %}
{%- if tools is not none and not tools_in_user_message %}{{- listed(tools) }}{%- endif %}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'ipython' or message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls|length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools is not none and tools_in_user_message %}{{- listed(tools) }}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# The prompt ends with the begin of the reasoning.
DEEPSEEK_R1 = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}{{- '<|Assistant|>' + content.split('</think>')[-1] }}"
    "{%- else %}{{- '<|User|>' + content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"
)

# Reads `reasoning_effort`, and no tools.
EFFORT = (
    "{{- 'Reasoning: ' + (reasoning_effort or 'medium') + '\\n' }}"
    "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
)

# Reads a content as a list of parts. System messages and tools have no branch.
LLAMA_GUARD = """\
{{- '<BEGIN CONVERSATION>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '\\n\\nUser:' }}
{%- elif message.role == 'assistant' %}{{- '\\n\\nAgent:' }}
{%- endif %}
{%- if message.role in ['user', 'assistant'] %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- ' ' + part.text | trim }}{%- endfor %}
{%- endif %}
{%- endfor %}
{{- '\\n\\n<END CONVERSATION>' }}"""
# Llama Guard 4 and others read the first part.
FIRST_PART = "{%- for message in messages %}{{- message.role + ': ' + message.content[0].text + '\\n' }}{%- endfor %}"

# Roles without a branch are left out, and so is a system message that is not the first message.
PHI3 = """\
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{{- '<|system|>\\n' + message.content + '<|end|>\\n' }}
{%- elif message.role == 'user' %}{{- '<|user|>\\n' + message.content + '<|end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>\\n' + message.content + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

# The last system message is written, once.
BAICHUAN = (
    "{%- set ns = namespace(system='') %}"
    "{%- for message in messages %}{%- if message.role == 'system' %}{%- set ns.system = message.content %}{%- endif %}"
    "{%- endfor %}{{- ns.system }}"
    "{%- for message in messages %}{%- if message.role != 'system' %}{{- '|' + message.content }}{%- endif %}"
    "{%- endfor %}"
)

GEMMA2 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Puts the system message before the last message of the user. Calls are written without the text next to them.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
{%- elif message.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should have a length of 9!') }}{%- endif %}
{{- call.function | tojson }}
{%- endfor %}{{- ']' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + '}' }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported') }}
{%- endif %}
{%- endfor %}"""

# A content and the arguments of a call are joined to other texts: both must be text.
DEEPSEEK_CALLS = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|Assistant|>' + message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + '\\n' + call.function.arguments }}
{%- endfor %}
{%- elif message.role == 'tool' %}{{- '<output>' + message.content }}
{%- else %}{{- '<|User|>' + message.content }}
{%- endif %}
{%- endfor %}"""
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '\\n' }}
{{- '# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ('system', 'developer') %}{% set instructions = messages[0].content %}
{%- set messages = messages[1:] %}{%- endif %}
{%- if instructions or tools %}
{{- '<|start|>developer<|message|>' + (instructions or '') }}
{%- if tools %}{{- '\\n# Tools\\nnamespace functions {' }}
{%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{%- endfor %}{{- '\\n}' }}{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + (messages[loop.index0 - 1].tool_calls[0].function.name) }}
{{- ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' + (header or '') }}{%- endif %}"""
