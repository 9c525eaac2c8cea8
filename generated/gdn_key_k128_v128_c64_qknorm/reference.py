"""gdn_key_k128_v128_c64_qknorm in plain PyTorch.

Made from the same graph as the kernels; what CPU tensors run, differentiable by autograd.
Inside a step q and k are [b, h, token, channel], values per value head [b, h, r, token, channel], states
[b, h, r, K, V].
"""

import torch

from .sequences import (
    Step,
    run,
)


def recurrent_step(q, k, v, gk, beta, S, scale, valid):
    """One token; returns o, S_out."""
    # t1 = sum k: q[k] * q[k]
    t1 = torch.einsum("bhk,bhk->bh", q, q)
    # t3 = t1 + 1e-06
    t3 = t1 + 1e-06
    # t4 = rsqrt(t3)
    t4 = torch.rsqrt(t3)
    # t5[k] = q[k] * t4
    t5 = torch.einsum("bhk,bh->bhk", q, t4)
    # qn[k] = cast(t5[k])
    qn = t5
    # t8 = sum k: k[k] * k[k]
    t8 = torch.einsum("bhk,bhk->bh", k, k)
    # t9 = 1e-06 + t8
    t9 = 1e-06 + t8
    # t10 = rsqrt(t9)
    t10 = torch.rsqrt(t9)
    # t11[k] = k[k] * t10
    t11 = torch.einsum("bhk,bh->bhk", k, t10)
    # kn[k] = cast(t11[k])
    kn = t11
    # eGk[k] = exp(gk[k])
    eGk = torch.exp(gk.clamp(max=80.0))
    # t18[k] = kn[k] * eGk[k]
    t18 = torch.einsum("bhk,bhrk->bhrk", kn, eGk)
    # KS[v] = sum k: S[k,v] * t18[k]
    KS = torch.einsum("bhrkv,bhrk->bhrv", S, t18)
    # e[v] = v[v] - KS[v]
    e = v - KS
    # t21[k,v] = eGk[k] * S[k,v]
    t21 = torch.einsum("bhrk,bhrkv->bhrkv", eGk, S)
    # KR[k,v] = kn[k] * beta * e[v]
    KR = torch.einsum("bhk,bhr,bhrv->bhrkv", kn, beta, e)
    # S_out[k,v] = t21[k,v] + KR[k,v]
    S_out = t21 + KR
    # t25[v] = sum k: qn[k] * S_out[k,v]
    t25 = torch.einsum("bhk,bhrkv->bhrv", qn, S_out)
    # o[v] = t25[v] * scale
    o = scale * t25
    return o, S_out


recurrent_fields = Step(
    recurrent_step,
    chunk=0,
    inputs=("q", "k", "v", "gk", "beta"),
    tokens=("q", "k", "v", "gk", "beta"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("scale",),
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
