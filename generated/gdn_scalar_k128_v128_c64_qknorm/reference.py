"""gdn_scalar_k128_v128_c64_qknorm in plain PyTorch.

Made from the same graph as the kernels; what CPU tensors run, differentiable by autograd.
Inside a step q and k are [b, h, token, channel], values per value head [b, h, r, token, channel], states
[b, h, r, K, V].
"""

import torch

from .sequences import (
    Step,
    decay_between,
    decay_from_start,
    decay_of_chunk,
    decay_to_end,
    run,
    unit_lower_inverse,
)


def chunk_step(q, k, v, g, beta, S, scale, valid):
    """One chunk; returns o, S_out."""
    # t1[i] = sum k: q[i,k] * q[i,k]
    t1 = torch.einsum("bhik,bhik->bhi", q, q)
    # t3[i] = t1[i] + 1e-06
    t3 = t1 + 1e-06
    # t4[i] = rsqrt(t3[i])
    t4 = torch.rsqrt(t3)
    # t5[i,k] = q[i,k] * t4[i]
    t5 = torch.einsum("bhik,bhi->bhik", q, t4)
    # qn[i,k] = cast(t5[i,k])
    qn = t5
    # t8[i] = sum k: k[i,k] * k[i,k]
    t8 = torch.einsum("bhik,bhik->bhi", k, k)
    # t9[i] = 1e-06 + t8[i]
    t9 = 1e-06 + t8
    # t10[i] = rsqrt(t9[i])
    t10 = torch.rsqrt(t9)
    # t11[i,k] = k[i,k] * t10[i]
    t11 = torch.einsum("bhik,bhi->bhik", k, t10)
    # kn[i,k] = cast(t11[i,k])
    kn = t11
    # E[i,j] = decay.ij(g[i])
    E = decay_between(g, 3)
    # eG[i] = decay.i0(g[i])
    eG = decay_from_start(g, 3)
    # eT[i] = decay.1i(g[i])
    eT = decay_to_end(g, 3)
    # eL = decay.10(g[i])
    eL = decay_of_chunk(g, 3)
    # t21[i,v] = sum k: kn[i,k] * S[k,v]
    t21 = torch.einsum("bhik,bhrkv->bhriv", kn, S)
    # KS[i,v] = eG[i] * t21[i,v]
    KS = torch.einsum("bhri,bhriv->bhriv", eG, t21)
    # t23[i,j] = sum k: kn[i,k] * kn[j,k]
    t23 = torch.einsum("bhik,bhjk->bhij", kn, kn)
    # A[i,j] = E[i,j] * beta[i] * t23[i,j]
    A = torch.einsum("bhrij,bhri,bhij->bhrij", E, beta, t23)
    # X[i,j] = uli(A[i,j])
    X = unit_lower_inverse(A)
    # e[i,v] = v[i,v] - KS[i,v]
    e = v - KS
    # y[i,v] = beta[i] * e[i,v]
    y = torch.einsum("bhri,bhriv->bhriv", beta, e)
    # r[i,v] = sum j: X[i,j] * y[j,v]
    r = torch.einsum("bhrij,bhrjv->bhriv", X, y)
    # t29[k,v] = eL * S[k,v]
    t29 = torch.einsum("bhr,bhrkv->bhrkv", eL, S)
    # t30[i,v] = eT[i] * r[i,v]
    t30 = torch.einsum("bhri,bhriv->bhriv", eT, r)
    # KR[k,v] = sum i: kn[i,k] * t30[i,v]
    KR = torch.einsum("bhik,bhriv->bhrkv", kn, t30)
    # S_out[k,v] = t29[k,v] + KR[k,v]
    S_out = t29 + KR
    # t34[i,j] = sum k: qn[i,k] * kn[j,k]
    t34 = torch.einsum("bhik,bhjk->bhij", qn, kn)
    # P[i,j] = E[i,j] * t34[i,j]
    P = torch.einsum("bhrij,bhij->bhrij", E, t34)
    # PR[i,v] = sum j: r[j,v] * P[i,j]
    PR = torch.einsum("bhrjv,bhrij->bhriv", r, P)
    # t37[i,v] = sum k: qn[i,k] * S[k,v]
    t37 = torch.einsum("bhik,bhrkv->bhriv", qn, S)
    # QS[i,v] = eG[i] * t37[i,v]
    QS = torch.einsum("bhri,bhriv->bhriv", eG, t37)
    # t39[i,v] = PR[i,v] + QS[i,v]
    t39 = PR + QS
    # o[i,v] = t39[i,v] * scale
    o = scale * t39
    return o, S_out


chunk_fields = Step(
    chunk_step,
    chunk=64,
    inputs=("q", "k", "v", "g", "beta"),
    tokens=("q", "k", "v", "g", "beta"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("scale",),
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


def recurrent_step(q, k, v, g, beta, S, scale, valid):
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
    # eG = exp(g)
    eG = torch.exp(g.clamp(max=80.0))
    # t18[v] = sum k: kn[k] * S[k,v]
    t18 = torch.einsum("bhk,bhrkv->bhrv", kn, S)
    # KS[v] = eG * t18[v]
    KS = torch.einsum("bhr,bhrv->bhrv", eG, t18)
    # e[v] = v[v] - KS[v]
    e = v - KS
    # t21[k,v] = eG * S[k,v]
    t21 = torch.einsum("bhr,bhrkv->bhrkv", eG, S)
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
    inputs=("q", "k", "v", "g", "beta"),
    tokens=("q", "k", "v", "g", "beta"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("scale",),
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
