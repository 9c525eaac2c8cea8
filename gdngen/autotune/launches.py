"""What a package launches, taken down without a GPU: its own host code runs, on tensors that nobody reads.

Triton itself binds the arguments, so that every launch asks for the very kernel (types, constants, what is known of
alignment, options) that it asks for on the GPU.  For processes of their own: Triton's driver is replaced.
"""

import functools
import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gdngen import inspection
from gdngen.ir.family import forward_graph
from gdngen.spec import Spec
from gdngen.target import Target

IN_FP32 = ("g", "gk", "gv", "A_log", "dt_bias", "h0", "z0")  # as models hold them; all else comes in the dtype of q
Make = Callable[[str, tuple[int, ...], Any], Any]


@dataclass(frozen=True)
class Shape:
    """A call: ``offsets`` is the dtype of cu_seqlens ("" for a batch of one length), ``heads`` H and HV."""

    operator: str
    dtype: str
    heads: tuple[int, int]
    tokens: int = 64
    sequences: int = 1
    offsets: str = ""
    initial: bool = False
    final: bool = False
    backward: bool = False


@dataclass(frozen=True)
class Wanted:
    """A kernel as a launch asks Triton for it."""

    kernel: str
    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    facts: dict[tuple[int, ...], Any]
    options: Any

    @functools.cached_property
    def source(self) -> Any:
        from triton.compiler import ASTSource

        return ASTSource(self.function, self.signature, self.constants, self.facts)

    @functools.cached_property
    def parts(self) -> tuple[str, str]:
        """The parts of Triton's cache key that this kernel decides: digests of its source and of its options."""
        return self.source.hash(), self.options.hash()

    @property
    def name(self) -> str:
        """Short for both; the same for every Python and every build of one Triton version."""
        return hashlib.sha256("-".join(self.parts).encode()).hexdigest()[:24]


class Recorder:
    """The package in a folder as it would launch on a target; ``gpu``: the device's name, whose decisions hold."""

    def __init__(self, folder: Path, target: Target, gpu: str = "") -> None:
        from triton.runtime.jit import JITFunction

        self.target, self.gpu = target, gpu
        inspection.stand_in_driver(target.backend, target.arch, target.warp_size)
        sys.path.insert(0, str(folder.parent))
        names = ("launch", "machine", "rehearsal", "arguments", "spec")
        modules: list[Any] = [importlib.import_module(f"{folder.name}.{name}") for name in names]
        self.host, self.machine, self.rehearsal, arguments, spec = modules
        self.new_call, self.spec = arguments.Call, Spec(**spec.SPEC)
        self.graph = forward_graph(self.spec)
        self.found: dict[str, Wanted] = {}  # by what Triton looks launches up under in one process
        vars(self.host)["machine_of"] = self._machine_of
        vars(self.machine)["install"] = lambda arch: 0  # what was compiled before
        for name, function in vars(self.host).items():
            if isinstance(function, JITFunction):
                function._do_compile = functools.partial(self._take_down, name, function)

    def record(self, shape: Shape, made: Make | None = None) -> dict[str, Wanted]:
        """The kernels that the launches of a call ask for; ``made(name, size, dtype)`` makes its tensors."""
        before, self.found = self.found, {}
        call, states = self._call(shape, made or _unwritten)
        if shape.backward:
            given = [name for name, x in call.inputs.items() if x is not None]
            wanted = states if shape.final else [None] * len(states)
            getattr(self.host, f"{shape.operator}_backward")(call, given, call.inputs["v"], *wanted)
        else:
            function = getattr(self.host, shape.operator)
            for one in self.rehearsal.variants(call, function.__wrapped__):
                function(one)
        recorded, self.found = self.found, before | self.found
        return recorded

    def _take_down(self, name: str, function: Any, key: str, *rest: Any) -> None:
        """In place of Triton's compilation of a launch that it has not seen yet."""
        signature, _, constants, options, facts, _ = rest
        self.found[f"{name} {key}"] = Wanted(name, function, signature, constants, facts, options)

    def _machine_of(self, tensor: Any) -> Any:
        """What the package's machine_of says of a tensor on the target."""
        device = SimpleNamespace(index=f"{self.target} {self.gpu}")
        there = SimpleNamespace(is_cuda=True, device=device, dtype=tensor.dtype)
        with inspection.on_gpu(self.target.backend, self.target.arch, self.target.processors, self.gpu):
            return self.machine.machine_of(there)

    def _call(self, shape: Shape, made: Make) -> tuple[Any, list[Any]]:
        """(the package's Call, tensors like its states)."""
        import torch

        (H, HV), K, V, T = shape.heads, self.spec.key_dim, self.spec.value_dim, shape.tokens
        B = 1 if shape.offsets else shape.sequences
        width = {"k": (K,), "v": (V,), "kv": (V, K) if self.spec.state_v_first else (K, V)}
        inputs: dict[str, Any] = {}
        states = [carry.init.value for carry in self.graph.carries]
        for name, i in self.graph.inputs.items():
            node = self.graph.nodes[i]
            rows: tuple[int, ...] = (B, T) if "n" in node.grid else (shape.sequences,) if i in states else ()
            size = (*rows, HV if "r" in node.grid else H, *width.get(node.axes.removeprefix("i"), ()))
            dtype = torch.float32 if name in IN_FP32 else getattr(torch, shape.dtype)
            if name not in self.graph.scalars:
                inputs[name] = made(name, size, dtype)
        like = [inputs[name] for i in states for name, j in self.graph.inputs.items() if i == j]
        if not shape.initial:
            inputs |= {name: None for name, i in self.graph.inputs.items() if i in states}
        offsets = None
        if shape.offsets:
            offsets = made("cu_seqlens", (shape.sequences + 1,), getattr(torch, shape.offsets))
        sizes = (B, T, H, HV, K, V, shape.sequences)
        device = inputs["q"].device
        return self.new_call(shape.operator, inputs, K**-0.5, offsets, shape.final, *sizes, device), like


def _unwritten(name: str, size: tuple[int, ...], dtype: Any) -> Any:
    """On the CPU: its addresses are aligned as those of a GPU are, and memory that is not touched costs nothing."""
    import torch

    return torch.empty(size, dtype=dtype)
