"""Who computes a call: the Triton kernels or the PyTorch version; and whether this package was made for it at all."""

import os
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad

from .arguments import ArgumentError, Call, Options, is_traced, is_transformed
from .spec import BUILD_COMMAND, DIFFERENTIABLE, MISSING, NAME, SPEC

# Kernel launches by kernel name, counted by launch.py.
LAUNCHES: Counter[str] = Counter()

# gdngen's own defaults and flag order, so that the command named in an error is the one gdngen would name.
DEFAULTS: dict[str, Any] = {
    "rule": "delta",
    "gate": None,  # always spelled out
    "beta": "head",
    "key_dim": 128,
    "value_dim": 128,
    "head_ratio": "any",
    "chunk": 64,
    "state_v_first": False,
    "fused_gate": "none",
    "lower_bound": None,
    "beta_logits": False,
    "neg_eigval": False,
    "qk_norm": False,
    "normalize": False,
    "feature_map": "identity",
    "varlen": True,
    "backward": True,
}
# What a caller knows each option as.
ARGUMENTS = {
    "rule": "the operator's rule",
    "gate": "the gates given in g, gk, gv",
    "key_dim": "the last dim of q and k",
    "value_dim": "the last dim of v",
    "fused_gate": "use_gate_in_kernel",
    "beta_logits": "use_beta_sigmoid_in_kernel",
    "neg_eigval": "allow_neg_eigval",
    "qk_norm": "use_qk_l2norm_in_kernel",
    "chunk": "chunk_size",
}

# (Options, whether a state goes in or out), once compared with SPEC -> whether beta=None has to be filled with ones.
_accepted: dict[tuple[Options, bool], bool] = {}


def run(options: Options, call: Call) -> Any:
    """(o, final_state) of one call; ArgumentError when this package was not generated for it."""
    key = (options, call.output_final_state or call.inputs["h0"] is not None)
    fill = _accepted.get(key)
    if fill is None:
        fill = _accepted[key] = _accept(*key)
    if SPEC["head_ratio"] != "any" and call.H * SPEC["head_ratio"] != call.HV:
        got = f"{call.HV} value heads for {call.H} query/key heads"
        raise _not_generated([f"v: got {got}, the package has {SPEC['head_ratio']} for each"], {"head_ratio": "any"})
    if call.cu_seqlens is not None and not SPEC["varlen"]:
        raise _not_generated(["cu_seqlens: got offsets, the package takes sequences of one length"], {"varlen": True})
    if fill:
        _fill_beta(call)
    return _function(call)(call)


def _accept(options: Options, stateful: bool) -> bool:
    """Compare every option the call states with this package's; None in options means the call states nothing."""
    said = options.said()
    if said.get("chunk") == 64:  # the default of every chunk operator: it insists on nothing
        del said["chunk"]
    if not stateful:  # nobody sees the layout
        del said["state_v_first"]
    # beta=None means 1, and a package that reads beta can be given ones.
    fill = options.beta == "none" and SPEC["beta"] in ("head", "value") and not SPEC["beta_logits"]
    if fill:
        del said["beta"]
    faults = [
        f"{ARGUMENTS.get(name, name)}: got {_text(wanted)}, the package has {_text(SPEC[name])}"
        for name, wanted in said.items()
        if _text(wanted) != _text(SPEC[name])
    ]
    if faults:
        raise _not_generated(faults, said)
    return fill


def _fill_beta(call: Call) -> None:
    shape = (call.B, call.T, call.HV, call.V)[: 4 if SPEC["beta"] == "value" else 3]
    call.inputs["beta"] = torch.ones((), device=call.device).expand(shape)


def _function(call: Call) -> Any:
    """The function that computes this call: launch.py's with a GPU or Triton's interpreter, else reference.py's."""
    differentiated = _needs_grad(call)
    if differentiated and not SPEC["backward"]:
        fault = "an input that requires grad: got one with grad enabled, the package is forward only"
        raise _not_generated([fault], {"backward": True}, "Or call it under torch.no_grad().")
    if are_kernels_for(call):
        if forward_ad._current_level >= 0:
            _refuse_tangents(call)
        if differentiated or is_traced() or is_transformed() or _is_without_contents(call):
            return _registered(call, differentiated)
        module = module_named("launch")
    elif call.device.type == "cpu":
        if call.cu_seqlens is not None and (DIFFERENTIABLE or not differentiated):
            if is_traced() or _is_without_contents(call):  # how far it would have to go on, only the offsets say
                return _registered(call, differentiated)
        module = module_named("reference")
    else:
        raise ArgumentError(
            f"q: got a tensor on {call.device}, expected one on a CUDA or ROCm GPU or on the CPU. "
            "Move the inputs there; the kernels of this package run on no other device."
        )
    return _operator(module, call)


def are_kernels_for(call: Call) -> bool:
    """Whether kernels compute a call; CPU tensors are for the PyTorch version, unless Triton interprets."""
    kind = call.device.type
    return kind == "cuda" or (kind == "cpu" and _interpreting())


def _is_without_contents(call: Call) -> bool:
    """Whether the tensors are of another kind than torch's own, such as fake ones: kernels would read their memory."""
    return type(call.inputs["q"]) not in (torch.Tensor, torch.nn.Parameter)


def _refuse_tangents(call: Call) -> None:
    for name, tensor in call.inputs.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(
                f"{name}: got a tensor with a tangent (forward-mode differentiation), expected one without: the "
                f"kernels of {NAME} have gradients in reverse mode alone. Use torch.func.vjp or jacrev, or CPU "
                "tensors, whose PyTorch version has both."
            )


def _operator(module: ModuleType, call: Call) -> Any:
    function = getattr(module, call.operator, None)
    if function is None:
        raise ArgumentError(f"{NAME} has no {call.operator} operator: {MISSING.get(call.operator, 'not generated')}.")
    return function


def _registered(call: Call, differentiated: bool) -> Any:
    """The operator as a torch op that autograd and torch.compile know."""
    if differentiated and not DIFFERENTIABLE:
        reason = f" ({MISSING['chunk_backward']})" if "chunk_backward" in MISSING else ""
        raise ArgumentError(
            f"{NAME}: an input requires grad and grad is enabled, but the Triton kernels of this package have no "
            f"backward{reason}. Call it under torch.no_grad(), or with CPU tensors: the PyTorch version differentiates."
        )
    _operator(module_named("launch" if are_kernels_for(call) else "reference"), call)  # an error where there is none
    return module_named("registration").run


def _needs_grad(call: Call) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in call.inputs.values()
    )


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def module_named(name: str) -> ModuleType:
    """launch.py, registration.py or reference.py, imported when needed: the PyTorch version must not need Triton."""
    try:  # plain import statements, which torch.compile can trace
        if name == "launch":
            from . import launch as module
        elif name == "registration":
            from . import registration as module
        else:
            from . import reference as module
    except ImportError as error:
        raise ImportError(
            f"{NAME}: {name}.py cannot be imported ({error}). GPU tensors need a working triton beside torch; "
            "CPU tensors without TRITON_INTERPRET run the PyTorch version, which needs torch alone."
        ) from error
    return module


def _not_generated(faults: list[str], wanted: dict[str, Any], more: str = "") -> ArgumentError:
    command = build_command({**SPEC, **wanted})
    lines = [f"{NAME} was not generated for this call.", *faults, f"Build a package that was: {command}"]
    return ArgumentError("\n".join([*lines, f"(This one is: {BUILD_COMMAND})", *filter(None, [more])]))


def build_command(spec: dict[str, Any]) -> str:
    """The command that builds the package of this Spec: --gate, and the flags that differ from the defaults."""
    flags = ["--gate", _text(tuple(spec["gate"]))]
    for name, default in DEFAULTS.items():
        value = spec[name]
        if name == "gate" or value == default or (name == "lower_bound" and spec["fused_gate"] != "bounded"):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + name.replace("_", "-"))
        else:
            flags += [flag, f"{value}"]
    return " ".join(["gdngen build", *flags])


def _text(value: Any) -> str:
    """An option as the command line spells it; a gate may come as a tuple or a list."""
    return "+".join(value) or "none" if isinstance(value, (tuple, list)) else f"{value}"
