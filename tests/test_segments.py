"""Sequences in segments: the scan's two passes and what comes between, interpreted, in segments of two chunks."""

import importlib

import pytest
import torch
from graphs import TARGET
from support import case, check
from test_training import check as check_gradients

from gdngen import api
from gdngen.ir.evaluate import evaluate
from gdngen.passes import segment
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec

SPEC = Spec(key_dim=9, value_dim=20, chunk=16)
MEMBERS = [
    SPEC,
    Spec(key_dim=16, value_dim=32, chunk=16, qk_norm=True, state_v_first=True),
    Spec(gate="none", key_dim=9, value_dim=20, chunk=16),
    Spec(gate="key", key_dim=9, value_dim=17, chunk=16),
    Spec(rule="additive", gate="none", beta="value", key_dim=16, value_dim=9, chunk=16),
    Spec(rule="additive", gate="scalar", beta="dt", key_dim=9, value_dim=20, chunk=16),
]
OFFSETS = (0, 33, 33, 65, 97, 98, 160)  # in segments of 32 tokens: ragged, empty, whole, one token; 10 rows behind
LENGTHS = {"dense": {"T": 97, "B": 2}, "packed": {"T": 170, "offsets": OFFSETS}, "one empty": {"T": 33, "offsets": (0, 0)}}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The package of a Spec with segments of two chunks, which it always splits sequences into."""
    folder, made = tmp_path_factory.mktemp("split"), {}

    def load(spec):
        if spec not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(segment, "CHUNKS", 2)
                path = api.build(spec, folder, name=f"split_{len(made)}")
            made[spec] = api.import_folder(path, path.name)
            importlib.import_module(f"{path.name}.segments").FEW = 0
        made[spec].LAUNCHES.clear()
        return made[spec]

    return load


@pytest.mark.parametrize("spec", MEMBERS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_results(split, spec, lengths):
    package = split(spec)
    check(package, case(spec, **LENGTHS[lengths], decays="mild", seed=3), "chunk")
    assert (package.LAUNCHES["scan"], package.LAUNCHES["combine"]) == (2, 1)


@pytest.mark.parametrize("spec", MEMBERS, ids=str)
def test_gradients(split, spec):
    package = split(spec)
    check_gradients(package, case(spec, 170, offsets=OFFSETS, decays="mild", seed=4))
    assert (package.LAUNCHES["states"], package.LAUNCHES["reverse"], package.LAUNCHES["combine"]) == (2, 2, 3)
