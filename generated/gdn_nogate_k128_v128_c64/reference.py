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
    # t6[i,j] = tri.causal()
    t6 = torch.ones_like(valid[:, None] * valid).tril(0)
    # t7[i,j] = sum k: k[i,k] * k[j,k]
    t7 = torch.einsum("bhik,bhjk->bhij", k, k)
    # A[i,j] = beta[i] * t7[i,j]
    A = torch.einsum("bhri,bhij->bhrij", beta, t7)
    # X[i,j] = uli(A[i,j])
    X = unit_lower_inverse(A)
    # t10[i,v] = v[i,v] + -KS[i,v]
    t10 = v - KS
    # y[i,v] = beta[i] * t10[i,v]
    y = torch.einsum("bhri,bhriv->bhriv", beta, t10)
    # r[i,v] = sum j: X[i,j] * y[j,v]
    r = torch.einsum("bhrij,bhrjv->bhriv", X, y)
    # t13[k,v] = sum i: k[i,k] * r[i,v]
    t13 = torch.einsum("bhik,bhriv->bhrkv", k, r)
    # S_out[k,v] = S[k,v] + t13[k,v]
    S_out = S + t13
    # t16[i,j] = sum k: q[i,k] * k[j,k]
    t16 = torch.einsum("bhik,bhjk->bhij", q, k)
    # P[i,j] = t6[i,j] * t16[i,j]
    P = torch.einsum("ij,bhij->bhij", t6, t16)
    # t18[i,v] = sum j: r[j,v] * P[i,j]
    t18 = torch.einsum("bhrjv,bhij->bhriv", r, P)
    # t19[i,v] = sum k: q[i,k] * S[k,v]
    t19 = torch.einsum("bhik,bhrkv->bhriv", q, S)
    # t20[i,v] = t18[i,v] + t19[i,v]
    t20 = t18 + t19
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
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


def recurrent_step(q, k, v, beta, S, scale, valid):
    """One token; returns o, S_out."""
    # KS[v] = sum k: k[k] * S[k,v]
    KS = torch.einsum("bhk,bhrkv->bhrv", k, S)
    # t6[v] = v[v] + -KS[v]
    t6 = v - KS
    # t7[k,v] = k[k] * beta * t6[v]
    t7 = torch.einsum("bhk,bhr,bhrv->bhrkv", k, beta, t6)
    # S_out[k,v] = S[k,v] + t7[k,v]
    S_out = S + t7
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
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
