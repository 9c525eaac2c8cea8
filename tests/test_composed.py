"""Options that are made of several calls, or of a call on tokens in another order: kernels and PyTorch version."""

import contextlib
from itertools import pairwise

import pytest
import torch
from support import BUDGETS, call, case, keywords, pytorch_version, same

from gdngen import oracle
from gdngen.spec import Spec

GLA = Spec(rule="additive", beta="none", key_dim=8, value_dim=6, chunk=16)
PLAIN = Spec(rule="additive", gate="none", beta="none", normalize=True, key_dim=8, value_dim=6, chunk=16)
KDA = Spec(gate="key", key_dim=8, value_dim=6, chunk=16, state_v_first=True)
BACK_ENDS = pytest.mark.parametrize("back_end", [contextlib.nullcontext, pytorch_version])
OFFSETS = (0, 3, 3, 11)  # of 13 rows


def close(found, wanted):
    sizes = [oracle.rms_ratio(a, b) for a, b in zip(found, wanted, strict=True)]
    assert [a.dtype for a in found] == [b.dtype for b in wanted]
    assert max(sizes) <= 10 * BUDGETS[torch.float32], sizes


# ---- tokens in reverse order -----------------------------------------------------------------------------------------


def flipped(x, offsets):
    """By hand, sequence by sequence; rows behind them stay."""
    ends = pairwise(offsets) if offsets else [(0, x.shape[1])]
    parts = [x[:, first:last].flip(1) for first, last in ends]
    return torch.cat([*parts, x[:, offsets[-1] :]] if offsets else parts, 1)


@BACK_ENDS
@pytest.mark.parametrize("offsets", [None, OFFSETS, (0,)])
@pytest.mark.parametrize("spec", [GLA, PLAIN])
def test_reverse(packages, spec, offsets, back_end):
    this = case(spec, 13, R=1, offsets=offsets, B=1 if offsets else 2)
    per_token = [name for name in ("q", "k", "v", "g") if name in this.x]
    turned = this.changed(**{name: flipped(this.x[name], offsets) for name in per_token})
    found = []
    with back_end():
        for one, options in ((this, {"reverse": True}), (turned, {})):
            leaves = [x.requires_grad_() for x in one.x.values()]
            o, *states = call(packages(spec), one, "recurrent", **options)
            loss = (o if options else flipped(o, offsets)).sin().sum() + sum(s.cos().sum() for s in states)
            gradients = dict(zip(one.x, torch.autograd.grad(loss, leaves)))
            if not options:
                o, gradients = flipped(o, offsets), gradients | {n: flipped(gradients[n], offsets) for n in per_token}
            found.append([o, *states, *gradients.values()])
            for x in leaves:
                x.requires_grad_(False)
    assert same(*found)


def test_reverse_compiles(packages):
    torch.compiler.reset()
    this, package = case(GLA, 13, R=1, offsets=OFFSETS), packages(GLA)

    def run(q):
        return call(package, this.changed(q=q), "recurrent", reverse=True)

    assert same(torch.compile(run, fullgraph=True, backend="aot_eager")(this.x["q"]), run(this.x["q"]))


def test_a_fixed_decay_has_a_gradient(packages):
    this, gamma = case(GLA, 13, R=2, B=2), torch.tensor([-0.1, -0.5], requires_grad=True)
    for form in ("chunk", "recurrent"):
        found = call(packages(GLA), this, form, g=None, g_gamma=gamma)
        wanted = call(packages(GLA), this, form, g=gamma.expand(2, 13, 2))
        assert same(found, wanted)
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in found), gamma)
        assert same((gradient,), torch.autograd.grad(sum(x.sum() for x in wanted), gamma))


# ---- states between chunks -------------------------------------------------------------------------------------------


@BACK_ENDS
@pytest.mark.parametrize(
    ("T", "offsets"),
    [(37, None), (0, None), (42, (0, 18, 18, 35)), (5, (0,))],
    ids=["dense", "no token", "packed", "none"],
)
@pytest.mark.parametrize("state", [True, False])
@torch.no_grad()
def test_states_that_enter_the_chunks(packages, T, offsets, state, back_end):
    this, package = case(KDA, T, R=2, B=1 if offsets else 2, offsets=offsets, state=state), packages(KDA)
    with back_end():
        o, final = call(package, this)
        given = keywords_of(this)
        for more in ({}, {"cu_seqlens_cpu": given.get("cu_seqlens")}):
            found_o, found_final, states = package.chunk_kda(
                **given, **more, return_intermediate_states=True, chunk_size=16
            )
            close([found_o, found_final.transpose(2, 3)], [o, final])
        given["output_final_state"] = False
        _, none, again = package.chunk_kda(**given, return_intermediate_states=True, chunk_size=16)
        wanted = []
        for n, (first, last) in enumerate(pairwise(offsets) if offsets else [(0, T)]):
            for stop in range(first, last, 16):
                one = this.changed(h0=this.x["h0"][n : n + 1] if offsets else this.x["h0"]) if state else this
                before = type(one)(one.spec, one.x).tokens(first, stop)
                wanted.append(call(package, before)[1].transpose(2, 3))
    B, HV = this.x["v"].shape[0], this.x["v"].shape[2]
    assert states.shape == (B, len(wanted), HV, KDA.value_dim, KDA.key_dim) and states.dtype == this.dtype
    if wanted:
        close([states], [torch.stack(wanted, 1)])
    assert none is None and same((again,), (states,))


def keywords_of(this):
    return {name: value for name, value in keywords(this, "chunk").items() if name != "chunk_size"}


def test_states_are_for_calls_without_gradients(packages):
    this, package = case(KDA, 20, R=1, offsets=(0, 4, 20)), packages(KDA)
    with pytest.raises(package.arguments.ArgumentError, match="return_intermediate_states: got True with gradients"):
        call(package, this, return_intermediate_states=True)
    with torch.inference_mode(), pytest.raises(package.arguments.ArgumentError, match=r"cu_seqlens_cpu: got \[2\]"):
        call(package, this, return_intermediate_states=True, cu_seqlens_cpu=torch.tensor([0, 20]))
    with torch.inference_mode(), pytest.raises(package.arguments.ArgumentError, match="last offset 30"):
        call(package, this, return_intermediate_states=True, cu_seqlens_cpu=torch.tensor([0, 4, 30]))


@torch.inference_mode()
def test_states_in_half_precision(packages):
    this, package = case(KDA, 20, R=1, dtype=torch.bfloat16), packages(KDA)
    o, final, states = package.chunk_kda(**keywords_of(this), return_intermediate_states=True)
    assert (o.dtype, final.dtype, states.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert states.shape[1] == 1, "chunks of 64 unless another length is asked for"
