"""Chat templates like those of published models, with their difficulties: turn markers, and texts that a template
trims, drops or moves.

`{% generation %}` encloses the assistant's text and the marker that ends its turn. From templates with these blocks,
transformers computes the expected loss mask, with which TRL trains; published templates have no blocks (`unmarked`).
"""

import re

G, E = "{% generation %}", "{% endgeneration %}"


def unmarked(template: str) -> str:
    return re.sub(r"{% (end)?generation %}", "", template)


def _turns(header: str, end: str, content: str = "m.content", prompt: str | None = None, after: str = "") -> str:
    """Returns a template that writes each message after a header with its role."""
    head = header.format("{{ m.role }}")
    generation_prompt = header.format("assistant") if prompt is None else prompt
    return (
        "{{ bos_token }}{% for m in messages %}" + head + "{% if m.role == 'assistant' %}" + G + "{{ " + content + " }}"
        + end + E + "{% else %}{{ " + content + " }}" + end + "{% endif %}" + after + "{% endfor %}"
        + "{% if add_generation_prompt %}" + generation_prompt + "{% endif %}"
    )  # fmt: skip


_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
CHATML = _turns("<|im_start|>{}\n", "<|im_end|>", after="{{ '\n' }}")
QWEN3 = (
    "{% for m in messages %}{% set said = m.content %}{% set thought = '' %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    + G + "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}<|im_end|>" + E
    + "{% else %}<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
LLAMA3 = _turns("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "m.content | trim")
LLAMA2 = (
    _ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} " + G + "{{ m.content.strip() }} {{ eos_token }}" + E + "{% endif %}{% endfor %}"
)  # fmt: skip
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.last %}{{ '[INST] be kind\n\n' + m.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
    "{% else %} " + G + "{{ m.content }}{{ eos_token }}" + E + "{% endif %}{% endfor %}"
)  # fmt: skip
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}" + G + "{{ m.content }}<|end|>"
    "{% if loop.last and not add_generation_prompt %}{{ '\n' + eos_token }}{% endif %}" + E
    + "{% else %}{{ m.content }}<|end|>{% endif %}{% if not loop.last or m.role == 'user' %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% elif messages[-1].role == 'user' %}{{ eos_token }}{% endif %}"
)  # fmt: skip
GEMMA = (
    _ALTERNATE + "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}" + G + "{{ m.content | trim }}<end_of_turn>" + E
    + "{% else %}{{ m.content | trim }}<end_of_turn>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)  # fmt: skip
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
    "{% set said = m.content %}{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>" + G + "{{ said }}<|eos|>" + E
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)  # fmt: skip
ZEPHYR = _turns("<|{}|>\n", "{{ eos_token }}", after="{{ '\n' }}")
VICUNA = (
    "{{ bos_token }}A chat between a user and an assistant.{% for m in messages %}{% if m.role == 'user' %}"
    " USER: {{ m.content }}{% else %} ASSISTANT:" + G + " {{ m.content }}{{ eos_token }}" + E
    + "{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)  # fmt: skip
COMMAND = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|turn|><|user|>{{ m.content.strip() }}<|close|>"
    "{% else %}<|turn|><|bot|>" + G + "{{ m.content.strip() }}<|answered|><|close|>" + E
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn|><|bot|>{% endif %}"
)  # fmt: skip
GLM = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}" + G + "{{ m.content }}"
    + E + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '\n' }}{% endif %}"
)  # fmt: skip
ALPACA = (
    "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n{% else %}### Response:\n"
    + G + "{{ m.content }}" + E
    + "{{ '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)  # fmt: skip
GRANITE = _turns("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>", after="{{ '\n' }}")
DATED = (
    "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\n' }}"
    + CHATML.replace("{{ bos_token }}", "")
)  # fmt: skip
OPEN = _turns("<{}>", "{% if not loop.last %}{{ eos_token }}{% endif %}")  # the last turn has no end marker
HARMONY = (  # only the last turn has an end marker of its own
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}" + G
    + "<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}" + E
    + "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # fmt: skip
NEMOTRON = (  # strips trailing white space only, and its generation prompt opens reasoning, which earlier turns lack
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}{{ '<think></think>' }}" + G
    + "{{ (' ' + m.content).rstrip()[1:] }}<|im_end|>" + E
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)  # fmt: skip
LEFT = _turns("<|{}|>", "{{ eos_token }}", "m.content.lstrip()")

FAMILIES = {
    "chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "llama2": LLAMA2, "mistral": MISTRAL, "phi3": PHI3,
    "gemma": GEMMA, "r1": R1, "zephyr": ZEPHYR, "vicuna": VICUNA, "command": COMMAND, "glm": GLM, "alpaca": ALPACA,
    "granite": GRANITE, "dated": DATED, "open": OPEN, "harmony": HARMONY, "nemotron": NEMOTRON, "left": LEFT,
}  # fmt: skip


def special_tokens(template: str) -> list[str]:
    """Returns the special tokens that occur in the template."""
    tokens = re.findall(r"<\|[A-Za-z_]+\|>|<(?:start|end)_of_turn>|\[/?INST\]", template)
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant")] if "'<|' + m.role" in template else []
    return sorted({*tokens, *roles})
