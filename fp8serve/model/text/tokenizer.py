"""Text to token ids and back: `tokenizer.json` through the `tokenizers` library, and the model's chat template.

Incremental decoding. Token texts do not simply concatenate: one character may span several tokens, and SentencePiece
vocabularies drop a leading space only at the very start. So a stream decodes a small window that starts at the last
token whose text was given out, and gives out the new text. Text that may still change is held back:
  * byte-level BPE: a last U+FFFD may be the start of a character; everything before it is settled;
  * byte fallback (`<0xE4>` tokens): a run of byte tokens is decoded as a whole, all or nothing, so all of it is held
    until a token of another kind comes.
The pieces then concatenate to exactly what `decode` gives for the whole, on any sequence of ids. No torch here.

A failure of the library, a panic of its Rust code included, is a ModelError while the tokenizer is read, and a
TokenizerError for a text or for tokens. How much text and time a token may cost is checked when the tokenizer is read
(text_bound.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers

from fp8serve.errors import Fp8ServeError, ModelError, RequestError, TokenizerError, one_line, shown
from fp8serve.model.storage.files import MAX_CARRIED_BYTES, present, read_optional_json, read_text
from fp8serve.model.text.chat import NOTHING, ChatTemplate, Message
from fp8serve.model.text.limited_process import is_limited
from fp8serve.model.text.limited_template import LimitedTemplate, outcome
from fp8serve.model.text.text_bound import TextBound, check_decoder, text_bound
from fp8serve.model.text.turns import Conversation, MarkedText, Markers, Span, assistant_spans

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What is read of a directory, besides the tokens that end a sequence."""
MAX_TEMPLATE_BYTES = 4 * 1024 * 1024  # the longest published template has 20 KB
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CANNOT_READ = "The model's tokenizer cannot read this text"
_CHARS_PER_TOKEN, _MARGIN = 8, 64  # the most on average, for most texts; how far a cut may change the tokens before it
_MAX_WINDOW, _SHORT_WINDOW = 256, 8  # tokens that a stream decodes at once, and what it goes back to
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@contextmanager
def library_failures(kind: type[Fp8ServeError], sentence: str) -> Iterator[None]:
    """Inside the block, a failure of a library written in Rust raises `kind`, whose message begins with `sentence`.

    A panic reaches Python as a `PanicException`, which is no `Exception` and cannot be imported; Rust has written a
    report to standard error before.
    """
    try:
        yield
    except (Fp8ServeError, MemoryError, OSError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{sentence}: {one_line(error)}.") from None
        raise


class Tokenizer:
    """One model's tokenizer. Thread-safe; building it reads three small files.

    template: a `LimitedTemplate`, or a `ChatTemplate` in a process that has limits.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        template: ChatTemplate | LimitedTemplate | None,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        self._backend, self._template = backend, template
        self.bos_id: int | None = _id_of(backend, special_tokens.get("bos_token"))
        own_eos = _id_of(backend, special_tokens.get("eos_token"))
        self.eos_id: int | None = own_eos if own_eos is not None else next(iter(eos_ids), None)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (*eos_ids, self.eos_id) if i is not None))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        check_decoder(backend, list(vocabulary))
        self.vocab_size: int = len(vocabulary)
        self.bound: TextBound | None = text_bound(backend)
        added = backend.get_added_tokens_decoder()
        self.added_ids: dict[str, int] = {token.content: i for i, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = b'"ByteLevel"' in backend.decoder.__getstate__() if backend.decoder else False
        ends = (backend.id_to_token(i) for i in self.eos_ids)
        named = {t for t in special_tokens.values() if t in vocabulary}
        self._markers = Markers(
            end=frozenset(t for t in ends if t),
            special=frozenset(t.content for t in added.values() if t.special) | named,
        )
        self._byte_ids = frozenset(i for t, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(t))

    @classmethod
    def from_dir(cls, model_dir: Path | str, today: date | None = None) -> "Tokenizer":
        """`today` is the date that the chat template gets; None: the machine's.

        ModelError: the directory has no tokenizer.json, or one of its tokenizer files is damaged.
        """
        model_dir = Path(model_dir)
        path = model_dir / "tokenizer.json"
        if not present(path):
            raise ModelError(lacks_tokenizer(model_dir))
        text = read_text(path, MAX_CARRIED_BYTES)
        config = read_optional_json(model_dir / "tokenizer_config.json")
        special = _special_tokens(read_optional_json(model_dir / "special_tokens_map.json") | config)
        source, eos_ids = template_source(model_dir, config), _eos_ids(model_dir)
        kind = ChatTemplate if is_limited() else LimitedTemplate
        template = kind(source, special, today) if source else None
        with library_failures(ModelError, f"{path} is not a tokenizer that can be read"):
            backend = tokenizers.Tokenizer.from_str(text)
            backend.no_truncation()
            backend.no_padding()
            # As transformers does: a named special token counts as one even where tokenizer.json lists it as a word.
            backend.add_special_tokens([t for t in special.values() if backend.token_to_id(t) is not None])
            return cls(backend, special, template, eos_ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_text(self) -> str | None:
        """The source of the chat template."""
        return None if self._template is None else self._template.source

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self._template is not None and self._template.takes_tools

    @property
    def special_texts(self) -> frozenset[str]:
        """Tokens that are left out of text unless they are requested."""
        return self._markers.special

    def fewest_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of `text`, from its length alone; 0 if there is none."""
        return 0 if self.bound is None else self.bound.fewest_tokens(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the model's own BOS, or whatever its post-processor adds, if `add_special_tokens`."""
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_pair(self, text: str, second: str | None = None, most: int | None = None) -> tuple[list[int], list[int]]:
        """Ids of a text, or of two as the model reads a pair; and for each id its text, 0 or 1.

        most: the limit of tokens in all; special ones around a text are never cut.
        """
        for part in (text, second or ""):
            _check_unicode(part)
        with library_failures(TokenizerError, _CANNOT_READ):
            if most is None:
                encoding = self._backend.encode(text, second)
                return encoding.ids, encoding.type_ids
            parts = [self._beginning(part, most, False) for part in (text, second) if part is not None]
            room = max(0, most - self.special_count(is_pair=second is not None))
            for encoded, share in zip(parts, shares([len(encoded.ids) for encoded in parts], room), strict=True):
                encoded.truncate(share)
            encoding = self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
            return encoding.ids, encoding.type_ids

    def special_count(self, *, is_pair: bool) -> int:
        """The number of tokens around a text, or around and between a pair of texts."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def beginning(self, text: str, most: int) -> str:
        """The beginning of `text` that its first `most` tokens cover."""
        ids, offsets = self.encode_beginning(text, most, add_special_tokens=False)
        return text if len(ids) <= most else text[: offsets[most - 1][1]]

    def first_of(self, ids: list[int], most: int) -> list[int]:
        """The first `most`; the end is cut off, except for the special token with which a text ends."""
        if len(ids) <= most:
            return ids
        return ids[: most - 1] + ids[-1:] if ids[-1] in self.special_ids else ids[:most]

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[Span]]:
        """Ids and, for each, the characters [start, end) of `text` that it covers; (0, 0) for added ones."""
        _check_unicode(text)
        with library_failures(TokenizerError, _CANNOT_READ):
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return encoding.ids, encoding.offsets

    def encode_beginning(
        self, text: str, tokens: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[Span]]:
        """As `encode_with_offsets`, for the part of `text` that gives the first `tokens`; None: for all of it.

        A tokenizer needs about 200 bytes per character, so a whole book is not tokenized for its first page. The result
        may end after the first `tokens` and before the end of the text.
        """
        if tokens is None:
            return self.encode_with_offsets(text, add_special_tokens)
        _check_unicode(text)
        with library_failures(TokenizerError, _CANNOT_READ):
            result = self._beginning(text, tokens, add_special_tokens)
        whole = len(result.ids) < tokens + _MARGIN
        return (result.ids, result.offsets) if whole else (result.ids[: tokens + 1], result.offsets[: tokens + 1])

    def _beginning(self, text: str, tokens: int, add_special_tokens: bool) -> tokenizers.Encoding:
        """For the whole text, or for a part that gives more than `tokens`."""
        chars = (tokens + _MARGIN) * _CHARS_PER_TOKEN
        while chars < len(text):
            encoding = self._backend.encode(text[:chars], add_special_tokens=add_special_tokens)
            if len(encoding.ids) >= tokens + _MARGIN:
                return encoding
            chars *= 2
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary have none."""
        with library_failures(TokenizerError, "The model's tokenizer cannot write these tokens"):
            try:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            except OverflowError:  # no tokenizer has ids of more than 32 bits
                return self.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens)

    def decode_known(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """As `decode`; RequestError names the first id that the tokenizer does not have."""
        for token_id in ids:
            if not 0 <= token_id < 1 << 32 or self._backend.id_to_token(token_id) is None:
                raise RequestError(f"The tokenizer has no token with the id {token_id}.")
        return self.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token on its own, specials included, as shown beside log-probabilities."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """The UTF-8 bytes that one token adds to a text, often part of a character. `first`: no text is before it.

        The bytes of all tokens of a text, joined, are the text's.
        """
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(piece)
        alone = self.token_text(token_id)
        if token_id in self._byte_ids:
            return b"" if first and not alone else bytes([int(piece[3:5], 16)])
        # a leading space is lost only at the start of a text: the text that a second such token adds is the whole token
        return (alone if first else self.decode([token_id] * 2, skip_special_tokens=False)[len(alone) :]).encode()

    def stream(self, skip_special_tokens: bool = True) -> "IncrementalDecoder":
        """A new incremental decoder for one answer."""
        return IncrementalDecoder(self, skip_special_tokens)

    def chat(
        self, messages: list[Message], add_generation_prompt: bool = True, variables: Mapping[str, Any] = NOTHING
    ) -> str:
        """The conversation as the model's template writes it, with further variables. ModelError: it has none."""
        return self._require_template().render(messages, add_generation_prompt, variables=variables)

    def begun_chat(self, messages: list[Message], variables: Mapping[str, Any] = NOTHING) -> str:
        """The conversation up to the end of its last message. ModelError: the model has no template."""
        return self._require_template().render_begun(messages, variables)

    def encode_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of the rendered conversation. The template writes BOS itself if the model needs one, so none is added."""
        return self.encode(self.chat(messages, add_generation_prompt), add_special_tokens=False)

    def assistant_spans(self, conversations: Sequence[Conversation]) -> list[MarkedText | Fp8ServeError]:
        """`turns.assistant_spans` of each, or its error. ModelError when the model has no chat template."""
        template = self._require_template()
        if isinstance(template, LimitedTemplate):
            return template.assistant_spans(conversations, self._markers)
        return [outcome(assistant_spans, template, conversation, self._markers) for conversation in conversations]

    def holds_back(self, token_id: int) -> bool:
        """Whether the text of this token depends on the token after it (a byte of a longer run)."""
        return token_id in self._byte_ids

    def _require_template(self) -> ChatTemplate | LimitedTemplate:
        if self._template is None:
            raise ModelError("The model has no chat template; send a plain prompt, or add a chat_template.jinja to it.")
        return self._template


def lacks_tokenizer(model_dir: Path) -> str:
    """The message for the owner of a directory without a tokenizer.json."""
    others = [name for name in ("tekken.json", "tokenizer.model") if present(model_dir / name)]
    return (
        f"{model_dir} holds no tokenizer.json{', and ' + others[0] + ' is not read' if others else ''}; "
        "save the model's fast tokenizer there, with save_pretrained of transformers' AutoTokenizer."
    )


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """How many tokens of one text, or of each of two, fit into `room`: of two the longer one is shortened first, as in
    tokenizers ("longest_first")."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    short = min(lengths)
    both = [short, room - short] if 2 * short <= room else [room // 2, room - room // 2]
    return both if lengths[0] <= lengths[1] else both[::-1]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("The text holds half of a surrogate pair, which is not valid Unicode.") from None


class IncrementalDecoder:
    """Takes ids one by one and gives settled text; the module's docstring says which text is held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []  # starts with the tokens of the last settled text, for their context
        self._context = 0  # how many tokens of the window are context
        self._sent = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        """The text that this token settles, often its own, sometimes empty. Costs one decode of a few tokens."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        if self._tokenizer.holds_back(token_id):
            return ""
        text = self._text()
        unsettled = text.endswith(_REPLACEMENT)
        new = text[self._sent : len(text) - 1] if unsettled else text[self._sent :]
        self._sent += len(new)
        if new and not unsettled:
            del self._window[: self._context]  # the tokens just settled are the next context
            self._context = len(self._window)
            self._sent = len(self._text())
        elif len(self._window) > _MAX_WINDOW:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """The text held back, at the end of the answer; resets the decoder."""
        rest = self._text()[self._sent :] if self._window else ""
        self._window, self._context, self._sent = [], 0, 0
        return rest

    def _shorten(self, text: str) -> None:
        """Goes back to the last tokens if they decode to the end of `text`. A vocabulary without text, or with nothing
        but halves of characters, would otherwise have all of an answer decoded for each of its tokens."""
        last = self._window[-_SHORT_WINDOW:]
        rest, held = self._tokenizer.decode(last, self._skip), len(text) - self._sent
        if text.endswith(rest) and held <= len(rest):
            self._window, self._context, self._sent = last, 0, len(rest) - held

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


def _byte_symbols() -> dict[str, int]:
    """The printable character by which byte-level BPE writes each byte in its vocabulary -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_SYMBOLS = _byte_symbols()


def _byte_level_bytes(piece: str) -> bytes:
    """Reads a piece as the decoder does: a word with a character that stands for no byte is an added token, and plain
    text."""
    if all(symbol in _BYTE_SYMBOLS for symbol in piece):
        return bytes(_BYTE_SYMBOLS[symbol] for symbol in piece)
    return piece.encode()


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Written as "<s>" or as {"content": "<s>", ...}."""
    tokens = {name: config.get(name) for name in _NAMED}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's `chat_template`: a string, or a list of named ones."""
    path = model_dir / "chat_template.jinja"
    if present(path):
        return read_text(path, MAX_TEMPLATE_BYTES)
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
        if "default" not in named:
            raise ModelError(f"{model_dir} has several chat templates ({shown(sorted(named))}) and no default.")
        value = named["default"]
    if value is not None and not isinstance(value, str):
        raise ModelError(
            f"{model_dir}: chat_template in tokenizer_config.json is neither text nor a list of templates."
        )
    return value


def _eos_ids(model_dir: Path) -> tuple[int, ...]:
    """End-of-sequence ids that generation_config.json or else config.json names."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(model_dir / name).get("eos_token_id")
        if value is not None:
            return tuple(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return ()
