"""`convert` warns about weights that stay in high precision, with their share; it converts parametrized layers."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

from fp8serve import DelayedScaling, Float8CurrentScaling, Linear, autocast, convert
from fp8serve.fp8.conversion import weights_left

transformers = pytest.importorskip("transformers")


def mixture() -> nn.Module:
    """Returns a model of transformers 5, most of whose weights are experts."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)  # type: ignore[no-any-return]


class Positions(nn.Module):
    """A linear layer and a parameter that is no linear weight, as in a vision transformer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(1, rows, 32))
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x + self.places)
        return out


class Special(nn.Linear):
    pass


def test_a_mixture_names_its_experts_and_their_share() -> None:
    model = mixture()
    with pytest.warns(UserWarning, match=r"^convert\(\) has left 9\d% of the weights in high precision \(") as record:
        convert(model)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert "(Qwen3MoeExperts.gate_up_proj, Qwen3MoeExperts.down_proj, " in str(record[0].message)
    counts = weights_left(model, ("lm_head",))
    assert counts["Qwen3MoeExperts.gate_up_proj"] == 2 * 8 * 128 * 32
    assert counts["Qwen3MoeExperts.down_proj"] == 2 * 8 * 32 * 64


def test_skipped_layers_are_not_announced() -> None:
    assert "Linear.weight" not in weights_left(mixture(), ("lm_head",))
    convert(mixture(), skip=("lm_head", "*.experts", "*.gate"))  # warnings are errors here


@pytest.mark.parametrize(("rows", "announced"), [(1, False), (64, True)])
def test_a_small_share_is_not_announced(rows: int, announced: bool) -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        convert(Positions(rows))
    expected = [
        "convert() has left 67% of the weights in high precision (Positions.places): it converts nn.Linear only."
    ]
    assert [str(w.message) for w in record] == (expected if announced else [])


def test_a_warning_names_an_unconverted_subclass_of_linear() -> None:
    with pytest.warns(UserWarning, match=r"left 50% of the weights in high precision \(Special\.weight\)"):
        convert(nn.Sequential(Special(8, 8), nn.Linear(8, 8)))


def test_tied_embeddings_and_converted_layers_are_not_left() -> None:
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64, bias=False))
    model[2].weight = model[0].weight
    assert weights_left(model) == weights_left(convert(model)) == {}


def test_a_warning_names_lazy_layers_which_are_converted_after_a_call() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"left 1 nn\.LazyLinear in high precision \('0' first\); run the model once"):
        convert(model)
    model(torch.ones(2, 4))
    assert all(isinstance(layer, Linear) for layer in convert(model).children())


@pytest.mark.parametrize("model", [nn.LazyLinear(8), nn.Sequential(nn.LazyLinear(8), nn.LazyConv2d(4, 3))])
def test_a_model_of_only_lazy_layers_asks_to_be_run_once(model: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        convert(model)
    assert str(record[0].message).startswith("convert() has converted nothing: of 1 linear layer")
    assert str(record[1].message).endswith("; run the model once.")


def test_an_embedding_bag_is_not_announced() -> None:
    convert(nn.Sequential(nn.EmbeddingBag(64, 8), nn.Linear(8, 8)))  # warnings are errors here


@pytest.mark.parametrize("register", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_layer_is_converted_and_stays_parametrized(register: object) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)).train(False)
    register(original[0])  # type: ignore[operator]
    expected = original(x := torch.randn(4, 16))
    model = convert(copy.deepcopy(original))
    assert all(isinstance(layer, Linear) for layer in model.children())
    assert torch.equal(model(x), expected)
    assert model.state_dict().keys() == original.state_dict().keys()
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad(), autocast(recipe=Float8CurrentScaling()):
        before = model(x)
        assert torch.equal(copy.deepcopy(model)(x), before)
        assert type(remove_parametrizations(model[0], "weight")) is Linear  # type: ignore[index]
        torch.testing.assert_close(model(x), before)
