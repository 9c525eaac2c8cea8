"""One recurrence, many members (contract section 2): where members coincide they give the same, gradients too.

And the members that models use agree with the models' own PyTorch code.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GATES, Case, call, case, errors
from test_kernels import PHASES
from test_training import cotangents, gradients, leaves

from gdngen.spec import Spec

SIZES = {"key_dim": 9, "value_dim": 20, "chunk": 16}
CLOSE = 1e-5
RULES = st.sampled_from(["delta", "additive"])
DECAYS = st.sampled_from(["mild", "some strong", "resets", "mixed"])
CHANNELS = {"key": SIZES["key_dim"], "value": SIZES["value_dim"]}
EXAMPLES = settings(max_examples=1 if os.environ.get("SHORT_RUN") else 4, phases=PHASES, report_multiple_bugs=False)


def close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    size = errors(found, tuple(x.double() for x in wanted))
    assert max(size) < CLOSE, size


def results_and_gradients(packages, this: Case, names: list[str]) -> tuple[tuple[torch.Tensor, ...], dict]:
    this = leaves(this)
    results = call(packages(this.spec), this)
    found = gradients(results, this, cotangents(results))
    return tuple(x.detach() for x in results), {name: found[name] for name in names}


def agree(packages, one: Case, other: Case) -> tuple[dict, dict]:
    """Two calls with the same results and the same gradients of all that both have; returns all gradients."""
    names = [name for name in one.x if name in other.x]
    first, of_first = results_and_gradients(packages, one, list(one.x))
    second, of_second = results_and_gradients(packages, other, list(other.x))
    close(first, second)
    close(tuple(of_first[n] for n in names), tuple(of_second[n] for n in names))
    return of_first, of_second


def length(draw) -> int:
    return draw(st.integers(1, 40))


@EXAMPLES
@given(data=st.data(), rule=RULES, gate=st.sampled_from(["scalar", "key", "value"]))
def test_a_gate_of_zero_is_no_gate(packages, data, rule, gate):
    gated = case(Spec(rule=rule, gate=gate, **SIZES), length(data.draw), decays="zero")
    agree(packages, gated, Case(Spec(rule=rule, gate="none", **SIZES), gated.changed(**{GATES[gate]: None}).x))


@EXAMPLES
@given(data=st.data(), rule=RULES, gate=st.sampled_from(["key", "value"]), decays=DECAYS)
def test_equal_channels_are_a_scalar_gate(packages, data, rule, gate, decays):
    scalar = case(Spec(rule=rule, **SIZES), length(data.draw), decays=decays)
    spread = scalar.x["g"].unsqueeze(-1).expand(*scalar.x["g"].shape, CHANNELS[gate])
    wide = Case(Spec(rule=rule, gate=gate, **SIZES), scalar.changed(g=None, **{GATES[gate]: spread}).x)
    of_scalar, of_wide = agree(packages, scalar, wide)
    close((of_wide[GATES[gate]].sum(-1),), (of_scalar["g"],))


@EXAMPLES
@given(data=st.data(), rule=RULES, gate=st.sampled_from(["key", "value"]), decays=DECAYS)
def test_gates_together_are_their_sum(packages, data, rule, gate, decays):
    both = case(Spec(rule=rule, gate=f"scalar+{gate}", **SIZES), length(data.draw), decays=decays)
    total = both.x["g"].unsqueeze(-1) + both.x[GATES[gate]]
    one = Case(Spec(rule=rule, gate=gate, **SIZES), both.changed(g=None, **{GATES[gate]: total}).x)
    of_both, of_one = agree(packages, both, one)
    close((of_one[GATES[gate]].sum(-1),), (of_both["g"],))


@EXAMPLES
@given(data=st.data(), rule=RULES, gate=st.sampled_from(["none", "scalar", "key", "value"]))
def test_a_write_strength_of_one_is_none(packages, data, rule, gate):
    written = case(Spec(rule=rule, gate=gate, **SIZES), length(data.draw))
    written = written.changed(beta=torch.ones_like(written.x["beta"]))
    agree(packages, written, Case(Spec(rule=rule, gate=gate, beta="none", **SIZES), written.changed(beta=None).x))


@EXAMPLES
@given(data=st.data(), rule=RULES, gate=st.sampled_from(["scalar", "key", "value", "scalar+key"]), decays=DECAYS)
def test_chunks_are_the_recurrence(packages, data, rule, gate, decays):
    """Chunk length 1 is the recurrent operator: made from the same graph, and the same function."""
    this = case(Spec(rule=rule, gate=gate, **SIZES), length(data.draw), decays=decays)
    with torch.no_grad():
        close(call(packages(this.spec), this, "chunk"), call(packages(this.spec), this, "recurrent"))


@pytest.mark.parametrize("decays", ["strong", "resets", "all resets", "mixed"])
@pytest.mark.parametrize("gate", ["key", "value"])
def test_results_do_not_depend_on_later_tokens(packages, gate, decays):
    this = case(Spec(gate=gate, **SIZES), 40, decays=decays)
    later = case(Spec(gate=gate, **SIZES), 40, decays="zero", seed=1)
    mixed = {n: torch.cat([x[:, :21], later.x[n][:, 21:]], 1) if x.shape[1] == 40 else x for n, x in this.x.items()}
    with torch.no_grad():
        first, second = (call(packages(this.spec), c)[0][:, :21] for c in (this, this.changed(**mixed)))
    assert torch.equal(first, second)


# ---- models ---------------------------------------------------------------------------------------------------------


def test_kimi_linear(packages):
    """The layer's two functions, from raw queries and keys and the layer's own log decay."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    spec = Spec(gate="key", qk_norm=True, key_dim=16, value_dim=16, chunk=32)
    this = case(spec, 45, B=2, H=3, R=1)
    x = [this.x[name] for name in ("q", "k", "v", "gk", "beta")]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    package = packages(spec)
    for theirs, ours in (
        (modeling.chunk_kimi_delta_attention, package.chunk_kda),
        (modeling.recurrent_kimi_delta_attention, package.fused_recurrent_kda),
    ):
        theirs = getattr(theirs, "__wrapped__", theirs)
        chunk = {"chunk_size": 32} if ours is package.chunk_kda else {}
        state = this.x["h0"]
        with torch.no_grad():
            close(ours(*x, initial_state=state, **options, **chunk), theirs(*x, initial_state=state, **options))


def test_kimi_linear_gate(packages):
    """The layer's forget gate computed in the operator: A_log per head, a bias per channel."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    spec = Spec(gate="key", fused_gate="softplus", qk_norm=True, key_dim=16, value_dim=16, chunk=32)
    this = case(spec, 33, H=3, R=1)
    gate = modeling.KimiLinearForgetGate(
        modeling.KimiLinearConfig(hidden_size=48, linear_head_dim=16, linear_num_heads=3)
    )
    gate.A_log.data = this.x["A_log"].reshape(1, 1, 3, 1)
    gate.dt_bias.data = this.x["dt_bias"].flatten()
    gate.f_a_proj = gate.f_b_proj = torch.nn.Identity()
    plain = Spec(gate="key", qk_norm=True, key_dim=16, value_dim=16, chunk=32)
    with torch.no_grad():
        log_decay = gate(this.x["a"].flatten(2))
        inputs = this.changed(a=None, A_log=None, dt_bias=None, gk=log_decay)
        close(call(packages(spec), this), call(packages(plain), Case(plain, inputs.x)))


def test_mamba2(packages):
    """The mixer's scan and its single step."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    spec = Spec(rule="additive", beta="dt", key_dim=16, value_dim=8, chunk=16)
    this = case(spec, 21, B=2, H=2, R=3)
    x = this.x
    limit, skip = (0.05, 1.5), torch.randn(6)
    scan, step = (
        getattr(f, "__wrapped__", f) for f in (modeling.mamba2_chunk_scan, modeling.mamba2_selective_state_update)
    )
    state = x["h0"].transpose(2, 3).contiguous()  # the layer's states are [N, HV, V, K]
    with torch.no_grad():
        wanted = scan(
            x["v"], x["dt"], -x["A_log"].exp(), x["k"], x["q"], 16, D=skip, dt_bias=x["dt_bias"], dt_softplus=True,
            initial_states=state, dt_limit=limit, return_final_states=True,
        )  # fmt: skip
        given = dict(x=x["v"], dt=x["dt"], A_log=x["A_log"], B=x["k"], C=x["q"], dt_bias=x["dt_bias"], D=skip)
        more = dict(initial_state=x["h0"], output_final_state=True)
        o, final = packages(spec).chunk_mamba2(**given, **more, dt_limit=limit)
        close((o, final.transpose(2, 3)), wanted)

        first = {name: value[:, :1] if name in ("x", "dt", "B", "C") else value for name, value in given.items()}
        o, final = packages(spec).recurrent_mamba2(**first, **more)
        dt, rate, bias = (  # the layer spreads them over channels
            y.expand(*y.shape[:1], 6, 8, *y.shape[3:]) if y.ndim > 2 else y.expand(6, 8)
            for y in (x["dt"][:, 0, :, None], -x["A_log"].exp()[None, :, None], x["dt_bias"][:, None])
        )
        rate = rate[0, ..., None].expand(6, 8, 16)
        out = step(
            state, x["v"][:, 0], dt, rate, x["k"][:, 0], x["q"][:, 0], D=skip[:, None], dt_bias=bias, dt_softplus=True
        )
        close((o[:, 0], final.transpose(2, 3)), (out, state))
