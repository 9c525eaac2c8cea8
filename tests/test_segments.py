"""Sequences in segments: the scan's two passes and what comes between, interpreted, in segments of two chunks."""

import importlib
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from graphs import TARGET
from support import DECAYS, ROOT, call, case, check, poisoned_memory, same

from gdngen import api
from gdngen.ir.evaluate import evaluate
from gdngen.passes import segment
from gdngen.passes.check import CHUNK
from gdngen.passes.pipeline import compile_spec
from gdngen.passes.plan import Kernel
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
LENGTHS = {
    "dense": {"T": 97, "B": 2},
    "packed": {"T": 170, "offsets": OFFSETS},
    "one empty": {"T": 70, "offsets": (0, 0)},
}
IN_SHORT = {(0, "packed"), (1, "dense"), (3, "packed"), (5, "dense"), (0, "one empty")}


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The package of a Spec with segments of two chunks, which it takes however many heads there are."""
    folder, made = tmp_path_factory.mktemp("split"), {}

    def load(spec):
        if spec not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(segment, "CHUNKS", 2)
                path = api.build(spec, folder, name=f"split_{len(made)}")
            made[spec] = api.import_folder(path, path.name)
            segments_of(made[spec]).PROCESSORS_PER_HEAD = 1e-9
        made[spec].LAUNCHES.clear()
        return made[spec]

    return load


def segments_of(package):
    return importlib.import_module(f"{package.__name__}.segments")


@pytest.mark.parametrize(
    ("member", "lengths"),
    [
        pytest.param(member, lengths, marks=[] if (member, lengths) in IN_SHORT else pytest.mark.full)
        for member, lengths in itertools.product(range(len(MEMBERS)), LENGTHS)
    ],
)
def test_results(split, member, lengths):
    spec = MEMBERS[member]
    package = split(spec)
    check(package, case(spec, **LENGTHS[lengths], seed=3), "chunk")
    assert (package.LAUNCHES["scan"], package.LAUNCHES["combine"]) == (2, 1)


@pytest.mark.parametrize("offsets", [(0, 5), (0, 64, 98)])
def test_rows_past_the_last_offset(split, offsets):
    """Zero in every segment, that of the final state and those behind it, whatever was in memory."""
    package = split(SPEC)
    with poisoned_memory():
        o, _ = check(package, case(SPEC, 170, offsets=offsets), "chunk")
    assert package.LAUNCHES["combine"] == 1
    assert not o[:, offsets[-1] :].any()


@pytest.mark.full
@pytest.mark.parametrize("decays", sorted(DECAYS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decays(split, decays, dtype):
    check(split(SPEC), case(SPEC, 170, offsets=OFFSETS, dtype=dtype, decays=decays), "chunk")


def test_segments_do_not_see_later_ones(split):
    """Same bits whatever follows, a NaN included; and where one segment is all there is, the bits of a whole pass."""
    this = case(SPEC, 97)
    broken = this.changed(v=this.x["v"].clone().index_fill_(1, torch.tensor([64]), torch.nan))
    package = split(SPEC)
    (o, _), (other, state) = call(package, this, "chunk"), call(package, broken, "chunk")
    assert same(o[:, :64], other[:, :64])
    assert state.isnan().any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments_of(package), "PROCESSORS_PER_HEAD", 1e9)
        whole, _ = call(package, this, "chunk")
    assert same(o[:, :32], whole[:, :32])
    assert not same(o[:, 64:], whole[:, 64:])


def combined(package, this):
    package.LAUNCHES.clear()
    call(package, this, "chunk")
    return package.LAUNCHES["combine"]


def test_what_is_not_split(split, monkeypatch):
    package = split(SPEC)
    segments, tuning = segments_of(package), importlib.import_module(f"{package.__name__}.tuning")
    assert combined(package, case(SPEC, 97)) == 1
    assert combined(package, case(SPEC, 64)) == 0, "two segments"
    settings = [
        (tuning, "BATCH_INVARIANT", True),
        (segments, "PROCESSORS_PER_HEAD", 1),  # of one processor and two heads
        (segments, "ROOMY", ("sm_100",)),
    ]
    for module, name, value in settings:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert combined(package, case(SPEC, 97)) == 0, name
    assert combined(package, case(SPEC, 97)) == 1
    wide = split(Spec(gate="none", rule="additive", beta="none", key_dim=129, value_dim=16, chunk=16))
    assert (
        combined(wide, case(Spec(gate="none", rule="additive", beta="none", key_dim=129, value_dim=16, chunk=16), 97))
        == 0
    )


def scan(spec):
    spec = Spec(**spec.model_dump() | {"backward": False})
    (kernel,) = (k for k in compile_spec(spec, TARGET).plan.operator("chunk").kernels if k.loop == "scan")
    return kernel


@pytest.mark.parametrize("spec", MEMBERS, ids=str)
def test_a_segment_is_a_map_and_a_write(spec):
    """S_out = M S_in + w: M of the unit matrix without what is written, w of 0, by the scan's own graph in float64."""
    kernel, generator = scan(spec), torch.Generator().manual_seed(0)
    assert kernel.is_segmented
    graph = kernel.graph
    sizes = {"b": 2, "h": 2, "r": 2, "k": 3, "v": 3, "i": CHUNK, "j": CHUNK}
    data = {}
    for name, i in graph.inputs.items():
        node = graph.nodes[i]
        shape = [sizes[axis] for axis in node.grid.replace("n", "") + node.axes]
        values = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3)]
        data[name] = values if "n" in node.grid else values[0]

    def final(start, written):
        given = {
            name: [written * x for x in data[name]] if segment.is_write(graph.nodes[i]) else data[name]
            for name, i in graph.inputs.items()
        }
        return evaluate(graph, given | {"h0": start}, 3 * CHUNK, CHUNK)["ht"]

    start = data["h0"]
    unit = torch.eye(3, dtype=torch.float64).expand_as(start)
    M, w = final(unit, 0.0), final(torch.zeros_like(start), 1.0)
    torch.testing.assert_close(M @ start + w, final(start, 1.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "spec", [Spec(gate="value"), Spec(gate="scalar+value"), Spec(rule="additive", gate="none", normalize=True)], ids=str
)
def test_what_differs_by_value_channel_or_has_two_states_is_not_split(spec):
    assert not scan(spec).is_segmented


STEP = """chunk C
S[k,v] @bnhr     = carry_in
w[k,v] @bnhr     = input
{}S_out[k,v] @bnhr = S[k,v] + {}
h0[k,v] @bhr     = input
carry S <- S_out[k,v]   init h0[k,v]   final -> ht
output S = S[k,v]
"""
UNIT = """t1[k,v] @bnhr    = w[k,v] * w[k,v]
t2[k,v] @bnhr    = rsqrt(t1[k,v])
t3[k,v] @bnhr    = w[k,v] * t2[k,v]
"""


@pytest.mark.parametrize(
    ("steps", "write", "accepted"),
    [
        ("", "w[k,v]", True),
        ("g[k] @bnhr       = input\nt1[k,v] @bnhr    = g[k] * S[k,v]\n", "t1[k,v] + w[k,v]", True),
        ("t1[k,v] @bnhr    = w[k,v] * S[k,v]\n", "t1[k,v]", False),  # another map for every value channel
        ("t1[k,v] @bnhr    = S[k,v] * S[k,v]\n", "t1[k,v]", False),
        ("t1[k,v] @bnhr    = exp(w[k,v])\n", "t1[k,v]", False),  # 1 where nothing is written
        ("t1[k,v] @hr      = input\n", "t1[k,v]", False),  # written whatever the tokens are
        (UNIT, "t3[k,v]", False),  # 0 times infinity where nothing is written
    ],
)
def test_steps_that_are_no_map_and_write_are_refused(steps, write, accepted):
    text = STEP.format(steps, write)
    assert segment.may_be_segmented(Kernel(name="scan", loop="scan", text=text, split_v=True)) == accepted


COMPILED = """
import json, sys
from pathlib import Path
from gdngen import inspection
from gdngen.autotune.launches import Recorder, Shape
from gdngen.target import get

folder, found = Path(sys.argv[1]), []
for target in sys.argv[2:]:
    recorder = Recorder(folder, get(target))
    for wanted in recorder.record(Shape("chunk", "bfloat16", (1, 4), 64, initial=True, final=True)).values():
        if wanted.kernel in ("scan", "combine"):
            there, options = wanted.function.device_caches[0][2], wanted.options.__dict__
            made = wanted.function.compile(wanted.source, target=there, options=options)
            code = inspection.machine_code(made, "cuda")
            fits = made.metadata.shared <= get(target).shared_bytes
            found.append([wanted.kernel, code["spill_bytes"], code["miscompiled"], fits])
print(json.dumps(found))
"""


@pytest.mark.full
@pytest.mark.parametrize("package", ["gdn_scalar_k128_v128_c64_qknorm", "gdn_key_k128_v128_c64_qknorm"])
def test_every_pass_of_presets_compiles_well(package, tmp_path):
    """On the targets that split sequences: nothing spills, nothing is visibly miscompiled, all fits."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for target in ("sm_80", "sm_90", "sm_100"):
        command = [sys.executable, "-c", COMPILED, str(ROOT / "generated" / package), target]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout.splitlines()[-1])
        assert [kernel for kernel, *_ in sorted(found)] == ["combine", "scan", "scan", "scan"]
        allowed = {"scan": 24} if (package, target) == ("gdn_key_k128_v128_c64_qknorm", "sm_80") else {}
        for kernel, spilled, *rest in found:
            assert spilled <= allowed.get(kernel, 0) and rest == [False, True], (target, found)
