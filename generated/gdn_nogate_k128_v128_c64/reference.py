"""gdn_nogate_k128_v128_c64 in plain PyTorch.

Made from the same graph as the kernels; what CPU tensors run, differentiable by autograd.
Inside a step q and k are [b, h, token, channel], values per value head [b, h, r, token, channel], states
[b, h, r, K, V].
"""

import torch

from .sequences import (
    Step,
    run,
    unit_lower_inverse,
)


def chunk_step(q, k, v, beta, S, scale, valid):
    """One chunk; returns o, S_out."""
    # KS[i,v] = sum k: k[i,k] * S[k,v]
    KS = torch.einsum("bhik,bhrkv->bhriv", k, S)
    # causal[i,j] = tri.causal()
    t6 = torch.ones_like(valid[:, None] * valid).tril(0)
    # t7[i,j] = sum k: k[i,k] * k[j,k]
    t7 = torch.einsum("bhik,bhjk->bhij", k, k)
    # A[i,j] = beta[i] * t7[i,j]
    A = torch.einsum("bhri,bhij->bhrij", beta, t7)
    # X[i,j] = uli(A[i,j])
    X = unit_lower_inverse(A)
    # e[i,v] = v[i,v] - KS[i,v]
    e = v - KS
    # y[i,v] = beta[i] * e[i,v]
    y = torch.einsum("bhri,bhriv->bhriv", beta, e)
    # r[i,v] = sum j: X[i,j] * y[j,v]
    r = torch.einsum("bhrij,bhrjv->bhriv", X, y)
    # KR[k,v] = sum i: k[i,k] * r[i,v]
    KR = torch.einsum("bhik,bhriv->bhrkv", k, r)
    # S_out[k,v] = S[k,v] + KR[k,v]
    S_out = S + KR
    # t16[i,j] = sum k: q[i,k] * k[j,k]
    t16 = torch.einsum("bhik,bhjk->bhij", q, k)
    # P[i,j] = causal[i,j] * t16[i,j]
    P = torch.einsum("ij,bhij->bhij", t6, t16)
    # PR[i,v] = sum j: r[j,v] * P[i,j]
    PR = torch.einsum("bhrjv,bhij->bhriv", r, P)
    # QS[i,v] = sum k: q[i,k] * S[k,v]
    QS = torch.einsum("bhik,bhrkv->bhriv", q, S)
    # t20[i,v] = PR[i,v] + QS[i,v]
    t20 = PR + QS
    # o[i,v] = t20[i,v] * scale
    o = scale * t20
    return o, S_out


chunk_fields = Step(
    chunk_step,
    chunk=64,
    inputs=("q", "k", "v", "beta"),
    tokens=("q", "k", "v", "beta"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("scale",),
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


def recurrent_step(q, k, v, beta, S, scale, valid):
    """One token; returns o, S_out."""
    # KS[v] = sum k: k[k] * S[k,v]
    KS = torch.einsum("bhk,bhrkv->bhrv", k, S)
    # e[v] = v[v] - KS[v]
    e = v - KS
    # KR[k,v] = k[k] * beta * e[v]
    KR = torch.einsum("bhk,bhr,bhrv->bhrkv", k, beta, e)
    # S_out[k,v] = S[k,v] + KR[k,v]
    S_out = S + KR
    # t10[v] = sum k: q[k] * S_out[k,v]
    t10 = torch.einsum("bhk,bhrkv->bhrv", q, S_out)
    # o[v] = t10[v] * scale
    o = scale * t10
    return o, S_out


recurrent_fields = Step(
    recurrent_step,
    chunk=0,
    inputs=("q", "k", "v", "beta"),
    tokens=("q", "k", "v", "beta"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("scale",),
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
