"""A real Qwen3-Next token mixer, prefill and decode, through operators that gdngen wrote.

Builds the qwen3-next package, puts its operators into the gated delta net layer of transformers (real head sizes,
random weights), and checks everything it computes: the layer's outputs and final state against the layer's own
PyTorch path and against float64, every operator call on the layer's own inputs, and one packed call sequence by
sequence.  With a GPU the Triton kernels run there; without one the package's PyTorch version runs, and after it a
smaller problem through the Triton kernels themselves, in Triton's interpreter.  Exits with 1 when an error exceeds
its budget.
"""

import copy
import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

import gdngen
from gdngen import api, explanation, oracle, presets
from gdngen.integrate.transformers import pytorch_operators, use_operators

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
BUDGET = {torch.float32: 5e-4, torch.bfloat16: 5e-3}  # rms(x - ref) / rms(ref) of outputs and states
HEAD_DIM = 128
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
KERNELS_RUN = DEVICE == "cuda" or INTERPRETING


@dataclass(frozen=True)
class Problem:
    """Sizes of one pass; ``lengths`` are the packed sequences."""

    hidden: int
    q_heads: int
    v_heads: int
    prefill: int
    decode: int
    lengths: tuple[int, ...]


@dataclass
class Report:
    """Prints one line per checked number and remembers the ones over budget."""

    failures: list[str] = field(default_factory=list)

    def check(self, what: str, error: float, budget: float, extra: str = "") -> None:
        good = error <= budget  # a NaN is not
        print(f"  {what:<32} {error:9.2e}{budget:12.1e}   {'ok' if good else 'TOO LARGE':<9} {extra}".rstrip())
        if not good:
            self.failures.append(f"{what}: {error:.2e} exceeds {budget:.1e}")

    def require(self, what: str, good: bool) -> None:
        if not good:
            self.failures.append(what)


@dataclass(frozen=True)
class Walk:
    """What one trip through the layer left behind: outputs, final recurrent state, seconds."""

    prefill: torch.Tensor
    decode: torch.Tensor
    state: torch.Tensor
    prefill_s: float
    decode_s: float

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("prefill output", self.prefill), ("decode outputs", self.decode), ("final state", self.state))


class Recorder:
    """A package's operators, keeping each call's inputs and results."""

    def __init__(self, package: ModuleType) -> None:
        self.calls: list[tuple[str, dict[str, Any], torch.Tensor, torch.Tensor]] = []
        self.SPEC = package.SPEC
        for name in OPERATORS:
            setattr(self, name, self._recorded(name, getattr(package, name)))

    def _recorded(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operator)
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
            h0 = options["initial_state"]
            h0 = None if h0 is None else h0.clone()  # the cache updates it in place
            o, state = operator(q, k, v, **options)
            inputs = {"q": q, "k": k, "v": v, "g": options["g"], "beta": options["beta"], "h0": h0}
            self.calls.append((name, inputs, o, state))
            return o, state

        return call


def recurrence(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 recurrence with q/k norm: what every number here is measured against."""
    return oracle.recurrence(oracle.normalized(q), oracle.normalized(k), *args, **options)


def oracle_operators() -> SimpleNamespace:
    """The recurrence as a pair of operators, so that the layer itself can run in float64."""

    def operator(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = recurrence(q, k, v, g=g, beta=beta, h0=initial_state)
        return o.to(v.dtype), state

    return SimpleNamespace(**dict.fromkeys(OPERATORS, operator))


def build(preset: presets.Preset) -> ModuleType:
    """The preset's package, written under generated/ and imported as any other package."""
    start = time.perf_counter()
    path = gdngen.build(preset.spec, out=ROOT / "generated")
    print(f"built generated/{path.name} in {time.perf_counter() - start:.1f} s\n")
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.name)


def make_layer(problem: Problem) -> tuple[torch.nn.Module, Qwen3NextConfig]:
    """One gated delta net layer of transformers with random weights."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=problem.hidden,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=problem.q_heads,
        linear_num_value_heads=problem.v_heads,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=4,
    )
    return Qwen3NextGatedDeltaNet(config, layer_idx=0).eval().to(DEVICE), config


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def walk(layer: torch.nn.Module, operators: Any, config: Qwen3NextConfig, hidden: torch.Tensor, prefill: int) -> Walk:
    """Prefill, then token by token, through the layer's own cache."""
    cache = transformers.DynamicCache(config=config)
    hidden = hidden.to(next(layer.parameters()).dtype)
    with use_operators(layer, operators):
        start = now()
        first = layer(hidden[:, :prefill], cache)
        middle = now()
        rest = [layer(token, cache) for token in hidden[:, prefill:].split(1, dim=1)]
        end = now()
    state = cache.layers[0].recurrent_states[0]
    return Walk(first, torch.cat(rest, dim=1), state, middle - start, (end - middle) / len(rest))


def check_layer(package: ModuleType, problem: Problem, dtype: torch.dtype, report: Report) -> None:
    """The layer with the package's operators against itself: its own PyTorch path, and all of it in float64."""
    layer, config = make_layer(problem)
    layer = layer.to(dtype)
    hidden = torch.randn(1, problem.prefill + problem.decode, problem.hidden, device=DEVICE).to(dtype)
    go = functools.partial(walk, config=config, hidden=hidden, prefill=problem.prefill)
    package.LAUNCHES.clear()
    recorder, own = Recorder(package), pytorch_operators(layer)
    ours, again = go(layer, recorder), go(layer, package)
    launches = dict(package.LAUNCHES)
    theirs, theirs_32 = go(layer, own), go(copy.deepcopy(layer).float(), own)
    exact = go(copy.deepcopy(layer).double(), oracle_operators())

    print(f"  {'the layer, against float64':<32} {'ours':>9}{'budget':>12} {'':11} {'own path':>13} {'own - ours':>13}")
    results = zip(ours.parts(), again.parts(), theirs.parts(), theirs_32.parts(), exact.parts())
    for (what, x), (_, repeated), (_, own_x), (_, own_32), (_, reference) in results:
        own_error = oracle.rms_ratio(own_x, reference)
        allowed = BUDGET[dtype] + (own_error if dtype != torch.float32 else 0)
        extra = f"{own_error:13.2e} {oracle.rms_ratio(x, own_32):13.2e}"
        report.check(what, oracle.rms_ratio(x, reference), allowed, extra)
        report.require(f"{what}: a second run gave other bits", torch.equal(x, repeated))
    check_calls(recorder, dtype, report)
    print(f"  time: prefill {again.prefill_s * 1e3:.1f} ms (layer's own path {theirs.prefill_s * 1e3:.1f}), ", end="")
    print(f"decode {again.decode_s * 1e3:.2f} ms a token (layer's own path {theirs.decode_s * 1e3:.2f})")
    print(f"  kernel launches: {launches or 'none, the PyTorch version computed this'}")
    report.require("the launch counter disagrees with what should have run", bool(launches) == KERNELS_RUN)


def check_calls(recorder: Recorder, dtype: torch.dtype, report: Report) -> None:
    """Each call that the layer made, on exactly the inputs it passed; the worst of each operator is shown."""
    print("  the operator calls on the inputs that the layer passed, against float64")
    for name in OPERATORS:
        calls = [call for call in recorder.calls if call[0] == name]
        report.require(f"the layer never called {name}", bool(calls))
        errors = []
        for _, inputs, o, state in calls:
            o_exact, state_exact = recurrence(**inputs)
            errors.append((oracle.rms_ratio(o, o_exact), oracle.rms_ratio(state, state_exact)))
        for what, values in zip(("output", "state"), zip(*errors)):
            kind = "chunk" if name.startswith("chunk") else "recurrent"
            report.check(f"{kind} {what}, worst of {len(calls)}", max(values), BUDGET[dtype])


@torch.no_grad()
def check_packed(package: ModuleType, problem: Problem, dtype: torch.dtype, report: Report) -> None:
    """One packed call, several value heads per q/k head (the layer never packs), checked sequence by sequence."""
    torch.manual_seed(1)
    ends = torch.tensor([0, *problem.lengths]).cumsum(0)
    tokens = int(ends[-1]) + 3  # three rows after the last sequence
    shape = {"q": problem.q_heads, "k": problem.q_heads, "v": problem.v_heads}
    x = {name: torch.randn(1, tokens, heads, HEAD_DIM, device=DEVICE).to(dtype) for name, heads in shape.items()}
    x["g"] = -20 * torch.rand(1, tokens, problem.v_heads, device=DEVICE) ** 4
    x["beta"] = torch.rand(1, tokens, problem.v_heads, device=DEVICE).to(dtype)
    h0 = torch.randn(len(problem.lengths), problem.v_heads, HEAD_DIM, HEAD_DIM, device=DEVICE)
    o, state = package.chunk_gated_delta_rule(
        **x,
        initial_state=h0,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends.to(DEVICE, torch.int32),
    )
    heads = f"{problem.q_heads} q/k heads, {problem.v_heads} value heads"
    print(f"  a packed call against float64: lengths {problem.lengths}, {heads}")
    for n, (begin, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist())):
        part, state_exact = {name: tensor[:, begin:end] for name, tensor in x.items()}, h0[n : n + 1]
        name = f"sequence {n}, {end - begin} tokens,"
        if begin < end:
            o_exact, state_exact = recurrence(**part, h0=state_exact)
            report.check(f"{name} output", oracle.rms_ratio(o[:, begin:end], o_exact), BUDGET[dtype])
        report.check(f"{name} state", oracle.rms_ratio(state[n : n + 1], state_exact), BUDGET[dtype])
    report.require("rows after the last sequence are not zero", not o[:, int(ends[-1]) :].any())
    print()


def main() -> int:
    preset = presets.get("qwen3-next")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, device {DEVICE}"
    if INTERPRETING:
        problem = Problem(256, 1, 2, prefill=96, decode=3, lengths=(70, 0, 17))
        how = "Triton kernels in Triton's interpreter, a smaller layer"
    else:
        problem = Problem(2048, preset.q_heads, preset.v_heads, prefill=512, decode=16, lengths=(200, 0, 64, 37, 1))
        how = "Triton kernels on the GPU" if DEVICE == "cuda" else "the package's PyTorch version (no GPU here)"
    transformers.logging.set_verbosity_error()  # it warns of every function that it runs in plain PyTorch
    torch.backends.cudnn.allow_tf32 = False  # the convolution would otherwise hide the operators' own error
    print(f"=== {how} ===\n{versions}")
    package = build(preset)
    if not INTERPRETING:
        print("\n".join(explanation.text(explanation.explain(api.compilation(preset.spec)))), end="\n\n")
    report = Report()
    for dtype in (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,):
        layer = f"{problem.q_heads} q/k heads, {problem.v_heads} value heads of {HEAD_DIM}"
        print(f"--- {dtype}: {layer}; {problem.prefill} tokens of prefill, {problem.decode} decode steps ---")
        print("errors are rms(x - reference) / rms(reference)")
        check_layer(package, problem, dtype, report)
        check_packed(package, problem, dtype, report)
    print("every number is within budget\n" if not report.failures else "FAILED:\n  " + "\n  ".join(report.failures))
    failed = bool(report.failures)
    if not KERNELS_RUN:
        sys.stdout.flush()
        again = [sys.executable, str(Path(__file__).resolve())]
        failed |= subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
