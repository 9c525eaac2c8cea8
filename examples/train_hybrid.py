"""Train a tiny hybrid model of transformers with gdngen's token mixers in it, and check them as it learns.

Two gated delta net layers and one of attention learn to recall: a key that comes again in a sequence is followed by the
same value as before.  Every tenth step the model's own path computes loss and gradients from the same weights, which
must agree.  The losses of two further runs are shown beside: the model's own path, and that with weights changed by
1e-7, for small differences grow in training whatever computes it, and tell nothing about operators.

150 steps take a minute on two cores; without a GPU the operators' PyTorch version runs.  `--plot loss.svg` draws the
losses (needs matplotlib), `--save DIR` keeps the trained model for examples/generate.py.
"""

import argparse
import contextlib
import copy
import importlib.util
import math
import sys
import time
from pathlib import Path

import tiny_hybrid
import torch
from tiny_hybrid import KEYS, PAIRS, VALUES
from torch import Tensor, nn

from gdngen.integrate import remove_operators, use_operators

STEPS, WINDOW = 150, 10  # losses are printed as means over a window of steps
BUDGET = 5e-3  # relative difference of a loss, and of all gradients together
NUDGE = 1e-7
OURS, OWN, NUDGED = "gdngen's token mixers", "the model's own", f"its own, weights changed by {NUDGE:.0e}"


def best_loss() -> float:
    """Of a model that remembers everything: the first value of a key can only be guessed."""
    guessed = sum((1 - 1 / KEYS) ** n for n in range(PAIRS)) / PAIRS
    return guessed * math.log(VALUES)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over the values; keys are random."""
    labels = tokens.clone()
    labels[:, ::2] = -100
    loss: Tensor = model(tokens, labels=labels).loss
    return loss


def difference(model: nn.Module, tokens: Tensor, loss: Tensor) -> Tensor:
    """Between the loss and the gradients that a model has, and those of its own path from the same weights.

    The larger of the two, relative to its own; NaN if either is.
    """
    own = copy.deepcopy(model)
    remove_operators(own)
    wanted = loss_of(own, tokens)
    slopes = [torch.autograd.grad(wanted, list(own.parameters())), [p.grad for p in model.parameters()]]
    pairs = [(wanted.detach(), loss), [torch.cat([slope.flatten() for slope in side]) for side in slopes]]
    return torch.stack([(second - first).norm() / first.norm() for first, second in pairs]).max()


def train(model: nn.Module, steps: int, device: str, *, checked: bool) -> tuple[Tensor, float]:
    """The loss at every step, and the largest difference to the model's own path where that is checked."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    losses, differences = [], [torch.zeros((), device=device)]
    for step, tokens in enumerate(tiny_hybrid.sequences(steps)):
        tokens = tokens.to(device)
        loss = loss_of(model, tokens)
        optimiser.zero_grad()
        loss.backward()
        if checked and step % WINDOW == 0:
            differences.append(difference(model, tokens, loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.detach())
        if len(losses) % WINDOW == 0:
            print(f" {torch.stack(losses[-WINDOW:]).mean():.3f}", end="", flush=True)
    return torch.stack(losses).cpu(), float(torch.stack(differences).max())  # this max hands on a NaN


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=generator).to(parameter.device))


def draw(file: Path, curves: dict[str, Tensor], device: str) -> None:
    """Losses over steps as an SVG, the same bytes for the same losses."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "gdngen", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for (name, losses), style in zip(curves.items(), ({"linewidth": 2}, {"linewidth": 1}, {"linewidth": 1})):
            axes.plot(range(1, len(losses) + 1), losses.tolist(), label=name, **style)
        axes.axhline(best_loss(), color="grey", linestyle=":", label="of a perfect memory")
        axes.set(xlabel="step", ylabel="loss (nats)", ylim=(0, None), title=f"{len(losses)} steps on {device}, float32")
        axes.legend()
        figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training, at least 1  [{STEPS}]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses as an SVG")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the trained model, as transformers does")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: expected at least 1")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install 'gdngen[bench]'")
    print(f"{options.steps} steps on {options.device}; best possible loss {best_loss():.3f}", flush=True)
    curves, largest = {}, math.nan
    for name in (NUDGED, OWN, OURS):
        model = tiny_hybrid.model().to(options.device)
        if name == NUDGED:
            nudge(model)
        print(f"{name:35} loss", end="", flush=True)
        start = time.perf_counter()
        with use_operators(model) if name == OURS else contextlib.nullcontext():
            curves[name], largest = train(model, options.steps, options.device, checked=name == OURS)
        print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    if options.save:
        model.save_pretrained(options.save)
    if options.plot:
        draw(options.plot, dict(reversed(curves.items())), options.device)
    agree = largest <= BUDGET  # a NaN does not
    print(f"from the same weights losses and gradients differ by {largest:.1e} at most")
    print("they agree" if agree else f"FAILED: more than {BUDGET:.0e}")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
