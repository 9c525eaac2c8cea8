"""Put operators into the gated delta net, Kimi Delta Attention and Mamba-2 layers of Hugging Face transformers.

The layers (Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, ...) call one function for prefill and one for decode, and
transformers has held them in two ways: newer releases look both up as globals of the model's module, older ones keep
them in attributes of the layer.  Both are replaced for the given layers only; other layers of the process keep theirs.
Without a package, what stands around the recurrence is replaced too: convolutions, and norms with a gate; so are the
short convolutions that LFM2 and LFM3 have in its place.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from gdngen.errors import ArgumentError
from gdngen.integrate import mixers
from gdngen.integrate.equipped import Equipment, Equipped, Role, equip, equipped_class, holds_forward, own_class, strip

Roles = dict[str, tuple[str, str]]

# gate -> operator -> (attribute of the layer in older releases, global of the model's module in newer ones)
ROLES: dict[str, Roles] = {
    "scalar": {
        "chunk_gated_delta_rule": ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
        "fused_recurrent_gated_delta_rule": ("recurrent_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    },
    "key": {
        "chunk_kda": ("chunk_kda", "chunk_kimi_delta_attention"),
        "fused_recurrent_kda": ("fused_recurrent_kda", "recurrent_kimi_delta_attention"),
    },
}

# Globals that gdngen.integrate.mixers has functions for: of Mamba-2 layers, and around any recurrence.
MAMBA2 = ("mamba2_chunk_scan", "mamba2_selective_state_update")
CONVOLUTION = ("causal_conv1d_fn", "causal_conv1d_update")
AT_ONCE = "mamba2_split_conv1d_scan_combined"  # all of a Mamba-2 layer; without a result the layer calls its parts

# Layers with a convolution that are left as they are, since packed sequences would be followed by half of the layer or
# by nothing: those with Mamba's first recurrence, which is none of the family, and those that hand on seq_idx alone.
MAMBA1 = "mamba_selective_scan"
SEQUENCE_NUMBERS = "seq_idx"

# What the layers themselves say in a call; anything else comes from the model, for whichever layer wants it.
LAYER_KEYWORDS = frozenset("g beta initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens".split())

# What the layers leave to the operator and what they do themselves, in the words of a package's SPEC.
LAYER_SPEC = {
    "rule": "delta",
    "beta": "head",
    "qk_norm": True,
    "fused_gate": "none",
    "beta_logits": False,
    "normalize": False,
    "state_v_first": False,
}


def use_operators(module: nn.Module, operators: Any = None, *, around: bool = True) -> "Installation":
    """Let ``module``, a layer or a whole model, compute with the operators of a package (or of gdngen.ops).

    Without ``operators`` every layer gets those that it needs, each from the package that its sizes and options ask
    for, and they are all of the token mixer: the recurrence of gated delta nets, Kimi Delta Attention and Mamba-2, the
    convolution and its update, and the norm with a gate.  With ``around=False`` convolutions and norms stay the layer's
    own.  With ``operators`` the recurrence alone is replaced, too.

    They stay until ``restore()`` is called on the result, or until a ``with`` block over it ends; a backward that
    computes checkpointed layers again uses what their forward used.  Where compiled layers lie inside of a checkpoint,
    run the backward first: it uses what they have by then, and torch refuses that (CheckpointError).  A module that
    holds no layer known here, or operators made for another kind of layer, raise ArgumentError and change nothing.

    Copies, replicas and pickled layers have the operators of their original; ``remove_operators`` takes them out.
    """
    return Installation(module, operators, around)


def remove_operators(module: nn.Module) -> None:
    """Give every layer of a module that has operators its own functions back, copies and loaded layers too."""
    for layer in _module(module).modules():
        strip(layer)


def _module(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module: got a {type(module).__name__}, expected a torch.nn.Module. Pass the model.")
    return module


def pytorch_operators(layer: nn.Module) -> SimpleNamespace:
    """The layer's own PyTorch functions under the operators' names, whatever faster library transformers found."""
    scope = _scope(layer)
    for roles in ROLES.values():
        if all(name in scope for _, name in roles.values()):
            return SimpleNamespace(**{role: inspect.unwrap(scope[name]) for role, (_, name) in roles.items()})
    wanted = " or ".join(name for roles in ROLES.values() for _, name in roles.values())
    raise ArgumentError(f"layer: the module of {type(layer).__name__} defines no {wanted}")


class Installation:
    """Operators in layers; a context manager, which may be entered again, that puts them in and takes them out."""

    def __init__(self, module: nn.Module, operators: Any, around: bool) -> None:
        self._gates = {layer: gate for layer in _module(module).modules() if (gate := _gate(layer))}
        self._around = around and operators is None
        self._others = _others(module, list(self._gates), around) if operators is None else {}
        if not self._gates and not self._others:
            known = ", or ".join(" and ".join(name for _, name in roles.values()) for roles in ROLES.values())
            for names in () if operators is not None else (MAMBA2, CONVOLUTION)[: 1 + around]:
                known += f", or {' and '.join(names)}"
            raise ArgumentError(
                f"module: {type(module).__name__} holds no gated delta net layer that is known here. Expected a layer "
                f"of transformers that calls {known} (in older releases one that holds functions of these kinds); for "
                "another layer, call the package's operators from its forward"
            )
        self.layers = [*self._gates, *self._others]
        self._operators = mixers if operators is None else operators
        self._entered, self._is_installed = 0, False
        self._install()

    def _install(self) -> None:
        for layer in self.layers:
            _check_layer(layer, gate := self._gates.get(layer))
            if gate:
                _check_operators(layer, gate, self._operators)
        classes = {layer: _class(layer, gate, self._operators, self._around) for layer, gate in self._gates.items()}
        classes |= {layer: equipped_class(equipment) for layer, equipment in self._others.items()}
        for layer, cls in classes.items():
            equip(layer, cls)
        self._is_installed = True

    def restore(self) -> None:
        """Put the original functions back; a second call does nothing."""
        if self._is_installed:
            self._is_installed = False
            for layer in self.layers:
                strip(layer)

    def __enter__(self) -> "Installation":
        if not self._is_installed:
            self._install()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.restore()


def _gate(layer: nn.Module) -> str | None:
    """Which kind of layer this is: a key of ROLES, or None for any other layer."""
    return next((gate for gate, roles in ROLES.items() if _holds(layer, roles) or _calls(layer, roles)), None)


def _holds(layer: nn.Module, roles: Roles) -> bool:
    """Whether the two functions are attributes of the layer."""
    return all(callable(getattr(layer, name, None)) for name, _ in roles.values())


def _calls(layer: nn.Module, roles: Roles) -> bool:
    """Whether the layer looks the two functions up as globals of its module."""
    return _looks_up(layer, tuple(name for _, name in roles.values()))


def _looks_up(layer: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether the layer's own forward reads all of these globals."""
    code = getattr(inspect.unwrap(own_class(layer).forward), "__code__", None)
    return code is not None and all(name in code.co_names for name in names)


def _scope(layer: nn.Module) -> dict[str, Any]:
    """The globals of the layer's forward: the module of its class may be another, as that of a sharded layer is."""
    found: dict[str, Any] = inspect.unwrap(own_class(layer).forward).__globals__
    return found


def _operator(operators: Any, role: str) -> Callable[..., Any]:
    function = getattr(operators, role, None)
    if not callable(function):
        name = getattr(operators, "__name__", type(operators).__name__)
        raise ArgumentError(f"operators: {name} has no {role}; pass a generated package or gdngen.ops")
    return function


def _others(module: nn.Module, layers: list[nn.Module], around: bool) -> dict[nn.Module, Equipment]:
    """What else is replaced where all of the token mixer is: Mamba-2 layers, and what stands around any recurrence."""
    mamba2 = [layer for layer in module.modules() if _looks_up(layer, MAMBA2)]
    names = (*MAMBA2, AT_ONCE, *(CONVOLUTION if around else ()))
    found, known = {layer: _equipment(layer, names) for layer in mamba2}, {*layers, *mamba2}
    if around:
        for layer in module.modules():
            if layer not in known and _is_short_convolution(layer):
                found[layer] = _equipment(layer, CONVOLUTION)
        for layer in known:
            found |= _norms(layer)
    return found


def _is_short_convolution(layer: nn.Module) -> bool:
    """Whether the layer calls the convolution, and offsets of packed sequences reach all that it calls."""
    code = getattr(inspect.unwrap(own_class(layer).forward), "__code__", None)
    return (
        code is not None
        and _looks_up(layer, CONVOLUTION)
        and not _looks_up(layer, (MAMBA1,))
        and SEQUENCE_NUMBERS not in code.co_consts
    )


def _equipment(layer: nn.Module, names: tuple[str, ...]) -> Equipment:
    return Equipment(own_class(layer), False, mixers, _fitting_roles(layer, names))


def _norms(layer: nn.Module) -> dict[nn.Module, Equipment]:
    """The norms with a gate of a layer."""
    found = {}
    for part in layer.modules():
        if own_class(part).__name__.endswith("RMSNormGated"):
            if norm := mixers.norm_like(part, own_class(part).forward):
                found[part] = Equipment(own_class(part), False, mixers, (), norm)
    return found


def _fitting_roles(layer: nn.Module, names: tuple[str, ...]) -> tuple[Role, ...]:
    """Those of the functions that the layer's forward looks up."""
    return tuple(Role(name, name, None) for name in names if _looks_up(layer, (name,)))


def _check_layer(layer: nn.Module, gate: str | None) -> None:
    """Refuse what cannot work before anything is replaced."""
    name = type(layer).__name__
    if isinstance(layer, Equipped):
        raise ArgumentError(
            f"module: a {name} has operators already; restore() what use_operators returned, or call "
            "remove_operators(module) for a copy or a loaded layer"
        )
    if not (gate and _holds(layer, ROLES[gate])) and not holds_forward(layer):
        raise ArgumentError(
            f"module: the forward of a {name} was replaced by a {type(vars(layer)['forward']).__name__} in which the "
            "layer's own forward cannot be found, so that it would not call the operators; call use_operators first "
            "and replace forward after it"
        )


def _check_operators(layer: nn.Module, gate: str, operators: Any) -> None:
    """A package says what it was generated for."""
    for role in ROLES[gate]:
        _operator(operators, role)
    spec, name = getattr(operators, "SPEC", None), type(layer).__name__
    if spec is None:
        return
    size = getattr(layer, "head_dim", None)
    dims = {"key_dim": getattr(layer, "head_k_dim", size), "value_dim": getattr(layer, "head_v_dim", size)}
    wanted = LAYER_SPEC | {"gate": (gate,)} | {name: size for name, size in dims.items() if size is not None}
    for option, value in wanted.items():
        got = tuple(spec[option]) if option == "gate" else spec[option]
        if got != value:
            raise ArgumentError(
                f"operators: {name} needs {option}={value!r}, the package has {got!r}; build one with "
                f"`gdngen build --gate {gate} --qk-norm --key-dim {dims['key_dim']} --value-dim {dims['value_dim']}`"
            )


def _class(layer: nn.Module, gate: str, operators: Any, around: bool) -> type:
    """The class of such layers with these operators; ``around``: and with convolutions of gdngen.ops."""
    held, scope = _holds(layer, ROLES[gate]), _scope(layer)
    roles = []
    for role, (attribute, name) in ROLES[gate].items():
        own = getattr(layer, attribute) if held else scope[name]
        taken = LAYER_KEYWORDS.union(inspect.signature(own).parameters)
        roles.append(Role(role, attribute if held else name, taken))
    convolution = _fitting_roles(layer, CONVOLUTION) if around and not held else ()
    return equipped_class(Equipment(own_class(layer), held, operators, (*roles, *convolution)))
