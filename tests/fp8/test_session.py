"""Sessions: their modules, the memory that is freed with a model, and copies."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8serve import DelayedScaling, DotProductAttention, Linear, NormLinear, Session, autocast, convert, scaling_state
from fp8serve.errors import RecipeError
from fp8serve.fp8.session import MODULES, UPDATE_CONFIGS, common_session

SHORT = DelayedScaling(amax_history_len=4)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))  # type: ignore[return-value]


def step(module: nn.Module, session: Session | None = None, magnitude: float = 1.0) -> Tensor:
    with autocast(recipe=SHORT, session=session):
        y: Tensor = module(torch.full((2, 8), magnitude))
    y.sum().backward()
    return y.detach()


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_without_a_session_is_in_the_common_session() -> None:
    assert Session.of(model()) is common_session()


def test_a_session_holds_the_modules_of_its_model_in_their_order() -> None:
    made_last_first = [Linear(8, 8) for _ in range(3)][::-1]
    session = Session(nn.Sequential(*made_last_first))
    assert session.live_modules() == made_last_first
    assert [m.position.number for m in made_last_first] == [0, 1, 2]
    assert not set(common_session().live_modules()) & set(made_last_first)


def test_a_session_changes_no_bit() -> None:
    plain, owner = model(), model()
    session = Session(owner)
    for i in range(3):
        assert torch.equal(step(plain, magnitude=i + 1.0), step(owner, session, magnitude=i + 1.0))
    assert equal(everything(plain), everything(owner))


def test_a_model_with_two_sessions_or_none_is_refused() -> None:
    mixed = nn.Sequential(model(), model())
    Session(mixed[0])
    with pytest.raises(RecipeError, match="have 2 sessions; make one"):
        Session.of(mixed)
    with pytest.raises(RecipeError, match="have 0 sessions"):
        Session.of(nn.ReLU())
    with pytest.raises(RecipeError, match="This ReLU has no FP8 modules to make a session of; convert it first"):
        Session(nn.ReLU())
    with pytest.raises(RecipeError, match="session must be a Session, such as Session"):
        autocast(session=mixed)  # type: ignore[arg-type]


def train_compiled(module: nn.Module, session: Session | None) -> None:
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    step(compiled, session)  # type: ignore[arg-type]
    torch._dynamo.reset()


def fail_backward(module: nn.Module, session: Session | None) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
            raise ValueError("as planned")

    with autocast(recipe=SHORT, session=session):
        y = module(Boom.apply(torch.ones(2, 8, requires_grad=True)))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="as planned"):
        y.sum().backward()


def run_twice(module: nn.Module, session: Session | None) -> None:
    step(module, session)
    step(module, session)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in its tracer
@pytest.mark.parametrize("use", [run_twice, train_compiled, fail_backward])
def test_a_deleted_model_frees_its_session_states_and_rules(use: Callable[[nn.Module, Session | None], None]) -> None:
    owner, plain = model(), model()
    session = Session(owner)
    use(owner, session)
    use(plain, None)
    references = [
        weakref.ref(thing) for thing in (owner, owner[0], session, plain, plain[0], scaling_state(owner[0])["input"])
    ]
    keys = [layer.key for layer in (owner[0], owner[2], plain[0], plain[2])]
    gc.collect()  # garbage of earlier tests
    rules = len(UPDATE_CONFIGS)
    del owner, plain, session
    gc.collect()
    assert [ref() for ref in references] == [None] * len(references)
    assert [MODULES.get(key) for key in keys] == [None] * 4
    assert len(UPDATE_CONFIGS) == rules - 1  # the rule of the model's own session


def test_a_backward_pass_runs_after_its_model_is_deleted() -> None:
    owner = model()
    x = torch.ones(2, 8, requires_grad=True)
    with autocast(recipe=SHORT, session=Session(owner)):
        y = owner(x)
    del owner
    gc.collect()
    y.sum().backward()
    assert x.grad is not None


def by_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]


def by_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [copy.deepcopy, by_pickle, by_file])
@pytest.mark.parametrize("owning", [False, True])
def test_a_copy_has_its_own_states_and_trains_like_the_original(make: Callable[[Any], Any], owning: bool) -> None:
    original = model()
    session = Session(original) if owning else None
    step(original, session)
    before = everything(original)
    twin = make(original)
    twin_session = Session.of(twin)
    assert (twin_session is common_session()) is not owning
    assert twin_session is not session
    assert [m.position.number for m in twin_session.live_modules()[-2:]] == [
        m.position.number for m in (twin[0], twin[2])
    ]
    step(twin, twin_session if owning else None, magnitude=9.0)
    assert equal(everything(original), before)
    step(original, session, magnitude=9.0)
    assert equal(everything(original), everything(twin))


def test_copies_in_the_common_session_do_not_use_numbers_of_new_modules() -> None:
    layer = Linear(8, 8)
    copies = [copy.deepcopy(layer) for _ in range(3)]
    assert Linear(8, 8).position.number == layer.position.number + 1
    assert {c.position.order for c in copies} != {layer.position.order}


def test_a_shallow_copy_does_not_replace_its_original() -> None:
    owner = model()
    session = Session(owner)
    twin = copy.copy(owner[0])
    assert set(session.live_modules()) == {owner[0], owner[2], twin}


def test_a_state_dict_can_be_loaded_in_another_session() -> None:
    first, second = model(), model()
    step(first, Session(first))
    owner = Session(second)
    second.load_state_dict(first.state_dict())
    assert torch.equal(step(first, Session.of(first)), step(second, owner))
    assert equal(everything(first), everything(second))


def test_scaling_state_of_a_module_without_states_is_refused() -> None:
    assert scaling_state(DotProductAttention()) == {}
    for module in (nn.Linear(8, 8), model(), NormLinear(nn.LayerNorm(8), Linear(8, 8))):
        with pytest.raises(TypeError, match=f"A {type(module).__name__} has no scaling state of its own"):
            scaling_state(module)
