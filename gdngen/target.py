"""Target: what a plan needs to know about a GPU, as a value.  Builds never detect one, so they repeat anywhere."""

from dataclasses import dataclass

from gdngen.errors import SpecError


@dataclass(frozen=True)
class Target:
    """One GPU architecture.  Sizes in bytes, rates in bytes/s and FLOP/s of dense 16-bit matrix work."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    processors: int
    shared_bytes: int
    bandwidth: float
    matrix_flops: float
    dot_seconds: float = 0.25e-6
    load_seconds: float = 0.7e-6
    reads_by_descriptor: bool = False  # matrix instructions of warp groups (wgmma) read shared memory on their own
    exact_products: bool = True  # fp32 products in three tf32 parts; else without matrix units
    descriptors: bool = False  # scans of 16-bit inputs load whole tiles (TMA); sm_120 has too little shared memory

    def __str__(self) -> str:
        return self.name


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 108, 163 << 10, 1.8e12, 280e12),
        Target("sm_90", "cuda", 90, 32, 132, 227 << 10, 4.2e12, 750e12, reads_by_descriptor=True, descriptors=True),
        Target("sm_100", "cuda", 100, 32, 148, 227 << 10, 7.2e12, 2000e12, descriptors=True),
        Target("sm_120", "cuda", 120, 32, 170, 99 << 10, 1.7e12, 400e12, exact_products=False),
        Target("gfx942", "hip", "gfx942", 64, 304, 64 << 10, 4.5e12, 900e12, exact_products=False),
    )
}
DEFAULT_TARGET = "sm_90"


def get(name: str) -> Target:
    """The Target of that name; SpecError lists the known ones."""
    if name not in TARGETS:
        raise SpecError(f"target: unknown {name!r}; known targets are {', '.join(TARGETS)}")
    return TARGETS[name]


def detect() -> Target | None:
    """The Target of the current GPU, the nearest older one where its own is not listed, None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return TARGETS["gfx942"]
    major, minor = torch.cuda.get_device_capability()
    known = [t for t in TARGETS.values() if t.backend == "cuda" and int(t.arch) <= major * 10 + minor]
    return max(known, key=lambda t: int(t.arch), default=None)
