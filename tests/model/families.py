"""Chat templates with the traps of those in use: marks of turns, and texts trimmed, dropped, moved or left out.

`{% generation %}` stands around what the assistant wrote and the mark that ends its turn: with it a template is the
oracle's (transformers' own mask, which TRL trains with), without it (`unmarked`) it is what models are published with.
"""

import re

G, E = "{% generation %}", "{% endgeneration %}"


def unmarked(template: str) -> str:
    return re.sub(r"{% (end)?generation %}", "", template)


def _turns(header: str, end: str, said: str = "m.content", prompt: str | None = None, after: str = "") -> str:
    """Every message behind a header that names its role."""
    head = header.format("{{ m.role }}")
    asked = header.format("assistant") if prompt is None else prompt
    return (
        "{{ bos_token }}{% for m in messages %}" + head + "{% if m.role == 'assistant' %}" + G + "{{ " + said + " }}"
        + end + E + "{% else %}{{ " + said + " }}" + end + "{% endif %}" + after + "{% endfor %}"
        + "{% if add_generation_prompt %}" + asked + "{% endif %}"
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
OPEN = _turns("<{}>", "{% if not loop.last %}{{ eos_token }}{% endif %}")  # the last turn is left open
HARMONY = (  # only the last turn ends with a mark of its own
    "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}" + G
    + "<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}" + E
    + "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # fmt: skip
NEMOTRON = (  # trims the end of a text only, and asks for reasoning that earlier turns do not have
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
    """The special tokens of a tokenizer of this family."""
    found = re.findall(r"<\|[A-Za-z_]+\|>|<(?:start|end)_of_turn>|\[/?INST\]", template)
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant")] if "'<|' + m.role" in template else []
    return sorted({*found, *roles})
