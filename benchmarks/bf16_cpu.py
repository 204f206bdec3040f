"""Whole models of 125M parameters on a CPU, bfloat16: prefill and decode beside Llama of the same shape."""

import torch

from benchmarks.harness import footnote, markdown, verify_model
from benchmarks.model_cpu import _decode, _interdomain, _llama, _prefill
from modeling_interdomain.op_common import multiplies_narrow

# What the ratio to Llama has to be, by kind and tokens before.
REQUIRED = {"prefill": {"2048": 1.1, "8192": 1.7}, "decode": {"512": 1.0}}

# Of logits token by token and of a whole prompt: each of some hundred results on the way is rounded to 2^-8.
_LARGEST_ERROR = 0.05


def run(quick: bool = False) -> dict:
    models = {"interdomain": _interdomain(quick), "llama": _llama(quick)}
    for model in models.values():
        model.to(torch.bfloat16)
    errors = {name: verify_model(model, _LARGEST_ERROR) for name, model in models.items()}
    seconds = 0.2 if quick else 10.0
    return {
        "relative_error": errors,
        "required": REQUIRED,
        "instructions": multiplies_narrow(torch.empty(0, dtype=torch.bfloat16)),
        "prefill": [_prefill(models, length, seconds) for length in ([64] if quick else [512, 2048, 8192])],
        "decode": [_decode(models, position, seconds) for position in ([32] if quick else [512])],
    }


def table(record: dict) -> str:
    rows = []
    for kind, bounds in record["required"].items():
        for row in record[kind]:
            tokens = row.get("length", row.get("position"))
            bound = bounds.get(str(tokens))
            speeds = [f"{row[name]['tokens_per_second']:,.1f}" for name in ("interdomain", "llama")]
            required = "" if bound is None else f"{bound:.1f}x, {'met' if row['ratio'] >= bound else 'missed'}"
            rows.append([kind, f"{tokens:,}", *speeds, f"{row['ratio']:.2f}x", required])
    header = ["", "tokens before", "Interdomain, tokens/s", "Llama, tokens/s", "ratio", "required"]
    about = "Batch 1, bfloat16, the recurrent state in float32. "
    return "\n\n".join([markdown(header, rows), about + footnote(record)])
