"""Put a package's operators into the gated delta net and Kimi Delta Attention layers of Hugging Face transformers.

The layers (Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, ...) call one function for prefill and one for decode, and
transformers has held them in two ways: newer releases look both up as globals of the model's module, older ones keep
them in attributes of the layer.  Both are replaced for the given layers only; other layers of the process keep theirs.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from gdngen.errors import ArgumentError

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

# What a model hands down to all its layers and what does not change this operator's result.
MODEL_KEYWORDS = frozenset(
    "num_items_in_batch output_hidden_states output_attentions output_router_logits use_cache return_dict "
    "cu_seq_lens_k max_length_q max_length_k position_ids cache_position is_causal seq_idx".split()
)

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


def use_operators(module: nn.Module, operators: Any) -> "Installation":
    """Let ``module``, a layer or a whole model, compute with the operators of a package (or of gdngen.ops).

    They stay until ``restore()`` is called on the result, or until a ``with`` block over it ends.  A module that holds
    no layer known here, or operators made for another kind of layer, raise ArgumentError and change nothing.
    """
    return Installation(module, operators)


def pytorch_operators(layer: nn.Module) -> SimpleNamespace:
    """The layer's own PyTorch functions under the operators' names, whatever faster library transformers found."""
    scope = vars(sys.modules[type(layer).__module__])
    for roles in ROLES.values():
        if all(name in scope for _, name in roles.values()):
            return SimpleNamespace(**{role: inspect.unwrap(scope[name]) for role, (_, name) in roles.items()})
    wanted = " or ".join(name for roles in ROLES.values() for _, name in roles.values())
    raise ArgumentError(f"layer: the module of {type(layer).__name__} defines no {wanted}")


class Installation:
    """Operators sitting in layers; a context manager that puts the originals back at the end."""

    def __init__(self, module: nn.Module, operators: Any) -> None:
        gates = {layer: gate for layer in module.modules() if (gate := _gate(layer))}
        if not gates:
            known = ", or ".join(" and ".join(name for _, name in roles.values()) for roles in ROLES.values())
            raise ArgumentError(
                f"module: {type(module).__name__} holds no gated delta net layer that is known here. Expected a layer "
                f"of transformers that calls {known} (in older releases one that holds functions of these kinds); for "
                "another layer, call the package's operators from its forward"
            )
        self.layers = list(gates)
        functions = {
            gate: {role: _adapt(_operator(operators, role)) for role in ROLES[gate]} for gate in set(gates.values())
        }
        for layer, gate in gates.items():
            _check(layer, gate, operators)
        self._undo = [_install(layer, ROLES[gate], functions[gate]) for layer, gate in gates.items()]

    def restore(self) -> None:
        """Put the original functions back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _gate(layer: nn.Module) -> str | None:
    """Which kind of layer this is: a key of ROLES, or None for any other layer."""
    return next((gate for gate, roles in ROLES.items() if _holds(layer, roles) or _calls(layer, roles)), None)


def _holds(layer: nn.Module, roles: Roles) -> bool:
    """Whether the two functions are attributes of the layer."""
    return all(callable(getattr(layer, name, None)) for name, _ in roles.values())


def _calls(layer: nn.Module, roles: Roles) -> bool:
    """Whether the layer looks the two functions up as globals of its module."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and all(name in code.co_names for _, name in roles.values())


def _operator(operators: Any, role: str) -> Callable[..., Any]:
    function = getattr(operators, role, None)
    if not callable(function):
        name = getattr(operators, "__name__", type(operators).__name__)
        raise ArgumentError(f"operators: {name} has no {role}; pass a generated package or gdngen.ops")
    return function


def _check(layer: nn.Module, gate: str, operators: Any) -> None:
    """A package says what it was generated for: compare that with the layer before anything is replaced."""
    if "forward" in vars(layer):
        raise ArgumentError(
            f"module: the forward of a {type(layer).__name__} is already replaced; restore() what use_operators "
            "returned, or install before the other library does"
        )
    spec = getattr(operators, "SPEC", None)
    if spec is None:
        return
    size = getattr(layer, "head_dim", None)
    dims = {"key_dim": getattr(layer, "head_k_dim", size), "value_dim": getattr(layer, "head_v_dim", size)}
    wanted = LAYER_SPEC | {"gate": (gate,)} | {name: size for name, size in dims.items() if size is not None}
    for name, value in wanted.items():
        got = tuple(spec[name]) if name == "gate" else spec[name]
        if got != value:
            raise ArgumentError(
                f"operators: {type(layer).__name__} needs {name}={value!r}, the package has {got!r}; build one with "
                f"`gdngen build --gate {gate} --qk-norm --key-dim {dims['key_dim']} --value-dim {dims['value_dim']}`"
            )


def _adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator as a layer calls it: what a model passes to every layer is left out, anything else is an error."""
    accepted = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if options.get("seq_idx") is not None and options.get("cu_seqlens") is None:
            raise ArgumentError("seq_idx: packed sequences are given to this operator as cu_seq_lens_q; pass that too")
        for name in options.keys() - accepted:
            given = options.pop(name)
            if given is not None and name not in MODEL_KEYWORDS:
                raise ArgumentError(f"{name}: the layer passed {given!r:.80}, which {function.__name__} does not take")
        return function(query, key, value, **options)

    return call


def _install(layer: nn.Module, roles: Roles, functions: dict[str, Callable[..., Any]]) -> Callable[[], None]:
    """Replace the layer's functions; the result puts them back."""
    if _holds(layer, roles):
        names = {attribute: functions[role] for role, (attribute, _) in roles.items()}
        originals = {name: vars(layer).get(name) for name in names}
        vars(layer).update(names)
        return lambda: _put_back(layer, originals)
    scope = {name: functions[role] for role, (_, name) in roles.items()}
    vars(layer)["forward"] = types.MethodType(_rebind(type(layer).forward, scope), layer)
    return lambda: _put_back(layer, {"forward": None})


def _put_back(layer: nn.Module, originals: dict[str, Any]) -> None:
    for name, value in originals.items():
        if value is None:
            vars(layer).pop(name, None)
        else:
            vars(layer)[name] = value


def _rebind(function: Any, scope: dict[str, Callable[..., Any]]) -> Any:
    """A copy of ``function`` that sees ``scope`` before its module's globals; its functools.wraps decorators stay."""
    inner = getattr(function, "__wrapped__", None)
    names, cells = function.__globals__, function.__closure__ or ()
    if inner is None:
        names = names | scope
    elif not any(cell.cell_contents is inner for cell in cells):
        raise ArgumentError(f"module: the decorator around {function.__qualname__} does not hold the function it wraps")
    else:
        inner_copy = _rebind(inner, scope)
        cells = tuple(types.CellType(inner_copy) if cell.cell_contents is inner else cell for cell in cells)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    del copy.__wrapped__  # type: ignore[attr-defined]
    if inner is not None:
        copy.__wrapped__ = inner_copy  # type: ignore[attr-defined]
    return copy
