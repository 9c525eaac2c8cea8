"""The Triton kernels, interpreted, against the float64 oracle: random members, shapes and inputs; every cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from graphs import SMALL, TARGET
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from support import DECAYS, RAW, VIEWS, Case, case, check, every_other_in_short, viewed
from triton.runtime import interpreter

from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec

# A failing call is reported as found: each costs seconds, and shrinking would try hundreds.
PHASES = [Phase.explicit, Phase.generate]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 3)]
# Chunks or tokens of all heads together: what the interpreter's time grows with; fewer where each channel decays.
WORK = {"chunk": 12, "recurrent": 250}
WORK_BY_CHANNEL = {"chunk": 5, "recurrent": 250}


def test_the_interpreter_takes_a_tensor_for_a_number(packages):
    """What numpy 2.4 refuses to answer, int() of an array, is not asked for; later Tritons do not ask."""

    class Number:
        def item(self):
            return 3

        def squeeze(self):
            return 3

        def __int__(self):
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    package, x = packages(Spec(key_dim=16, value_dim=16, chunk=16)), torch.ones(1, 3, 1, 16)
    package.chunk_gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], chunk_size=16)  # mends it
    found = {}
    scope = SimpleNamespace(set_attr=lambda tensor, name, value: found.update({name: value}))
    interpreter._patch_lang_tensor(None, scope)
    assert found["__index__"](SimpleNamespace(handle=SimpleNamespace(data=Number()))) == 3


def test_masks_of_integers_are_truth_values(packages):
    """As Triton 3.9's interpreter makes them of comparisons of numbers, and refuses them."""
    package, x = packages(Spec(key_dim=16, value_dim=16, chunk=16)), torch.ones(1, 3, 1, 16)
    package.chunk_gated_delta_rule(x, x, x, -x[..., 0], x[..., 0], chunk_size=16)  # mends it
    x, y, floats = torch.arange(4.0), torch.zeros(4), tl.pointer_type(tl.float32)
    places = [t.data_ptr() + 4 * np.arange(4, dtype=np.uint64) for t in (x, y)]
    source, target = (interpreter.TensorHandle(place, floats) for place in places)
    mask = interpreter.TensorHandle(np.array([True, False, True, True]), tl.int1)
    mask.data = mask.data.astype(np.int64)
    builder, policies = interpreter.InterpreterBuilder(), [None] * (1 if triton.__version__ >= "3.9" else 2)
    loaded = builder.create_masked_load(source, mask, None, *policies, False)
    builder.create_masked_store(target, loaded, mask, *policies)
    assert y.tolist() == [0.0, 0.0, 2.0, 3.0]


# ---- random members --------------------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 40), st.sampled_from([60, 64, 100, 128, 256]))


@st.composite
def members(draw, form: str) -> Spec:
    """Members with kernels of this form: the recurrent one has every write strength."""
    rule = draw(st.sampled_from(["delta", "delta", "additive"]))
    gates = ["none", "scalar", "scalar", "scalar", "key", "key", "value", "scalar+key", "key+value"]
    gate = draw(st.sampled_from(gates))
    per_value = ["value"] if form == "recurrent" or rule == "additive" else []
    beta = draw(st.sampled_from(["none", "head", "head", *per_value]))
    logits = beta != "none" and draw(st.booleans())
    fused = draw(st.sampled_from(["none", "softplus", "bounded"])) if gate in ("scalar", "key", "value") else "none"
    return Spec(
        rule=rule,
        gate=gate,
        beta=beta,
        key_dim=draw(sizes),
        value_dim=draw(sizes),
        chunk=draw(st.sampled_from([16, 32, 64] if gate in ("none", "scalar") else [16, 32])),
        fused_gate=fused,
        lower_bound=draw(st.sampled_from([-5.0, -0.5])) if fused == "bounded" else None,
        beta_logits=logits,
        neg_eigval=logits and draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
    )


@st.composite
def calls(draw, form: str) -> Case:
    """A member and one call of it, small enough for the interpreter."""
    spec = draw(members(form))
    H, R = draw(st.sampled_from(HEADS))
    unit = int(spec.chunk) if form == "chunk" else 1
    work = WORK_BY_CHANNEL if {"key", "value"} & set(spec.gate) else WORK
    most = work[form] * unit // (H * R)  # tokens
    offsets, B = None, 1
    if draw(st.booleans()):
        lengths = draw(st.lists(st.sampled_from([0, 0, 1, 5, 16, 17, 40]), min_size=1, max_size=4))
        while sum(-(-length // unit) * unit for length in lengths) > most:
            lengths.pop()
        offsets = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
        T = offsets[-1] + draw(st.sampled_from([0, 0, 1, 20]))
    else:
        B = draw(st.integers(1, 2))
        T = draw(st.integers(0, max(1, min(100, most // B))))
    this = case(
        spec,
        T,
        B=B,
        H=H,
        R=R,
        dtype=draw(st.sampled_from([torch.float32, *FLOATS])),
        gate_dtype=draw(st.sampled_from([torch.float32, *FLOATS])),
        offsets=offsets,
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        state=draw(st.booleans()),
        bias=draw(st.booleans()),
        decays=draw(st.sampled_from(sorted(RAW if spec.fused_gate != "none" else DECAYS))),
        scale=draw(st.sampled_from([None, None, 1.0, -0.3])),
        seed=draw(st.integers(0, 1000)),
    )
    if "h0" in this.x and draw(st.booleans()):
        this = this.changed(h0=this.x["h0"].bfloat16())
    return viewed(this, draw(st.sampled_from(sorted(VIEWS))))


@settings(max_examples=5, phases=PHASES, report_multiple_bugs=False)
@given(this=calls("chunk"))
def test_random_chunk_calls(packages, this):
    check(packages(this.spec), this, "chunk")


@settings(max_examples=3, phases=PHASES, report_multiple_bugs=False)
@given(this=calls("recurrent"))
def test_random_recurrent_calls(packages, this):
    check(packages(this.spec), this, "recurrent")


@pytest.mark.full
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("shard", range(1, 7))
def test_many_random_calls(packages, form, shard):
    """Hundreds more: six times thirty of each form."""

    @seed(shard)
    @settings(max_examples=30, derandomize=False, phases=PHASES, report_multiple_bugs=False)
    @given(this=calls(form))
    def run(this):
        check(packages(this.spec), this, form)

    run()


# ---- every cut -------------------------------------------------------------------------------------------------------

CUT = Spec(key_dim=9, value_dim=20, chunk=16)


def offered(spec: Spec) -> list[str]:
    found = compile_spec(spec, TARGET)
    names = [candidate.cut.name for candidate in found.choices["chunk"].front]
    return sorted({*names, "none", "X+P", "S+U+W+r"})


@pytest.mark.parametrize("cut", offered(CUT))
def test_every_cut(packages, cut):
    package = packages(CUT, f"cut={cut}")
    check(package, case(CUT, T=35, R=2, decays="mixed"))
    check(package, case(CUT, T=30, R=1, offsets=(0, 0, 17, 20), decays="some strong", dtype=torch.float16))


@pytest.mark.parametrize(
    "spec",
    [
        Spec(gate="none", beta_logits=True, neg_eigval=True, chunk=16, **SMALL),
        Spec(qk_norm=True, fused_gate="softplus", chunk=16, state_v_first=True, **SMALL),
        Spec(rule="additive", beta="dt", chunk=16, **SMALL),
        Spec(rule="additive", normalize=True, feature_map="elu1", chunk=16, **SMALL),
    ],
    ids=lambda spec: spec.name,
)
def test_cuts_of_other_members(packages, spec):
    """The first, the last and one between of the cuts that are offered."""
    found = compile_spec(spec, TARGET)
    cuts = [candidate.cut.name for candidate in found.choices["chunk"].front]
    for cut in {cuts[0], cuts[len(cuts) // 2], cuts[-1]}:
        check(packages(spec, f"cut={cut}"), case(spec, T=20, decays="some strong"))


# ---- every member ----------------------------------------------------------------------------------------------------

MEMBERS = [
    Spec(**SMALL),
    Spec(gate="none", **SMALL),
    Spec(gate="none", beta="none", **SMALL),
    Spec(fused_gate="bounded", lower_bound=-2.0, qk_norm=True, beta_logits=True, state_v_first=True, **SMALL),
    Spec(feature_map="elu1", **SMALL),
    Spec(rule="additive", beta="dt", **SMALL),
    Spec(rule="additive", beta="value", beta_logits=True, **SMALL),
    Spec(rule="additive", gate="none", beta="none", **SMALL),
    Spec(rule="additive", gate="none", beta="none", feature_map="elu1", **SMALL),
    Spec(rule="additive", gate="none", beta="none", normalize=True, **SMALL),
    Spec(rule="additive", normalize=True, feature_map="elu1", **SMALL),
    Spec(gate="key", fused_gate="softplus", **SMALL),
    Spec(gate="value", fused_gate="bounded", **SMALL),
    Spec(gate="scalar+key+value", beta="value", beta_logits=True, neg_eigval=True, **SMALL),
]


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("spec", every_other_in_short(MEMBERS), ids=lambda spec: spec.name)
def test_members(packages, spec, form):
    """Dense and packed, under the name that users know."""
    package = packages(spec)
    if not any(operator.name == form for operator in compile_spec(spec, TARGET).plan.operators):
        pytest.skip("no kernels of this form")
    check(package, case(spec, T=20, B=2, R=1), form)
    check(package, case(spec, T=25, H=2, R=1, offsets=(0, 7, 7, 24), state=False, bias=False), form)


@pytest.mark.parametrize("form", [pytest.param("chunk", marks=pytest.mark.full), "recurrent"])  # chunks: test_training
@pytest.mark.parametrize("spec", MEMBERS, ids=lambda spec: spec.name)
def test_several_tiles_of_v(packages, spec, form):
    """More value channels than a tile holds; a normaliser's programs hold all of v."""
    wide = Spec(**{**spec.model_dump(), "value_dim": 40, "chunk": 16})
    if not any(operator.name == form for operator in compile_spec(wide, TARGET).plan.operators):
        pytest.skip("no kernels of this form")
    check(packages(wide, *([] if spec.normalize else ["BV=16"])), case(wide, T=18, R=2), form)
