"""Plan -> Source: every file of a package, name -> text."""

import textwrap
from pathlib import Path

from gdngen.codegen.environment import TEMPLATES, WIDTH, folded, render
from gdngen.codegen.kernel import KernelWriter
from gdngen.codegen.launch import launch_text, registration_text, tuning_text
from gdngen.codegen.torch_version import reference_text
from gdngen.passes.plan import Plan

RUNTIME = Path(__file__).parents[1] / "runtime"
# The operators are the same in gdngen.ops, and compilers are asked the same before a package is written.
SHARED = ("arguments.py", "compilers.py", "composed.py", "keywords.py", "operators.py")
STATIC = ("compiled.py", "device.py", "dispatch.py", "machine.py", "rehearsal.py", "sequences.py")
OF_SEGMENTS = ("segments.py", "kernels/combine.py")


def sources(plan: Plan, name: str) -> dict[str, str]:
    """All Python files of the package, in sorted order: same plan, same bytes."""
    files = {file: (RUNTIME / file).read_text() for file in SHARED}
    files |= {file: (TEMPLATES / "package" / file).read_text() for file in STATIC}
    writers = {op.name: [KernelWriter(plan, op, kernel) for kernel in op.kernels] for op in plan.operators}
    files |= {f"kernels/{writer.kernel.name}.py": writer.text() for own in writers.values() for writer in own}
    if any(kernel.is_segmented for operator in plan.operators for kernel in operator.kernels):
        files |= {file: (TEMPLATES / "package" / file).read_text() for file in OF_SEGMENTS}
    files["kernels/__init__.py"] = '"""One Triton kernel per file."""\n'
    files["launch.py"] = launch_text(plan, writers)
    files["reference.py"] = reference_text(plan)
    files["registration.py"] = registration_text(plan)
    files["tuning.py"] = tuning_text(plan)
    files["spec.py"] = _spec_text(plan, name)
    spec, build = folded("Spec: ", str(plan.spec)), folded("Build: ", plan.spec.command)
    files["__init__.py"] = render("package/__init__.py", name=name, spec=spec, command=build)
    return dict(sorted(files.items()))


def _spec_text(plan: Plan, name: str) -> str:
    spec = plan.spec
    missing = [f'    "{operator}": {_literal(reason)},' for operator, reason in plan.missing]
    rows = [f'    "{key}": {_literal(value)},' for key, value in spec.model_dump().items()]
    return render(
        "package/spec.py",
        name=_literal(name),
        command=_long_literal(spec.command),
        differentiable=plan.operator("chunk_backward") is not None,
        rows=rows,
        missing=missing,
    )


def _long_literal(text: str) -> str:
    """A string in double quotes, in parentheses over several lines where it is too long for one."""
    if len(text) <= WIDTH - 24:
        return _literal(text)
    pieces = textwrap.wrap(text, WIDTH - 12, break_on_hyphens=False)
    return "\n".join(["(", *(f'    "{piece} "' for piece in pieces[:-1]), f'    "{pieces[-1]}"', ")"])


def _literal(value: object) -> str:
    """A Python literal in double quotes."""
    if isinstance(value, tuple):
        inner = ", ".join(_literal(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
