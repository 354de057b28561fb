"""Several adapters in one batch: each answer, also one without an adapter, has the bits that it has alone."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8serve.cli import main
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, RequestError
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import Forward
from fp8serve.train.log_probs import log_probs
from fp8serve.train.lora import adapted_model, adapter_parameters

from .adapters import write_random_adapter
from .tiny import call_each_layer, write_model, write_scales

Answer = tuple[list[int], list[object]]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "seed": 1},
    "dora": {"rank": 7, "dora": True, "seed": 2},
    "of some layers": {"rank": 2, "only": ("q_proj", "o_proj", "down_proj"), "seed": 3},
}
PROMPTS = [[5, 6, 7, 8] * 5, [9, 10, 11] * 4, [1, 2, 3] * 9, [77]]
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "delayed": ("llama", {}, {}),
    "fp8 cache": ("mistral", {"head_dim": 40, "sliding_window": 12}, {"kv_cache_dtype": "fp8"}),
    "biases, rowwise": ("qwen2", {}, {"recipe": "rowwise"}),
    "norms after each block, block scales": ("gemma2", {"intermediate_size": 200}, {"recipe": "block"}),
    "a shared expert, current": ("qwen2_moe", {}, {"recipe": "current"}),
    "joined in the file, bf16": ("phi3", {}, {"recipe": "bf16"}),
}


def write_model_and_adapters(folder: Path, kind: str) -> tuple[Path, dict[str, Any], dict[str, Path]]:
    """Returns the model directory, the engine options, and the adapter directories by name."""
    family, sizes, options = MODELS[kind]
    model = write_model(folder / "model", family, **sizes)
    if "recipe" not in options:
        write_scales(model, model / "scales.safetensors", kv=True)
    adapters = {name: write_random_adapter(folder / name, model, **how) for name, how in KINDS.items()}
    return model, options, adapters


def engine_with(model: Path, adapters: dict[str, Path], **options: Any) -> Engine:
    engine = Engine(model, **options)
    for name, directory in adapters.items():
        engine.load_adapter(name, directory)
    return engine


def generate(engine: Engine, requests: Sequence[tuple[str | None, list[int]]], **sampling: Any) -> list[Answer]:
    """Returns tokens and log-probabilities of requests of one batch. Each is an adapter's name, or None, and a
    prompt."""
    params = SamplingParams(**{"max_new_tokens": 5, "temperature": 0.0, "logprobs": 2, "ignore_eos": True} | sampling)
    answers: list[Answer] = [([], []) for _ in requests]
    for number, (adapter, prompt) in enumerate(requests):
        engine.add_request(Request(str(number), tuple(prompt), params, adapter=adapter))
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens, logprobs = answers[int(output.request_id)]
            tokens.extend(output.token_ids)
            logprobs.extend((*(output.prompt_logprobs or ()), *(output.logprobs or ())))
    return answers


@pytest.mark.parametrize("kind", MODELS)
def test_answers_in_a_mixed_batch_equal_answers_alone(tmp_path: Path, kind: str) -> None:
    model, options, adapters = write_model_and_adapters(tmp_path, kind)
    names = (None, *adapters)
    plain = Engine(model, **options)
    alone = {None: [generate(plain, [(None, prompt)])[0] for prompt in PROMPTS]}
    for name in adapters:
        single = engine_with(model, {name: adapters[name]}, **options)
        alone[name] = [generate(single, [(name, prompt)])[0] for prompt in PROMPTS]
    assert len({repr(alone[name][0]) for name in names}) == len(names)  # every adapter gives another answer

    together = Engine(
        model, **options, max_batch_tokens=24, max_num_seqs=16, block_size=4
    )  # prompts are prefilled in chunks
    together.pack_weights()
    for name, directory in adapters.items():
        together.load_adapter(name, directory)
    requests = [(name, prompt) for prompt in PROMPTS for name in names]
    expected = [alone[name][number] for number in range(len(PROMPTS)) for name in names]
    assert generate(together, requests) == expected
    hits = together.stats()["prefix_hit_tokens_total"]
    assert generate(together, requests[::-1]) == expected[::-1]
    assert together.stats()["prefix_hit_tokens_total"] > hits
    call_each_layer(together)
    assert generate(together, requests[:8]) == expected[:8]


@pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")
@pytest.mark.parametrize("kind", ["delayed", "fp8 cache"])
def test_answers_that_fill_the_context_equal_answers_alone(tmp_path: Path, kind: str) -> None:
    """Prompts are up to one token shorter than the context. Prefixes are shared, prompts are prefilled in chunks, and
    the cache has too few blocks for all requests. Every answer equals that of an engine with no other request."""
    model, options, adapters = write_model_and_adapters(tmp_path, kind)
    context = 96
    text = [(7 * i) % 50 + 3 for i in range(context)]
    requests = [(name, text[:length]) for length in (context - 1, 40, context - 17) for name in (None, *adapters)]

    def answers(batch: Sequence[tuple[str | None, list[int]]], blocks: int, **more: Any) -> list[Answer]:
        engine = engine_with(model, adapters, max_model_len=context, num_blocks=blocks, **options, **more)
        results: list[Answer] = []
        for length in dict.fromkeys(len(prompt) for _, prompt in batch):
            group = [(name, prompt) for name, prompt in batch if len(prompt) == length]
            results += generate(
                engine, group * 2, max_new_tokens=context - length
            )  # twice, so that prefixes are found in the cache
        return results

    together = answers(requests, 20, max_num_seqs=8, max_prefill_tokens=24)
    alone = [answers([one], 20) for one in requests]
    for length in (context - 1, 40, context - 17):
        assert len({str(a[0]) for (_, prompt), a in zip(requests, alone, strict=True) if len(prompt) == length}) > 1
    number = 0
    for start in range(0, len(requests), len(adapters) + 1):
        for _ in range(2):
            for index in range(start, start + len(adapters) + 1):
                assert len(together[number][0]) == context - len(requests[index][1])
                assert together[number] == alone[index][0] == alone[index][1]
                number += 1


@pytest.mark.parametrize(("length", "new"), [(96, 1), (95, 2), (97, 1), (200, 1), (1, 96)])
def test_requests_beyond_the_context_are_refused_in_one_sentence(tmp_path: Path, length: int, new: int) -> None:
    model, options, adapters = write_model_and_adapters(tmp_path, "delayed")
    engine = engine_with(model, adapters, max_model_len=96, **options)
    params = SamplingParams(max_new_tokens=new)
    with pytest.raises(RequestError) as caught:
        engine.add_request(Request("a", (5,) * length, params, adapter="lora"))
    assert str(caught.value) == (
        f"The prompt has {length} tokens and max_new_tokens is {new}, together {length + new}, but the context "
        "holds 96: shorten the prompt or ask for fewer new tokens."
    )
    assert not engine.has_work()
    engine.unload_adapter("lora")  # the refused request does not hold the adapter
    with pytest.raises(RequestError, match="lora"):
        engine.add_request(Request("b", (5,), SamplingParams(max_new_tokens=1), adapter="lora"))
    assert not engine.adapters.by_name.get("lora")


@pytest.mark.parametrize("dora", [False, True])
def test_log_probs_with_an_adapter_equal_the_trainers(tmp_path: Path, dora: bool) -> None:
    model = write_model(tmp_path / "model", "qwen2", intermediate_size=200)
    write_scales(model, model / "scales.safetensors")
    adapter = write_random_adapter(tmp_path / "adapter", model, dora=dora, rank=5)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "to be or not to be"}\n')
    config = TrainConfig(str(model), (str(data),), str(tmp_path / "run"), lora_rank=5, lora_alpha=8.5, dora=dora)
    decoder = adapted_model(config)
    weights = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, master in adapter_parameters(decoder).items():
            suffix = "" if name.endswith("vector") else ".weight"
            master.copy_(weights[f"base_model.model.{name}{suffix}"])
    expected = log_probs(Forward(decoder, None), PROMPTS[:3])

    engine = engine_with(model, {"a": adapter}, max_batch_tokens=24)
    requests = [(name, prompt) for prompt in PROMPTS[:3] for name in ("a", None)]
    answers = generate(engine, requests, prompt_logprobs=0, max_new_tokens=1, logprobs=None)[::2]
    for (_, logprobs), of_trainer in zip(answers, expected, strict=True):
        assert [item.logprob for item in logprobs] == of_trainer.tolist()  # type: ignore[attr-defined]


def test_an_adapter_may_be_unloaded_while_in_use_and_its_name_used_again(tmp_path: Path) -> None:
    model, _, adapters = write_model_and_adapters(tmp_path, "delayed")
    engine = engine_with(model, {"a": adapters["lora"]}, block_size=4)
    lora = generate(engine_with(model, {"a": adapters["lora"]}), [("a", PROMPTS[0])])
    dora = generate(engine_with(model, {"a": adapters["dora"]}), [("a", PROMPTS[0])])
    with pytest.raises(RequestError, match="an adapter 'a' already"):
        engine.load_adapter("a", adapters["dora"])

    params = SamplingParams(max_new_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True)
    engine.add_request(Request("old", tuple(PROMPTS[0]), params, adapter="a"))
    outputs = engine.step()
    assert engine.stats()["adapters"] == {"a": {"running": 1, "waiting": 0}}
    engine.unload_adapter("a")  # while a request uses it
    with pytest.raises(RequestError, match="no adapter 'a' here"):
        engine.generate([PROMPTS[0]], adapter="a")
    engine.load_adapter("a", adapters["dora"])
    engine.add_request(Request("new", tuple(PROMPTS[0]), params, adapter="a"))
    while engine.has_work():
        outputs += engine.step()
    for request, expected in (("old", lora), ("new", dora)):
        of_request = [output for output in outputs if output.request_id == request]
        assert [token for output in of_request for token in output.token_ids] == expected[0][0]
        assert of_request[-1].num_cached_tokens == 0
    engine.unload_adapter("a")
    assert all(layer.adapters is None for layer in engine.loaded.frozen.values())
    assert engine.info()["adapters"] == []


def test_generate_command_takes_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _, adapters = write_model_and_adapters(tmp_path, "delayed")
    command = ["generate", str(model), "--max-new-tokens", "5", "--json"]
    tokens = {}
    for name, more in (("none", []), ("lora", ["--adapter", str(adapters["lora"])])):
        assert main([*command, *more, "Once upon"]) == 0
        tokens[name] = json.loads(capsys.readouterr().out)[0]["token_ids"]
    engine = engine_with(model, {"a": adapters["lora"]})
    for name, adapter in (("none", None), ("lora", "a")):
        assert tokens[name] == list(
            engine.generate(["Once upon"], adapter=adapter, max_new_tokens=5, temperature=0.0)[0].token_ids
        )
    assert main([*command, "--adapter", str(tmp_path / "none"), "Once"]) == 1
    assert "adapter_config.json" in capsys.readouterr().err


def test_saved_prefixes_are_restored_only_for_their_adapter(tmp_path: Path) -> None:
    model, _, adapters = write_model_and_adapters(tmp_path, "delayed")
    options = {"block_size": 4, "cache_dir": str(tmp_path / "cache")}
    first = engine_with(model, {"a": adapters["lora"]}, **options)
    expected = generate(first, [("a", PROMPTS[0])])
    first.save_prefixes()
    restarted = engine_with(model, {"b": adapters["lora"], "a": adapters["dora"]}, **options)
    other = generate(restarted, [("a", PROMPTS[0])])
    assert restarted.stats()["prefix_restored_hit_tokens_total"] == 0
    assert other != expected
    assert generate(restarted, [("b", PROMPTS[0])]) == expected
    assert restarted.stats()["prefix_restored_hit_tokens_total"] > 0


def test_invalid_adapters_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model, _, adapters = write_model_and_adapters(tmp_path, "delayed")
    other = write_model(tmp_path / "other", hidden_size=128)
    engine = engine_with(model, {"a": adapters["lora"]}, max_lora_rank=8)
    expected = generate(engine, [("a", PROMPTS[0]), (None, PROMPTS[1])])

    broken = Path(shutil.copytree(adapters["lora"], tmp_path / "broken"))
    tensors = load_file(broken / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, broken / "adapter_model.safetensors")
    truncated = Path(shutil.copytree(adapters["lora"], tmp_path / "cut"))
    (truncated / "adapter_model.safetensors").write_bytes((truncated / "adapter_model.safetensors").read_bytes()[:-9])
    wide = write_random_adapter(tmp_path / "wide", model, rank=9)
    shape = write_random_adapter(tmp_path / "shape", other)
    for directory, message in (
        (broken, "holds NaN or an infinity"),
        (truncated, "adapter_model.safetensors"),
        (wide, "is 9, above the limit of 8; raise max_lora_rank"),
        (shape, r"must be \[4, 64\] in this model, found \[4, 128\]"),
        (tmp_path / "none", "adapter_config.json"),
    ):
        with pytest.raises(Fp8ServeError, match=message):
            engine.load_adapter("b", directory)
    assert [adapter["name"] for adapter in engine.info()["adapters"]] == ["a"]
    assert generate(engine, [("a", PROMPTS[0]), (None, PROMPTS[1])]) == expected
