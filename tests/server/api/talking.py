"""A server whose model writes exactly its last instruction."""

from typing import Any

from fp8serve.model.text.chat import ChatTemplate
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenizerFacts
from tests.server.fakes import FakeEngine, Launcher, byte_backend

LAST = "{% if tools %}{% endif %}{{ messages[-1].content }}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


class EchoLauncher(Launcher):
    """Starts engines that repeat their prompt, which the template makes of the last message alone."""

    async def __call__(self, source: Any) -> tuple[FakeEngine, TokenizerFacts]:
        engine, _ = await super().__call__(source)
        tokenizer = Tokenizer(byte_backend(), {"eos_token": "<eos>"}, ChatTemplate(LAST, {}))
        return engine, TokenizerFacts.from_tokenizer(tokenizer)


def echo(directory: Any) -> EchoLauncher:
    (directory / "chat_template.jinja").write_text(LAST)
    return EchoLauncher()
