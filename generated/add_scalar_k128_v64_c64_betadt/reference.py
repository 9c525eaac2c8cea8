"""add_scalar_k128_v64_c64_betadt in plain PyTorch.

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
    where_valid,
)


def chunk_step(q, k, v, dt, dt_bias, A_log, S, dt_min, dt_max, scale, valid):
    """One chunk; returns o, S_out."""
    # t5[i] = dt[i] + dt_bias
    t5 = dt + dt_bias[None, :, :, None]
    # t6[i] = softplus(t5[i])
    t6 = torch.nn.functional.softplus(t5, threshold=20.0)
    # sp[i] = clamp(t6[i], dt_min, dt_max)
    sp = t6.clamp(dt_min, dt_max)
    # t11 = exp(A_log)
    t11 = torch.exp(A_log.clamp(max=80.0))
    # t12[i] = sp[i] * t11
    t12 = torch.einsum("bhri,hr->bhri", sp, t11)
    # t13[i] = -t12[i]
    t13 = -t12
    # g[i] = valid(t13[i])
    g = where_valid(valid, t13, 3)
    # E[i,j] = decay.ij(g[i])
    E = decay_between(g, 3)
    # eG[i] = decay.i0(g[i])
    eG = decay_from_start(g, 3)
    # eT[i] = decay.1i(g[i])
    eT = decay_to_end(g, 3)
    # eL = decay.10(g[i])
    eL = decay_of_chunk(g, 3)
    # r[i,v] = v[i,v] * sp[i]
    r = torch.einsum("bhriv,bhri->bhriv", v, sp)
    # t21[k,v] = eL * S[k,v]
    t21 = torch.einsum("bhr,bhrkv->bhrkv", eL, S)
    # t22[i,v] = v[i,v] * sp[i] * eT[i]
    t22 = torch.einsum("bhriv,bhri,bhri->bhriv", v, sp, eT)
    # KR[k,v] = sum i: k[i,k] * t22[i,v]
    KR = torch.einsum("bhik,bhriv->bhrkv", k, t22)
    # S_out[k,v] = t21[k,v] + KR[k,v]
    S_out = t21 + KR
    # t26[i,j] = sum k: q[i,k] * k[j,k]
    t26 = torch.einsum("bhik,bhjk->bhij", q, k)
    # P[i,j] = E[i,j] * t26[i,j]
    P = torch.einsum("bhrij,bhij->bhrij", E, t26)
    # PR[i,v] = sum j: r[j,v] * P[i,j]
    PR = torch.einsum("bhrjv,bhrij->bhriv", r, P)
    # t29[i,v] = sum k: q[i,k] * S[k,v]
    t29 = torch.einsum("bhik,bhrkv->bhriv", q, S)
    # QS[i,v] = eG[i] * t29[i,v]
    QS = torch.einsum("bhri,bhriv->bhriv", eG, t29)
    # t31[i,v] = PR[i,v] + QS[i,v]
    t31 = PR + QS
    # o[i,v] = t31[i,v] * scale
    o = scale * t31
    return o, S_out


chunk_fields = Step(
    chunk_step,
    chunk=64,
    inputs=("q", "k", "v", "dt", "dt_bias", "A_log"),
    tokens=("q", "k", "v", "dt"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("dt_min", "dt_max", "scale"),
    state_v_first=False,
)


def chunk(call):
    """(o, final state) of a Call."""
    return run(chunk_fields, call)


def recurrent_step(q, k, v, dt, dt_bias, A_log, S, dt_min, dt_max, scale, valid):
    """One token; returns o, S_out."""
    # t5 = dt + dt_bias
    t5 = dt + dt_bias
    # t6 = softplus(t5)
    t6 = torch.nn.functional.softplus(t5, threshold=20.0)
    # sp = clamp(t6, dt_min, dt_max)
    sp = t6.clamp(dt_min, dt_max)
    # t11 = exp(A_log)
    t11 = torch.exp(A_log.clamp(max=80.0))
    # t12 = sp * t11
    t12 = torch.einsum("bhr,hr->bhr", sp, t11)
    # t13 = -t12
    t13 = -t12
    # g = valid(t13)
    g = t13
    # eG = exp(g)
    eG = torch.exp(g.clamp(max=80.0))
    # t17[k,v] = eG * S[k,v]
    t17 = torch.einsum("bhr,bhrkv->bhrkv", eG, S)
    # KR[k,v] = k[k] * v[v] * sp
    KR = torch.einsum("bhk,bhrv,bhr->bhrkv", k, v, sp)
    # S_out[k,v] = t17[k,v] + KR[k,v]
    S_out = t17 + KR
    # t21[v] = sum k: q[k] * S_out[k,v]
    t21 = torch.einsum("bhk,bhrkv->bhrv", q, S_out)
    # o[v] = t21[v] * scale
    o = scale * t21
    return o, S_out


recurrent_fields = Step(
    recurrent_step,
    chunk=0,
    inputs=("q", "k", "v", "dt", "dt_bias", "A_log"),
    tokens=("q", "k", "v", "dt"),
    grouped=("q", "k"),
    inits=("h0",),
    scalars=("dt_min", "dt_max", "scale"),
    state_v_first=False,
)


def recurrent(call):
    """(o, final state) of a Call."""
    return run(recurrent_fields, call)
