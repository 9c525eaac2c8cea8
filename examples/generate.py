"""Generate greedily with a cache, prompts of different lengths in one batch, with gdngen's token mixers in the model.

The prompts are padded on the left; prefill goes through the chunk kernels, each further token through those of decode.
Three ways must give the same tokens in float32: the padded batch with operators, each prompt alone with operators, and
the model's own path.  `--model DIR` takes what `examples/train_hybrid.py --save DIR` trained, which then recalls.
"""

import argparse
import sys
import time

import tiny_hybrid
import torch
from tiny_hybrid import KEYS, PAD
from torch import Tensor
from transformers import AutoModelForCausalLM

from gdngen.integrate import use_operators

LENGTHS = (31, 17, 9, 25)  # of the prompts, which end with a key
TOKENS = 24


def prompts() -> list[Tensor]:
    rows = next(tiny_hybrid.sequences(1, seed=2))
    return [row[:length] for row, length in zip(rows, LENGTHS)]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """[B, longest] tokens, and 1 for those that are no padding."""
    longest = max(map(len, rows))
    tokens, mask = torch.full((len(rows), longest), PAD), torch.zeros(len(rows), longest, dtype=torch.long)
    for n, row in enumerate(rows):
        tokens[n, longest - len(row) :], mask[n, longest - len(row) :] = row, 1
    return tokens, mask


def generated(model: torch.nn.Module, rows: list[Tensor], count: int, device: str) -> Tensor:
    """[B, count] new tokens, the likeliest each."""
    tokens, mask = (x.to(device) for x in padded(rows))
    found: Tensor = model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return found[:, tokens.shape[1] :].cpu()


def recalled(row: Tensor) -> int | None:
    """The value that belongs to the prompt's last key; None where the key is new."""
    for key, value in row[:-1].unflatten(0, (-1, 2)).tolist():
        if key == int(row[-1]):
            return int(value)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="a trained model  [random weights]")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"to generate, at least 1  [{TOKENS}]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens {options.tokens}: expected at least 1")
    made = AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny_hybrid.model()
    model, rows = made.to(options.device).eval(), prompts()
    own = generated(model, rows, options.tokens, options.device)
    with use_operators(model):
        start = time.perf_counter()
        batch = generated(model, rows, options.tokens, options.device)
        print(f"{len(rows)} prompts, {options.tokens} tokens each, {time.perf_counter() - start:.1f} s", flush=True)
        alone = torch.cat([generated(model, [row], options.tokens, options.device) for row in rows])
    for row, tokens in zip(rows, batch):
        known, first = recalled(row), int(tokens[0])
        said = "a new key" if known is None else f"recalls {known - KEYS}" if first == known else "does not recall"
        print(f"prompt of {len(row):2} tokens: {said}, continues {' '.join(map(str, tokens.tolist()))}")
    agree = torch.equal(batch, own) and torch.equal(alone, own)
    print("the same tokens each way" if agree else "FAILED: padded, alone and the model's own path differ")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
