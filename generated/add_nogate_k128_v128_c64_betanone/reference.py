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
    # KR[k,v] = sum i: k[i,k] * v[i,v]
    KR = torch.einsum("bhik,bhriv->bhrkv", k, v)
    # S_out[k,v] = S[k,v] + KR[k,v]
    S_out = S + KR
    # causal[i,j] = tri.causal()
    t7 = torch.ones_like(valid[:, None] * valid).tril(0)
    # t8[i,j] = sum k: q[i,k] * k[j,k]
    t8 = torch.einsum("bhik,bhjk->bhij", q, k)
    # P[i,j] = causal[i,j] * t8[i,j]
    P = torch.einsum("ij,bhij->bhij", t7, t8)
    # PR[i,v] = sum j: v[j,v] * P[i,j]
    PR = torch.einsum("bhrjv,bhij->bhriv", v, P)
    # QS[i,v] = sum k: q[i,k] * S[k,v]
    QS = torch.einsum("bhik,bhrkv->bhriv", q, S)
    # t12[i,v] = PR[i,v] + QS[i,v]
    t12 = PR + QS
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
    scalars=("scale",),
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


def recurrent_step(q, k, v, S, scale, valid):
    """One token; returns o, S_out."""
    # KR[k,v] = k[k] * v[v]
    KR = torch.einsum("bhk,bhrv->bhrkv", k, v)
    # S_out[k,v] = S[k,v] + KR[k,v]
    S_out = S + KR
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
    scalars=("scale",),
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
