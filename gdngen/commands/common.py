"""What commands share: the options of a Spec, JSON or lines, tables."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from gdngen import presets
from gdngen import target as targets
from gdngen.spec import CHUNKS, Spec

Pins = tuple[str, ...]
OPTIONS: dict[str, tuple[Any, str]] = {
    "rule": (["delta", "additive"], "How a token is written: over what the state predicts, or added."),
    "gate": (str, "none, or scalar, key, value; several are joined by +."),
    "beta": (["none", "head", "value", "dt"], "Write strength: per head, per value channel, Mamba-2's dt."),
    "key_dim": (int, "Head dim of q and k, up to 256."),
    "value_dim": (int, "Head dim of v."),
    "head_ratio": (str, "Value heads per query/key head; any: bound at launch."),
    "chunk": ([*map(str, CHUNKS), "auto"], "Tokens per chunk."),
    "state_v_first": (bool, "States are [V, K] in memory, not [K, V]."),
    "fused_gate": (["none", "softplus", "bounded"], "Compute the gate from its raw input in the operator."),
    "lower_bound": (float, "Of the bounded gate, in [-5, 0); -5 if not given."),
    "beta_logits": (bool, "beta comes as logits; the sigmoid is applied in the operator."),
    "neg_eigval": (bool, "Twice the sigmoid of beta's logits."),
    "qk_norm": (bool, "Normalise q and k in the operator."),
    "normalize": (bool, "Divide o by the sum of the weights; states are then pairs."),
    "feature_map": (["identity", "elu1"], "Applied to q and k in the operator."),
    "varlen": (bool, "Without packed sequences."),
    "backward": (bool, "Without gradients."),
}


def flag(name: str) -> str:
    return ("--no-" if Spec.model_fields[name].default is True else "--") + name.replace("_", "-")


def in_options(text: str) -> str:
    """What was asked, in the words of the command line: --key-dim for key_dim, --beta-logits for beta_logits=True,
    --rule additive for rule='additive'."""
    others = ("preset", "target", "name", "out", "shapes", "kernels")
    named = {name: flag(name) for name in OPTIONS} | {name: f"--{name}" for name in others}
    for name, option in named.items():
        text = re.sub(rf"\b{name}=True\b", option, text)
        text = re.sub(rf"\b{name}='?([\w+.-]+)'?", rf"{option} \1", text)
        text = re.sub(rf"(^|; |, but ){name}(?=: | is )", rf"\1{option}", text)
        if "_" in name:  # no word of prose
            text = re.sub(rf"(?<![\w-]){name}\b", option, text)
    return text


def asks_for_a_spec(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --preset, the Spec's options, --target and --pin; hands on ``spec``, ``target`` and ``pins``."""

    @functools.wraps(command)
    def wrapped(preset: str | None, target: str, **options: Any) -> Any:
        given = {name: value for name in OPTIONS if (value := options.pop(name)) is not None}
        if preset is not None and given:
            named = ", ".join(map(flag, given))
            raise click.UsageError(
                f"--preset {preset} is a whole Spec and leaves nothing for {named}: give one of them"
            )
        given |= {n: int(given[n]) for n in ("chunk", "head_ratio") if given.get(n, "").isdigit()}
        spec = presets.get(preset).spec if preset is not None else Spec(**given)
        return command(spec=spec, target=targets.get(target).name, **options)

    shared = click.option("--pin", "pins", multiple=True, metavar="KEY=VALUE", help="Force a decision of the plan.")
    known = f"{', '.join(targets.TARGETS)}.  [{targets.DEFAULT_TARGET}]"
    wrapped = shared(click.option("--target", default=targets.DEFAULT_TARGET, metavar="T", help=known)(wrapped))
    for name, (kind, text) in reversed(OPTIONS.items()):
        default = Spec.model_fields[name].default
        if kind is bool:
            wrapped = click.option(flag(name), name, flag_value=not default, default=None, help=text)(wrapped)
            continue
        shown = "" if default is None else f"  [{'+'.join(default) if isinstance(default, tuple) else default}]"
        kind = click.Choice(kind) if isinstance(kind, list) else kind
        wrapped = click.option(flag(name), name, type=kind, help=text + shown)(wrapped)
    return click.option("--preset", metavar="NAME", help="The Spec of a published model (gdngen list).")(wrapped)


def published_heads(preset: str | None, spec: Spec) -> list[tuple[int, int]]:
    """Query/key and value heads of the preset that is named, else of all presets of this Spec."""
    found = [presets.get(preset)] if preset is not None else [p for p in presets.PRESETS.values() if p.spec == spec]
    return list(dict.fromkeys((p.q_heads, p.v_heads) for p in found if p.q_heads))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


def emit(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """The JSON document, or the lines as they come."""
    for line in [json.dumps(value, indent=2)] if as_json else lines:
        click.echo(line)


def table(rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
