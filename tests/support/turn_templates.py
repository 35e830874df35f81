"""Chat templates of six kinds, with the tokens that end their turns, and tokenizers of bytes for them."""

from dataclasses import dataclass, replace

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the tokens that it writes.

    Attributes:
        marks: special tokens; the first one is EOS of the released models.
        words: added tokens that are not special.
        end: the token that ends an assistant's answer.
        call_end: the token that ends an assistant's tool call; empty if the template writes no calls.
    """

    text: str
    marks: tuple[str, ...]
    end: str
    call_end: str
    words: tuple[str, ...] = ()

    def tokenizer(self, eos: str | None = None) -> PreTrainedTokenizerFast:
        """Make a tokenizer of bytes with this template. With `eos`, that is the EOS token, as base models have one."""
        special = [*self.marks, *([eos] if eos else [])]
        added = list(dict.fromkeys([*special, *self.words]))
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*added, *alphabet])}
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.words])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=eos or self.marks[0],
            bos_token=self.marks[1],
            pad_token=self.marks[0],
            chat_template=self.text,
        )


QWEN3 = ChatTemplate(
    """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set places = namespace(last_user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set places.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > places.last_user %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    marks=("<|im_end|>", "<|im_start|>"),
    words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    end="<|im_end|>",
    call_end="<|im_end|>",
)
LLAMA3 = ChatTemplate(
    """\
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {%- if builtin_tools is defined %}{{- 'Environment: ipython\\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- '<|eom_id|>' if builtin_tools is defined else '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    marks=("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    end="<|eot_id|>",
    call_end="<|eot_id|>",
)
GEMMA3 = ChatTemplate(
    """\
{{- bos_token }}
{%- set lead = '' %}
{%- if messages[0].role == 'system' %}
    {%- set lead = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- set text = message.content if message.content is string else message.content[0].text %}
    {{- (lead if loop.first else '') + text | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
""",
    marks=("<end_of_turn>", "<bos>", "<start_of_turn>"),
    end="<end_of_turn>",
    call_end="",
)
MISTRAL = ChatTemplate(
    """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT] ' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids of calls have 9 characters') }}{%- endif %}
            {{- call.function | tojson + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    marks=(
        "</s>",
        "<s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
    ),
    end="</s>",
    call_end="</s>",
)
HARMONY = ChatTemplate(
    """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception('text or a thought, not both') }}{%- endif %}
        {%- set thought = message.content or message.thinking %}
        {%- if thought %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
""",
    marks=("<|return|>", "<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>"),
    end="<|return|>",
    call_end="<|call|>",
)
OLD_HARMONY = replace(HARMONY, text=HARMONY.text.replace("<|return|>", "<|end|>"), end="<|end|>")
"""A template of that kind that ends the last answer as all others, with the token that also ends a thought."""
DEEPSEEK = ChatTemplate(
    """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}
        {{- '<｜Assistant｜>' + (message.content.split('</think>')[-1] if message.content else '') }}
        {%- if message.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
""",
    marks=("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    words=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    end="<｜end▁of▁sentence｜>",
    call_end="<｜end▁of▁sentence｜>",
)
TEMPLATES = {
    "qwen3": QWEN3,
    "llama3.1": LLAMA3,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "gpt-oss": HARMONY,
    "deepseek": DEEPSEEK,
}
