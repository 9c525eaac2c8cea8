"""Operators in layers, whatever else is done to the layers: copies, pickles, hooks, compilation, recomputation."""

import copy
import functools
import inspect
import io
import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")
from support import pytorch_version
from test_transformers import Old, layer_and_config, oracle_operators

from gdngen import ops, oracle
from gdngen.errors import ArgumentError
from gdngen.integrate import mixers, pytorch_operators, remove_operators, use_operators
from gdngen.integrate.transformers import ROLES

HIDDEN = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(3))


class Counting:
    """A layer's own functions as operators, which count their calls."""

    def __init__(self, layer) -> None:
        own, self.calls = pytorch_operators(layer), 0
        for name in vars(own):
            setattr(self, name, functools.partial(self._call, getattr(own, name)))

    def _call(self, own, q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False):
        self.calls += 1
        options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return own(q, k, v, g, beta, initial_state=initial_state, **options)


def fresh():
    return layer_and_config()[0].train()


def results(layer):
    """Output and gradients of a layer, freshly computed."""
    layer.zero_grad()
    output = layer(HIDDEN)
    output.square().sum().backward()
    return [plain(output.detach()), *gradients_of(layer)]


def gradients_of(outer):
    """In the order of the plain layer's parameters, whatever they are called by now."""
    found = {}
    for name, parameter in inside(outer).named_parameters():
        found[name.removeprefix("parametrizations.").removesuffix(".original")] = plain(parameter.grad).clone()
    return [found[name] for name, _ in fresh().named_parameters()]


def inside(outer):
    """The layer itself."""
    while wrapped := outer._modules.keys() & {"_orig_mod", "module"}:  # torch.compile's, DistributedDataParallel's
        outer = getattr(outer, *wrapped)
    return outer


def plain(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree(found, wanted):
    return all(oracle.rms_ratio(a, b) < 1e-4 for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def wanted():
    return results(fresh())


# ---- hooks as those of accelerate: the own forward in an attribute, a wrapper in its place ---------------------------


def hook(layer):
    layer._hooked_forward = layer.forward

    def wrapped(module, *args, **options):
        module.hooked = getattr(module, "hooked", 0) + 1
        return module._hooked_forward(*args, **options)

    layer.forward = functools.update_wrapper(functools.partial(wrapped, layer), layer._hooked_forward)


def unhook(layer):
    layer.forward = layer._hooked_forward
    del layer._hooked_forward


def wrap(layer):
    """In a closure, for good."""
    inner = layer.forward
    layer.forward = lambda *args, **options: inner(*args, **options)


def test_hooks_before_and_after(wanted):
    for order in ("before", "after"):
        layer, operators = fresh(), Counting(fresh())
        if order == "before":
            hook(layer)
        installed = use_operators(layer, operators)
        if order == "after":
            hook(layer)
        assert agree(results(layer), wanted) and (operators.calls, layer.hooked) == (1, 1)
        installed.restore()
        assert agree(results(layer), wanted) and (operators.calls, layer.hooked) == (1, 2), order
        unhook(layer)
        assert agree(results(layer), wanted) and (operators.calls, layer.hooked) == (1, 2)
        with installed:
            results(layer)
        assert operators.calls == 2


class Holding:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args, **options):
        return self.inner(*args, **options)


def from_the_class(layer):
    """As accelerate's mixed precision: the function without its layer in a closure, which is bound again."""
    layer._original_forward, own = layer.forward, layer.forward.__func__

    def inside(self, *args, **options):
        return own(self, *args, **options)

    layer.forward = types.MethodType(inside, layer)


def in_an_object(layer):
    holding = Holding(layer.forward.__func__)
    layer.forward = types.MethodType(lambda self, *args, **options: holding(self, *args, **options), layer)


def by_name(layer):
    layer._inner_forward = layer.forward
    layer.forward = lambda *args, **options: getattr(layer, "_inner_forward")(*args, **options)  # noqa: B009


def bound_in_an_object(layer):
    layer.forward = Holding(layer.forward)


@pytest.mark.parametrize("wrapped", [from_the_class, in_an_object, by_name, bound_in_an_object])
def test_ways_to_hold_a_forward(wrapped, wanted):
    for order in ("before", "after"):
        layer, operators = fresh(), Counting(fresh())
        if order == "before":
            wrapped(layer)
        with use_operators(layer, operators):
            if order == "after":
                wrapped(layer)
            assert agree(results(layer), wanted) and operators.calls == 1
        assert agree(results(layer), wanted) and operators.calls == 1


def test_a_forward_that_is_kept_but_not_called_is_no_way_in():
    layer = fresh()
    layer._original_forward, own = layer.forward, functools.partial(layer.forward.__func__, layer)
    layer.forward = lambda *args, **options: own(*args, **options)
    with pytest.raises(ArgumentError, match=r"was replaced by a function .* call use_operators first"):
        use_operators(layer, oracle_operators())


def test_a_forward_that_cannot_be_found_is_refused():
    class Opaque:
        __slots__ = ("inner",)

        def __init__(self, inner):
            self.inner = inner

        def __call__(self, *args, **options):
            return self.inner(*args, **options)

    layer = fresh()
    layer.forward = Opaque(layer.forward)
    before = dict(vars(layer))
    with pytest.raises(ArgumentError, match=r"was replaced by a Opaque .* call use_operators first"):
        use_operators(layer, oracle_operators())
    assert vars(layer) == before
    layer, operators = fresh(), Counting(fresh())
    use_operators(layer, operators)
    layer.forward = Opaque(layer.forward)
    remove_operators(layer)
    layer(HIDDEN)
    assert operators.calls == 0


# ---- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda layer: layer._replicate_for_data_parallel()])
def test_copies_compute_with_their_own_weights(copied, wanted):
    layer, operators = fresh(), Counting(fresh())
    installed = use_operators(layer, operators)
    twin = copied(layer)
    vars(twin)["_parameters"] = dict(layer._parameters)
    twin.A_log = torch.nn.Parameter(layer.A_log.detach() + 2.0)
    assert not agree([twin(HIDDEN)], wanted[:1]) and operators.calls == 1
    installed.restore()
    twin(HIDDEN)
    assert operators.calls == 2  # the copy still has them
    remove_operators(twin)
    twin(HIDDEN)
    assert operators.calls == 2 and type(twin) is type(fresh())


# ---- pickles ---------------------------------------------------------------------------------------------------------


def saved(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def module_of_operators(name, monkeypatch):
    module = types.ModuleType(name)
    module.__dict__.update(vars(oracle_operators()))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("through", [saved, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_pickled_layers_have_their_operators(through, wanted, monkeypatch):
    package = module_of_operators("operators_to_import", monkeypatch)
    layer = fresh()
    with use_operators(layer, package):
        loaded = through(layer)
    package.calls["chunk_gated_delta_rule"] = 0
    assert agree(results(loaded), wanted) and package.calls["chunk_gated_delta_rule"] == 1
    with pytest.raises(ArgumentError, match="has operators already"):
        use_operators(loaded, package)
    remove_operators(loaded)
    assert agree(results(through(loaded)), wanted) and package.calls["chunk_gated_delta_rule"] == 1
    with use_operators(loaded, package):
        results(loaded)
    assert package.calls["chunk_gated_delta_rule"] == 2


def test_a_pickled_layer_without_its_package_is_an_error(monkeypatch):
    with use_operators(layer := fresh(), module_of_operators("operators_to_miss", monkeypatch)):
        data = pickle.dumps(layer)
    monkeypatch.delitem(sys.modules, "operators_to_miss")
    with pytest.raises(ArgumentError, match="operators_to_miss, which cannot be imported here"):
        pickle.loads(data)


# ---- installations ---------------------------------------------------------------------------------------------------


def test_an_installation_can_be_entered_again(wanted):
    layer, operators = fresh(), Counting(fresh())
    installed = use_operators(layer, operators)
    with installed, installed:
        results(layer)
    results(layer)
    with installed:
        with installed:
            pass
        results(layer)
    assert operators.calls == 2


def test_what_is_no_module():
    for code in (lambda: use_operators(None, oracle_operators()), lambda: remove_operators(None)):
        with pytest.raises(ArgumentError, match=r"module: got a NoneType, expected a torch\.nn\.Module"):
            code()
    with pytest.raises(ArgumentError, match="operators: int has no"):
        use_operators(fresh(), 3)


def test_a_class_that_was_made_of_the_layers_since(wanted):
    """As parametrised weights and sharding do."""
    layer, operators = fresh(), Counting(fresh())
    own = type(layer)
    installed = use_operators(layer, operators)
    layer.__class__ = type("Extended", (type(layer),), {"extra": 1})
    assert agree(results(layer), wanted) and operators.calls == 1
    installed.restore()
    assert agree(results(layer), wanted) and operators.calls == 1
    assert layer.extra == 1 and type(layer).__bases__ == (own,)


# ---- recomputation ---------------------------------------------------------------------------------------------------


def checkpointed(layer):
    return checkpoint(layer, HIDDEN, use_reentrant=False).square().sum()


def gradients(layer, loss):
    layer.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in layer.parameters()]


def test_a_backward_after_the_block_recomputes_with_the_operators(wanted):
    layer, operators = fresh(), Counting(fresh())
    own = type(layer)
    with use_operators(layer, operators):
        loss = checkpointed(layer)
    assert agree(gradients(layer, loss), wanted[1:]) and operators.calls == 2
    later = checkpointed(layer)  # while the first loss is alive
    assert agree(gradients(layer, later), wanted[1:]) and operators.calls == 2
    del loss, later
    layer(HIDDEN)
    assert type(layer) is own


def test_a_backward_inside_the_block_recomputes_without(wanted):
    layer, operators = fresh(), Counting(fresh())
    loss = checkpointed(layer)
    with use_operators(layer, operators):
        assert agree(gradients(layer, loss), wanted[1:]) and operators.calls == 0
        loss = checkpoint(layer, HIDDEN.clone().requires_grad_(), use_reentrant=True).square().sum()
        assert agree(gradients(layer, loss), wanted[1:]) and operators.calls == 2


def test_two_kinds_of_forwards_waiting_for_their_backward():
    layer, operators = fresh(), Counting(fresh())
    with use_operators(layer, operators):
        first = checkpointed(layer)
    second = checkpointed(layer)
    with pytest.raises(ArgumentError, match="forwards with and without operators wait"):
        (first + second).backward()


def test_layers_that_hold_their_functions_cannot_be_recomputed_otherwise():
    class Differentiable(Old):
        def original(self, q, k, v, g, beta, **_):
            return (q.exp() * v,)

    layer, q = Differentiable(), torch.randn(1, 3, 2, 8, requires_grad=True)
    for inside in (True, False):
        installed = use_operators(layer, oracle_operators())
        if not inside:
            installed.restore()
        loss = checkpoint(layer, q, q, -torch.rand(1, 3, 2), use_reentrant=False).sum()
        if inside:
            installed.restore()
            with pytest.raises(ArgumentError, match="taken out after the forward"):
                loss.backward()
        else:
            with installed, pytest.raises(ArgumentError, match="put in after the forward"):
                loss.backward()


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_compiled_with_operators_in_it(wanted):
    torch.compiler.reset()
    layer, operators = fresh(), oracle_operators()
    with use_operators(layer, operators):
        whole = torch.compile(layer, backend="eager", fullgraph=True)
        assert agree([whole(HIDDEN)], wanted[:1]) and operators.calls["chunk_gated_delta_rule"] == 1


def test_compiled_before_operators_come_and_go(wanted):
    torch.compiler.reset()
    layer, inside, operators = fresh(), fresh(), oracle_operators()
    whole = torch.compile(layer, backend="eager")
    inside.compile(backend="eager")
    for compiled, plain in ((whole, layer), (inside, inside)):
        compiled(HIDDEN)
        operators.calls["chunk_gated_delta_rule"] = 0
        with use_operators(plain, operators):
            assert agree([compiled(HIDDEN)], wanted[:1]) and operators.calls["chunk_gated_delta_rule"] == 1
        assert agree([compiled(HIDDEN)], wanted[:1]) and operators.calls["chunk_gated_delta_rule"] == 1


# ---- other classes, made of the layer's ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parametrize(layer):
    register_parametrization(layer, "A_log", torch.nn.Identity())


@pytest.mark.parametrize("made", [fully_shard, parametrize])
def test_layers_of_a_class_made_elsewhere(made, wanted, one_process):
    """Its module is not the one whose functions the layer calls."""
    for first in ("made", "installed"):
        layer, operators = fresh(), Counting(fresh())
        if first == "made":
            made(layer)
        with use_operators(layer, operators):
            if first == "installed":
                made(layer)
            assert agree(results(layer), wanted) and operators.calls == 1
        assert agree(results(layer), wanted) and operators.calls == 1


def test_a_layer_whose_forward_is_awaited_can_be_saved(wanted):
    layer, operators = fresh(), Counting(fresh())
    with use_operators(layer, operators):
        loss = checkpointed(layer)
    for loaded in (saved(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert type(loaded) is type(fresh()) or loaded.equipment.layer is type(fresh())
        assert agree(results(loaded), wanted) and operators.calls == 1
    assert agree(gradients(layer, loss), wanted[1:]) and operators.calls == 2


# ---- any order -------------------------------------------------------------------------------------------------------


STEPS = {
    "hook": lambda layer: None if hasattr(layer, "_hooked_forward") else hook(layer),
    "unhook": lambda layer: unhook(layer) if hasattr(layer, "_hooked_forward") else None,
    "wrap": wrap,
    "compile": lambda layer: layer.compile(backend="eager"),
    "parametrize": parametrize,
    "shard": fully_shard,
}  # each changes a layer
NEW = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": saved,
    "compiled": lambda outer: torch.compile(outer, backend="eager"),
    "distribute": DistributedDataParallel,
}  # each gives another in its place
AT_MOST_ONCE = ("parametrize", "shard", "compiled", "distribute")
EXCLUDES = {  # by torch itself: what cannot come any more
    "shard": {"compiled", "distribute", "copy", "deepcopy", "save", "parametrize"},
    "parametrize": {"save", "deepcopy", "copy", "shard"},
    "distribute": {"parametrize", "shard", "copy", "save", "deepcopy"},
    "compiled": {"shard", "copy", "save", "deepcopy"},
    "hook": {"copy", "deepcopy", "save"},  # such a copy would call the original
    "wrap": {"copy", "deepcopy", "save"},
}


def importable():
    name = "operators_of_any_order"
    if name not in sys.modules:
        module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(vars(oracle_operators()))
    return sys.modules[name]


class Order:
    """A layer that goes through steps; what it computes with is told by the calls that its operators count."""

    def __init__(self, wanted):
        self.outer, self.wanted, self.package = fresh(), wanted, importable()
        self.calls, self.has_operators, self.done = self.package.calls, False, []

    def forget(self):
        self.calls.update(dict.fromkeys(self.calls, 0))

    def called(self):
        """Whether every operator of a prefill was."""
        return self.calls["chunk_gated_delta_rule"] > 0

    def step(self, name):
        if (name in AT_MOST_ONCE and name in self.done) or any(name in EXCLUDES.get(old, ()) for old in self.done):
            return
        self.done.append(name)
        if name in STEPS:
            STEPS[name](inside(self.outer))
        elif name in NEW:
            self.outer = NEW[name](self.outer)
        else:
            getattr(self, name)()

    def install(self):
        if not self.has_operators:
            use_operators(self.outer, self.package)
        self.has_operators = True

    def remove(self):
        remove_operators(self.outer)
        self.has_operators = False

    def run(self):
        self.forget()
        assert agree(results(self.outer), self.wanted), self.done
        assert self.called() == self.has_operators, self.done

    def run_checkpointed(self):
        """Operators come or go between forward and backward, which computes the forward again."""
        if {"compile", "compiled"} & set(self.done):
            return
        self.outer.zero_grad()
        had, loss = self.has_operators, checkpointed(self.outer)
        self.remove() if had else self.install()
        self.forget()
        loss.backward()
        assert agree(gradients_of(self.outer), self.wanted[1:]), self.done
        assert self.called() == had, self.done


OFTEN = ["install", "remove", "install", "remove", "run", "run_checkpointed"]


class WholeMixer(Order):
    """The same with all of the token mixer: recurrence, convolution, and a norm, which is a layer of its own."""

    def __init__(self, wanted):
        super().__init__(wanted)
        self.package, self.calls = None, AROUND_CALLS

    def called(self):
        assert len({count > 0 for count in self.calls.values()}) == 1, (self.done, self.calls)
        return all(self.calls.values())


AROUND_CALLS = dict.fromkeys(("chunk_gated_delta_rule", "causal_conv1d_fn", "rms_norm_gated"), 0)


def counting(name, own):
    @functools.wraps(own)
    def call(*args, **options):
        AROUND_CALLS[name] += 1
        return own(*args, **options)

    return call


def go_through(order, steps):
    torch.compiler.reset()
    for name in [*steps, "run", "remove", "run", "install", "run"]:
        order.step(name)


SOME_STEPS = st.lists(st.sampled_from([*STEPS, *NEW, *OFTEN]), max_size=9)


@settings(max_examples=40)
@given(steps=SOME_STEPS)
def test_any_order(wanted, one_process, steps):
    go_through(Order(wanted), steps)


@pytest.fixture(scope="module")
def counted():
    with pytest.MonkeyPatch.context() as patch, pytorch_version():
        for name in ("causal_conv1d_fn", "rms_norm_gated"):
            patch.setattr(ops, name, counting(name, getattr(ops, name)))
        name = "chunk_gated_delta_rule"  # the layer calls it itself
        patch.setattr(mixers, name, counting(name, getattr(mixers, name)))
        yield


@settings(max_examples=20)
@given(steps=SOME_STEPS)
def test_any_order_for_all_of_the_token_mixer(wanted, one_process, counted, steps):
    go_through(WholeMixer(wanted), steps)


# ---- what models hand to their layers --------------------------------------------------------------------------------


KIMI_LIKE = {  # configuration and layer
    "kimi_linear": ("KimiLinearConfig", "KimiLinearDeltaAttention"),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridDeltaAttention"),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextLinearAttention"),
}


def kimi_like(library):
    modeling = pytest.importorskip(f"transformers.models.{library}.modeling_{library}")
    configuration, layer = (getattr(modeling, name) for name in KIMI_LIKE[library])
    config = configuration(
        hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], linear_head_dim=16, linear_num_heads=2
    )
    torch.manual_seed(0)
    layer = layer(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer


@pytest.mark.parametrize(("library", "gate"), [("qwen3_next", "scalar"), ("kimi_linear", "key")])
def test_operators_take_what_the_layers_own_functions_name(library, gate):
    modeling = pytest.importorskip(f"transformers.models.{library}.modeling_{library}")
    for operator, (_, name) in ROLES[gate].items():
        own = inspect.signature(inspect.unwrap(getattr(modeling, name))).parameters
        ours = inspect.signature(getattr(ops, operator)).parameters
        named = [parameter for parameter in own.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][3:]
        assert {parameter.name for parameter in named} <= set(ours)
        defaults = {p.name: p.default for p in named if p.default is not p.empty}
        assert defaults == {name: ours[name].default for name in defaults}


LOSS = {"shift_labels": torch.zeros(2, 5, dtype=torch.int64), "ignore_index": -100, "num_items_in_batch": 3}


@pytest.mark.parametrize("library", ["qwen3_next", *KIMI_LIKE])
@torch.no_grad()
def test_keywords_for_other_layers_are_left_out(library):
    layer = fresh() if library == "qwen3_next" else kimi_like(library)
    hidden = HIDDEN if library == "qwen3_next" else HIDDEN[..., :32]
    keywords = LOSS | {"position_embeddings": (HIDDEN, HIDDEN), "input_ids": LOSS["shift_labels"], "scale": 3.0}
    operators, expected = Counting(layer), layer(hidden, **keywords)
    with use_operators(layer, operators):
        assert agree([layer(hidden, **keywords)], [expected])
        if library != "qwen3_next":
            with pytest.raises(ArgumentError, match=r"cu_seq_lens_q: this layer hands .* on its own path either"):
                layer(hidden, cu_seq_lens_q=torch.tensor([0, 5]))
    assert operators.calls >= 1


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_a_whole_model_with_a_loss_and_checkpoints():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 11}
    sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    sizes |= {"linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    sizes |= {"shared_expert_intermediate_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = modeling.Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **sizes)
    model, tokens = modeling.Qwen3NextForCausalLM(config).train(), torch.arange(10).reshape(2, 5)
    model.gradient_checkpointing_enable()
    layer = model.model.layers[0].linear_attn
    found = []
    for operators in (None, Counting(layer)):
        model.zero_grad()
        installed = use_operators(model, operators) if operators else None
        loss = model(tokens, labels=tokens, shift_labels=tokens, ignore_index=-100).loss
        if installed:
            installed.restore()
        loss.backward()
        found.append([loss.detach(), layer.A_log.grad.clone(), layer.in_proj_qkvz.weight.grad.clone()])
    assert agree(found[1], found[0]) and operators.calls == 2
