"""Which version of a package runs a call, what a package refuses, and how gdngen.ops finds a package."""

import importlib
import shutil
import subprocess
import sys
import threading
import types
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import call, case, pytorch_version

import gdngen
from gdngen import ops
from gdngen.errors import SpecError
from gdngen.passes.pipeline import compile_spec
from gdngen.runtime import dispatch as runtime_dispatch
from gdngen.runtime.arguments import prepare
from gdngen.spec import Spec
from gdngen.target import get

ROOT = Path(gdngen.__path__[0])
COPIES = [ROOT / "runtime" / f"{name}.py" for name in ("operators", "arguments", "composed", "keywords")]
DISPATCH = ROOT / "templates" / "package" / "dispatch.py"
B, T, H, HV, K, V = 1, 3, 2, 4, 8, 6
NUMBER = count()

# Each back end answers with its own name, so that a test sees which one ran.
BACKEND = """
from .dispatch import LAUNCHES

def {form}(call):
    LAUNCHES["kernel"] += {counts}
    return "{name}", call
"""


def write_package(folder, spec, forms=("chunk", "recurrent"), launch=None, differentiable=True):
    """A package whose kernels, their recording for autograd and reference are fabricated; returns its name."""
    name = f"fabricated_{next(NUMBER)}"
    package = folder / name
    package.mkdir()
    for source in (*COPIES, DISPATCH):
        shutil.copy(source, package)
    package.joinpath("__init__.py").write_text("from .dispatch import LAUNCHES\nfrom .operators import *\n")
    package.joinpath("spec.py").write_text(
        f"SPEC = {spec.model_dump()!r}\nNAME = {spec.name!r}\nBUILD_COMMAND = {spec.command!r}\n"
        f"DIFFERENTIABLE = {differentiable}\n"
        "MISSING = {'chunk': 'the reason; use the recurrent operator'}\n"
    )
    for module in ("launch", "reference"):
        text = "".join(BACKEND.format(form=form, name=module, counts=int(module == "launch")) for form in forms)
        package.joinpath(f"{module}.py").write_text(launch if launch and module == "launch" else text)
    if differentiable:
        package.joinpath("registration.py").write_text(BACKEND.format(form="run", name="registration", counts=0))
    return name


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Import a fabricated package for the fields of a Spec; its own sizes are those of the tests."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def load(*, forms=("chunk", "recurrent"), launch=None, differentiable=True, **fields):
        spec = Spec(**{"key_dim": K, "value_dim": V} | fields)
        return importlib.import_module(write_package(tmp_path, spec, forms, launch, differentiable))

    return load


def tokens(**more):
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV), "beta": (B, T, HV)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | more


def refusal(module, operator="chunk_gated_delta_rule", **arguments):
    with pytest.raises(module.arguments.ArgumentError) as error:
        getattr(module, operator)(**tokens(**arguments))
    return str(error.value)


STATE = torch.zeros(B, HV, K, V)


# ---- which version runs ----------------------------------------------------------------------------------------------


def test_cpu_tensors_run_the_pytorch_version(package):
    module = package()
    for operator, form in (
        (module.chunk_gated_delta_rule, "chunk"),
        (module.fused_recurrent_gated_delta_rule, "recurrent"),
    ):
        name, call = operator(**tokens())
        assert (name, call.operator) == ("reference", form)
    assert module.LAUNCHES.total() == 0


def test_the_interpreter_runs_the_kernels(package, monkeypatch):
    module = package()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert module.chunk_gated_delta_rule(**tokens())[0] == "launch"
    assert module.LAUNCHES == {"kernel": 1}
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert module.chunk_gated_delta_rule(**tokens())[0] == "reference"


def test_the_pytorch_version_needs_no_triton(package, monkeypatch):
    module = package(launch="import a_triton_that_is_missing\n")
    assert module.chunk_gated_delta_rule(**tokens())[0] == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ImportError, match=r"a_triton_that_is_missing.*need a working triton"):
        module.chunk_gated_delta_rule(**tokens())


def run_on(module, device):
    options, call = prepare("chunk", "delta", **tokens(), chunk_size=64)
    call.device = torch.device(device)
    return module.dispatch.run(options, call)


def test_devices(package):
    module = package()
    assert run_on(module, "cuda")[0] == "launch"
    with pytest.raises(ValueError, match="q: got a tensor on meta, expected one on a CUDA or ROCm GPU or on the CPU"):
        run_on(module, "meta")


WANTS = {"q": torch.zeros(B, T, H, K, requires_grad=True)}


def test_gradients_of_the_kernels_are_recorded(package, monkeypatch):
    module = package()
    operators = (module.chunk_gated_delta_rule, module.fused_recurrent_gated_delta_rule)
    assert [operator(**tokens(**WANTS))[0] for operator in operators] == ["reference"] * 2
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for operator, form in zip(operators, ("chunk", "recurrent")):
        name, call = operator(**tokens(**WANTS))
        assert (name, call.operator) == ("registration", form) and call.inputs["q"] is WANTS["q"]
        assert operator(**tokens())[0] == "launch"
        with torch.no_grad():
            assert operator(**tokens(**WANTS))[0] == "launch"
        assert operator(**tokens(q=WANTS["q"].detach()))[0] == "launch"


def test_compiled_code_sees_one_op(package, monkeypatch):
    module = package()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert module.chunk_gated_delta_rule(**tokens())[0] == "registration"


@pytest.mark.parametrize("operator", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_packages_without_backward_kernels(package, monkeypatch, operator):
    module = package(differentiable=False)
    assert getattr(module, operator)(**tokens(**WANTS))[0] == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    message = refusal(module, operator, **WANTS)
    assert "have no backward" in message and "torch.no_grad()" in message
    assert module.LAUNCHES.total() == 0
    with torch.no_grad():
        assert getattr(module, operator)(**tokens(**WANTS))[0] == "launch"


def test_which_members_have_backward_kernels(packages):
    """Those with chunk kernels; of the others a call that wants gradients is refused before anything is launched."""
    spec = Spec(key_dim=5, value_dim=4, chunk=16)
    module, this = packages(spec), case(spec, T=3)
    k = this.x["k"].requires_grad_()
    module.LAUNCHES.clear()
    (gradient,) = torch.autograd.grad(sum(y.sum() for y in call(module, this)), k)
    kernels = [
        kernel.name for operator in compile_spec(spec, get("sm_90")).plan.operators for kernel in operator.kernels
    ]
    assert set(module.LAUNCHES) == set(kernels) - {"recurrence", "queries"}  # queries gives dq, which nobody wants
    with pytorch_version():
        (expected,) = torch.autograd.grad(sum(y.sum() for y in call(module, this)), k)
    torch.testing.assert_close(gradient, expected)
    spec = spec.model_copy(update={"beta": "value"})
    module, this = packages(spec), case(spec, T=3)
    this.x["k"].requires_grad_()
    module.LAUNCHES.clear()
    with pytest.raises(module.arguments.ArgumentError, match="have no backward"):
        call(module, this, "recurrent")
    assert module.LAUNCHES.total() == 0
    with torch.no_grad():
        call(module, this, "recurrent")
    assert module.LAUNCHES == {"recurrence": 1}


def test_forward_only_packages(package):
    message = refusal(package(backward=False), g=torch.zeros(B, T, HV, requires_grad=True))
    wanted = Spec(key_dim=K, value_dim=V)
    assert "forward only" in message and wanted.command in message and "torch.no_grad()" in message


def test_a_member_without_a_chunk_form(package):
    # The arguments refuse such a call first; this is the package's own guard.
    module = package(forms=("recurrent",))
    message = refusal(module)
    assert "has no chunk operator: the reason; use the recurrent operator" in message
    assert module.fused_recurrent_gated_delta_rule(**tokens())[0] == "reference"


# ---- what a package was made for -------------------------------------------------------------------------------------

GK = torch.zeros(B, T, HV, K)
REFUSED = [
    ({}, {"gk": GK}, "the gates given in g, gk, gv: got scalar+key, the package has scalar", {"gate": "scalar+key"}),
    ({}, {"g": None}, "got none, the package has scalar", {"gate": "none"}),
    (
        {},
        {"use_qk_l2norm_in_kernel": True},
        "use_qk_l2norm_in_kernel: got True, the package has False",
        {"qk_norm": True},
    ),
    ({"qk_norm": True}, {}, "use_qk_l2norm_in_kernel: got False, the package has True", {"qk_norm": False}),
    (
        {"fused_gate": "softplus"},
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "lower_bound": -5},
        "use_gate_in_kernel: got bounded, the package has softplus",
        {"fused_gate": "bounded", "lower_bound": -5.0},
    ),
    (
        {"fused_gate": "bounded"},
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "lower_bound": -2},
        "lower_bound: got -2.0, the package has -5.0",
        {"lower_bound": -2.0},
    ),
    ({"fused_gate": "bounded"}, {}, "got none, the package has bounded", {"fused_gate": "none", "lower_bound": None}),
    (
        {"beta_logits": True},
        {"beta": None},
        "beta: got none, the package has head",
        {"beta": "none", "beta_logits": False},
    ),
    ({}, {"use_beta_sigmoid_in_kernel": True}, "use_beta_sigmoid_in_kernel: got True", {"beta_logits": True}),
    ({"rule": "additive"}, {}, "the operator's rule: got delta, the package has additive", {"rule": "delta"}),
    ({"key_dim": 128}, {}, "the last dim of q and k: got 8, the package has 128", {"key_dim": K}),
    ({"value_dim": 128}, {}, "the last dim of v: got 6, the package has 128", {"value_dim": V}),
    ({}, {"chunk_size": 32}, "chunk_size: got 32, the package has 64", {"chunk": 32}),
    ({"chunk": 128}, {"chunk_size": 32}, "chunk_size: got 32, the package has 128", {"chunk": 32}),
    ({}, {"initial_state": STATE.mT, "state_v_first": True}, "state_v_first: got True", {"state_v_first": True}),
    ({"state_v_first": True}, {"output_final_state": True}, "state_v_first: got False", {"state_v_first": False}),
    ({"head_ratio": 1}, {}, "v: got 4 value heads for 2 query/key heads, the package has 1", {"head_ratio": "any"}),
    ({"varlen": False}, {"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens: got offsets", {"varlen": True}),
]


@pytest.mark.parametrize(("made_for", "asked", "fault", "changes"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refusals_name_the_command_that_would_do(package, made_for, asked, fault, changes):
    module = package(**made_for)
    spec = {"key_dim": K, "value_dim": V} | made_for
    message = refusal(module, **asked)
    assert fault in message and Spec(**spec).name in message
    assert f"Build a package that was: {Spec(**spec | changes).command}\n" in message
    assert refusal(module, **asked) == message  # a refusal is not remembered as accepted


ACCEPTED = [
    ({"chunk": 128}, {"chunk_size": 64}),
    ({"chunk": 128}, {"chunk_size": 128}),
    ({"chunk": "auto"}, {"chunk_size": 64}),
    ({"state_v_first": True}, {"state_v_first": False}),
    ({}, {"state_v_first": True}),
    ({"feature_map": "elu1"}, {}),
    ({"head_ratio": 2}, {}),
    ({"varlen": False}, {}),
    ({}, {"cu_seqlens": torch.tensor([0, T])}),
]


@pytest.mark.parametrize(("made_for", "asked"), ACCEPTED)
def test_what_makes_no_difference_is_accepted(package, made_for, asked):
    assert package(**made_for).chunk_gated_delta_rule(**tokens(**asked))[0] == "reference"


def test_the_recurrent_operator_ignores_the_chunk(package):
    assert package(chunk=16).fused_recurrent_gated_delta_rule(**tokens())[0] == "reference"


def test_an_accepted_layout_without_states_does_not_let_states_in(package):
    module = package(state_v_first=True)
    module.chunk_gated_delta_rule(**tokens())
    assert "state_v_first: got False" in refusal(module, initial_state=STATE)


@pytest.mark.parametrize("beta", ["head", "value"])
def test_no_beta_is_ones(package, beta):
    _, call = package(beta=beta).fused_recurrent_gated_delta_rule(**tokens(beta=None))
    expected = torch.ones(B, T, HV, V) if beta == "value" else torch.ones(B, T, HV)
    assert torch.equal(call.inputs["beta"], expected)


def test_options_are_compared_once(package, monkeypatch):
    module = package()
    for _ in range(3):
        module.chunk_gated_delta_rule(**tokens())
    monkeypatch.setattr(module.dispatch, "_accept", None)
    module.chunk_gated_delta_rule(**tokens(initial_state=None))
    assert len(module.dispatch._accepted) == 1


@st.composite
def specs(draw):
    fields = {
        "rule": st.sampled_from(["delta", "additive"]),
        "gate": st.sampled_from(["none", "scalar", "key", "value", "scalar+key", "key+value", "scalar+key+value"]),
        "beta": st.sampled_from(["none", "head", "value", "dt"]),
        "key_dim": st.sampled_from([1, 64, 128, 256]),
        "value_dim": st.sampled_from([1, 64, 128, 1000]),
        "head_ratio": st.sampled_from(["any", 1, 4]),
        "chunk": st.sampled_from([16, 32, 64, 128, "auto"]),
        "fused_gate": st.sampled_from(["none", "softplus", "bounded"]),
        "feature_map": st.sampled_from(["identity", "elu1"]),
    }
    flags = ("state_v_first", "beta_logits", "neg_eigval", "qk_norm", "normalize", "varlen", "backward")
    spec = {name: draw(strategy) for name, strategy in fields.items()} | {flag: draw(st.booleans()) for flag in flags}
    if spec["fused_gate"] == "bounded":
        spec["lower_bound"] = draw(st.sampled_from([None, -5.0, -0.5]))
    return spec


@pytest.fixture(scope="module")
def build_command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    sys.path.insert(0, str(folder))
    yield importlib.import_module(write_package(folder, Spec()) + ".dispatch").build_command
    sys.path.remove(str(folder))


@settings(max_examples=300, deadline=None)
@given(fields=specs())
def test_a_package_and_the_spec_name_the_same_command(build_command, fields):
    try:
        spec = Spec(**fields)
    except SpecError:
        return
    assert build_command(spec.model_dump()) == spec.command
    assert build_command(spec.model_dump(mode="json")) == spec.command


def test_defaults_agree_with_the_spec(package):
    defaults = package().dispatch.DEFAULTS
    assert list(defaults) == list(Spec.model_fields)
    assert all(field.default == defaults[name] for name, field in Spec.model_fields.items() if name != "gate")


def test_a_package_stands_alone(tmp_path):
    name = write_package(tmp_path, Spec())
    script = (
        f"import sys, {name}; sys.exit(any(m.split('.')[0] in ('gdngen', 'triton', 'pydantic') for m in sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr


# ---- gdngen.ops ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(package, monkeypatch):
    """gdngen.ops with a loader that fabricates packages and notes the Specs it was asked for."""
    asked = []

    def load(spec):
        asked.append(spec)
        return package(**spec.model_dump())

    monkeypatch.setattr(runtime_dispatch, "_packages", {})
    api = types.SimpleNamespace(load=load)
    monkeypatch.setitem(sys.modules, "gdngen.api", api)
    monkeypatch.setattr(gdngen, "api", api, raising=False)
    return asked


def test_ops_derive_the_spec_from_the_call(loaded):
    assert ops.chunk_gated_delta_rule(**tokens())[0] == "reference"
    assert loaded == [Spec(key_dim=K, value_dim=V)]
    ops.chunk_gated_delta_rule(**tokens())
    assert len(loaded) == 1
    ops.chunk_kda(**tokens(g=GK), chunk_size=32, use_qk_l2norm_in_kernel=True, state_v_first=True)
    assert loaded[1] == Spec(key_dim=K, value_dim=V, gate="key", chunk=32, qk_norm=True, state_v_first=True)
    x, dt, bc = torch.zeros(B, T, HV, V), torch.zeros(B, T, HV), torch.zeros(B, T, H, K)
    ops.recurrent_mamba2(x, dt, torch.zeros(HV), bc, bc)
    assert loaded[2] == Spec(key_dim=K, value_dim=V, rule="additive", beta="dt")
    ops.fused_recurrent_gated_delta_rule(**tokens(g=None, beta=None, gv=torch.zeros(B, T, HV, V)))
    assert loaded[3] == Spec(key_dim=K, value_dim=V, gate="value", beta="none")


def test_threads_load_a_package_once(loaded):
    start = threading.Barrier(4)
    names = []

    def work():
        start.wait()
        names.append(ops.chunk_gated_delta_rule(**tokens())[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert names == ["reference"] * 4 and len(loaded) == 1


def test_launches_add_up_over_packages(loaded, monkeypatch):
    assert ops.LAUNCHES["kernel"] == 0 and not ops.LAUNCHES and dict(ops.LAUNCHES) == {}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ops.chunk_gated_delta_rule(**tokens())
    ops.fused_recurrent_gated_delta_rule(**tokens())
    ops.chunk_kda(**tokens(g=GK))
    # The recurrent call shares no Options with the chunk one, but a loader may give both the same package.
    runtime_dispatch._packages["the same package again"] = next(iter(runtime_dispatch._packages.values()))
    assert ops.LAUNCHES["kernel"] == sum(ops.LAUNCHES.values()) == ops.LAUNCHES.total() == 3
    assert list(ops.LAUNCHES.items()) == [("kernel", 3)] and ops.LAUNCHES.copy() == Counter(kernel=3)
    assert "kernel" in ops.LAUNCHES and "other" not in ops.LAUNCHES and repr(ops.LAUNCHES) == "Launches({'kernel': 3})"
    ops.LAUNCHES.clear()
    assert sum(ops.LAUNCHES.values()) == 0
