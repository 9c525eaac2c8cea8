"""Scans that load through tensor descriptors, as GPUs of sm_90 and sm_100 do: the same bits as through pointers."""

import sys
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import pytest
import torch
from support import Case, call, case, same, viewed

from gdngen.passes.accumulate import accumulated
from gdngen.passes.order import by_depth
from gdngen.passes.pipeline import compile_spec
from gdngen.presets import PRESETS
from gdngen.spec import Spec
from gdngen.target import TARGETS

SIZES = {"key_dim": 24, "value_dim": 40, "chunk": 16}
MEMBERS = (
    Spec(qk_norm=True, **SIZES),
    Spec(gate="key", state_v_first=True, **SIZES),
    Spec(gate="scalar+value", rule="additive", **SIZES),
    Spec(gate="none", rule="additive", beta="none", normalize=True, **SIZES),
)


def module(package: ModuleType, name: str) -> ModuleType:
    return sys.modules[f"{package.__name__}.{name}"]


@contextmanager
def described(package: ModuleType):
    """Inside, launches hand over descriptors; yields those that were made."""
    machine, launch, tuning = (module(package, name) for name in ("machine", "launch", "tuning"))
    made: list[object] = []

    def descriptor(*arguments):
        made.append(arguments)
        return kind(*arguments)

    kind = machine.TensorDescriptor
    with (
        mock.patch.object(launch, "choice", lambda *args, **more: tuning.choice(*args, **more)._replace(descriptors=1)),
        mock.patch.object(machine, "TensorDescriptor", descriptor),
    ):
        yield made


def results(package: ModuleType, this: Case) -> tuple[torch.Tensor, ...]:
    """o, the final states, and gradients of everything."""
    leaves = {name: x.detach().requires_grad_() for name, x in this.x.items()}
    found = call(package, this.changed(**leaves))
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(x.shape, generator=generator) for x in found]
    return *found, *torch.autograd.grad(found, list(leaves.values()), given)


PACKED = (0, 20, 20, 37)


@pytest.mark.parametrize(
    ("spec", "offsets"),
    [
        pytest.param(spec, offsets, marks=pytest.mark.full if {"key", "value"} & set(spec.gate) else ())
        for spec, offsets in [*zip(MEMBERS, (None, PACKED, None, PACKED)), (MEMBERS[0], PACKED)]
    ],
    ids=str,
)
def test_descriptors_give_the_same_bits(packages, spec, offsets):
    package, this = packages(spec), case(spec, T=40 if offsets else 37, offsets=offsets)
    wanted = results(package, this)
    with described(package) as made:
        found = results(package, this)
    assert same(found, wanted)
    assert len(made) > 3


def test_a_view_is_described_by_its_strides(packages):
    package, this = packages(MEMBERS[0]), viewed(case(MEMBERS[0], T=37, H=2), "split")
    wanted = results(package, this)
    with described(package):
        assert same(results(package, this), wanted)


@pytest.mark.parametrize("change", [{"value_dim": 5}, {"T": 0}], ids=["rows of 20 bytes", "no tokens"])
def test_what_cannot_be_described_is_loaded_by_pointers(packages, change):
    spec = Spec(qk_norm=True, **SIZES | {n: x for n, x in change.items() if n != "T"})
    package, this = packages(spec), case(spec, T=change.get("T", 20))
    with torch.no_grad():
        wanted = call(package, this)
        with described(package) as made:
            assert same(call(package, this), wanted)
    tokens = [block for *_, block in made if len(block) == 4]
    assert not tokens  # v is not; what the package stored itself is aligned


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_scan_waits_for_no_load_of_a_few_bytes(preset):
    """Per-token numbers come from a kernel before it, as vectors in fp32 that a descriptor can load."""
    plan = compile_spec(PRESETS[preset].spec, TARGETS["sm_90"], ()).plan
    for operator in plan.operators:
        stored = {value.name for value in operator.stored}
        for kernel in operator.kernels:
            if kernel.loop == "scan":
                loaded = {n for n, i in kernel.graph.inputs.items() if "n" in kernel.graph.nodes[i].grid}
                assert all(len(kernel.graph.nodes[kernel.graph.inputs[n]].axes) == 2 for n in loaded - stored)


def test_products_of_a_reverse_scan_share_an_accumulator():
    """dS is a sum of terms without factors of their own: S d, and products that are added onto it."""
    plan = compile_spec(Spec(qk_norm=True), TARGETS["sm_90"], ()).plan
    backward = plan.operator("chunk_backward")
    assert backward is not None
    (reverse,) = (kernel for kernel in backward.kernels if kernel.is_reverse)
    graph = reverse.graph
    total = graph[graph.carries[0].out]
    kinds = sorted(graph.kind(ref.value) for ref in total.args)
    assert (total.op, kinds, set(total.attrs)) == ("add", ["dot", "dot", "product"], {1.0})
    assert by_depth(accumulated(graph)) == graph
