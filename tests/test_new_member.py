"""Members from outside: the one of examples/error_free.py, every operator of it, in kernels and in PyTorch; others."""

import ast
import importlib.util
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from graphs import TARGET
from members import SMALL, OneInverseTooMany, TwoInverses
from support import pytorch_version

from gdngen import api, oracle
from gdngen.codegen.sources import sources
from gdngen.errors import GraphError
from gdngen.explanation import explain
from gdngen.ir.family import Family
from gdngen.passes import regroup
from gdngen.passes.pipeline import compile_spec
from gdngen.passes.rewrite import RULES
from gdngen.spec import Spec

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "error_free.py"
SIZES = {"key_dim": 9, "value_dim": 20, "chunk": 16}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("error_free", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["error_free"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["error_free"], module.OPS["relax"], module.OPS["relax_slope"]


def inputs(size: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 37, heads, width, generator=generator) for heads, width in ((1, 9), (1, 9), (2, 20)))
    g, beta = -torch.rand(1, 37, 2, generator=generator), 2 * torch.rand(1, 37, 2, generator=generator)
    return [x.requires_grad_() for x in (q, size * k, v, g, beta)]


def check(example, package, size: float) -> None:
    x = inputs(size)
    o, exact = package.chunk_gated_delta_rule(*x, chunk_size=16)[0], example.recurrence(*x)
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad(y, x, cotangent.to(y.dtype)) for y in (o, exact))
    assert oracle.rms_ratio(o, exact) < 1e-5
    assert max(map(oracle.rms_ratio, found, wanted)) < 1e-4
    with torch.no_grad():
        decoded = package.fused_recurrent_gated_delta_rule(*x[:4], beta=x[4])[0]
    assert oracle.rms_ratio(decoded, exact) < 1e-5


@pytest.mark.parametrize("size", [1e-3, 0.1, 0.5, 2.0])  # of keys: series and closed form, weak and full writes
def test_the_example(packages, example, size):
    package = packages(example.ErrorFree(**SIZES))
    package.LAUNCHES.clear()
    check(example, package, size)
    assert {"prepare", "scan", "gradients", "recurrence"} <= set(package.LAUNCHES)
    with pytorch_version():
        check(example, package, size)


def test_with_a_gate_per_key_channel(packages, example):
    """What the example does not say: the family's other axes are there too."""
    q, k, v, g, beta = (x.detach() for x in inputs(1.0))
    gk = g.unsqueeze(-1) * torch.linspace(0, 2, 9)
    package = packages(example.ErrorFree(gate="key", **SIZES))
    square = k.double().square().sum(-1).repeat_interleave(2, 2)
    strength = -torch.expm1(-beta.double() * square) / square
    exact = oracle.recurrence(q, k, v, gk=gk, beta=strength)[0]
    assert oracle.rms_ratio(package.chunk_kda(q, k, v, gk, beta, chunk_size=16)[0], exact) < 1e-5


def test_without_a_write_strength(packages, example):
    """Its op then has a number for its first operand."""
    q, k, v, g, _ = (x.detach() for x in inputs(0.5))
    package = packages(example.ErrorFree(beta="none", **SIZES))
    exact = example.recurrence(q, k, v, g, torch.ones_like(g))
    assert oracle.rms_ratio(package.chunk_gated_delta_rule(q, k, v, g, None, chunk_size=16)[0], exact) < 1e-5


def test_the_member_takes_less_than_sixty_lines():
    text = EXAMPLE.read_text()
    member = text[text.index("# ---- the member") : text.index("# ---- and what it gives")]
    assert 20 < len(member.splitlines()) < 60


class ProductGate(Family):
    """A gate that is a product of inputs: the only readers of it are products with its own decays."""

    def gate(self, gate, softplus):
        return self.build.mul(self.build.input("gv", "iv", "bnhr"), self.build.input("beta", "i", "bnhr"), coef=0.5)


class WithProductGate(Spec):
    family: ClassVar[type[Family]] = ProductGate


def test_every_name_in_a_kernel_is_defined_where_the_gate_is_a_product():
    plan = compile_spec(WithProductGate(gate="value", rule="additive", key_dim=16, value_dim=16, chunk=32), TARGET).plan
    texts = {file: text for file, text in sources(plan, "any").items() if file.startswith("kernels/")}
    for file, text in texts.items():
        tree = ast.walk(ast.parse(text))
        names = [(node.id, isinstance(node.ctx, ast.Load)) for node in tree if isinstance(node, ast.Name)]
        read, defined = ({name for name, load in names if load is way} for way in (True, False))
        assert {name for name in read if name.startswith("b_")} <= defined, file
    assert "decay_to_middle" in texts["kernels/crossings.py"]


# ---- rewrites that do not hold for a member --------------------------------------------------------------------------


def doubled(build, node, args):
    """A rule that holds for no member."""
    return build.ein(args, node.axes, 2.0) if node.op == "ein" and node.summed == "k" else None


def test_a_form_that_does_not_hold_is_left_out_with_a_note(monkeypatch):
    spec = Spec(backward=False, **SIZES)
    forms = compile_spec(spec, TARGET).plan
    for rule in ("distribute_inverse", "read_after_write"):
        monkeypatch.setitem(RULES, rule, doubled)
    found = compile_spec.__wrapped__(spec, TARGET)
    assert [note.split(": ")[0] for note in found.notes] == [
        "form distribute_inverse is left out",
        "form read_after_write is left out",
    ]
    assert set(found.notes) <= set(explain(found)["notes"])
    assert forms.operator("recurrent").forms == ("fold_to_tokens", "read_after_write")
    assert found.plan.operator("recurrent").forms == ("fold_to_tokens",)
    assert {candidate.cut.forms for candidate in found.choices["chunk"].front} == {()}


def test_terms_that_cannot_be_regrouped_stay_apart(monkeypatch):
    monkeypatch.setattr(regroup, "_diagonal_apart", doubled)
    found = compile_spec.__wrapped__(Spec(**SIZES), TARGET)
    assert [note.split(": ")[0] for note in found.notes] == ["form regroup is left out"]
    assert found.plan.operator("chunk_backward")


@pytest.mark.parametrize("gate", ["scalar", "key", "value"])
def test_what_assumes_one_inverse_does_not_apply_to_two(gate):
    """The product of the first with what stands between is a matrix over tokens, not [i,v]."""
    found = compile_spec(TwoInverses(gate=gate, backward=False, **SMALL), TARGET)
    assert not found.notes and len(found.plan.operators) == 2


def test_a_member_that_depends_on_where_chunks_begin_is_an_error():
    with pytest.raises(GraphError, match=r"not what its graph says in chunks of one token .*may not depend on where"):
        compile_spec(OneInverseTooMany(backward=False, **SMALL), TARGET)


# ---- the cache -------------------------------------------------------------------------------------------------------

MODULE = """
from typing import ClassVar
from gdngen import Spec
from gdngen.ir.family import Family

class HalvedFamily(Family):
    def write_strength(self, k, softplus):
        return self.build.mul(super().write_strength(k, softplus), coef={strength})

class Halved(Spec):
    family: ClassVar[type[Family]] = HalvedFamily
"""


def member_from(folder: Path, name: str, strength: float) -> type[Spec]:
    (folder / f"{name}.py").write_text(MODULE.format(strength=strength))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Halved


def test_a_member_without_a_name_of_its_own_is_not_the_plain_spec(tmp_path, monkeypatch):
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    fields = {"rule": "additive", "gate": "none", "backward": False} | SIZES
    plain, halved = api.load(Spec(**fields)), api.load(member_from(tmp_path, "halved", 0.5)(**fields))
    assert plain is api.load(Spec(**fields)) and plain is not halved
    q, k, v = (x.detach() for x in inputs(1.0)[:3])
    with pytorch_version():
        one, two = (p.chunk_simple_gla(q, k, v, None, chunk_size=16)[0] for p in (plain, halved))
    torch.testing.assert_close(two, one / 2)
    third = api.load(member_from(tmp_path, "halved", 0.25)(**fields))  # the source has changed
    assert third is not halved
    assert api.load(member_from(tmp_path, "other", 0.25)(**fields)) is not third
    for name in ("halved", "other"):
        del sys.modules[name]


def test_a_member_without_a_source_file_is_told_apart():
    one, two = (type("Local", (Spec,), {"__module__": "nowhere"}) for _ in range(2))
    assert len({api.member_suffix(member) for member in (Spec, one, two)}) == 3
    assert api.member_suffix(Spec) == "" and api.member_suffix(one) == api.member_suffix(one)
