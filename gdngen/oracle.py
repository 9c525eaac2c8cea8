"""The float64 oracle: the recurrence of contract section 2, token by token, independent of the IR."""

import torch


def recurrence(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, h0=None, rule="delta", normalize=False, z0=None
):
    """(o [B,T,HV,V], S [B,HV,K,V]), with ``normalize`` (o, (S, z [B,HV,K])); float64, differentiable.

    q, k [B,T,H,K]; v [B,T,HV,V]; g, gk, gv, beta as in contract section 1, already computed; h0 [B,HV,K,V].
    """
    (B, T, HV, V), K = v.shape, q.shape[3]
    q, k = (x.double().repeat_interleave(HV // q.shape[2], dim=2) for x in (q, k))
    decay = [
        (x.double().clamp(min=-800).exp(), form)
        for x, form in ((g, (..., None, None)), (gk, (..., None)), (gv, (..., None, slice(None))))
        if x is not None
    ]
    beta = torch.ones(B, T, HV, 1, dtype=torch.float64) if beta is None else beta.double().reshape(B, T, HV, -1)
    S = torch.zeros(B, HV, K, V, dtype=torch.float64) if h0 is None else h0.double()
    z = torch.zeros(B, HV, K, dtype=torch.float64) if z0 is None else z0.double()
    S, z, beta, v, rows = S.to(v.device), z.to(v.device), beta.to(v.device), v.double(), []
    for t in range(T):
        for a, form in decay:
            S = a[:, t][form] * S
            z = a[:, t][form][..., 0] * z if normalize else z
        predicted = torch.einsum("bhkv,bhk->bhv", S, k[:, t]) if rule == "delta" else 0.0
        S = S + k[:, t, :, :, None] * (beta[:, t] * (v[:, t] - predicted))[:, :, None, :]
        z = z + k[:, t]
        o = torch.einsum("bhkv,bhk->bhv", S, q[:, t])
        rows.append(
            o / ((z * q[:, t]).sum(-1, keepdim=True) + 1e-10)
            if normalize
            else (K**-0.5 if scale is None else scale) * o
        )
    o = torch.stack(rows, 1) if rows else v.new_zeros(B, 0, HV, V)
    return o, ((S, z) if normalize else S)


def gate(a, A_log, dt_bias=None, lower_bound=None):
    """The fused gates of contract section 3 in float64: softplus, or bounded when ``lower_bound`` is given."""
    rate = A_log.double().exp().reshape(-1, *[1] * (a.ndim - 3))
    x = a.double() if dt_bias is None else a.double() + dt_bias.double().reshape(a.shape[2:])
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.nn.functional.softplus(x, threshold=20)


def normalized(x):
    """q/k norm of contract section 3 in float64."""
    return x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rms_ratio(x, reference):
    """The error measure of contract section 5: rms(x - ref) / rms(ref); plain rms(x) where the reference is 0."""
    size = reference.double().square().mean().sqrt()
    error = (x.to(reference.device).double() - reference.double()).square().mean().sqrt()
    return float(error / size) if size > 0 else float(error)
