"""Which layers recall? Multi-query associative recall by start, modes, state size and length.

The task is `mqar` of examples/recall.py: key-value pairs, then the same keys again in another order, and the model is
asked for their values. Every condition sees the same sequences in the same order with the same optimiser; a seed
changes the weights and the sequences. At the two smaller sizes three learning rates are run with the first seed, and
more where the best one lies at an end; each condition's best is run with the other seeds, and for the frontier, where
it learned (WORTHWHILE), with other state sizes. A run ends once two looks in a row at the held-out sequences find
SOLVED of the answers right, whatever its learning rate was by then.

Keys stand at even places and values at odd ones, which a layer could learn instead of looking. The shifted control
puts 0 to 7 random tokens, other ones for every sequence, in front.

Of a condition whose name ends in "short first" the first SHORT_STEPS steps of a run are of each smaller size: whether a
size that is not learned is more than the state holds, or more than can be begun with. Since it was found to be the
latter, more than 128 tokens are asked only of what has begun with fewer.

    python -m benchmarks.recall_study             # all runs that results/recall_study.json does not hold yet
    python -m benchmarks.recall_study --first     # only the most informative runs
    python -m benchmarks.recall_study --table     # the tables as markdown
    python -m benchmarks.recall_study --plot      # results/recall_study.png
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.recall import Pairs, answers, mqar_batches
from examples.training import cosine_with_warmup, parameter_groups
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.ops.diagonal.mixing import mixing_matrix

FILE = RESULTS / "recall_study.json"
SHAPE = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAINING = {"batch_size": 32, "steps": {"8": 1500, "16": 2000, "32": 2000, "64": 2000}, "held_out_batches": 8}
EVERY = 125  # steps between two looks at the held-out sequences
SOLVED = 0.999  # right answers, twice in a row, at which a run ends
SHIFT = 7
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

RANDOM = {"start": "random"}  # of all conditions but the last
S4D = {"token_mixers": "s4d"}
HERMITIAN = {"product": "hermitian"}
POSTERIOR = HERMITIAN | {"coefficient_init": "posterior"}
UNIFORM = {"modes": "uniform", "input_matrix_init": "unit_variance"}
EVEN = {"time_step_spacing": "even", "time_step_min": 0.02, "time_step_max": 0.1}
LEAD = POSTERIOR | UNIFORM | EVEN
INDUCTION = {"query_init": "induction"}
SSD = {"token_mixers": "ssd", "ssd_state_size": 128}  # a state of as many numbers as 32 modes of keys and values
MAMBA2 = SSD | {"ssd_conv_kernel": 4, "ssd_activation": "silu", "ssd_dt_bias": "time_step"}
HAX = {
    "sparse_attention": "hax",
    "sparse_keys": 16,
    "sparse_num_heads": 1,
    "sparse_key_dim": 16,
    "sparse_hash": "sign",
    "sparse_hash_size": 4,
}
CONDITIONS = {
    "Interdomain": {},
    "posterior, uniform, even": LEAD,
    "softmax": {"token_mixers": "softmax", "rope_parameters": ROPE},
    "S4D-only": S4D,
    "hermitian": HERMITIAN,
    "posterior, S4D-Inv": POSTERIOR,
    "posterior, S4D-Lin": POSTERIOR | {"modes": "s4d_lin"},
    "posterior, uniform": POSTERIOR | UNIFORM | {"time_step_min": 0.03},
    "identity, uniform, even": LEAD | {"coefficient_init": "identity"},
    "normal, uniform, even": LEAD | {"coefficient_init": "normal"},
    "posterior, uniform, even, output 0.05": LEAD | {"output_init_rms": 0.05},
    "posterior, uniform, even, output 0.3": LEAD | {"output_init_rms": 0.3},
    "posterior, uniform, even, output 1": LEAD | {"output_init_rms": 1.0},
    "posterior, uniform, even to 1": LEAD | {"time_step_max": 1.0},
    "Interdomain, RoPE": {"rope_parameters": ROPE, "rope_placement": "after"},
    "S4D-only, S4D-Lin": S4D | {"modes": "s4d_lin"},
    "S4D-only, uniform, even": S4D | UNIFORM | EVEN,
    "single input": {"state_input": "generic"},
    "single input, posterior, uniform, even": LEAD | {"state_input": "generic"},
    "linear readout": S4D | {"state_input": "key_value"},
    "linear readout, uniform, even": S4D | UNIFORM | EVEN | {"state_input": "key_value"},
    "posterior, uniform, even, induction": LEAD | INDUCTION,
    "induction alone": INDUCTION,
    "normal, uniform, even, output 0.02, induction": LEAD
    | INDUCTION
    | {"coefficient_init": "normal", "output_init_rms": 0.02},
    "hermitian, output 0.02, induction": HERMITIAN | INDUCTION | {"output_init_rms": 0.02},
    "SSD": SSD,
    "SSD as in Mamba-2": MAMBA2,
    "SSD as in Mamba-2, HAX": MAMBA2 | HAX,
    "S4D-only, uniform, even, HAX": S4D | UNIFORM | EVEN | HAX,
    "Interdomain, HAX": HAX,
    "recall": {"start": "recall"},
}
FRONTIER = ("recall", "posterior, uniform, even", "Interdomain", "S4D-only, uniform, even", "softmax")
SHORT_FIRST = {
    f"{name}, short first": CONDITIONS[name]
    for name in ("recall", "posterior, uniform, even", "S4D-only, uniform, even", "softmax")
}
SHORT_STEPS = 125
SETTINGS = ((8, 64), (16, 128), (32, 256), (64, 512))  # pairs, tokens
BRACKETED = SETTINGS[:2]
LEARNING_RATES, LIMITS, SEEDS = (3e-3, 1e-3, 1e-2), (3e-4, 3e-2), (0, 1, 2)
STATE_SIZE, STATE_SIZES = 32, (16, 32, 64, 128)
WORTHWHILE = 0.2  # right answers with which larger settings are run, which `guessed` reaches with few pairs


def guessed(pairs: int) -> float:
    """Right answers of who looks nothing up, but rules out the values that have been answered, as the text shows them.

    Who is asked for the last value has one left to choose from, at the first question all.
    """
    return sum(1 / left for left in range(1, pairs + 1)) / pairs


def item(
    condition: str,
    setting: tuple[int, int] = SETTINGS[0],
    learning_rate: float = LEARNING_RATES[0],
    seed: int = 0,
    state_size: int = STATE_SIZE,
    shifted: bool = False,
) -> dict:
    """What tells a run from the others."""
    return {
        "condition": condition,
        "pairs": setting[0],
        "length": setting[1],
        "state_size": state_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "shifted": shifted,
    }


# What the default start is held to: the smaller size in five seeds, twice the pairs in as many tokens; and beside it
# the posterior start without induction, softmax, the parts of the start alone, and longer sequences.
DENSE = (16, 64)
HELD_TO = (
    *(item("recall", seed=seed) for seed in range(5)),
    *(item("recall", DENSE, seed=seed) for seed in range(5)),
    *(item("posterior, uniform, even", seed=seed) for seed in range(5)),
    *(item("softmax", learning_rate=rate) for rate in LEARNING_RATES),
    item("induction alone"),
    item("normal, uniform, even, output 0.02, induction"),
    item("recall", SETTINGS[1]),
    *(item("recall", shifted=True, seed=seed) for seed in SEEDS),
    *(item(name, learning_rate=rate) for name in FRONTIER for rate in LEARNING_RATES),
    item("recall", SETTINGS[1], state_size=64),
    item("recall", SETTINGS[2]),
    item("posterior, uniform, even, induction"),
    *(item("recall", SETTINGS[1], state_size=size) for size in STATE_SIZES),
    item("softmax", DENSE, learning_rate=1e-3),
    *(item("posterior, uniform, even", DENSE, seed=seed) for seed in range(5)),
    *(item("softmax", learning_rate=1e-3, seed=seed) for seed in range(1, 5)),
    *(item("posterior, uniform, even, output 0.05", seed=seed) for seed in range(2)),
    # What the default adds to queries that start as keys do: the modes, and then C.
    *(
        item(name, setting)
        for setting in (SETTINGS[0], DENSE, SETTINGS[1])
        for name in ("hermitian, output 0.02, induction", "normal, uniform, even, output 0.02, induction")
    ),
    *(item("recall, short first", SETTINGS[2], state_size=size) for size in (128, 32)),
    item("softmax, short first", SETTINGS[2], 1e-3),
    item("recall, short first", SETTINGS[3]),
    item("S4D-only, uniform, even, short first", SETTINGS[2]),
    item("posterior, uniform, even, short first", SETTINGS[2]),
)
# What is longer, begun with what is shorter: a quarter of an hour to an hour each.
LONGEST = (
    *(item("recall, short first", SETTINGS[2], seed=seed) for seed in SEEDS),
    *(item("recall, short first", SETTINGS[2], state_size=size) for size in STATE_SIZES),
    *(item("recall, short first", SETTINGS[3], state_size=size, seed=seed) for seed in SEEDS for size in STATE_SIZES),
)
FIRST = (
    item("posterior, uniform, even"),
    item("Interdomain"),
    item("posterior, uniform, even", seed=1),
    item("softmax"),
    item("S4D-only"),
    item("posterior, uniform, even", seed=2),
    item("Interdomain", seed=1),
    item("S4D-only, uniform, even"),
)


def plan(runs: list[dict]) -> Iterator[dict]:
    """The most informative runs first; then rates, seeds, the control, state sizes, and what is longer."""
    yield from FIRST
    yield from HELD_TO
    for setting in BRACKETED:
        asked = [name for name in CONDITIONS if setting == SETTINGS[0] or best_rate(runs, name, SETTINGS[0])]
        for rate in LEARNING_RATES:
            yield from (item(name, setting, rate) for name in asked)
        for name in asked:
            if beyond := rate_beyond(tried_rates(runs, name, setting)):
                yield item(name, setting, beyond)
        for name in asked:
            if rate := best_rate(runs, name, setting):
                yield from (item(name, setting, rate, seed) for seed in SEEDS)
    for name in FRONTIER:
        first, second = (best_rate(runs, name, setting) for setting in BRACKETED)
        if first:
            yield from (item(name, BRACKETED[0], first, seed, shifted=True) for seed in SEEDS)
        rate = second or first
        if rate and has_learned(runs, name, BRACKETED[0]):
            sizes = (STATE_SIZE,) if name == "softmax" else STATE_SIZES
            yield from (item(name, BRACKETED[1], rate, state_size=size) for size in sizes)
    yield from LONGEST


def has_learned(runs: list[dict], name: str, setting: tuple[int, int]) -> bool:
    """Whether some run of a condition with this setting has the answers that a larger one is worth."""
    return any(
        row["accuracy"] >= WORTHWHILE
        for row in runs
        if (row["condition"], row["pairs"], row["length"]) == (name, *setting) and not row["shifted"]
    )


def tried_rates(
    runs: list[dict], name: str, setting: tuple[int, int], state_size: int = STATE_SIZE
) -> dict[float, tuple[float, float]]:
    """`(errors, nats)` by learning rate of a condition with the first seed, from the smallest on."""
    wanted = item(name, setting, state_size=state_size)
    del wanted["learning_rate"]
    found = sorted((row for row in runs if wanted.items() <= row.items()), key=lambda row: row["learning_rate"])
    return {row["learning_rate"]: (1 - row["accuracy"], row["loss"]) for row in found}


def rate_beyond(tried: dict[float, tuple[float, float]]) -> float | None:
    """The next learning rate to try where the best one of a whole grid lies at its end, within the limits."""
    if not set(LEARNING_RATES) <= set(tried):
        return None
    best = min(tried, key=lambda rate: tried[rate])
    beyond = {min(tried): LIMITS[0], max(tried): LIMITS[1]}.get(best)
    return None if beyond in tried else beyond


def best_rate(runs: list[dict], name: str, setting: tuple[int, int]) -> float | None:
    """The learning rate with the fewest errors, once worse ones lie on both sides of it or the limits are reached."""
    tried = tried_rates(runs, name, setting)
    if not set(LEARNING_RATES) <= set(tried) or rate_beyond(tried) is not None:
        return None
    return min(tried, key=lambda rate: tried[rate])


def make_model(condition: str, state_size: int = STATE_SIZE, seed: int = 0, **others):
    """A model as it begins; `others` are fields beside those of the condition."""
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    fields = SHAPE | RANDOM | {"state_size": state_size} | tokens | (CONDITIONS | SHORT_FIRST)[condition] | others
    return InterdomainForCausalLM(InterdomainConfig(**fields))


def make_batches(pairs: int, length: int, shifted: bool, seed: int, hidden_answers: bool = False) -> Iterator[Pairs]:
    generator = torch.Generator().manual_seed(seed)
    most = SHIFT if shifted else 0
    options = {"shift": most, "hidden_answers": hidden_answers}
    return mqar_batches(pairs, length, SHAPE["vocab_size"], TRAINING["batch_size"], generator, **options)


def with_short_first(
    batches: Iterator[Pairs], length: int, shifted: bool, seed: int, hidden_answers: bool = False
) -> Iterator[Pairs]:
    """SHORT_STEPS batches of each setting of fewer tokens, then these."""
    shorter = (make_batches(*setting, shifted, seed, hidden_answers) for setting in SETTINGS if setting[1] < length)
    return itertools.chain(*(itertools.islice(short, SHORT_STEPS) for short in shorter), batches)


def run_condition(
    condition: str,
    pairs: int,
    length: int,
    state_size: int,
    learning_rate: float,
    seed: int,
    shifted: bool,
    steps: int | None = None,
) -> dict:
    """Train one condition and ask it about new sequences."""
    model = make_model(condition, state_size, seed)
    found = {
        "parameters": model.num_parameters(),
        "state_bytes": 4 * sum(model.config.state_sizes(length).values()),
        "theory": theory(model, length),
    }
    batches, asked = (make_batches(pairs, length, shifted, first) for first in (seed, seed + 1000))
    if condition in SHORT_FIRST:
        batches = with_short_first(batches, length, shifted, seed)
    steps = steps or TRAINING["steps"][str(pairs)]
    return found | train_and_ask(model, batches, asked, steps, learning_rate, SOLVED)


def train_and_ask(
    model,
    batches: Iterator[Pairs],
    asked: Iterator[Pairs],
    steps: int,
    learning_rate: float,
    solved: float = math.inf,
    look: Callable[..., dict] | None = None,
) -> dict:
    """Train a model, and ask it about other sequences, on the way (`curve`, by step) and at the end.

    It ends before `steps` where two looks in a row find `solved` of the answers right, and where `batches` end. What
    `look(model, step)` finds is kept, too (`looks`, by step).
    """
    optimizer = torch.optim.AdamW(parameter_groups(model, learning_rate), betas=(0.9, 0.95))
    peaks = [group["lr"] for group in optimizer.param_groups]
    held_out = [batch for _, batch in zip(range(TRAINING["held_out_batches"]), asked)]
    curve, looks = {}, {}
    for step, batch in zip(range(1, steps + 1), batches):
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * cosine_with_warmup(step / steps)
        loss = answers(model, batch).loss()
        if not math.isfinite(loss.item()):
            return {"accuracy": 0.0, "loss": math.inf, "curve": curve, "failed": f"loss {loss} at step {step}"}
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            curve[str(step)] = evaluate(model, held_out[:4])[0]
            if look is not None:
                looks[str(step)] = look(model, step)
            if len(curve) > 1 and min(list(curve.values())[-2:]) >= solved:
                break
    accuracy, loss = evaluate(model, held_out)
    found = {"accuracy": accuracy, "loss": loss, "curve": curve, "failed": None}
    return found if look is None else found | {"looks": looks}


@torch.no_grad()
def evaluate(model, batches: list[Pairs]) -> tuple[float, float]:
    """The fraction of right answers, and nats an answer."""
    model.eval()
    found = [(answer.accuracy(), answer.nats().item()) for answer in (answers(model, batch) for batch in batches)]
    model.train()
    accuracy, nats = map(statistics.mean, zip(*found))
    return accuracy, nats


@torch.no_grad()
def theory(model, length: int) -> dict | None:
    """What the start promises in the first layer, by the kernel K(a, b) of the ages of a key and a value.

    Returns:
        "span": ages below `length` at which K(a, a) of some head exceeds the root of the sum of K(a, b)^2 over all
        other b, the noise that other values are; "resolution": for those, the median of sum_b K(a, b)^2 / K(a, a)^2 of
        the best head, 1 where a value is alone. None for a layer without a query, or without a state.
    """
    recurrence = getattr(model.model.layers[0].token_mixer, "recurrence", None)
    if getattr(recurrence, "degree", 1) == 1:
        return None
    log_decay, beta, coefficients = (torch.view_as_complex(x.double()) for x in recurrence.parameters_of_operator())
    features = beta[:, None] * torch.exp(log_decay[:, None] * torch.arange(length)[:, None])
    rows = torch.view_as_real(features).flatten(2)
    pairs = torch.view_as_real(coefficients)
    kernel = rows @ mixing_matrix(pairs, model.config.product, *pairs.shape[:2], rows) @ rows.mT
    width = kernel.square().sum(-1) / kernel.diagonal(dim1=1, dim2=2).square()
    best = width.min(0).values
    kept = best[best < 2]
    return {"span": len(kept), "resolution": kept.median().item() if len(kept) else None}


def best_runs(
    runs: list[dict], name: str, setting: tuple[int, int], shifted: bool = False, state_size: int = STATE_SIZE
) -> list[dict]:
    """All seeds at the best learning rate so far."""
    tried = tried_rates(runs, name, setting, state_size)
    rate = min(tried, key=lambda rate: tried[rate], default=LEARNING_RATES[0])
    wanted = item(name, setting, rate, shifted=shifted, state_size=state_size)
    del wanted["seed"]
    return [row for row in runs if wanted.items() <= row.items()]


def reached(row: dict, accuracy: float = 0.9) -> float:
    """The first step at which so many answers were right."""
    return next((int(step) for step, right in row["curve"].items() if right >= accuracy), math.inf)


def table(record: dict) -> str:
    """Accuracy at the two smaller sizes by condition, and the frontier over state sizes and lengths."""
    runs = record["runs"]
    header = ["condition", "bytes of state", "span, resolution at the start"]
    for pairs, length in BRACKETED:
        header += [f"{pairs} pairs in {length} tokens", "rate", "90% at step"]
    rows = []
    for name in CONDITIONS:
        by_setting = [best_runs(runs, name, setting) for setting in BRACKETED]
        first = next((found[0] for found in by_setting if found), None)
        if first is None:
            continue
        cells = [name, f"{first['state_bytes']:,}", _theory_cell(first)]
        for setting, found in zip(BRACKETED, by_setting):
            known = best_rate(runs, name, setting) is not None
            rate = f"{found[0]['learning_rate']:g}" + ("" if known else ", not bracketed") if found else ""
            steps = ", ".join(str(x) if (x := reached(row)) < math.inf else "never" for row in found)
            cells += [_accuracies(found), rate, steps]
        rows.append(cells)
    frontier, columns = [], (SETTINGS[0], DENSE, *SETTINGS[1:])
    for name in (*FRONTIER, *SHORT_FIRST):
        for size in STATE_SIZES:
            found = [best_runs(runs, name, setting, state_size=size) for setting in columns]
            if any(found):
                frontier.append([name, str(size), *(_accuracies(rows) for rows in found)])
    shifted = [
        [name, _accuracies(found)] for name in CONDITIONS if (found := best_runs(runs, name, BRACKETED[0], True))
    ]
    settings = [f"{pairs} pairs in {length} tokens" for pairs, length in columns]
    tables = [markdown(header, rows), markdown(["condition", "modes M", *settings], frontier)]
    if shifted:
        tables.append(markdown(["shifted control", settings[0]], shifted))
    training = record["training"]
    steps = ", ".join(f"{count:,} steps with {pairs} pairs" for pairs, count in training["steps"].items())
    about = (
        f"{len(runs)} runs so far, which took {sum(row['seconds'] for row in runs) / 3600:.0f} hours one after the "
        f"other. Right answers, one number a seed; batches of {training['batch_size']}, {steps}, "
        f"fewer where {SOLVED:.1%} were right twice in a row; M = {STATE_SIZE} in the first table. Span: ages at which "
        "the kernel of the first layer holds a value above the noise of all others."
    )
    return "\n\n".join([*tables, f"{about} {footnote(record)}"])


def _accuracies(rows: list[dict]) -> str:
    return ", ".join(f"{row['accuracy']:.1%}" for row in sorted(rows, key=lambda row: row["seed"])) or "not run"


def _theory_cell(row: dict) -> str:
    if row["theory"] is None:
        return ""
    span, resolution = row["theory"]["span"], row["theory"]["resolution"]
    return f"{span} of {row['length']}" + (f", {resolution:.2f}" if resolution else "")


def plot(record: dict) -> Path:
    """Accuracy against bytes of state, and against length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = dict(zip(SETTINGS, ("-", "--", "-.", ":")))
    for color, name in enumerate((*FRONTIER, *SHORT_FIRST)):
        for setting, style in styles.items():
            sizes = [best_runs(record["runs"], name, setting, state_size=size) for size in STATE_SIZES]
            points = [(rows[0]["state_bytes"], _mean(rows)) for rows in sizes if rows]
            if points:
                left.plot(*zip(*points), style, marker="o", color=f"C{color}", label=f"{name}, {setting[1]} tokens")
        lengths = [(setting[1], best_runs(record["runs"], name, setting)) for setting in SETTINGS]
        points = [(length, _mean(rows)) for length, rows in lengths if rows]
        if points:
            right.plot(*zip(*points), marker="o", color=f"C{color}", label=name)
    left.set(xlabel="bytes of state", ylabel="right answers", xscale="log", ylim=(-0.02, 1.02))
    right.set(xlabel="tokens (pairs: an eighth)", ylabel="right answers", ylim=(-0.02, 1.02))
    right.set_xscale("log", base=2)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path = FILE.with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path


def _mean(rows: list[dict]) -> float:
    return statistics.mean(row["accuracy"] for row in rows)


def main() -> None:
    parser = studies.parser(__doc__, plot=True)
    parser.add_argument("--first", action="store_true", help="only the most informative runs")
    arguments = parser.parse_args()
    planned = (lambda runs: iter(FIRST)) if arguments.first else plan
    fresh = {"training": TRAINING, "shape": SHAPE}
    studies.show_or_run(arguments, FILE, fresh, planned, lambda: run_condition, table, plot)


if __name__ == "__main__":
    main()
