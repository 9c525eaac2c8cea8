"""Numbers beyond fp16 on the way, states that are not finite, inputs left out: right where they are right."""

import pytest
import torch
from support import pytorch_version
from torch.nn.functional import normalize

from gdngen import oracle
from gdngen.codegen.sources import sources
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec
from gdngen.target import get

SIZES = {"key_dim": 16, "value_dim": 16, "chunk": 16}
FORMS = pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
BUDGET = 5e-3


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def inputs(T: int = 40, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (normalize(torch.randn(1, T, 1, 16, generator=generator), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(1, T, 2, 16, generator=generator).to(dtype)
    g, beta = -torch.rand(1, T, 2, generator=generator), torch.rand(1, T, 2, generator=generator)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def wanted(x: dict[str, torch.Tensor], **more):
    return oracle.recurrence(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **more)


@FORMS
@pytest.mark.parametrize("cut", ["X+P", "S+X+r", "U+W+P", "none"])
def test_fp16_with_a_state_beyond_its_range(packages, name, cut):
    """o is small although the state is not: nothing on the way may be rounded to fp16."""
    x = inputs()
    x |= {"q": x["q"] * 1e-2, "g": x["g"] * 0.01}
    h0 = 1e6 * torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(4))
    package = packages(Spec(**SIZES), f"cut={cut}")
    o, state = getattr(package, name)(**x, scale=0.01, initial_state=h0, output_final_state=True)
    reference = wanted(x, scale=0.01, h0=h0)
    assert oracle.rms_ratio(o, reference[0]) < BUDGET and oracle.rms_ratio(state, reference[1]) < BUDGET


@FORMS
def test_fp16_prefix_before_writes_beyond_its_range(packages, name):
    x = inputs()
    operator = getattr(packages(Spec(**SIZES)), name)
    before = operator(**x)[0][:, :22]
    x["v"], x["beta"] = x["v"].clone(), x["beta"].clone()
    x["v"][:, 22:], x["beta"][:, 22:] = 6e4, 2.0
    assert torch.equal(operator(**x)[0][:, :22], before)


@FORMS
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3])
def test_fp16_keeps_the_precision_of_values_of_any_size(packages, name, scale):
    x = inputs()
    x["v"] = (x["v"].float() * min(scale, 10.0)).half()
    o, state = getattr(packages(Spec(**SIZES)), name)(**x, scale=1.0 / scale, output_final_state=True)
    values = wanted(x, scale=1.0 / scale)
    assert oracle.rms_ratio(o, values[0]) < BUDGET and oracle.rms_ratio(state, values[1]) < BUDGET


@FORMS
@pytest.mark.parametrize("what", ["v", "k", "h0"])
def test_rows_past_the_end_are_zero_behind_a_state_that_is_not_finite(packages, name, what):
    x = inputs(dtype=torch.float32)
    h0 = torch.zeros(2, 2, 16, 16)
    target = {"h0": h0[1:]}.get(what, x.get(what))
    target[:, -1 if what == "h0" else 12] = torch.nan
    o, _ = getattr(packages(Spec(**SIZES)), name)(**x, initial_state=h0, cu_seqlens=torch.tensor([0, 5, 14]))
    assert not o[:, 14:].any() and torch.isfinite(o[:, :5]).all()


@FORMS
@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_fused_gate_without_a_bias(packages, name, bound):
    """dt_bias is optional in both versions."""
    spec = Spec(**SIZES, fused_gate="bounded" if bound else "softplus")
    x = inputs(dtype=torch.float32)
    options = {"use_gate_in_kernel": True, "A_log": torch.tensor([0.3, -0.2]), "lower_bound": bound}
    operator = getattr(packages(spec), name)
    kernels = operator(**x, **options)[0]
    with pytorch_version():
        plain = operator(**x, **options)[0]
    x["g"] = oracle.gate(x["g"], options["A_log"], None, bound)
    for found in (kernels, plain):
        assert oracle.rms_ratio(found, wanted(x)[0]) < 1e-5


def test_offsets_of_heads_are_64_bits_wide():
    """i_hv * stride may pass 2^31 in a head-first view, which is read in place."""
    files = sources(compile_spec(Spec(**SIZES), get("sm_90")).plan, "package")
    for name in ("prepare", "scan", "recurrence"):
        text = files.get(f"kernels/{name}.py", "% HV).to(tl.int64)")
        assert "% HV).to(tl.int64)" in text or "% (HV // R)).to(tl.int64)" in text  # of a group, then i_h * R + i_r
    assert "kernels/recurrence.py" in files
