"""add_nogate_k128_v128_c64_betanone in plain PyTorch.

Made from the same graph as the kernels; what CPU tensors run, differentiable by autograd.
Inside a step q and k are [b, h, token, channel], values per value head [b, h, r, token, channel], states
[b, h, r, K, V].
"""

import torch

from .sequences import (
    Step,
    run,
)


def chunk_step(q, k, v, S, scale, valid):
    """One chunk; returns o, S_out."""
    # t4[k,v] = sum i: k[i,k] * v[i,v]
    t4 = torch.einsum("bhik,bhriv->bhrkv", k, v)
    # S_out[k,v] = S[k,v] + t4[k,v]
    S_out = S + t4
    # t7[i,j] = tri.causal()
    t7 = torch.ones_like(valid[:, None] * valid).tril(0)
    # t8[i,j] = sum k: q[i,k] * k[j,k]
    t8 = torch.einsum("bhik,bhjk->bhij", q, k)
    # P[i,j] = t7[i,j] * t8[i,j]
    P = torch.einsum("ij,bhij->bhij", t7, t8)
    # t10[i,v] = sum j: v[j,v] * P[i,j]
    t10 = torch.einsum("bhrjv,bhij->bhriv", v, P)
    # t11[i,v] = sum k: q[i,k] * S[k,v]
    t11 = torch.einsum("bhik,bhrkv->bhriv", q, S)
    # t12[i,v] = t10[i,v] + t11[i,v]
    t12 = t10 + t11
    # o[i,v] = t12[i,v] * scale
    o = scale * t12
    return o, S_out


chunk_fields = Step(
    chunk_step,
    chunk=64,
    inputs=("q", "k", "v"),
    tokens=("q", "k", "v"),
    grouped=("q", "k"),
    inits=("h0",),
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


def recurrent_step(q, k, v, S, scale, valid):
    """One token; returns o, S_out."""
    # t4[k,v] = k[k] * v[v]
    t4 = torch.einsum("bhk,bhrv->bhrkv", k, v)
    # S_out[k,v] = S[k,v] + t4[k,v]
    S_out = S + t4
    # t7[v] = sum k: q[k] * S_out[k,v]
    t7 = torch.einsum("bhk,bhrkv->bhrv", q, S_out)
    # o[v] = t7[v] * scale
    o = scale * t7
    return o, S_out


recurrent_fields = Step(
    recurrent_step,
    chunk=0,
    inputs=("q", "k", "v"),
    tokens=("q", "k", "v"),
    grouped=("q", "k"),
    inits=("h0",),
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
