"""What a training step of the models of `core_study` takes on a CPU: as many parameters, as large states, float32.

All conditions of a size take turns in one process, so that what else the machine does hits them alike.
"""

import torch

from benchmarks import peers
from benchmarks.core_conditions import CONDITIONS, FEWER, LANGUAGE, REFERENCE, SIZES, WORDS, fields_of
from benchmarks.harness import footnote, markdown, time_in_turns, verify_operator
from examples.training import next_token_loss
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM


@peers.quickened(on_gpu=False)
def run(quick: bool = False) -> dict:
    sizes, seconds = ((LANGUAGE,), 0.1) if quick else ((LANGUAGE, FEWER), 60.0)
    return {"relative_error": verify_operator(), "rows": [_step(size, seconds, quick) for size in sizes]}


def _step(task: str, seconds: float, quick: bool) -> dict:
    """Seconds of a forward and a backward pass of each condition, and the tokens that they read."""
    size = SIZES[task]
    batch, length = (1, 32) if quick else (size.training["batch_size"], size.training["sequence_length"])
    ids = torch.randint(size.shape["vocab_size"], (batch, length + 1), generator=torch.Generator().manual_seed(0))

    def step(model):
        model.zero_grad()
        next_token_loss(model, ids).backward()
        return [x.grad for x in model.parameters()]

    models = {}
    for name in CONDITIONS:
        torch.manual_seed(0)
        models[name] = InterdomainForCausalLM(InterdomainConfig(**fields_of(name, size.shape)))
    times = time_in_turns({name: lambda model=model: step(model) for name, model in models.items()}, seconds)
    return {"size": WORDS[task].split()[0], "tokens": batch * length, "times": times}


def table(record: dict) -> str:
    """Tokens a second of each condition, and its speed beside that of Interdomain without gates."""
    rows = []
    for name in CONDITIONS:
        cells = []
        for row in record["rows"]:
            found, reference = row["times"][name], row["times"][REFERENCE]
            rates = [row["tokens"] / found[which] for which in ("median", "p80", "p20")]
            cells += ["{:,.0f} ({:,.0f} to {:,.0f})".format(*rates), f"{reference['median'] / found['median']:.2f}x"]
        rows.append([name, *cells])
    header = ["tokens a second", *(x for row in record["rows"] for x in (row["size"], f"beside {REFERENCE}"))]
    about = "A forward and a backward pass in float32, medians with the 20th and 80th percentile, in turns."
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])
