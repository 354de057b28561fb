"""The conversation of a chat: an optional system message, then user and assistant messages in turn."""

import json
from pathlib import Path
from typing import Any

from fp8serve.errors import MachineError, RequestError

Message = dict[str, Any]


class Conversation:
    """A list of turns. `system` is the system message; it is empty if there is none."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []  # (user message, assistant message)

    def messages(self, prompt: str | None = None) -> list[Message]:
        """Returns the messages of the conversation. `prompt` is added as a last user message."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return messages if prompt is None else [*messages, {"role": "user", "content": prompt}]

    def save(self, file: Path) -> None:
        """Writes the conversation to a new file, as a line of JSON that `finetune --data` reads. Raises RequestError if
        there are no turns, and MachineError if the file exists or cannot be written."""
        if not self.turns:
            raise RequestError("There is nothing to save yet.")
        try:
            with file.expanduser().open("x", encoding="utf-8") as out:
                out.write(json.dumps({"messages": self.messages()}, ensure_ascii=False) + "\n")
        except OSError as problem:
            raise MachineError(f"{file} cannot be written: {problem.strerror}; use another name.") from None
