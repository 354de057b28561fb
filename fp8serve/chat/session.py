"""An interactive chat in the terminal. An input line is a message to the model, or a command if it begins with a slash.

Answers are printed as they are generated; reasoning and tool calls are dimmed. An error does not end the chat: a
message without an answer is dropped, and the earlier conversation is unchanged.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fp8serve.chat.models import ChatModel, ChatOptions, Message, Piece
from fp8serve.errors import Fp8ServeError, MachineError, RequestError, shown
from fp8serve.terminal import printable

PROMPT = "> "
DIM, PLAIN = "\033[2m", "\033[0m"


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


class Session:
    """A chat with one model. `read` prints a prompt and returns the next input line. At the end of the input it must
    raise EOFError."""

    def __init__(
        self, model: ChatModel, options: ChatOptions, system: str = "", read: Callable[[str], str] = input
    ) -> None:
        self.model, self.options, self.read = model, options, read
        self.conversation = Conversation(system)
        self._repeats = 0  # how often the last message was sent again, each time with another seed
        self._last_kind: str | None = None  # the kind of the last printed piece of the answer

    def run(self) -> None:
        """Runs the chat until /quit or the end of the input."""
        print(f"{printable(self.model.name)}: type /help for a list of commands, ctrl-D to quit.")
        while True:
            try:
                line = self.read(PROMPT).strip()
            except KeyboardInterrupt:
                print("\n(type ctrl-D or /quit to quit)")
                continue
            except EOFError:
                print()
                return
            if line == "/quit":
                return
            self.handle_line(line)

    def handle_line(self, line: str) -> None:
        """Runs a command or sends a message. Prints the error if it fails."""
        try:
            if line.startswith("/"):
                self._run_command(*line[1:].split(maxsplit=1))
            elif line:
                self._repeats = 0
                self._send(line)
        except Fp8ServeError as problem:
            print(printable(_with_advice(problem)))

    # -- commands ------------------------------------------------------------------------------------------------------

    def _run_command(self, name: str = "", text: str = "") -> None:
        if name not in COMMANDS:
            raise RequestError(f"There is no command {shown('/' + name)}; /help lists them.")
        COMMANDS[name](self, text.strip())

    def help(self, text: str) -> None:
        """show this list"""
        width = max(map(len, COMMANDS))
        for name, command in COMMANDS.items():
            print(f"/{name:{width}}  {command.__doc__}")
        print(f"/{'quit':{width}}  quit, like ctrl-D; ctrl-C stops an answer")

    def reset(self, text: str) -> None:
        """start a new conversation with the same system message"""
        self.conversation = Conversation(self.conversation.system)
        print("(started a new conversation)")

    def system(self, text: str) -> None:
        """TEXT: set the system message; without TEXT: remove it"""
        self.conversation.system = text
        print("(applies from the next answer on)")

    def regenerate(self, text: str) -> None:
        """generate another answer to the last message"""
        if not self.conversation.turns:
            raise RequestError("There is no message to answer again.")
        last_turn = self.conversation.turns.pop()
        self._repeats += 1
        has_answer = False
        try:
            has_answer = self._send(last_turn[0])
        finally:
            self.conversation.turns += [] if has_answer else [last_turn]

    def save(self, text: str) -> None:
        """FILE: save the conversation as a line of training data"""
        if not text:
            raise RequestError("Name a file, for example: /save chat.jsonl")
        self.conversation.save(Path(text))
        print(f"(saved to {text})")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _send(self, message: str) -> bool:
        """Sends a message and prints the answer. Returns whether there is an answer, which may be cut off by ctrl-C. If
        there is one, adds it to the conversation."""
        seed = None if self.options.seed is None else self.options.seed + self._repeats
        texts: list[str] = []
        self._last_kind = None
        try:
            answer_pieces = self.model.answer(self.conversation.messages(message), replace(self.options, seed=seed))
            with closing(answer_pieces) as pieces:  # type: ignore[type-var]  # a generator
                for piece in pieces:
                    self._print(piece)
                    texts += [piece.text] * (piece.kind == "text")
        except KeyboardInterrupt:
            print(f"{PLAIN} (stopped)", end="")
        except Fp8ServeError:
            print(PLAIN if self._last_kind is None else PLAIN + "\n", end="")
            raise
        print(PLAIN)
        answer = "".join(texts)
        if answer:
            self.conversation.turns.append((message, answer))
        return bool(answer)

    def _print(self, piece: Piece) -> None:
        """Prints a piece of an answer. A new kind of piece, or a new tool call, starts on a new line."""
        if piece.text:
            starts_line = piece.kind != self._last_kind or piece.starts_call
            if self._last_kind is not None and starts_line:
                print(PLAIN)
            if starts_line:
                print({"text": PLAIN, "reasoning": DIM, "tool": f"{DIM}calls "}[piece.kind], end="")
            self._last_kind = piece.kind
            print(printable(piece.text) + " " * piece.starts_call, end="", flush=True)


COMMANDS: dict[str, Callable[[Session, str], None]] = {
    "help": Session.help, "reset": Session.reset, "system": Session.system, "regenerate": Session.regenerate,
    "save": Session.save,
}  # fmt: skip


def _with_advice(problem: Fp8ServeError) -> str:
    """Returns the message of an error. If the context is full, adds the commands that help."""
    is_full = "context" in str(problem) and "token" in str(problem)
    return f"{problem} Use /reset to start a new conversation, and /save to save this one." if is_full else str(problem)


def print_answer(model: ChatModel, options: ChatOptions, system: str, question: str) -> None:
    """Prints the text of the answer to one question."""
    messages = Conversation(system).messages(question)
    with closing(model.answer(messages, options)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            if piece.kind == "text":
                print(piece.text, end="", flush=True)
    print(flush=True)
