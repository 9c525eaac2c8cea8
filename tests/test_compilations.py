"""On a GPU: after the first calls of a configuration nothing is compiled, whatever the lengths."""

import random
from typing import Any

import pytest
import torch

from gdngen import calls
from gdngen.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*launch choices measured on:RuntimeWarning"),
]
HEADS, LENGTHS, SEQUENCES = (4, 8), 200, 3
SPECS = {"scalar": Spec(gate="scalar", qk_norm=True), "key": Spec(gate="key"), "dt": Spec(rule="additive", beta="dt")}


def one_call(package: Any, spec: Spec, form: str, T: int, offsets: tuple[int, ...], backward: bool) -> None:
    """A call as models make it: slices of longer tensors, whose addresses are what they happen to be."""
    case = calls.Case("length", T + 3, 1 if offsets else SEQUENCES, offsets)
    x = calls.inputs(spec, case, torch.bfloat16, HEADS, "cuda")
    rows = ("A_log", "dt_bias", "h0", "cu_seqlens")
    x = {name: y if name in rows else y[:, T % 4 : T % 4 + T] for name, y in x.items()}
    given = calls.keywords(spec, form, x, case)
    if backward:
        given = {n: y.requires_grad_() if getattr(y, "is_floating_point", bool)() else y for n, y in given.items()}
    with torch.set_grad_enabled(backward):
        o, state = getattr(package, calls.operator_name(spec, form))(**given)
        if backward:
            torch.autograd.backward([o, state], [torch.ones_like(o), torch.ones_like(state)])


@pytest.mark.parametrize("what", SPECS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_two_hundred_lengths_compile_nothing(
    packages, monkeypatch: pytest.MonkeyPatch, what: str, packed: bool
) -> None:
    import triton

    spec, numbers = SPECS[what], random.Random(0)
    package, asked = packages(spec), []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **rest: asked.append(repr), raising=True
    )

    def call(T: int) -> None:
        ends = sorted(numbers.randint(0, T) for _ in range(SEQUENCES - 1))
        offsets = (0, *ends, T) if packed else ()
        one_call(package, spec, "chunk", T, offsets, backward=False)
        one_call(package, spec, "chunk", T, offsets, backward=True)
        one_call(package, spec, "recurrent", T, offsets, backward=False)

    call(64)
    first = len(asked)
    assert first >= 5
    for T in (1, 16, 63, 65, *(numbers.randint(1, 5000) for _ in range(LENGTHS))):
        call(T)
    assert asked[first:] == []
