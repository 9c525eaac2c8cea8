"""gdn_key_k128_v128_c64_qknorm in plain PyTorch.

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


def chunk_step(q, k, v, gk, beta, S, scale, valid):
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
    # Ek[i,j,k] = decay.ij(gk[i,k])
    Ek = decay_between(gk, 3)
    # eGk[i,k] = decay.i0(gk[i,k])
    eGk = decay_from_start(gk, 3)
    # eTk[i,k] = decay.1i(gk[i,k])
    eTk = decay_to_end(gk, 3)
    # eLk[k] = decay.10(gk[i,k])
    eLk = decay_of_chunk(gk, 3)
    # t21[i,k] = kn[i,k] * eGk[i,k]
    t21 = torch.einsum("bhik,bhrik->bhrik", kn, eGk)
    # KS[i,v] = sum k: S[k,v] * t21[i,k]
    KS = torch.einsum("bhrkv,bhrik->bhriv", S, t21)
    # t23[i,j] = sum k: kn[i,k] * kn[j,k] * Ek[i,j,k]
    t23 = torch.einsum("bhik,bhjk,bhrijk->bhrij", kn, kn, Ek)
    # A[i,j] = beta[i] * t23[i,j]
    A = torch.einsum("bhri,bhrij->bhrij", beta, t23)
    # X[i,j] = uli(A[i,j])
    X = unit_lower_inverse(A)
    # e[i,v] = v[i,v] - KS[i,v]
    e = v - KS
    # y[i,v] = beta[i] * e[i,v]
    y = torch.einsum("bhri,bhriv->bhriv", beta, e)
    # r[i,v] = sum j: X[i,j] * y[j,v]
    r = torch.einsum("bhrij,bhrjv->bhriv", X, y)
    # t29[k,v] = eLk[k] * S[k,v]
    t29 = torch.einsum("bhrk,bhrkv->bhrkv", eLk, S)
    # t30[i,k] = kn[i,k] * eTk[i,k]
    t30 = torch.einsum("bhik,bhrik->bhrik", kn, eTk)
    # KR[k,v] = sum i: r[i,v] * t30[i,k]
    KR = torch.einsum("bhriv,bhrik->bhrkv", r, t30)
    # S_out[k,v] = t29[k,v] + KR[k,v]
    S_out = t29 + KR
    # P[i,j] = sum k: qn[i,k] * kn[j,k] * Ek[i,j,k]
    P = torch.einsum("bhik,bhjk,bhrijk->bhrij", qn, kn, Ek)
    # PR[i,v] = sum j: r[j,v] * P[i,j]
    PR = torch.einsum("bhrjv,bhrij->bhriv", r, P)
    # t36[i,k] = qn[i,k] * eGk[i,k]
    t36 = torch.einsum("bhik,bhrik->bhrik", qn, eGk)
    # QS[i,v] = sum k: S[k,v] * t36[i,k]
    QS = torch.einsum("bhrkv,bhrik->bhriv", S, t36)
    # t38[i,v] = PR[i,v] + QS[i,v]
    t38 = PR + QS
    # o[i,v] = t38[i,v] * scale
    o = scale * t38
    return o, S_out


chunk_fields = Step(
    chunk_step,
    chunk=64,
    inputs=("q", "k", "v", "gk", "beta"),
    tokens=("q", "k", "v", "gk", "beta"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("scale",),
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


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
