"""A chat at the terminal: each input is a question, or a command that begins with a slash.

Answers appear as they come, after the model's reasoning and tool calls in dim letters. No error ends the chat: a
question without an answer is dropped, and the conversation before it is kept.
"""

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fp8serve.chat.conversation import Conversation
from fp8serve.chat.models import ChatModel, ChatOptions
from fp8serve.client.answers import Piece
from fp8serve.errors import Fp8ServeError, RequestError, shown
from fp8serve.terminal import printable

PROMPT = "> "
DIM, PLAIN = "\033[2m", "\033[0m"


class Session:
    """`read` gives the next line, and raises EOFError at the end of the input."""

    def __init__(
        self, model: ChatModel, options: ChatOptions, system: str = "", read: Callable[[str], str] = input
    ) -> None:
        self.model, self.options, self.read = model, options, read
        self.conversation = Conversation(system)
        self._again = 0  # how often the last question was repeated, with another seed each time
        self._last_kind: str | None = None  # the kind of piece that was written last

    def run(self) -> None:
        """Until /quit or the end of the input."""
        print(f"{printable(self.model.name)}: /help lists the commands, ctrl-D leaves.")
        while True:
            try:
                line = self.read(PROMPT).strip()
            except KeyboardInterrupt:
                print("\n(ctrl-D or /quit leaves)")
                continue
            except EOFError:
                print()
                return
            if line == "/quit":
                return
            self.take(line)

    def take(self, line: str) -> None:
        """One line of input. Reports an error in it."""
        try:
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            elif line:
                self._again = 0
                self._ask(line)
        except Fp8ServeError as problem:
            print(printable(_advised(problem)))

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, name: str = "", text: str = "") -> None:
        if name not in COMMANDS:
            raise RequestError(f"There is no command {shown('/' + name)}; /help lists them.")
        COMMANDS[name](self, text.strip())

    def help(self, text: str) -> None:
        """this list"""
        width = max(map(len, COMMANDS))
        for name, command in COMMANDS.items():
            print(f"/{name:{width}}  {command.__doc__}")
        print(f"/{'quit':{width}}  leave, as ctrl-D does; ctrl-C stops an answer")

    def reset(self, text: str) -> None:
        """forget the conversation; the system message stays"""
        self.conversation = Conversation(self.conversation.system)
        print("(a new conversation)")

    def system(self, text: str) -> None:
        """TEXT: tell the model this before all else; without TEXT: nothing"""
        self.conversation.system = text
        print("(from the next answer on)")

    def regenerate(self, text: str) -> None:
        """another answer to the last question"""
        if not self.conversation.turns:
            raise RequestError("There is no question to answer again.")
        last = self.conversation.turns.pop()
        self._again += 1
        answered = False
        try:
            answered = self._ask(last[0])
        finally:
            self.conversation.turns += [] if answered else [last]

    def save(self, text: str) -> None:
        """FILE: write the conversation as a line of training data"""
        if not text:
            raise RequestError("Give a file: /save chat.jsonl")
        self.conversation.save(Path(text))
        print(f"(saved to {text})")

    # -- answers -------------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> bool:
        """Whether there is an answer, whole or cut off by ctrl-C; if so it becomes part of the conversation."""
        seed = None if self.options.seed is None else self.options.seed + self._again
        texts: list[str] = []
        self._last_kind = None
        try:
            answer_pieces = self.model.answer(self.conversation.messages(question), replace(self.options, seed=seed))
            with closing(answer_pieces) as pieces:  # type: ignore[type-var]  # a generator
                for piece in pieces:
                    self._show(piece)
                    texts += [piece.text] * (piece.kind == "text")
        except KeyboardInterrupt:
            print(f"{PLAIN} (stopped)", end="")
        except Fp8ServeError:
            print(PLAIN if self._last_kind is None else PLAIN + "\n", end="")
            raise
        print(PLAIN)
        answer = "".join(texts)
        if answer:
            self.conversation.turns.append((question, answer))
        return bool(answer)

    def _show(self, piece: Piece) -> None:
        if piece.text:
            if self._last_kind is not None and (piece.kind != self._last_kind or piece.opens):
                print(PLAIN)
            if piece.kind != self._last_kind or piece.opens:
                print({"text": PLAIN, "reasoning": DIM, "tool": f"{DIM}calls "}[piece.kind], end="")
            self._last_kind = piece.kind
            print(printable(piece.text) + " " * piece.opens, end="", flush=True)


COMMANDS: dict[str, Callable[[Session, str], None]] = {
    "help": Session.help, "reset": Session.reset, "system": Session.system, "regenerate": Session.regenerate,
    "save": Session.save,
}  # fmt: skip


def _advised(problem: Fp8ServeError) -> str:
    full = "context" in str(problem) and "token" in str(problem)
    return f"{problem} /reset begins a new conversation; /save keeps this one." if full else str(problem)


def answer_lines(model: ChatModel, options: ChatOptions, system: str, questions: list[str]) -> None:
    """The answers to questions of one conversation on standard output, and nothing else."""
    conversation = Conversation(system)
    for question in questions:
        texts = []
        with closing(model.answer(conversation.messages(question), options)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                if piece.kind == "text":
                    texts.append(piece.text)
                    print(piece.text, end="", flush=True)
        print(flush=True)
        conversation.turns.append((question, "".join(texts)))
    sys.stdout.flush()
