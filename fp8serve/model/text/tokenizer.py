"""Tokenizes and decodes text with the `tokenizers` library, and renders the model's chat template.

`Tokenizer.stream` decodes one token after another (token_streams.py).

Errors of the library, including panics of its Rust code, become a ModelError while the tokenizer is loaded and a
TokenizerError afterwards. Loading also checks the cost of decoding (token_bounds.py).
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from fp8serve.errors import Fp8ServeError, ModelError, RequestError, TokenizerError, one_line, shown
from fp8serve.model.storage.files import MAX_COPIED_FILE_BYTES, present, read_optional_json, read_text
from fp8serve.model.text.assistant_spans import Conversation, Span, SpannedText, SpecialTokens, assistant_spans
from fp8serve.model.text.chat import NO_VARIABLES, ChatTemplate, Message
from fp8serve.model.text.limited_process import is_limited
from fp8serve.model.text.limited_template import LimitedTemplate, result_or_error
from fp8serve.model.text.token_bounds import TokenLengthBound, check_decoder, token_length_bound
from fp8serve.model.text.token_streams import ByteStream, WindowStream, byte_level_bytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""The files that `Tokenizer.from_dir` reads, besides the configurations that name end-of-sequence tokens."""
MAX_TEMPLATE_BYTES = 4 * 1024 * 1024  # the longest published template has 20 KB
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CANNOT_READ = "The model's tokenizer cannot read this text"
_CHARS_PER_TOKEN = 8  # an upper limit of the average in most texts
_MARGIN_TOKENS = 64  # tokens before the end of a truncated text that may differ from those of the whole text
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@contextmanager
def translate_library_errors(error_class: type[Fp8ServeError], sentence: str) -> Iterator[None]:
    """Raises `error_class`, with a message that begins with `sentence`, if a Rust library fails inside the block.

    A panic in Rust raises `PanicException`, which is no `Exception` and cannot be imported.
    """
    try:
        yield
    except (Fp8ServeError, MemoryError, OSError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise error_class(f"{sentence}: {one_line(error)}.") from None
        raise


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe. A `ChatTemplate` renders in this process, which must have
    limits (limited_process.py); a `LimitedTemplate` renders in a child process that has limits."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        template: ChatTemplate | LimitedTemplate | None,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        self._backend, self._template = backend, template
        self.bos_id: int | None = _id_of(backend, special_tokens.get("bos_token"))
        eos_id = _id_of(backend, special_tokens.get("eos_token"))
        self.eos_id: int | None = eos_id if eos_id is not None else next(iter(eos_ids), None)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (*eos_ids, self.eos_id) if i is not None))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        check_decoder(backend, list(vocabulary))
        self.vocab_size: int = len(vocabulary)
        self.bound: TokenLengthBound | None = token_length_bound(backend)
        added = backend.get_added_tokens_decoder()
        self.added_ids: dict[str, int] = {token.content: i for i, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = b'"ByteLevel"' in backend.decoder.__getstate__() if backend.decoder else False
        self._is_byte_level_only = isinstance(backend.decoder, decoders.ByteLevel)
        ends = (backend.id_to_token(i) for i in self.eos_ids)
        named = {t for t in special_tokens.values() if t in vocabulary}
        self._special_tokens = SpecialTokens(
            end=frozenset(t for t in ends if t), all=frozenset(t.content for t in added.values() if t.special) | named
        )
        self._bytes_by_id: dict[int, bytes] = {}  # a cache of `_stream_bytes`
        self._byte_ids = frozenset(i for t, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(t))

    @classmethod
    def from_dir(cls, model_dir: Path | str, today: date | None = None) -> "Tokenizer":
        """Loads the tokenizer of a model directory.

        `today` is the date that the chat template sees, or None for the machine's date. Raises ModelError if
        tokenizer.json is missing or a file is damaged.
        """
        model_dir = Path(model_dir)
        path = model_dir / "tokenizer.json"
        if not present(path):
            raise ModelError(missing_tokenizer_message(model_dir))
        text = read_text(path, MAX_COPIED_FILE_BYTES)
        config = read_optional_json(model_dir / "tokenizer_config.json")
        special = _special_tokens(read_optional_json(model_dir / "special_tokens_map.json") | config)
        source, eos_ids = template_source(model_dir, config), _eos_ids(model_dir)
        template_class = ChatTemplate if is_limited() else LimitedTemplate
        template = template_class(source, special, today) if source else None
        with translate_library_errors(ModelError, f"{path} is not a tokenizer that can be read"):
            backend = tokenizers.Tokenizer.from_str(text)
            backend.no_truncation()
            backend.no_padding()
            # transformers also treats named special tokens as special if tokenizer.json lists them as ordinary ones
            backend.add_special_tokens([t for t in special.values() if backend.token_to_id(t) is not None])
            return cls(backend, special, template, eos_ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, by its text in the vocabulary."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_text(self) -> str | None:
        return None if self._template is None else self._template.source

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template reads the variable `tools`."""
        return self._template is not None and self._template.takes_tools

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens, which decoded text omits unless a request asks for them."""
        return self._special_tokens.all

    def min_token_count(self, text: str) -> int:
        """Returns a lower bound of the number of tokens, which follows from the text's length; 0 if none is known."""
        return 0 if self.bound is None else self.bound.min_token_count(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids, by default with the special tokens that the tokenizer adds, such as BOS."""
        return self.encode_truncated(text, None, add_special_tokens)[0]

    def encode_pair(
        self, text: str, second: str | None = None, limit: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns the token ids and type ids of a text or of a pair of texts. The result has at most `limit` tokens;
        added special tokens are never truncated."""
        for part in (text, second or ""):
            _check_unicode(part)
        with translate_library_errors(TokenizerError, _CANNOT_READ):
            if limit is None:
                encoding = self._backend.encode(text, second)
                return encoding.ids, encoding.type_ids
            parts = [self._encode_prefix(part, limit, False) for part in (text, second) if part is not None]
            available = max(0, limit - self.special_count(is_pair=second is not None))
            lengths = truncated_lengths([len(encoded.ids) for encoded in parts], available)
            for encoded, length in zip(parts, lengths, strict=True):
                encoded.truncate(length)
            encoding = self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
            return encoding.ids, encoding.type_ids

    def special_count(self, *, is_pair: bool) -> int:
        """Returns the number of special tokens that the tokenizer adds to a text, or to a pair of texts."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def truncate_text(self, text: str, limit: int) -> str:
        """Returns the beginning of `text` that its first `limit` tokens cover."""
        ids, offsets = self.encode_truncated(text, limit, add_special_tokens=False)
        return text if len(ids) <= limit else text[: offsets[limit - 1][1]]

    def truncate_ids(self, ids: list[int], limit: int) -> list[int]:
        """Truncates the ids of a text to `limit`, and preserves a special token at its end."""
        return truncate_ids(ids, limit, self.special_ids)

    def encode_truncated(
        self, text: str, count: int | None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[Span]]:
        """Returns the ids and the span [start, end) of `text` that each covers, (0, 0) for added special tokens.

        The result has all ids if the text is short or `count` is None, and otherwise the first `count` + 1, so that the
        caller sees whether it must truncate. Of a long text only a prefix is tokenized, because the tokenizer needs
        about 200 bytes of memory per character.
        """
        _check_unicode(text)
        with translate_library_errors(TokenizerError, _CANNOT_READ):
            if count is None:
                result = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                result = self._encode_prefix(text, count, add_special_tokens)
        is_truncated = count is not None and len(result.ids) >= count + _MARGIN_TOKENS
        end = count + 1 if count is not None and is_truncated else None
        return result.ids[:end], result.offsets[:end]

    def _encode_prefix(self, text: str, count: int, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encodes the text, or a prefix of at least `count` + _MARGIN_TOKENS tokens."""
        chars = (count + _MARGIN_TOKENS) * _CHARS_PER_TOKEN
        while chars < len(text):
            encoding = self._backend.encode(text[:chars], add_special_tokens=add_special_tokens)
            if len(encoding.ids) >= count + _MARGIN_TOKENS:
                return encoding
            chars *= 2
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; ids outside the vocabulary have no text."""
        with translate_library_errors(TokenizerError, "The model's tokenizer cannot write these tokens"):
            try:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            except OverflowError:  # no tokenizer has ids of more than 32 bits
                return self.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens)

    def decode_known(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decodes `ids` as `decode` does. Raises RequestError for an id outside the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < 1 << 32 or self._backend.id_to_token(token_id) is None:
                raise RequestError(f"The tokenizer has no token with the id {token_id}.")
        return self.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token, also of a special one, as shown with log-probabilities."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """Returns the UTF-8 bytes that a token adds to a text, which may be a part of a character.

        `first` is True for the first token of a text. The bytes of all tokens concatenate to those of the text.
        """
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(piece)
        single = self.token_text(token_id)
        if token_id in self._byte_ids:
            return b"" if first and not single else bytes([int(piece[3:5], 16)])
        # decoding drops a leading space only at the beginning of a text, so the second of two tokens has its full text
        return (single if first else self.decode([token_id] * 2, skip_special_tokens=False)[len(single) :]).encode()

    def stream(self, skip_special_tokens: bool = True) -> ByteStream | WindowStream:
        """Returns a new incremental decoder for one output."""
        if self._is_byte_level_only and not self._byte_ids:
            return ByteStream(self._stream_bytes, self.special_ids if skip_special_tokens else frozenset())
        return WindowStream(self, skip_special_tokens)

    def _stream_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token of a byte-level vocabulary. The bytes of tokens that occurred are stored."""
        if (result := self._bytes_by_id.get(token_id)) is None:
            result = self._bytes_by_id[token_id] = self.token_bytes(token_id) if 0 <= token_id < 1 << 32 else b""
        return result

    def chat(
        self, messages: list[Message], add_generation_prompt: bool = True, variables: Mapping[str, Any] = NO_VARIABLES
    ) -> str:
        """Renders the conversation with the chat template. Raises ModelError if the model has none."""
        return self._require_template().render(messages, add_generation_prompt, variables=variables)

    def chat_to_continue(self, messages: list[Message], variables: Mapping[str, Any] = NO_VARIABLES) -> str:
        """Renders the conversation up to the end of its last message, which the model continues. Raises ModelError
        if the model has no chat template."""
        return self._require_template().render_to_continue(messages, variables)

    def encode_chat(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        """Returns the ids of the rendered conversation; special tokens are those that the template writes."""
        return self.encode(self.chat(messages, add_generation_prompt), add_special_tokens=False)

    def assistant_spans(self, conversations: Sequence[Conversation]) -> list[SpannedText | Fp8ServeError]:
        """Returns the rendered text and the assistant's spans of each conversation, or its error. Raises ModelError
        if the model has no chat template."""
        template = self._require_template()
        if isinstance(template, LimitedTemplate):
            return template.assistant_spans(conversations, self._special_tokens)
        return [
            result_or_error(assistant_spans, template, conversation, self._special_tokens)
            for conversation in conversations
        ]

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is a byte such as `<0xE4>`, which is decoded together with the bytes after it."""
        return token_id in self._byte_ids

    def _require_template(self) -> ChatTemplate | LimitedTemplate:
        if self._template is None:
            raise ModelError("The model has no chat template; send a plain prompt, or add a chat_template.jinja to it.")
        return self._template


def truncate_ids(ids: list[int], limit: int, special_ids: Collection[int]) -> list[int]:
    """Truncates the ids of a text to `limit`, and preserves a special token at its end."""
    if len(ids) <= limit:
        return ids
    return ids[: limit - 1] + ids[-1:] if ids[-1] in special_ids else ids[:limit]


def missing_tokenizer_message(model_dir: Path) -> str:
    """Returns the message for a directory without a tokenizer.json."""
    unsupported = [name for name in ("tekken.json", "tokenizer.model") if present(model_dir / name)]
    return (
        f"{model_dir} holds no tokenizer.json{f', and {unsupported[0]} is not supported' if unsupported else ''}; "
        "save the model's fast tokenizer there, with save_pretrained of transformers' AutoTokenizer."
    )


def truncated_lengths(lengths: Sequence[int], limit: int) -> list[int]:
    """Returns the lengths to which one or two texts are truncated so that they have at most `limit` tokens together.

    The longer text is truncated first, as with "longest_first" in tokenizers.
    """
    if len(lengths) == 1 or sum(lengths) <= limit:
        return [min(length, limit) for length in lengths]
    short = min(lengths)
    result = [short, limit - short] if 2 * short <= limit else [limit // 2, limit - limit // 2]
    return result if lengths[0] <= lengths[1] else result[::-1]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("The text holds half of a surrogate pair, which is not valid Unicode.") from None


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of the named special tokens, which files write as "<s>" or as {"content": "<s>", ...}."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKEN_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Returns the source of the chat template, or None if the directory has none.

    It is chat_template.jinja, or `chat_template` in tokenizer_config.json: a text, or the default of a list of named
    templates.
    """
    path = model_dir / "chat_template.jinja"
    if present(path):
        return read_text(path, MAX_TEMPLATE_BYTES)
    value = config.get("chat_template")
    if isinstance(value, list):
        by_name = {str(t.get("name")): t.get("template") for t in value if isinstance(t, dict)}
        if "default" not in by_name:
            raise ModelError(f"{model_dir} has several chat templates ({shown(sorted(by_name))}) and no default.")
        value = by_name["default"]
    if value is not None and not isinstance(value, str):
        raise ModelError(
            f"{model_dir}: chat_template in tokenizer_config.json is neither text nor a list of templates."
        )
    return value


def _eos_ids(model_dir: Path) -> tuple[int, ...]:
    """Returns the end-of-sequence ids in generation_config.json, or else in config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(model_dir / name).get("eos_token_id")
        if value is not None:
            return tuple(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    return ()
