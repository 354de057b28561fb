"""The conversation so far: a system message, then questions and answers in turn."""

import json
from pathlib import Path
from typing import Any

from fp8serve.errors import MachineError, RequestError

Message = dict[str, Any]


class Conversation:
    """`turns`: (question, answer); `system`: the system message, empty for none."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[tuple[str, str]] = []

    def messages(self, question: str | None = None) -> list[Message]:
        """All of it, with a question at the end that has no answer yet."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question_before, answer in self.turns:
            messages += [{"role": "user", "content": question_before}, {"role": "assistant", "content": answer}]
        return messages if question is None else [*messages, {"role": "user", "content": question}]

    def save(self, file: Path) -> None:
        """Saves it as one line of JSON, which `finetune --data` reads. An existing file is not overwritten."""
        if not self.turns:
            raise RequestError("There is nothing to save yet.")
        try:
            with file.expanduser().open("x", encoding="utf-8") as out:
                out.write(json.dumps({"messages": self.messages()}, ensure_ascii=False) + "\n")
        except OSError as problem:
            raise MachineError(f"{file} cannot be written: {problem.strerror}; give another name.") from None
