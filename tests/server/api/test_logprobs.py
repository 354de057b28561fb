"""Log-probabilities of a text: the tokens' bytes join to it, offsets point into it, and no alternatives are merged."""

import json
from typing import Any

import pytest

from fp8serve.engine.output import RequestOutput, TokenLogprob
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenizerFacts, TokenTable
from fp8serve.server.api.openai.logprobs import LogprobStream, PositionedToken, chat_logprobs, completion_logprobs
from tests.model.oracle import byte_fallback
from tests.server.conftest import Server, Start
from tests.server.fakes import byte_tokenizer

TEXTS = ["abc", "naïve café ☕ 日本語", "😀", "a😀b"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def output(text: str, token: int, top: tuple[int, ...] = (), **more: Any) -> RequestOutput:
    tops = tuple((i, -1.0 - n) for n, i in enumerate(top))
    return RequestOutput("r", text, (token,), (TokenLogprob(token, -0.5, tops),), settled_chars=(len(text),), **more)


async def completion(server: Server, **request: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the choice of a plain answer, and the choices of the chunks of the same answer streamed."""
    whole = (await server.client.post("/v1/completions", json=request)).json()["choices"][0]
    streamed = (await server.client.post("/v1/completions", json=request | {"stream": True})).text
    lines = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    return whole, [line["choices"][0] for line in lines]


@pytest.mark.parametrize("text", TEXTS)
async def test_bytes_add_up_to_the_text(start: Start, text: str) -> None:
    async with start() as server:
        message = [{"role": "user", "content": text}]
        request = {"messages": message, "max_tokens": len(f"<user>{text}".encode()), "logprobs": True}
        response = (await server.client.post("/v1/chat/completions", json=request)).json()["choices"][0]
        content = response["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in content)
        assert joined == response["message"]["content"].encode() == f"<user>{text}".encode()
        assert not any("\ufffd" in entry["token"] for entry in content)


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [None, "☕", " ☕ 日", "aï", "b"])
async def test_offsets_are_places_in_the_returned_text(start: Start, text: str, stop: str | None) -> None:
    async with start() as server:
        request = {"prompt": text, "max_tokens": len(text.encode()), "logprobs": 1} | ({"stop": stop} if stop else {})
        whole, chunks = await completion(server, **request)
        offsets = whole["logprobs"]["text_offset"]
        names = whole["logprobs"]["tokens"]
        assert offsets == sorted(offsets)
        assert all(0 <= offset < len(whole["text"]) for offset in offsets)
        for offset, name in zip(offsets, names, strict=True):
            assert name.startswith("bytes:") or whole["text"][offset] == name
        joined = b"".join(
            bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode() for name in names
        )
        assert joined == whole["text"].encode()
        for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            parts = [chunk["logprobs"][key] for chunk in chunks if chunk["logprobs"]]
            assert [item for part in parts for item in part] == whole["logprobs"][key]


async def test_completions_list_the_token_itself_beside_the_most_likely_ones(start: Start) -> None:
    """OpenAI and vLLM do so, too ("up to logprobs+1 elements"). A chat lists exactly `top_logprobs` alternatives."""
    async with start() as server:
        whole, chunks = await completion(server, prompt="abc", max_tokens=2, logprobs=0)
        assert whole["logprobs"]["top_logprobs"] == [{token: -0.5} for token in whole["logprobs"]["tokens"]]
        assert chunks[0]["logprobs"]["top_logprobs"] == whole["logprobs"]["top_logprobs"][:1]
    tokenizer = facts(byte_tokenizer())
    rare = placed(tokenizer, output("C", 34, (32, 33), finish_reason="length"))
    assert completion_logprobs(rare, tokenizer)["top_logprobs"] == [{"A": -1.0, "B": -2.0, "C": -0.5}]
    assert [entry["token"] for entry in chat_logprobs(rare, tokenizer)["content"][0]["top_logprobs"]] == ["A", "B"]


async def test_the_bytes_of_one_character_are_separate_tokens(start: Start) -> None:
    async with start() as server:
        whole, _ = await completion(server, prompt="é", max_tokens=2, logprobs=5)
        assert whole["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert whole["logprobs"]["text_offset"] == [0, 0]


def facts(tokenizer: Tokenizer) -> TokenizerFacts:
    """Returns the facts of a tokenizer, with the texts of all its tokens."""
    results = TokenizerFacts.from_tokenizer(tokenizer)
    results.table = TokenTable(TokenTable.serialize(tokenizer, tokenizer.vocab_size))
    return results


def placed(tokenizer: TokenizerFacts, *outputs: RequestOutput) -> list[PositionedToken]:
    stream = LogprobStream(tokenizer, SamplingParams())
    return [item for one in outputs for item in stream.add(one)]


def test_alternatives_with_equal_text_are_all_listed() -> None:
    backend = byte_fallback()
    tokenizer = facts(Tokenizer(backend, SPECIAL, None))
    plain, byte, marked = (backend.token_to_id(piece) for piece in ("a", "<0x61>", "▁a"))
    at_start = placed(tokenizer, output("a", plain, (plain, byte, marked), finish_reason="length"))
    assert completion_logprobs(at_start, tokenizer)["top_logprobs"] == [
        {"a": -1.0, f"token_id:{byte}": -2.0, f"token_id:{marked}": -3.0}
    ]
    later = placed(tokenizer, output("a", plain), output("a", plain, (plain, byte, marked), finish_reason="length"))
    assert completion_logprobs(later, tokenizer)["top_logprobs"][1] == {"a": -1.0, f"token_id:{byte}": -2.0, " a": -3.0}
    assert len(chat_logprobs(at_start, tokenizer)["content"][0]["top_logprobs"]) == 3


def test_the_token_that_ends_the_text_has_no_bytes() -> None:
    tokenizer = facts(byte_tokenizer())
    for ending in ({"stop_reason": None}, {"stop_reason": 256}):
        tokens = placed(tokenizer, output("A", 32), output("", 256, finish_reason="stop", **ending))
        content = chat_logprobs(tokens, tokenizer)["content"]
        assert [entry["bytes"] for entry in content] == [[65], None]
        assert content[1]["token"] == "<eos>"
    tokens = placed(tokenizer, output("A", 32), output("", 33, finish_reason="stop", stop_reason=33))
    assert [entry["bytes"] for entry in chat_logprobs(tokens, tokenizer)["content"]] == [[65], None]


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [None, "☕", "b"])
async def test_an_echoed_prompt_comes_before_the_answer(start: Start, text: str, stop: str | None) -> None:
    async with start() as server:
        new = len(text.encode())
        request = {"prompt": text, "max_tokens": new, "logprobs": 1, "echo": True} | ({"stop": stop} if stop else {})
        whole, chunks = await completion(server, **request)
        logprobs = whole["logprobs"]
        assert whole["text"].startswith(text)
        assert logprobs["token_logprobs"][:new] == [None, *(-float(n) for n in range(1, new))]
        assert logprobs["top_logprobs"][0] is None
        assert [len(top) for top in logprobs["top_logprobs"][1:new]] == [1] * (new - 1)
        joined = b"".join(
            bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else name.encode()
            for name in logprobs["tokens"]
        )
        assert joined == whole["text"].encode()
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert name.startswith("bytes:") or whole["text"][offset] == name
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        for key, values in logprobs.items():
            parts = [chunk["logprobs"][key] for chunk in chunks if chunk["logprobs"]]
            assert [item for part in parts for item in part] == values


async def test_an_echo_without_log_probabilities_and_without_an_answer(start: Start) -> None:
    async with start() as server:
        whole, chunks = await completion(server, prompt="abc", max_tokens=2, echo=True)
        assert (whole["text"][:3], whole["logprobs"]) == ("abc", None)
        assert chunks[0]["text"] == "abc"
        whole, chunks = await completion(server, prompt="abc", max_tokens=0, echo=True, logprobs=0)
        assert (whole["text"], whole["finish_reason"]) == ("abc", "length")
        assert whole["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert "".join(chunk["text"] for chunk in chunks) == "abc"
        response = (
            await server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0, "echo": True})
        ).json()
        counts = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
        assert response["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        refused = await server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
        assert refused.status_code == 400
        assert "needs echo" in refused.text


async def test_every_prompt_and_choice_is_echoed(start: Start) -> None:
    async with start() as server:
        request = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 1, "echo": True, "logprobs": 0}
        response = (await server.client.post("/v1/completions", json=request)).json()
        assert [choice["text"][:-1] for choice in response["choices"]] == ["ab", "ab", "cde", "cde"]
        assert [len(choice["logprobs"]["tokens"]) for choice in response["choices"]] == [3, 3, 4, 4]
