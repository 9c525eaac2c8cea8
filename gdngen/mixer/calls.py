"""Random inputs of a member, and the float64 answer: its graph, evaluated on the very same numbers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gdngen.ir import evaluate
from gdngen.ir.graph import Graph
from gdngen.mixer.graphs import backward_graph, forward_graph
from gdngen.mixer.sources import inputs_of
from gdngen.mixer.specs import Convolution, Gate, MixerSpec


def inputs(
    spec: MixerSpec, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, sequences: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """x and what else the member reads; ``shape`` is [B, T, D], ``sequences`` the number of packed ones."""
    generator = torch.Generator().manual_seed(seed)
    (B, T, D), N = shape, sequences if sequences is not None else shape[0]
    shapes: dict[str, tuple[int, ...]] = {name: (B, T, D) for name in inputs_of(spec)}
    shapes |= dict.fromkeys(PER_CHANNEL, (D,))
    if isinstance(spec, Convolution):
        shapes |= {"weight": (D, spec.width), "h0": (N, D, spec.columns)}
    return {name: torch.randn(shapes[name], generator=generator).to(dtype) for name in inputs_of(spec)}


def number_of(spec: MixerSpec) -> float:
    """An ordinary number for a call of a member: a gate's bound, else an epsilon."""
    return -5.0 if isinstance(spec, Gate) else 1e-5


def answer(
    spec: MixerSpec, given: dict[str, Tensor | None], number: float, offsets: Sequence[int] | None,
    cotangents: dict[str, Tensor | None],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """(outputs, gradients) in float64 by the forward and the derived backward graph, sequence after sequence."""
    x = given["x"]
    assert x is not None
    T = x.shape[1]
    ends = [(0, T)] if offsets is None else list(pairwise(offsets))
    parts = []
    for n, (first, last) in enumerate(ends):
        rows = slice(None) if offsets is None else slice(n, n + 1)
        parts.append(_sequence(spec, given, number, (first, last), rows, cotangents))
    outputs = {name: _joined(name, [part[0] for part in parts], T) for name in parts[0][0]}
    gradients = {
        name: _joined(name, [part[1] for part in parts], T) if name in PER_TOKEN or name == "h0"
        else torch.stack([part[1][name] for part in parts]).sum(0)
        for name in parts[0][1]
    }  # fmt: skip
    return outputs, gradients


PER_CHANNEL = ("weight", "bias", "A_log", "dt_bias")
PER_TOKEN = ("x", "g", "residual", "o", "s")


def _joined(name: str, parts: list[dict[str, Tensor]], T: int) -> Tensor:
    """Tokens one after the other, rows past the last sequence 0; windows as rows."""
    if name not in PER_TOKEN:
        return torch.cat([part[name] for part in parts])
    tokens = torch.cat([part[name] for part in parts], 1)
    return torch.nn.functional.pad(tokens, (0, 0, 0, T - tokens.shape[1]))


def _sequence(
    spec: MixerSpec, given: dict[str, Tensor | None], number: float, tokens: tuple[int, int], rows: slice,
    cotangents: dict[str, Tensor | None],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Outputs and gradients of sequences of one length, in one chunk."""
    x, (first, last) = given["x"], tokens
    assert x is not None
    D, length, B = x.shape[2], last - first, x[rows].shape[0] if rows == slice(None) else 1

    def part(tensor: Tensor | None, like: tuple[int, ...]) -> Tensor:
        return torch.zeros(like, dtype=torch.float64) if tensor is None else tensor.double()

    per_token = {name: part(given.get(name), x.shape)[:, first:last] for name in PER_TOKEN}
    numbers = {"eps": number, "lower_bound": number, "inverse_dim": 1.0 / D}
    data: dict[str, Any] = {**per_token, **{n: torch.tensor(x, dtype=torch.float64) for n, x in numbers.items()}}
    data |= {name: part(given.get(name), (D,)) for name in PER_CHANNEL}
    data |= {f"d{name}": part(cotangents.get(name), x.shape)[:, first:last] for name in ("o", "s")}
    names: list[str] = []
    if isinstance(spec, Convolution):
        data |= {f"w{d}": data["weight"][:, -1 - d] for d in range(spec.width)}
        h0 = part(given.get("h0"), (0,))
        h0 = h0[rows] if h0.numel() else torch.zeros(B, D, spec.columns, dtype=torch.float64)
        dht = cotangents.get("ht")
        dht = torch.zeros_like(h0) if dht is None else dht.double()[rows]
        for m in range(1, spec.columns + 1):
            data |= {f"h0_{m}": h0[:, :, -m], f"h{m}": [h0[:, :, -m]], f"dht_{m}": dht[:, :, -m]}
            names.append(str(m))
        if length == 0:
            return _empty(spec, B, D) | {"ht": h0}, _empty_gradients(spec, B, D) | {"h0": dht}
    elif length == 0:
        return _empty(spec, B, D), _empty_gradients(spec, B, D)
    outputs = _evaluated(forward_graph(spec), data, length)
    found = _evaluated(backward_graph(spec), data, length)
    gradients = {name[1:]: value for name, value in found.items() if name[1:] in (*PER_TOKEN, *PER_CHANNEL)}
    if isinstance(spec, Convolution):
        outputs = {"o": outputs["o"], "ht": _window(outputs, "ht_", names)}
        gradients["weight"] = torch.stack([found[f"dw{d}"] for d in reversed(range(spec.width))], 1)
        gradients["h0"] = _window(found, "dh0_", names)
    return outputs, gradients


def _evaluated(graph: Graph, data: dict[str, Any], length: int) -> dict[str, Tensor]:
    return evaluate(graph, data, length, max(length, 1))


def _window(found: dict[str, Tensor], prefix: str, names: list[str]) -> Tensor:
    return torch.stack([found[prefix + name] for name in reversed(names)], 2)


def _empty(spec: MixerSpec, B: int, D: int) -> dict[str, Tensor]:
    """The outputs of a sequence without tokens, which hands its window on."""
    none = torch.zeros(B, 0, D, dtype=torch.float64)
    return {name: none for name, _ in forward_graph(spec).outputs}


def _empty_gradients(spec: MixerSpec, B: int, D: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(PER_CHANNEL, (D,))
    if isinstance(spec, Convolution):
        shapes["weight"] = (D, spec.width)
    wanted = (name for name in inputs_of(spec) if name != "h0")
    return {name: torch.zeros(shapes.get(name, (B, 0, D)), dtype=torch.float64) for name in wanted}
